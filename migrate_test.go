package idempotency_test

import (
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// Any number of processes may start, and migrate, at once.
func TestMigrateAtOnce(t *testing.T) {
	for _, level := range []string{"read committed", "serializable"} {
		dbURL := pgtest.Database(t)
		cfg := idempotency.PostgresConfig{Schema: "new"}
		errs := make([]error, 16)
		var wg sync.WaitGroup
		for i := range errs {
			pool := newPool(t, dbURL, withSetting("default_transaction_isolation", level))
			wg.Go(func() { errs[i] = idempotency.MigrateWith(t.Context(), pool, cfg) })
		}
		wg.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
		pool := newPool(t, dbURL)
		require.Equal(t, 3, queryOne[int](t, pool, "SELECT count(*) FROM new.idempotency_records_migrations"))
		require.Equal(t, 0, queryOne[int](t, pool, "SELECT count(*) FROM new.idempotency_records"))
	}
}

// Tables that share what has to be made, or are one under two names.
func TestMigrateSeveralTablesAtOnce(t *testing.T) {
	dbURL := pgtest.Database(t)
	var configs []idempotency.PostgresConfig
	for i := range 8 {
		configs = append(configs, idempotency.PostgresConfig{Schema: "new", Table: strconv.Itoa(i)},
			idempotency.PostgresConfig{}, idempotency.PostgresConfig{Schema: "public"})
	}
	errs := make([]error, len(configs))
	var wg sync.WaitGroup
	for i, cfg := range configs {
		pool := newPool(t, dbURL)
		require.NoError(t, pool.Ping(t.Context()))
		wg.Go(func() { errs[i] = idempotency.MigrateWith(t.Context(), pool, cfg) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

// Where nothing is missing, a role needs no right to change anything.
func TestMigrateIsReadOnlyWhenDone(t *testing.T) {
	dbURL := pgtest.Database(t)
	reader := newPool(t, dbURL, withSetting("default_transaction_read_only", "on"))
	require.ErrorContains(t, idempotency.Migrate(t.Context(), reader), "read-only")
	require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
	require.NoError(t, idempotency.Migrate(t.Context(), reader))
}

// What a later version of the package has migrated is left alone, and so is a
// table that Migrate did not make.
func TestMigrateLeavesOthersTables(t *testing.T) {
	pool := migrated(t)
	_, err := pool.Exec(t.Context(), "INSERT INTO idempotency_records_migrations (version) VALUES (1000)")
	require.NoError(t, err)
	require.NoError(t, idempotency.Migrate(t.Context(), pool))

	_, err = pool.Exec(t.Context(), "CREATE TABLE mine (n integer); INSERT INTO mine VALUES (42)")
	require.NoError(t, err)
	require.ErrorContains(t, idempotency.MigrateWith(t.Context(), pool, idempotency.PostgresConfig{Table: "mine"}), "already exists")
	require.Equal(t, 42, queryOne[int](t, pool, "SELECT n FROM mine"))
	require.False(t, queryOne[bool](t, pool, "SELECT to_regclass('mine_migrations') IS NOT NULL"), "nothing is left of it")
}

// The exported SQL makes the same table as Migrate does.
func TestMigrationsAreWhatMigrateRuns(t *testing.T) {
	migrations, err := idempotency.Migrations(idempotency.PostgresConfig{})
	require.NoError(t, err)
	byHand := newPool(t, pgtest.Database(t))
	for i, m := range migrations {
		require.Equal(t, i+1, m.Version)
		_, err := byHand.Exec(t.Context(), m.SQL)
		require.NoError(t, err)
	}
	const columns = `SELECT string_agg(format('%s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
		(SELECT collname FROM pg_collation c WHERE c.oid = a.attcollation)), E'\n' ORDER BY a.attnum)
		FROM pg_attribute a WHERE attrelid = 'idempotency_records'::regclass AND attnum > 0`
	const indexes = `SELECT string_agg(pg_get_indexdef(indexrelid), E'\n' ORDER BY indexrelid)
		FROM pg_index WHERE indrelid = 'idempotency_records'::regclass`
	byMigrate := migrated(t)
	for _, sql := range []string{columns, indexes} {
		require.Equal(t, queryOne[string](t, byMigrate, sql), queryOne[string](t, byHand, sql))
	}

	// S35: six text columns, byte by byte, are the primary key; bodies are bytes.
	require.Contains(t, queryOne[string](t, byMigrate, indexes),
		"(scope_version, tenant_id, principal_id, route, ns, idem_key)")
	require.Equal(t, 6, strings.Count(queryOne[string](t, byMigrate, columns), ` text t C`))
	require.Contains(t, queryOne[string](t, byMigrate, columns), "response_body bytea")
}

// Keys are UTF-8: a database in another encoding cannot hold them all.
func TestMigrateRefusesOtherEncodings(t *testing.T) {
	server := pgtest.Start(t)
	admin := newPool(t, server.Database(t))
	_, err := admin.Exec(t.Context(), "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
	require.NoError(t, err)
	cfg := admin.Config()
	cfg.ConnConfig.Database = "latin"
	latin := newPoolWith(t, cfg)
	require.ErrorContains(t, idempotency.Migrate(t.Context(), latin), "LATIN1")
	require.False(t, queryOne[bool](t, latin, "SELECT to_regclass('idempotency_records') IS NOT NULL"))
}
