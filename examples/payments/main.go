// Command payments is a small payments API for two tenants. Creating a charge and
// creating a refund are guarded operations: each needs an Idempotency-Key, and a
// retry gets the stored answer of the first request. The idempotency records are
// in PostgreSQL if DATABASE_URL is set, in a table that the program makes itself,
// else in memory; payments are kept nowhere.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const shutdownTimeout = 15 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Getenv("DATABASE_URL"), os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "payments:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends. It prints the curl lines to stdout, and its log and
// usage to stderr.
func run(ctx context.Context, args []string, databaseURL string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("payments", flag.ContinueOnError)
	flags.SetOutput(stderr)
	addr := flags.String("addr", "127.0.0.1:8080", "address to listen on; port 0 takes a free one")
	delay := flags.Duration("delay", 200*time.Millisecond, "how long a payment takes, so that two requests can meet")
	if err := flags.Parse(args); err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(stderr, nil))

	store, closeStore, err := openStore(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer closeStore()
	handler, idem, err := newServer(store, slow(*delay), logger)
	if err != nil {
		return err
	}
	srv := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       15 * time.Second,
		WriteTimeout:      *delay + 30*time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", *addr)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, usage, "http://"+ln.Addr().String())

	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err = <-served:
		return err
	case <-ctx.Done():
	}

	// First no more requests, then no more outcomes that wait to be stored.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	return errors.Join(srv.Shutdown(ctx), idem.Shutdown(ctx))
}

// usage is a format with the server's URL as its one argument.
const usage = `listening on %[1]s

A charge. Send it twice: the second answer is the first one, byte for byte, with
"Idempotency-Replayed: true".

  curl -i %[1]s/v1/charges -H 'Authorization: Bearer token-a' -H 'Content-Type: application/json' -H 'Idempotency-Key: "order-1"' -d '{"amount":1000,"currency":"EUR"}'

The same key from the other tenant (another charge), for a refund (it happens), and
for another amount (422).

  curl -i %[1]s/v1/charges -H 'Authorization: Bearer token-b' -H 'Content-Type: application/json' -H 'Idempotency-Key: "order-1"' -d '{"amount":1000,"currency":"EUR"}'
  curl -i %[1]s/v1/refunds -H 'Authorization: Bearer token-a' -H 'Content-Type: application/json' -H 'Idempotency-Key: "order-1"' -d '{"amount":1000,"currency":"EUR"}'
  curl -i %[1]s/v1/charges -H 'Authorization: Bearer token-a' -H 'Content-Type: application/json' -H 'Idempotency-Key: "order-1"' -d '{"amount":2000,"currency":"EUR"}'

No key (400), and a key without its quotes (400).

  curl -i %[1]s/v1/charges -H 'Authorization: Bearer token-a' -H 'Content-Type: application/json' -d '{"amount":1000,"currency":"EUR"}'
  curl -i %[1]s/v1/charges -H 'Authorization: Bearer token-a' -H 'Content-Type: application/json' -H 'Idempotency-Key: order-1' -d '{"amount":1000,"currency":"EUR"}'

Ctrl-C stops the server.
`
