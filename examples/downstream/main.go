// Command downstream charges cards at a payment provider, which is a service of its
// own that nobody can roll back. The provider is idempotent, too; each charge asks it
// with a downstream key, which is the same on every attempt. So a process that dies
// between the provider's answer and its own charges once all the same.
//
// The provider is a small server within the process, unless PROVIDER_URL names one.
// The idempotency records are in PostgreSQL if DATABASE_URL is set, else in memory.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

const shutdownTimeout = 15 * time.Second

// A setting is where the program finds what, and how long it takes others to learn
// that it died.
type setting struct {
	addr, databaseURL, providerURL string
	lease                          time.Duration // 0: the default
	paid                           func()        // called when the provider has answered
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, setting{
		addr: "127.0.0.1:8080", databaseURL: os.Getenv("DATABASE_URL"), providerURL: os.Getenv("PROVIDER_URL"), paid: func() {},
	}, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "downstream:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, s setting, stdout, stderr io.Writer) error {
	logger := slog.New(slog.NewTextHandler(stderr, nil))
	store, closeStore, err := openStore(ctx, s.databaseURL)
	if err != nil {
		return err
	}
	defer closeStore()
	mux := http.NewServeMux()
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", s.addr)
	if err != nil {
		return err
	}
	defer func() { _ = ln.Close() }() // closed before, unless something fails
	url := "http://" + ln.Addr().String()
	if s.providerURL == "" {
		s.providerURL = url + "/provider"
		p, err := newProvider()
		if err != nil {
			return err
		}
		mux.Handle("/provider/", http.StripPrefix("/provider", p))
	}
	idem, err := idempotency.New(store, idempotency.Config{
		// Who asks, as an authentication in front established it.
		KeyScope:  func(r *http.Request) string { return r.Header.Get("X-Account") },
		Principal: func(r *http.Request) string { return r.Header.Get("X-User") },
		Lease:     s.lease,
		Logger:    logger,
	})
	if err != nil {
		return err
	}
	mux.Handle("POST /v1/charges", idem.Named("charge").Handler(charging{
		provider: client{url: s.providerURL}, paid: s.paid,
	}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	fmt.Fprintf(stdout, usage, url)

	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err = <-served:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	return errors.Join(srv.Shutdown(ctx), idem.Shutdown(ctx))
}

// openStore returns where the idempotency records are kept, and what closes it.
func openStore(ctx context.Context, databaseURL string) (store idempotency.Store, closeStore func(), err error) {
	if databaseURL == "" {
		return idempotency.NewMemoryStore(), func() {}, nil
	}
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return nil, nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	if err := idempotency.Migrate(ctx, pool); err != nil {
		pool.Close()
		return nil, nil, err
	}
	return idempotency.NewPostgresStore(pool), pool.Close, nil
}

// usage is a format with the server's URL as its one argument.
const usage = `listening on %[1]s

A charge; and what the provider was asked for, and did.

  curl -i %[1]s/v1/charges -H 'X-Account: acme' -H 'X-User: alice' -H 'Idempotency-Key: "order-1"' -d '{"card":"tok_1","amount":1000}'
  curl %[1]s/provider/payments
`
