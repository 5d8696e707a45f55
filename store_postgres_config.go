package idempotency

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DefaultPostgresTable is the table of a [PostgresConfig] that names none.
const DefaultPostgresTable = "idempotency_records"

// PostgresConfig says where a [PostgresStore] keeps its records, and how it sends
// its statements. The zero value is valid. Names are quoted: capital letters are
// kept, and any character may be in them but U+0000 and the dollar sign.
type PostgresConfig struct {
	_ [0]func() // keyed literals only

	// Schema is the schema of the table, at most 63 bytes. Default: the one that the
	// connection's search_path leads to.
	Schema string
	// Table is the table's name, at most 52 bytes, so that there is room for
	// "_migrations" or "_successors" behind it. Default: [DefaultPostgresTable].
	Table string
	// DisableBatching sends each statement by itself, in a transaction of its own,
	// on its caller's goroutine. Set it where a batch would span servers, as in a
	// distributed database: its transaction would have to commit on all of them.
	// Default: group commit, see [PostgresStore].
	DisableBatching bool
	// Isolation is the isolation level of the transactions of [Config].Transactional. Under
	// pgx.RepeatableRead and pgx.Serializable an operation may be refused at its commit
	// (SQLSTATE 40001): its request gets 503 retry. Default: the database's own default.
	Isolation pgx.TxIsoLevel
	// MaxTransactions is how many transactions of [Config].Transactional are open at the
	// same time; further requests wait, at most [Config].StoreTimeout, and get 503
	// store-unavailable then. Each holds a connection while its handler runs, so leave
	// some for everything else: handlers that take a second connection out of an empty
	// pool would wait for each other. Default: half of what the pool can have, at least 1.
	MaxTransactions int
}

const (
	maxPostgresName = 63 // bytes; PostgreSQL cuts longer ones off
	versionSuffix   = "_migrations"
	successorSuffix = "_successors" // no longer than the other

	// defaultSuccessorTable is the one beside DefaultPostgresTable.
	defaultSuccessorTable = "idempotency_successors"
)

// isolationLevels are those of PostgreSQL; the first is the database's default.
var isolationLevels = []pgx.TxIsoLevel{"", pgx.ReadUncommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func (c PostgresConfig) withDefaults() PostgresConfig {
	c.Table = orDefault(c.Table, DefaultPostgresTable)
	return c
}

// validate returns all faults of db and of a config that has its defaults.
func (c PostgresConfig) validate(db PostgresDB) []error {
	faults := c.validateNames()
	if !slices.Contains(isolationLevels, c.Isolation) {
		faults = append(faults, &ConfigError{Field: "Isolation", Value: string(c.Isolation), Reason: "is no isolation level"})
	}
	if c.MaxTransactions < 0 {
		faults = append(faults, &ConfigError{
			Field: "MaxTransactions", Value: strconv.Itoa(c.MaxTransactions), Reason: "is negative",
		})
	}
	if reason := checkPostgresDB(db); reason != "" {
		faults = append(faults, &ConfigError{Field: "db", Reason: reason})
	}
	return faults
}

func (c PostgresConfig) validateNames() []error {
	var faults []error
	for _, n := range []struct {
		field, value string
		limit        int
	}{
		{"Schema", c.Schema, maxPostgresName},
		{"Table", c.Table, maxPostgresName - len(versionSuffix)},
	} {
		if reason := checkPostgresName(n.value, n.limit); reason != "" {
			faults = append(faults, &ConfigError{Field: n.field, Value: n.value, Reason: reason})
		}
	}
	return faults
}

func checkPostgresName(name string, limit int) string {
	switch {
	case len(name) > limit:
		return fmt.Sprintf("is longer than %d bytes", limit)
	case !utf8.ValidString(name):
		return "is not valid UTF-8"
	case strings.ContainsAny(name, "\x00$"):
		return "contains U+0000 or a dollar sign"
	}
	return ""
}

// checkPostgresDB refuses what is one connection, directly or inside: claims of
// concurrent requests would meet on it, and inside a transaction none would be
// committed.
func checkPostgresDB(db PostgresDB) string {
	if v := reflect.ValueOf(db); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return "is required"
	}
	switch db.(type) {
	case interface{ PgConn() *pgconn.PgConn }, interface{ Conn() *pgx.Conn }:
		return "is a single connection or a transaction: a pool is required"
	}
	return ""
}

// table returns the table's name for use in a statement.
func (c PostgresConfig) table() string { return c.qualify(c.Table) }

// versionTable is where it is kept which migrations of the table have run.
func (c PostgresConfig) versionTable() string { return c.qualify(c.Table + versionSuffix) }

// successorTable is where it is kept which identities have succeeded others.
func (c PostgresConfig) successorTable() string {
	if c.Table == DefaultPostgresTable {
		return c.qualify(defaultSuccessorTable)
	}
	return c.qualify(c.Table + successorSuffix)
}

func (c PostgresConfig) qualify(name string) string {
	if c.Schema == "" {
		return quoteName(name)
	}
	return quoteName(c.Schema) + "." + quoteName(name)
}

func quoteName(name string) string { return pgx.Identifier{name}.Sanitize() }
