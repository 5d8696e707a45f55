package main

import (
	"context"
	"net"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A cost is what operations took besides time.
type cost struct {
	roundTrips int64
	commits    int64 // of transactions that wrote, and so waited for the disk
	wal        int64 // bytes
	cpu        time.Duration
}

func (c cost) minus(d cost) cost {
	return cost{c.roundTrips - d.roundTrips, c.commits - d.commits, c.wal - d.wal, c.cpu - d.cpu}
}

// A meter reads the costs of all that happens on a server that nobody else uses.
type meter struct {
	admin *pgxpool.Pool
	trips *atomic.Int64
}

func (m meter) read(ctx context.Context) (cost, error) {
	c := cost{roundTrips: m.trips.Load(), cpu: cpuTime()}
	err := m.admin.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
		(pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&c.commits, &c.wal)
	return c, err
}

// newPool opens all connections of a pool whose round trips are counted.
func newPool(ctx context.Context, databaseURL string, size int, trips *atomic.Int64) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns, cfg.MinConns = int32(size), int32(size) //nolint:gosec // at most 64
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &countedConn{Conn: conn, trips: trips}, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := openAll(ctx, pool, size); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func openAll(ctx context.Context, pool *pgxpool.Pool, size int) error {
	for range size {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
	}
	return nil
}

// A countedConn counts the round trips of a connection: what is written after
// something was read begins one.
type countedConn struct {
	net.Conn

	trips   *atomic.Int64
	waiting atomic.Bool // for an answer
}

func (c *countedConn) Write(p []byte) (int, error) {
	if !c.waiting.Swap(true) {
		c.trips.Add(1)
	}
	return c.Conn.Write(p)
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.waiting.Store(false)
	}
	return n, err
}
