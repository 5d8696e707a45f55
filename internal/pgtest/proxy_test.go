package pgtest_test

import (
	"context"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency/internal/pgtest"
)

// proxied returns a proxy in front of a database with an empty table t, and a
// connection that does not pass through it.
func proxied(t *testing.T) (*pgtest.Proxy, *pgx.Conn) {
	t.Helper()
	url := pgtest.Database(t)
	direct := connect(t, url)
	exec1(t, direct, `CREATE TABLE t (s text)`)
	return pgtest.NewProxy(t, url), direct
}

func TestProxyRoundTrips(t *testing.T) {
	t.Parallel()
	p, _ := proxied(t)
	conn := connect(t, p.URL())
	require.Zero(t, p.RoundTrips())
	cost := func(do func()) int64 {
		before := p.RoundTrips()
		do()
		return p.RoundTrips() - before
	}
	const insert = `INSERT INTO t VALUES ($1)`
	cached := func() { exec1(t, conn, insert, "x") }
	for _, tc := range []struct {
		name string
		want int64
		do   func()
	}{
		{"simple query", 1, func() { exec1(t, conn, `SELECT 1`, pgx.QueryExecModeSimpleProtocol) }},
		{"exec mode", 1, func() { exec1(t, conn, insert, pgx.QueryExecModeExec, "x") }},
		{"describe and exec", 2, func() { exec1(t, conn, insert, pgx.QueryExecModeDescribeExec, "x") }},
		{"cached statement, first", 2, cached},
		{"cached statement, then", 1, cached},
		{"prepare", 1, func() {
			_, err := conn.Prepare(t.Context(), "p", `SELECT $1::int`)
			require.NoError(t, err)
		}},
		{"large", 1, func() { exec1(t, conn, insert, strings.Repeat("x", 1<<20)) }},
		{"batch of cached statements", 1, func() {
			b := &pgx.Batch{}
			b.Queue(insert, "x")
			b.Queue(insert, "y")
			require.NoError(t, conn.SendBatch(t.Context(), b).Close())
		}},
		{"failing query", 1, func() {
			_, err := conn.Exec(t.Context(), `SELECT 1/0`)
			require.Error(t, err)
		}},
		{"transaction", 4, func() {
			tx, err := conn.Begin(t.Context())
			require.NoError(t, err)
			for range 2 {
				_, err := tx.Exec(t.Context(), insert, "x")
				require.NoError(t, err)
			}
			require.NoError(t, tx.Commit(t.Context()))
		}},
	} {
		require.Equal(t, tc.want, cost(tc.do), tc.name)
	}
	require.Zero(t, cost(func() { connect(t, p.URL()) }), "startup")
}

func TestProxyCuts(t *testing.T) {
	t.Parallel()
	const insert = `INSERT INTO t VALUES ($1)`
	for _, tc := range []struct {
		name  string
		match string
		mode  pgx.QueryExecMode
		first bool // the statement runs once before
	}{
		{"simple query", "INSERT INTO t", pgx.QueryExecModeSimpleProtocol, false},
		{"SQL of a Parse", "INSERT INTO t", pgx.QueryExecModeExec, false},
		{"value of a Bind", "needle", pgx.QueryExecModeCacheStatement, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, direct := proxied(t)
			rows := func() int { return query1[int](t, direct, `SELECT count(*) FROM t WHERE s = 'needle'`) }
			run := func(conn *pgx.Conn, value string) error {
				_, err := conn.Exec(t.Context(), insert, tc.mode, value)
				return err
			}
			for i, arm := range []func(string){p.CutBeforeSending, p.CutAfterSending} {
				conn := connect(t, p.URL())
				if tc.first {
					require.NoError(t, run(conn, "hay"))
				}
				arm(tc.match)
				exec1(t, conn, `SELECT 'hay'`)
				require.Equal(t, i, p.Cuts())

				err := run(conn, "needle")
				require.Error(t, err)
				require.False(t, pgconn.SafeToRetry(err))
				require.True(t, conn.IsClosed())
				require.Equal(t, i+1, p.Cuts())
				require.Equal(t, i, rows(), "before: not there, after: there")

				require.NoError(t, run(connect(t, p.URL()), "hay"), "the trap is disarmed")
			}
			require.Equal(t, 2, p.Cuts())
		})
	}
}

