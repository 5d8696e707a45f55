package idempotency_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// shortLease is what the tests of faults wait for.
const shortLease = time.Second

// A pgSite is a guarded site on Postgres whose middleware can be waited for.
type pgSite struct {
	*site
	m    *idempotency.Middleware
	logs *syncBuffer
}

func newPGSite(t *testing.T, db idempotency.PostgresDB, cfg idempotency.Config, h http.HandlerFunc) pgSite {
	t.Helper()
	var s pgSite
	s.logs = &syncBuffer{}
	cfg.Logger = slog.New(slog.NewTextHandler(s.logs, nil))
	s.m = newMiddleware(t, idempotency.NewPostgresStore(db), cfg)
	s.site = newSite(t, http1, s.m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.runs.Add(1)
		h(w, r)
	})))
	return s
}

// settled waits until nothing is left to be told to the store.
func (s pgSite) settled(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	require.NoError(t, s.m.Shutdown(ctx), s.logs)
}

func (s pgSite) unavailable(t *testing.T, c call) {
	t.Helper()
	a := s.do(t.Context(), c)
	require.Equal(t, http.StatusServiceUnavailable, a.status, a.body)
	require.Equal(t, string(idempotency.CodeStoreUnavailable), a.code(t))
	require.NotEmpty(t, a.header.Get("Retry-After"))
	require.NotContains(t, a.body, "SQLSTATE")
}

// created expects that the request ran, or was replayed, with that attempt.
func (s pgSite) created(t *testing.T, c call, replayed bool) reply {
	t.Helper()
	a := s.do(t.Context(), c)
	require.NoError(t, a.err)
	require.Equal(t, http.StatusCreated, a.status, "%s\n%s", a.body, s.logs)
	require.Equal(t, replayed, a.replayed())
	return a
}

// S30: no claim, no run. What the server never got is not to be released either:
// an outage leaves no work behind, also where a record is held.
func TestS30PostgresDownAtClaim(t *testing.T) {
	server := pgtest.Start(t)
	pool := newPool(t, server.Database(t))
	require.NoError(t, idempotency.Migrate(t.Context(), pool))
	s := newPGSite(t, pool, idempotency.Config{Lease: shortLease, HoldAbandoned: true}, echo)

	server.Stop(t)
	pool.Reset() // a statement sent on a connection that is dead already would be in doubt
	for range 3 {
		s.unavailable(t, call{})
	}
	require.Zero(t, s.runs.Load())
	require.Zero(t, idempotency.Unsettled(s.m))
	server.Restart(t)
	s.created(t, call{}, false)
	s.created(t, call{}, true)
	require.EqualValues(t, 1, s.runs.Load())
	s.settled(t)
}

// S30: the effect has happened, so its answer is delivered, and its outcome is
// stored as soon as there is a database again, after the lease's end, too.
func TestS30PostgresDownAtCompletion(t *testing.T) {
	server := pgtest.Start(t)
	dbURL := server.Database(t)
	pool := newPool(t, dbURL)
	require.NoError(t, idempotency.Migrate(t.Context(), pool))
	var down time.Time
	s := newPGSite(t, pool, idempotency.Config{Lease: shortLease, StoreTimeout: shortLease / 4},
		func(w http.ResponseWriter, r *http.Request) {
			server.Stop(t)
			down = time.Now()
			echo(w, r)
		})
	first := s.created(t, call{body: "pay"}, false)

	<-time.After(time.Until(down.Add(2 * shortLease))) // the lease's end, and more, must be in the past
	server.Restart(t)
	admin := newPool(t, dbURL)
	require.Eventually(t, func() bool { return count(t, admin, "status = 'completed'") == 1 }, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, 1, count(t, admin, "attempt = 1 AND lease_expires_at < now()"), "no second owner")
	retry := s.created(t, call{body: "pay"}, true)
	require.Equal(t, first.body, retry.body)
	require.EqualValues(t, 1, s.runs.Load())
	s.settled(t)
}

// S27, S30: a retry that takes over before the late outcome arrives has the key;
// the late outcome touches nothing.
func TestS27PostgresTakenOverWhileDown(t *testing.T) {
	dbURL := pgtest.Database(t)
	require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
	proxy := pgtest.NewProxy(t, dbURL)
	cfg := idempotency.Config{Lease: shortLease, StoreTimeout: shortLease / 4}
	cutOff := newPGSite(t, newPool(t, proxy.URL()), cfg, func(w http.ResponseWriter, r *http.Request) {
		proxy.Refuse(true)
		echo(w, r)
	})
	other := newPGSite(t, newPool(t, dbURL), cfg, echo)

	cutOff.created(t, call{}, false)
	var second reply
	require.Eventually(t, func() bool {
		second = other.do(t.Context(), call{})
		return second.status == http.StatusCreated
	}, 20*time.Second, 20*time.Millisecond, "the lease ends")
	require.False(t, second.replayed())
	proxy.Refuse(false)
	cutOff.settled(t)
	require.Contains(t, cutOff.logs.String(), "lease lost")
	require.Equal(t, second.body, other.created(t, call{}, true).body)
	require.EqualValues(t, 1, cutOff.runs.Load())
	require.EqualValues(t, 1, other.runs.Load())
}

