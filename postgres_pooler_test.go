package idempotency_test

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
	"github.com/keytuple/idempotency/storetest"
)

// S37: the contract through pgbouncer in transaction mode, where each statement
// may meet another session. Three of them serve sixteen clients.
func TestS37PostgresThroughPgbouncer(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			pool := newPool(t, pgbouncer(t, pgtest.Database(t)), withMode(mode))
			var tables atomic.Int64
			storetest.Run(t, func(t *testing.T) storetest.Subject {
				t.Helper()
				cfg := idempotency.PostgresConfig{Table: fmt.Sprint("records ", tables.Add(1))}
				require.NoError(t, idempotency.MigrateWith(t.Context(), pool, cfg))
				return storetest.Subject{
					Store:   idempotency.NewPostgresStoreWith(pool, cfg),
					Advance: func(d time.Duration) { advance(t, pool, pgx.Identifier{cfg.Table}.Sanitize(), d) },
				}
			})
		})
	}
}

// pgbouncer starts one in front of a database and returns the URL that leads
// through it.
func pgbouncer(t *testing.T, dbURL string) string {
	t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer"
		if _, err := os.Stat(program); err != nil {
			t.Skip("pgbouncer is not installed")
		}
	}
	server, err := pgconn.ParseConfig(dbURL)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("/tmp", "pgbouncer-") //nolint:usetesting // another user must be able to enter it
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o777))
	password := ""
	if server.Password != "" {
		password = " password=" + server.Password
	}
	config := fmt.Sprintf("[databases]\n* = host=%s port=%d user=%s%s\n[pgbouncer]\nunix_socket_dir = %s\n"+
		"auth_type = any\npool_mode = transaction\ndefault_pool_size = 3\n", server.Host, server.Port, server.User, password, dir)
	file := filepath.Join(dir, "ini")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o644))
	args := []string{file}
	if os.Getuid() == 0 {
		args = append(args, "-u", "nobody") // it refuses to run as root
		if server.Host[0] == '/' {
			args[2] = "postgres" // who may enter the directory of the socket
		}
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	log := &syncBuffer{}
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	through := url.URL{Scheme: "postgres", User: url.User(server.User), Path: "/" + server.Database}
	through.RawQuery = url.Values{"host": {dir}, "port": {"6432"}, "sslmode": {"disable"}}.Encode()
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), through.String())
		return err == nil && conn.Close(t.Context()) == nil
	}, 10*time.Second, 20*time.Millisecond, log)
	return through.String()
}