func TestProxyCutsAfterCommit(t *testing.T) {
	t.Parallel()
	p, direct := proxied(t)
	conn := connect(t, p.URL())
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO t VALUES ('x')`)
	require.NoError(t, err)
	p.CutAfterSending("commit")
	require.Error(t, tx.Commit(t.Context()))
	require.Equal(t, 1, query1[int](t, direct, `SELECT count(*) FROM t`))
}

func TestProxyHoldsAnswer(t *testing.T) {
	t.Parallel()
	p, direct := proxied(t)
	const insert = `INSERT INTO t VALUES ($1)`
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec, pgx.QueryExecModeCacheStatement,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			exec1(t, direct, `TRUNCATE t`)
			conn := connect(t, p.URL())
			exec1(t, conn, insert, mode, "hay")
			held, release := p.HoldAnswer("needle")
			exec1(t, conn, insert, mode, "hay")
			select {
			case <-held:
				t.Fatal("held an answer to another statement")
			default:
			}
			result := make(chan error, 1)
			go func() {
				_, err := conn.Exec(context.WithoutCancel(t.Context()), insert, mode, "needle")
				result <- err
			}()
			<-held
			require.Equal(t, 1, query1[int](t, direct, `SELECT count(*) FROM t WHERE s = 'needle'`), "it is committed")
			require.Never(t, func() bool { return len(result) > 0 }, 50*time.Millisecond, 10*time.Millisecond)
			release()
			release()
			require.NoError(t, <-result)
			exec1(t, conn, insert, mode, "needle") // the trap is disarmed, and the connection lives
		})
	}
	require.Zero(t, p.Cuts())

	t.Run("client gone", func(t *testing.T) {
		conn := connect(t, p.URL())
		held, _ := p.HoldAnswer("needle")
		ctx, hangUp := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() {
			_, err := conn.Exec(ctx, insert, pgx.QueryExecModeSimpleProtocol, "needle")
			result <- err
		}()
		<-held
		hangUp()
		require.ErrorIs(t, <-result, context.Canceled) // and what is held does not hold the proxy up at its end
	})
}

func TestProxyOfStoppedServer(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	p := pgtest.NewProxy(t, s.Database(t))
	conn := connect(t, p.URL())
	p.CutAfterSending("pg_sleep")
	result := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), `SELECT pg_sleep(600)`)
		result <- err
	}()
	require.Never(t, func() bool { return p.Cuts() > 0 }, 200*time.Millisecond, 10*time.Millisecond)
	s.Stop(t)
	require.Error(t, <-result)
	require.Equal(t, 1, p.Cuts())

	_, err := pgx.Connect(t.Context(), p.URL())
	require.Error(t, err)
	s.Restart(t)
	require.NoError(t, connect(t, p.URL()).Ping(t.Context()))
}

func TestProxyRefuse(t *testing.T) {
	t.Parallel()
	p, _ := proxied(t)
	conn := connect(t, p.URL())
	p.Refuse(true)
	require.Error(t, conn.Ping(t.Context()))
	_, err := pgx.Connect(t.Context(), p.URL())
	require.Error(t, err)
	p.Refuse(false)
	require.NoError(t, connect(t, p.URL()).Ping(t.Context()))
}

func TestProxyForwardsCancelRequests(t *testing.T) {
	t.Parallel()
	p, direct := proxied(t)
	conn := connect(t, p.URL())
	result := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), `SELECT pg_sleep(600)`)
		result <- err
	}()
	require.Eventually(t, func() bool {
		return query1[bool](t, direct, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database())`)
	}, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, conn.PgConn().CancelRequest(t.Context()))
	var canceled *pgconn.PgError
	require.ErrorAs(t, <-result, &canceled)
	require.Equal(t, "57014", canceled.Code)
}

func TestProxyDeclinesTLS(t *testing.T) {
	t.Parallel()
	p, _ := proxied(t)
	config, err := pgx.ParseConfig(strings.Replace(p.URL(), "sslmode=disable", "sslmode=prefer", 1))
	require.NoError(t, err)
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
}

func TestProxyEndsWithTheTest(t *testing.T) {
	t.Parallel()
	var address string
	var client net.Conn
	t.Run("proxy", func(t *testing.T) {
		p, _ := proxied(t)
		u, err := url.Parse(p.URL())
		require.NoError(t, err)
		address = u.Host
		client, err = new(net.Dialer).DialContext(t.Context(), "tcp", address)
		require.NoError(t, err)
		// Says nothing: the proxy waits for its startup message.
	})
	defer client.Close()
	_, err := io.ReadAll(client)
	if err != nil {
		require.ErrorContains(t, err, "reset")
	}
	_, err = new(net.Dialer).DialContext(t.Context(), "tcp", address)
	require.Error(t, err)
}
