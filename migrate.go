package idempotency

import (
	"context"
	_ "embed" // schema.sql
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed schema.sql
var schemaSQL string

//go:embed schema_successors.sql
var successorsSQL string

// aliasesSQL has room for what the records of operations with several names remember:
// the digests of their primary name and of their origin, where it is not their own.
const aliasesSQL = `ALTER TABLE idempotency_records ADD COLUMN alias_of bytea, ADD COLUMN origin bytea;
`

// A Migration is one version of a [PostgresStore]'s table.
type Migration struct {
	// Version is 1 for the first migration, and one more for each that follows.
	Version int
	// SQL holds the statements that lead from the version before to this one. They
	// can run in a transaction, once.
	SQL string
}

// Migrations returns all migrations of the table that cfg names, in their order,
// for those who run migrations with a tool of their own. They expect that the
// schema exists. Such a database is not to be given to [Migrate], too. The error
// joins a [*ConfigError] for each fault of cfg.
func Migrations(cfg PostgresConfig) ([]Migration, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validateNames()...); err != nil {
		return nil, err
	}
	return cfg.migrations(), nil
}

func (c PostgresConfig) migrations() []Migration {
	return []Migration{
		{Version: 1, SQL: strings.ReplaceAll(schemaSQL, DefaultPostgresTable, c.table())},
		{Version: 2, SQL: strings.ReplaceAll(aliasesSQL, DefaultPostgresTable, c.table())},
		{Version: 3, SQL: strings.ReplaceAll(successorsSQL, defaultSuccessorTable, c.successorTable())},
	}
}

// Migrate brings the table of a [PostgresStore] with default configuration up to
// date. See [MigrateWith].
func Migrate(ctx context.Context, db PostgresDB) error {
	return MigrateWith(ctx, db, PostgresConfig{})
}

// MigrateWith brings the table that cfg names up to date: it makes the schema if
// cfg names one that does not exist, and runs the [Migrations] that are missing,
// all in one transaction. Which ones ran is kept in a table beside it, whose name
// ends in "_migrations".
//
// Any number of processes may call it at once, each time they start. Where
// nothing is missing it only reads. A database that a later version of this
// package has migrated is left as it is.
func MigrateWith(ctx context.Context, db PostgresDB, cfg PostgresConfig) error {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validate(db)...); err != nil {
		return err
	}
	migrations := cfg.migrations()
	version, err := cfg.version(ctx, db)
	if err == nil && version < len(migrations) {
		err = cfg.migrate(ctx, db, migrations)
	}
	if err != nil {
		return postgresError("migrate", err)
	}
	return nil
}

type postgresQuerier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// version returns the version of the table, 0 if there is none.
func (c PostgresConfig) version(ctx context.Context, db postgresQuerier) (int, error) {
	exists, err := queryValue[bool](ctx, db, "SELECT to_regclass($1) IS NOT NULL", c.versionTable())
	if err != nil || !exists {
		return 0, err
	}
	return queryValue[int](ctx, db, "SELECT coalesce(max(version), 0) FROM "+c.versionTable())
}

func queryValue[T any](ctx context.Context, db postgresQuerier, sql string, args ...any) (T, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		var zero T
		return zero, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
}

// migrate runs the migrations that are missing, while others wait.
func (c PostgresConfig) migrate(ctx context.Context, db PostgresDB, migrations []Migration) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	if err := c.prepare(ctx, tx); err != nil {
		return err
	}
	version, err := c.version(ctx, tx)
	if err != nil {
		return err
	}
	for _, m := range migrations[min(version, len(migrations)):] {
		if _, err := tx.Exec(ctx, m.SQL); err != nil {
			return fmt.Errorf("version %d: %w", m.Version, err)
		}
		if _, err := tx.Exec(ctx, "INSERT INTO "+c.versionTable()+" (version) VALUES ($1)", m.Version); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

// migrationLock is the number of the advisory lock that migrations of one database
// wait for, whatever their tables are: a schema may be new to several.
const migrationLock = 0x6964656d706f74 // "idempot"

// prepare makes tx the only migration of its database, and makes what the record of
// its versions needs.
func (c PostgresConfig) prepare(ctx context.Context, tx pgx.Tx) error {
	// What another migration has committed while this one waited for it must be seen.
	if _, err := tx.Exec(ctx, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(migrationLock)); err != nil {
		return err
	}
	encoding, err := queryValue[string](ctx, tx, "SELECT current_setting('server_encoding')")
	if err != nil {
		return err
	}
	if encoding != "UTF8" {
		return fmt.Errorf("the database's encoding is %s; keys need UTF8", encoding)
	}
	if c.Schema != "" {
		exists, err := queryValue[bool](ctx, tx, "SELECT to_regnamespace($1) IS NOT NULL", quoteName(c.Schema))
		if err != nil {
			return err
		}
		if !exists {
			if _, err := tx.Exec(ctx, "CREATE SCHEMA "+quoteName(c.Schema)); err != nil {
				return err
			}
		}
	}
	_, err = tx.Exec(ctx, "CREATE TABLE IF NOT EXISTS "+c.versionTable()+
		" (version integer PRIMARY KEY, migrated_at timestamptz NOT NULL DEFAULT now())")
	return err
}