// S30: a server that refuses to write, as a replica does after a failover, is
// down.
func TestS30PostgresReadOnly(t *testing.T) {
	dbURL := pgtest.Database(t)
	require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
	s := newPGSite(t, newPool(t, dbURL, withSetting("default_transaction_read_only", "on")), idempotency.Config{Lease: shortLease}, echo)
	s.unavailable(t, call{})
	require.Zero(t, s.runs.Load())
	require.Contains(t, s.logs.String(), "25006")
}

// S27, S37: where a connection breaks, in any mode, before a statement arrived or
// after it was committed, the handler runs once and its outcome is stored.
func TestS27PostgresConnectionCut(t *testing.T) {
	for _, mode := range modes {
		for _, tt := range []struct {
			name string
			cut  func(p *pgtest.Proxy, match string)
		}{
			{"after it was committed", (*pgtest.Proxy).CutAfterSending},
			{"before it arrived", (*pgtest.Proxy).CutBeforeSending},
		} {
			t.Run(mode.String()+" "+tt.name, func(t *testing.T) {
				dbURL := pgtest.Database(t)
				admin := newPool(t, dbURL)
				require.NoError(t, idempotency.Migrate(t.Context(), admin))
				proxy := pgtest.NewProxy(t, dbURL)
				cutCompletion := false
				s := newPGSite(t, newPool(t, proxy.URL(), withMode(mode)), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
					if cutCompletion {
						tt.cut(proxy, "cut here")
					}
					echo(w, r)
				})
				s.created(t, call{key: `"before"`}, false) // prepares the statements

				tt.cut(proxy, "cut here")
				c := call{key: `"cut here, at the claim"`}
				first := s.created(t, c, false)
				require.Equal(t, 1, proxy.Cuts())
				require.Equal(t, first.body, s.created(t, c, true).body)

				cutCompletion = true
				c = call{key: `"cut here, at the completion"`}
				first = s.created(t, c, false)
				require.Equal(t, 2, proxy.Cuts())
				require.Equal(t, first.body, s.created(t, c, true).body)

				require.EqualValues(t, 3, s.runs.Load())
				require.Equal(t, 3, count(t, admin, "attempt = 1 AND status = 'completed'"))
				s.settled(t)
			})
		}
	}
}

// S26, S30: a statement that hangs is given up at its deadline, and what may
// become of it is released.
func TestS30PostgresStatementHangs(t *testing.T) {
	pool := migrated(t)
	s := newPGSite(t, pool, idempotency.Config{Lease: shortLease, StoreTimeout: shortLease / 4}, echo)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)

	s.unavailable(t, call{})
	require.Zero(t, s.runs.Load())
	require.NoError(t, tx.Commit(t.Context()))
	s.created(t, call{}, false)
	s.created(t, call{}, true)
	require.EqualValues(t, 1, s.runs.Load())
	s.settled(t)
}

// S20: any bytes come back.
func TestS20PostgresAnyBytes(t *testing.T) {
	random := rand.NewChaCha8([32]byte{})
	body := make([]byte, 1<<20)
	_, _ = random.Read(body) // NUL and invalid UTF-8 among them
	copy(body, "\x00\xff\xfe\\x00'")
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			pool := migrated(t, withMode(mode))
			s := newPGSite(t, pool, idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
				for i := range 200 {
					w.Header().Add("X-"+strconv.Itoa(i), "a, b; \"c\" \xff\xfe")
					w.Header().Add("X-"+strconv.Itoa(i), "")
				}
				w.Header().Set("Content-Type", "application/octet-stream")
				w.Header().Set("Trailer", "Digest")
				w.WriteHeader(http.StatusCreated)
				_, _ = w.Write(body)
				w.Header().Set("Digest", "sha-256=x, y")
			})
			first := s.created(t, call{}, false)
			require.Len(t, first.body, len(body))
			require.Equal(t, string(body), first.body)
			require.Equal(t, http.Header{"Digest": {"sha-256=x, y"}}, first.trailer)
			retry := s.created(t, call{}, true)
			retry.header.Del(idempotency.HeaderReplayed)
			require.Equal(t, first.header, retry.header)
			require.True(t, first.body == retry.body)
			require.Equal(t, first.trailer, retry.trailer)
			require.EqualValues(t, 1, s.runs.Load())
		})
	}
}
