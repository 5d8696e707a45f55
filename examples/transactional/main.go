// Command transactional charges accounts. An order, a row of the ledger and a row of
// the outbox are written in the transaction that the idempotency middleware commits
// together with the answer: whenever the process dies, all of it is there, or nothing.
//
// It needs a PostgreSQL database in DATABASE_URL, and makes its tables there.
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
)

const shutdownTimeout = 15 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Getenv("DATABASE_URL"), "127.0.0.1:8080", os.Stdout, os.Stderr, func(step) {})
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "transactional:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, databaseURL, addr string, stdout, stderr io.Writer, reached func(step)) error {
	if databaseURL == "" {
		return errors.New("DATABASE_URL is not set: transactions need a PostgreSQL database")
	}
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer pool.Close()
	handler, idem, err := newServer(ctx, pool, slog.New(slog.NewTextHandler(stderr, nil)), reached)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
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
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	return errors.Join(srv.Shutdown(ctx), idem.Shutdown(ctx))
}

// usage is a format with the server's URL as its one argument.
const usage = `listening on %[1]s

A charge. Send it twice, or kill the server in between: there is one order.

  curl -i %[1]s/v1/charges -H 'X-Account: acme' -H 'X-User: alice' -H 'Idempotency-Key: "order-1"' -d '{"reference":"A-1","amount":1000}'
  curl %[1]s/v1/totals

The same reference under another key: 422, which is stored, and nothing is written.

  curl -i %[1]s/v1/charges -H 'X-Account: acme' -H 'X-User: alice' -H 'Idempotency-Key: "order-2"' -d '{"reference":"A-1","amount":1000}'
`
