package pgtest_test

import (
	"os/exec"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency/internal/pgtest"
)

// connect returns a connection for the time of the test.
func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	return conn
}

func exec1(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func query1[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) (value T) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&value))
	return value
}

func TestDatabase(t *testing.T) {
	t.Parallel()
	outer := connect(t, pgtest.Database(t))
	const tables = `SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace`
	var names []string
	t.Run("two", func(t *testing.T) {
		for range 2 {
			conn := connect(t, pgtest.Database(t))
			require.Zero(t, query1[int](t, conn, tables))
			exec1(t, conn, `CREATE TABLE t ()`)
			names = append(names, query1[string](t, conn, `SELECT current_database()`))
		}
		require.NotEqual(t, names[0], names[1])
	})
	require.Zero(t, query1[int](t, outer, `SELECT count(*) FROM pg_database WHERE datname = ANY ($1)`, names))
	require.Zero(t, query1[int](t, outer, tables))
}

func TestDatabaseDropsDespiteConnections(t *testing.T) {
	t.Parallel()
	outer := connect(t, pgtest.Database(t))
	var name string
	t.Run("leaks", func(t *testing.T) {
		url := pgtest.Database(t)
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		name = query1[string](t, conn, `SELECT current_database()`)
	})
	require.Zero(t, query1[int](t, outer, `SELECT count(*) FROM pg_database WHERE datname = $1`, name))
}

func TestDatabaseOfEnvironment(t *testing.T) {
	base := pgtest.Database(t)
	t.Setenv("IDEMPOTENCY_TEST_DATABASE_URL", base+"&application_name=a%20b")
	conn := connect(t, pgtest.Database(t))
	require.Equal(t, "a b", query1[string](t, conn, `SHOW application_name`))
	require.Equal(t,
		query1[string](t, connect(t, base), `SHOW unix_socket_directories`),
		query1[string](t, conn, `SHOW unix_socket_directories`))
	require.NotEqual(t, base, conn.Config().ConnString())
}

func TestURLIsForLibpqToo(t *testing.T) {
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("no psql")
	}
	url := pgtest.Database(t)
	t.Setenv("PGPORT", "1")
	for _, url := range []string{url, pgtest.NewProxy(t, url).URL()} {
		out, err := exec.CommandContext(t.Context(), psql, "-XAtc", "SELECT current_user", url).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, "postgres\n", string(out))
	}
}

func TestServer(t *testing.T) {
	t.Parallel()
	var dir string
	t.Run("until the end of the test", func(t *testing.T) { dir = testServer(t) })
	require.NoDirExists(t, dir)
}

func testServer(t *testing.T) (dir string) {
	t.Helper()
	s := pgtest.Start(t, "full_page_writes=off", "max_connections=20")
	url := s.Database(t)
	conn := connect(t, url)
	require.Equal(t, "off", query1[string](t, conn, `SHOW full_page_writes`))
	require.Equal(t, "20", query1[string](t, conn, `SHOW max_connections`))
	exec1(t, conn, `CREATE TABLE t (n int)`)
	exec1(t, conn, `INSERT INTO t VALUES (1)`)
	exec1(t, conn, `BEGIN`)
	exec1(t, conn, `INSERT INTO t VALUES (2)`)

	s.Stop(t)
	require.Error(t, conn.Ping(t.Context()))
	_, err := pgx.Connect(t.Context(), url)
	require.Error(t, err)
	s.Stop(t) // nothing to do

	for range 2 { // stopped, then running
		s.Restart(t)
		conn = connect(t, url)
		require.Equal(t, 1, query1[int](t, conn, `SELECT sum(n) FROM t`))
	}
	dir = query1[string](t, conn, `SHOW unix_socket_directories`)
	require.DirExists(t, dir)
	return dir
}

func TestServe(t *testing.T) {
	t.Parallel()
	url, remove, err := pgtest.Serve(t.Context(), "max_connections=21")
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	require.Equal(t, "21", query1[string](t, conn, `SHOW max_connections`))
	dir := query1[string](t, conn, `SHOW data_directory`)
	require.NoError(t, remove())
	require.NoDirExists(t, dir)
	require.Error(t, conn.Ping(t.Context()))
	_ = conn.Close(t.Context())

	_, _, err = pgtest.Serve(t.Context(), "no_such_setting=1")
	require.Error(t, err)
}
