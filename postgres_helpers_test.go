package idempotency_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// newPool returns a pool of connections to a database, which options may change.
func newPool(t *testing.T, dbURL string, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dbURL)
	require.NoError(t, err)
	cfg.MaxConns = 16
	for _, option := range options {
		option(cfg)
	}
	return newPoolWith(t, cfg)
}

func newPoolWith(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	leavesNothing(t)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// withMode makes a pool send all statements in that mode.
func withMode(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
}

// withSetting makes each session of a pool begin with that setting.
func withSetting(name, value string) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams[name] = value }
}

// migrated returns a pool of connections to a new database with the default table.
func migrated(t *testing.T, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	pool := newPool(t, pgtest.Database(t), options...)
	require.NoError(t, idempotency.Migrate(t.Context(), pool))
	return pool
}

// advance moves the records of a table d nearer to their ends: to the store, its
// clock has gone forward.
func advance(t *testing.T, pool *pgxpool.Pool, table string, d time.Duration) {
	t.Helper()
	_, err := pool.Exec(t.Context(), "UPDATE "+table+` SET created_at = created_at - $1::interval,
		lease_expires_at = lease_expires_at - $1::interval, expires_at = expires_at - $1::interval`, d)
	require.NoError(t, err)
}

// queryOne returns the one value that a query returns.
func queryOne[T any](t *testing.T, db idempotency.PostgresDB, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return v
}

// modes are those of pgx that the store must work in; the last two are for
// poolers.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// count returns the number of records in the default table that meet a condition.
func count(t *testing.T, pool *pgxpool.Pool, condition string, args ...any) int {
	t.Helper()
	return queryOne[int](t, pool, "SELECT count(*) FROM idempotency_records WHERE "+condition, args...)
}
