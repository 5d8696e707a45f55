package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

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
