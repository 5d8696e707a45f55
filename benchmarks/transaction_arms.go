package main

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

// What a handler writes, in a transaction with its outcome or in one of its own.
const (
	createOrdersSQL = `CREATE TABLE orders (id uuid PRIMARY KEY, amount integer NOT NULL)`
	insertOrderSQL  = `INSERT INTO orders (id, amount) VALUES ($1, $2)`
)

// transactionArms compare the claim, the handler's write and the outcome in one
// transaction with a commit for each of them.
func (s *site) transactionArms(c cell) []arm {
	response := responseOf(c.Bytes)
	arms := []arm{{kind: armLibrary, pool: libraryPool, savepoints: 1, do: func(ctx context.Context, _, _ int) error {
		return inTransaction(ctx, s.inTx, response)
	}}}
	for _, n := range c.pools() {
		arms = append(arms, arm{kind: armFloor, pool: n, do: func(ctx context.Context, _, _ int) error {
			return separately(ctx, s.pools[n], response)
		}})
	}
	return arms
}

var errNoTransaction = errors.New("there is no transaction")

func inTransaction(ctx context.Context, store *idempotency.PostgresStore, r idempotency.Response) error {
	c, err := claimOf(uuid.NewString())
	if err != nil {
		return err
	}
	record, tx, err := store.ClaimInTransaction(ctx, c)
	switch {
	case err != nil:
		return err
	case tx == nil:
		return unexpected(record)
	}
	handlerTx, ok := idempotency.PostgresTx(tx.Context(ctx))
	if !ok {
		return errors.Join(errNoTransaction, tx.Rollback(ctx))
	}
	if err := writeOrder(ctx, handlerTx); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return tx.Commit(ctx, r)
}

func separately(ctx context.Context, pool *pgxpool.Pool, r idempotency.Response) error {
	key := uuid.NewString()
	if err := plainClaim(ctx, pool, key); err != nil {
		return err
	}
	if err := writeOrder(ctx, pool); err != nil {
		return err
	}
	return plainComplete(ctx, pool, key, r)
}

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func writeOrder(ctx context.Context, db execer) error {
	_, err := db.Exec(ctx, insertOrderSQL, pgtype.UUID{Bytes: uuid.New(), Valid: true}, 1000)
	return err
}
