package idempotency

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool" //nolint:depguard // only for the methods that borrow a connection from the caller's pool
)

// A postgresLender lends connections: a *pgxpool.Pool, or what embeds one.
type postgresLender interface {
	Acquire(ctx context.Context) (*pgxpool.Conn, error)
	Stat() *pgxpool.Stat
}

// A lentConn is what is used of a *pgxpool.Conn.
type lentConn interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	Conn() *pgx.Conn
	Hijack() *pgx.Conn
	Release()
}

// transactions are those that a store has open for handlers. Each has a slot, and
// a connection of its own.
type transactions struct {
	lender  postgresLender
	options pgx.TxOptions
	slots   chan struct{}

	mu      sync.Mutex
	running map[ScopedKey]struct{} // keys whose handler runs
}

func newTransactions(lender postgresLender, cfg PostgresConfig) *transactions {
	slots := cfg.MaxTransactions
	if slots == 0 {
		slots = max(1, int(lender.Stat().MaxConns())/2)
	}
	return &transactions{
		lender: lender, options: pgx.TxOptions{IsoLevel: cfg.Isolation},
		slots: make(chan struct{}, slots), running: make(map[ScopedKey]struct{}),
	}
}

// tryTake takes a slot if one is free. It must be given back.
func (ts *transactions) tryTake() bool {
	select {
	case ts.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// take waits for a slot.
func (ts *transactions) take(ctx context.Context) error {
	select {
	case ts.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (ts *transactions) give() { <-ts.slots }

func (ts *transactions) enter(names []ScopedKey) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, name := range names {
		ts.running[name] = struct{}{}
	}
}

func (ts *transactions) leave(names []ScopedKey) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, name := range names {
		delete(ts.running, name)
	}
}

// isRunning reports whether a handler of this process runs for one of the names.
func (ts *transactions) isRunning(names []ScopedKey) bool {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, name := range names {
		if _, running := ts.running[name]; running {
			return true
		}
	}
	return false
}
