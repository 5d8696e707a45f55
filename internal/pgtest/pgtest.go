// Package pgtest gives tests a PostgreSQL of their own, to use and to break.
//
// [Database] is the usual one: an empty database on a server that all tests of
// the process share. [Start] is a server that a test may configure, crash and
// restart. [Proxy] counts round trips, and cuts connections or holds answers back
// at a chosen statement. [Run] does for a command what Database does for a test,
// and [Serve] for a program what Start does.
//
// Servers run from the machine's PostgreSQL programs, without TCP, in a temporary
// directory. They do not outlive the process that started them, however it ends.
package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// envURL names the variable with the URL of a server to use instead of starting
// one. Its user must be allowed to create databases.
const envURL = "IDEMPOTENCY_TEST_DATABASE_URL"

// errNoBinaries reports a machine without the PostgreSQL server's programs.
var errNoBinaries = errors.New("pgtest: no PostgreSQL server found: install PostgreSQL 14 or later")

// shared is the server of [Database]. It is never closed: its watchdog does that
// when the process ends.
var shared struct {
	once   sync.Once
	server *Server
	err    error
}

// Database returns the connection URL of a new, empty database, which is dropped
// at the end of the test along with all connections to it.
//
// It is made on the server that the variable IDEMPOTENCY_TEST_DATABASE_URL names,
// else on one that is started once per process. Where that is impossible because
// PostgreSQL is not installed, the test is skipped, or fails if the variable CI
// is not empty.
func Database(tb testing.TB) string {
	tb.Helper()
	base := os.Getenv(envURL)
	if base == "" {
		ctx := context.WithoutCancel(tb.Context())
		shared.once.Do(func() { shared.server, shared.err = startServer(ctx) })
		if errors.Is(shared.err, errNoBinaries) {
			unavailable(tb, fmt.Errorf("%w, or set %s", shared.err, envURL))
		}
		if shared.err != nil {
			tb.Fatal(shared.err)
		}
		base = shared.server.url()
	}
	d, err := createDatabase(tb.Context(), base)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.drop(context.WithoutCancel(tb.Context())); err != nil {
			tb.Error(err)
		}
	})
	return d.url
}

// unavailable ends a test that found no PostgreSQL: a machine of a developer may
// lack it, one that decides about a change must not.
func unavailable(tb testing.TB, err error) {
	tb.Helper()
	if os.Getenv("CI") != "" {
		tb.Fatal(err)
	}
	tb.Skip(err)
}

// database is one that [createDatabase] made.
type database struct{ base, name, url string }

// createDatabase makes an empty database with a random name on the server of the
// URL base.
func createDatabase(ctx context.Context, base string) (database, error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	d := database{base: base, name: "idempotency_test_" + hex.EncodeToString(random[:])}

	// Not %w: the error of url.Parse quotes the URL, with its password.
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return database{}, fmt.Errorf("pgtest: %s is not a postgres:// URL", envURL)
	}
	u.Path, u.RawPath = "/"+d.name, ""
	// Both would win over the path.
	setQuery(u, nil, "dbname", "database")
	d.url = u.String()

	// template0 is empty whatever was done to template1, and has no connections,
	// which would block the copy.
	if err := d.exec(ctx, "CREATE DATABASE "+d.name+" TEMPLATE template0"); err != nil {
		return database{}, fmt.Errorf("pgtest: create database: %w", err)
	}
	return d, nil
}

// drop removes the database and ends all connections to it.
func (d database) drop(ctx context.Context) error {
	if err := d.exec(ctx, "DROP DATABASE IF EXISTS "+d.name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("pgtest: drop database: %w", err)
	}
	return nil
}

func (d database) exec(ctx context.Context, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.base)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// setQuery removes and sets query parameters of u. It writes a space as %20,
// since libpq takes a plus sign for itself.
func setQuery(u *url.URL, set map[string]string, remove ...string) {
	q := u.Query()
	for _, k := range remove {
		q.Del(k)
	}
	for k, v := range set {
		q.Set(k, v)
	}
	u.RawQuery = strings.NewReplacer("+", "%20", "%2F", "/").Replace(q.Encode())
}
