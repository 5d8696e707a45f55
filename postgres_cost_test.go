package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// quiet are settings under which a server writes to its log what statements
// cause, and nothing else.
var quiet = []string{
	"full_page_writes=off", "autovacuum=off", "wal_level=minimal", "max_wal_senders=0", "checkpoint_timeout=1h",
}

// withoutPings keeps a pool from asking an idle connection whether it is alive,
// which would be one more round trip.
func withoutPings(cfg *pgxpool.Config) {
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
}

// A cost is what a server had to do.
type cost struct {
	roundTrips   int64
	transactions int64 // that wrote: each has an ID, and a commit that is flushed
	wal          int64 // bytes
}

// A meter reads costs from a server of its own.
type meter struct {
	proxy *pgtest.Proxy
	admin *pgxpool.Pool
}

func newMeter(t *testing.T) (m meter, pool *pgxpool.Pool) {
	t.Helper()
	dbURL := pgtest.Start(t, quiet...).Database(t)
	m = meter{proxy: pgtest.NewProxy(t, dbURL), admin: newPool(t, dbURL)}
	require.NoError(t, idempotency.Migrate(t.Context(), m.admin))
	return m, newPool(t, m.proxy.URL(), withoutPings)
}

func (m meter) read(t *testing.T) cost {
	t.Helper()
	return cost{
		roundTrips:   m.proxy.RoundTrips(),
		transactions: queryOne[int64](t, m.admin, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"),
		wal:          queryOne[int64](t, m.admin, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"),
	}
}

// of returns what f cost.
func (m meter) of(t *testing.T, f func()) cost {
	t.Helper()
	before := m.read(t)
	f()
	after := m.read(t)
	return cost{after.roundTrips - before.roundTrips, after.transactions - before.transactions, after.wal - before.wal}
}

// S36: a first request costs two round trips and two commits; one that meets a
// record costs one round trip and writes nothing.
func TestS36PostgresCostOfARequest(t *testing.T) {
	m, pool := newMeter(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newGuardedSite(t, idempotency.NewPostgresStore(pool), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			entered <- struct{}{}
			<-leave
		}
		w.WriteHeader(http.StatusCreated)
	})
	send := func(c call, status int) func() {
		return func() {
			t.Helper()
			require.Equal(t, status, s.do(t.Context(), c).status)
		}
	}
	charge, refund := call{key: `"charge"`}, call{key: `"refund"`}
	reused := call{key: `"charge"`, body: "other"}
	send(charge, http.StatusCreated)() // so that the statements are prepared

	first := m.of(t, send(refund, http.StatusCreated))
	require.EqualValues(t, 2, first.roundTrips)
	require.EqualValues(t, 2, first.transactions)
	require.Positive(t, first.wal)

	slow := call{key: `"slow"`, path: "/slow"}
	done := make(chan int)
	go func() { done <- s.do(t.Context(), slow).status }()
	<-entered
	for name, again := range map[string]func(){
		"replay":    send(charge, http.StatusCreated),
		"in flight": send(slow, http.StatusConflict),
		"reused":    send(reused, http.StatusUnprocessableEntity),
	} {
		again() // the first look at a record may tidy its page
		require.Equal(t, cost{roundTrips: 1}, m.of(t, again), name)
	}
	close(leave)
	require.Equal(t, http.StatusCreated, <-done)
	require.EqualValues(t, 3, s.runs.Load())
}

// S35: completing leaves the indexes alone.
func TestS35PostgresCompletionIsHOT(t *testing.T) {
	m, pool := newMeter(t)
	const workers, each = 8, 200
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				if !noError(t, firstRequest(t, pool, fmt.Sprintf("%d %d", w, i))) {
					return
				}
			}
		})
	}
	wg.Wait()
	pool.Close() // sessions report what they did at their end
	const updates = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'idempotency_records'"
	require.Eventually(t, func() bool { return queryOne[int](t, m.admin, updates) == workers*each }, 10*time.Second, 10*time.Millisecond)
	hot := queryOne[int](t, m.admin, strings.Replace(updates, "n_tup_upd", "n_tup_hot_upd", 1))
	t.Logf("%d of %d updates were HOT", hot, workers*each)
	require.GreaterOrEqual(t, hot, workers*each*9/10)
}

// firstRequest claims a key and completes it with a body of 200 bytes.
func firstRequest(t *testing.T, pool *pgxpool.Pool, key string) error {
	t.Helper()
	store := idempotency.NewPostgresStore(pool)
	c := memoryClaim(t, key)
	if _, err := store.Claim(t.Context(), c); err != nil {
		return err
	}
	return store.Complete(t.Context(), memoryLeaseOf(c), idempotency.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   []byte(strings.Repeat("x", 200)),
	})
}

// S36: what a first request adds to the server's log is what a plain INSERT and a
// plain UPDATE of the same table add, and at most an eighth more.
func TestS36PostgresLogOfAFirstRequest(t *testing.T) {
	m, pool := newMeter(t)
	const requests = 500
	ours := m.of(t, func() {
		for i := range requests {
			require.NoError(t, firstRequest(t, pool, strconv.Itoa(i)))
		}
	})
	require.NoError(t, idempotency.MigrateWith(t.Context(), m.admin, idempotency.PostgresConfig{Table: "floor"}))
	var headers []byte
	require.NoError(t, m.admin.QueryRow(t.Context(), "SELECT response_headers FROM idempotency_records LIMIT 1").Scan(&headers))
	floor := m.of(t, func() {
		for i := range requests {
			c := memoryClaim(t, strconv.Itoa(i))
			_, err := pool.Exec(t.Context(), `INSERT INTO floor (scope_version, tenant_id, principal_id, route, ns, idem_key,
				fingerprint, status, held, owner, attempt, lease_expires_at, created_at, expires_at)
				VALUES ('v1', 'acme', 'alice', 'charge', 'u:', $1, $2, 'in_progress', false, $3, 1, now() + '1 min', now(), now() + '1 h')`,
				c.Key.Key(), c.Fingerprint[:], c.Owner.String())
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `UPDATE floor SET status = 'completed', response_code = 201, response_headers = $2,
				response_body = $3 WHERE scope_version = 'v1' AND tenant_id = 'acme' AND principal_id = 'alice'
				AND route = 'charge' AND ns = 'u:' AND idem_key = $1`, c.Key.Key(), headers, []byte(strings.Repeat("x", 200)))
			require.NoError(t, err)
		}
	})
	require.EqualValues(t, 2*requests, ours.transactions)
	require.EqualValues(t, 2*requests, floor.transactions)
	ratio := float64(ours.wal) / float64(floor.wal)
	t.Logf("%d bytes of log a request, %d without this package: %.3f times", ours.wal/requests, floor.wal/requests, ratio)
	require.LessOrEqual(t, ratio, 1.12)
}
