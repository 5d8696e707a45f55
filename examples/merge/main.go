// Command merge shows what becomes of retries when two accounts are merged into a third.
// It sends the same requests to two servers: one that was told of the merge, and one that
// was not, and prints what came back.
//
// The records are in memory. If DATABASE_URL is set, they are in PostgreSQL, and the merge
// is a row there, which the server learns of within seconds.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

func main() {
	if err := run(context.Background(), os.Getenv("DATABASE_URL"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "merge:", err)
		os.Exit(1)
	}
}

// A request is a charge that a shop asks for.
type request struct{ shop, order, amount string }

func (r request) String() string {
	return fmt.Sprintf("%s: order %s, %s", r.shop, r.order, r.amount)
}

// What shops ask for before shop-a and shop-b are merged into shop-c, and afterwards.
var (
	before = []request{
		{"shop-a", "1", "10 EUR"}, {"shop-a", "2", "20 EUR"}, {"shop-b", "2", "25 EUR"},
	}
	after = []request{
		{"shop-c", "1", "10 EUR"}, // what shop-a did, sent again
		{"shop-c", "2", "20 EUR"}, // two of one number: the payload tells which
		{"shop-c", "2", "25 EUR"},
		{"shop-c", "2", "29 EUR"}, // neither
		{"shop-c", "3", "30 EUR"},
		{"shop-a", "3", "30 EUR"}, // sent again by a till that still has the old credentials
		{"shop-a", "2", "20 EUR"},
	}
)

// run plays the story on both servers and prints it.
func run(ctx context.Context, databaseURL string, out io.Writer) (err error) {
	store, pool, err := openStore(ctx, databaseURL)
	if err != nil {
		return err
	}
	if pool != nil {
		defer pool.Close()
	}
	untold, err := newServer(store, nil)
	if err != nil {
		return err
	}
	defer untold.Close()
	m := newMerge(pool)
	told, err := newServer(store, m.predecessors)
	if err != nil {
		return err
	}
	defer told.Close()

	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	defer func() { err = errors.Join(err, table.Flush()) }()
	fmt.Fprintln(table, "what was asked\tnot told of the merge\ttold of it")
	if err := play(ctx, table, "before the merge", before, untold, told); err != nil {
		return err
	}
	if err := m.merge(ctx, told); err != nil {
		return err
	}
	return play(ctx, table, "after it", after, untold, told)
}

// play sends requests to both servers and prints what came back.
func play(ctx context.Context, table io.Writer, title string, requests []request, untold, told *server) error {
	fmt.Fprintf(table, "\n%s\n", title)
	for _, r := range requests {
		a, errA := untold.send(ctx, r)
		b, errB := told.send(ctx, r)
		if err := errors.Join(errA, errB); err != nil {
			return fmt.Errorf("%v: %w", r, err)
		}
		fmt.Fprintf(table, "  %v\t%s\t%s\n", r, a, b)
	}
	return nil
}

func openStore(ctx context.Context, databaseURL string) (idempotency.Store, *pgxpool.Pool, error) {
	if databaseURL == "" {
		return idempotency.NewMemoryStore(), nil, nil
	}
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return nil, nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	if err := idempotency.Migrate(ctx, pool); err != nil {
		pool.Close()
		return nil, nil, err
	}
	return idempotency.NewPostgresStore(pool), pool, nil
}

// A merge knows who has been merged into whom.
type merge struct {
	successions *idempotency.PostgresSuccessions // nil: merged is all that is known
	merged      map[string][]string
}

func newMerge(pool *pgxpool.Pool) *merge {
	m := &merge{merged: make(map[string][]string)}
	if pool != nil {
		m.successions = idempotency.NewPostgresSuccessions(pool, idempotency.PostgresConfig{})
	}
	return m
}

// merge makes shop-a and shop-b shop-c, from the time on at which it returns.
func (m *merge) merge(ctx context.Context, s *server) error {
	into := s.tenant("shop-c")
	var begins time.Time
	for _, shop := range []string{"shop-a", "shop-b"} {
		from := s.tenant(shop)
		if m.successions == nil {
			m.merged[into] = append(m.merged[into], from)
			continue
		}
		declared, err := m.successions.Declare(ctx, idempotency.Identity{Tenant: from}, idempotency.Identity{Tenant: into}, 24*time.Hour)
		if err != nil {
			return err
		}
		begins = declared.Begins
	}
	// Only then may shop-c send what shop-a and shop-b have sent.
	select {
	case <-time.After(time.Until(begins)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// predecessors is an [idempotency.PredecessorsFunc].
func (m *merge) predecessors(ctx context.Context, today idempotency.Identity) ([]idempotency.Identity, error) {
	if m.successions != nil {
		return m.successions.Predecessors(ctx, today)
	}
	var ids []idempotency.Identity
	for _, tenant := range m.merged[today.Tenant] {
		ids = append(ids, idempotency.Identity{Tenant: tenant, Principal: today.Principal})
	}
	return ids, nil
}
