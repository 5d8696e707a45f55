package idempotency_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S38, S43: an operation in a transaction is recorded under all of its names together
// with what it wrote, and meets what was recorded under any.
func TestS38SeveralNames(t *testing.T) {
	pool := newOrders(t)
	change := scopeChanges[0]
	old := newTxSite(t, pool, idempotency.PostgresConfig{}, change.before, ordered)
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, change.then, ordered)

	require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body, s.logs)
	require.Equal(t, 1, orders(t, pool))
	require.Equal(t, 2, count(t, pool, "status = 'completed' AND attempt = 1"))
	for _, site := range []*txSite{old, s} {
		require.True(t, site.do(t.Context(), call{}).replayed())
		site.do(t.Context(), call{body: "x"}).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
	}
}

// S24, S38, S43: released records, of either scope, are taken over with the free names.
func TestS38SeveralNamesTakenOver(t *testing.T) {
	for _, stood := range []string{"old", "new", "both"} {
		t.Run(stood, func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			change := scopeChanges[0]
			cfg := change.before
			switch stood {
			case "new":
				cfg = change.then
				cfg.EarlierScopes = nil
			case "both":
				cfg = change.then
			}
			failing := newGuardedSite(t, idempotency.NewPostgresStore(pool), cfg, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusBadGateway)
			})
			require.Equal(t, http.StatusBadGateway, failing.do(t.Context(), call{}).status)
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, change.then, ordered)
			require.Equal(t, "attempt 2", s.do(t.Context(), call{}).body, s.logs)
			require.Equal(t, 2, count(t, pool, "status = 'completed' AND attempt = 2"))
			require.Equal(t, 1, orders(t, pool))
			require.True(t, s.do(t.Context(), call{}).replayed())
		})
	}
}

// S38, S43: while a transaction of one scope is open, a duplicate of the other is in
// flight, at once, in the same process and in another; and so is what it would refuse,
// since the open one may be its own.
func TestS38SeveralNamesInFlight(t *testing.T) {
	for _, rolledBack := range []bool{false, true} {
		t.Run(fmt.Sprintf("rolled back %t", rolledBack), func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			first, second := scopeChanges[0].before, scopeChanges[0].then
			if rolledBack {
				first, second = second, first
			}
			entered, leave := make(chan struct{}), make(chan struct{})
			one := newTxSite(t, pool, idempotency.PostgresConfig{}, first, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				entered <- struct{}{}
				stay(t, leave)
				ordered(tx, w, r)
			})
			others := []*txSite{
				newTxSite(t, pool, idempotency.PostgresConfig{}, second, ordered),
				newTxSite(t, newPool(t, pool.Config().ConnString()), idempotency.PostgresConfig{}, second, ordered),
			}
			await := one.start(t.Context())
			receive(t, entered)
			for _, other := range others {
				other.do(t.Context(), call{}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
				other.do(t.Context(), call{body: "x"}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
			}
			close(leave)
			require.Equal(t, "attempt 1", await(t).body)
			for _, other := range others {
				require.True(t, other.do(t.Context(), call{}).replayed())
				require.Zero(t, other.runs.Load())
			}
			require.Equal(t, 1, orders(t, pool))
		})
	}
}

// S38, S44: under merged names, a mismatch is not told while a transaction is open that
// may be the operation's own; a record of its own is.
func TestS38MergedNamesInFlight(t *testing.T) {
	pool := newOrders(t)
	plain := newGuardedSite(t, idempotency.NewPostgresStore(pool), idempotency.Config{}, echo)
	require.Equal(t, http.StatusCreated, plain.do(t.Context(), call{tenant: "C", body: "c"}).status)
	require.Equal(t, http.StatusCreated, plain.do(t.Context(), call{tenant: "B", body: "b"}).status)
	entered, leave := make(chan struct{}), make(chan struct{})
	a := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		stay(t, leave)
		ordered(tx, w, r)
	})
	done := make(chan reply, 1)
	go func() { done <- a.do(t.Context(), call{tenant: "A", body: "a"}) }()
	receive(t, entered)

	full := idempotency.PostgresConfig{MaxTransactions: 1}
	merged := newTxSite(t, newPool(t, pool.Config().ConnString()), full, mergedIntoC("A", "B"), ordered)
	merged.do(t.Context(), call{tenant: "C", body: "a"}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
	merged.do(t.Context(), call{tenant: "C", body: "z"}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
	require.True(t, merged.do(t.Context(), call{tenant: "C", body: "b"}).replayed())
	require.True(t, merged.do(t.Context(), call{tenant: "C", body: "c"}).replayed())
	close(leave)
	require.Equal(t, "attempt 1", receive(t, done).body)
	require.Equal(t, "attempt 1", merged.do(t.Context(), call{tenant: "C", body: "a"}).body)
	merged.do(t.Context(), call{tenant: "C", body: "z"}).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
	require.Zero(t, merged.runs.Load())
}

// S38, S43: where all transactions are taken, records are still found under every name.
func TestS38SeveralNamesWithoutASlot(t *testing.T) {
	pool := newOrders(t)
	change := scopeChanges[0]
	plain := newGuardedSite(t, idempotency.NewPostgresStore(pool), change.before, echo)
	require.Equal(t, http.StatusCreated, plain.do(t.Context(), call{key: `"done"`}).status)
	entered, leave := make(chan struct{}), make(chan struct{})
	cfg := change.then
	cfg.StoreTimeout = 200 * time.Millisecond
	s := newTxSite(t, pool, idempotency.PostgresConfig{MaxTransactions: 1}, cfg, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		stay(t, leave)
		ordered(tx, w, r)
	})
	await := s.start(t.Context())
	receive(t, entered)
	require.True(t, s.do(t.Context(), call{key: `"done"`}).replayed())
	s.do(t.Context(), call{key: `"done"`, body: "x"}).
		requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable) // it might be an open one's
	close(leave)
	require.Equal(t, "attempt 1", await(t).body)
	require.EqualValues(t, 1, s.runs.Load())
}

// S38, S43: a name that another mode has taken meanwhile undoes what the handler wrote;
// the request is answered from that one's record.
func TestS38SeveralNamesTakenMeanwhile(t *testing.T) {
	for _, stood := range []bool{false, true} {
		t.Run(fmt.Sprintf("over a released record %t", stood), func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			change := scopeChanges[0]
			store := idempotency.NewPostgresStore(pool)
			fails := stood
			old := newGuardedSite(t, store, change.before, func(w http.ResponseWriter, r *http.Request) {
				if fails {
					w.WriteHeader(http.StatusBadGateway)
					return
				}
				echo(w, r)
			})
			if stood {
				require.Equal(t, http.StatusBadGateway, old.do(t.Context(), call{}).status)
				fails = false
			}
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, change.then, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				require.Equal(t, http.StatusCreated, old.do(r.Context(), call{}).status)
				ordered(tx, w, r)
			})
			a := s.do(t.Context(), call{})
			require.True(t, a.replayed(), a.body)
			require.Zero(t, orders(t, pool))
			require.Equal(t, 1, count(t, pool, "true"), "all names or none")
			s.idle(t)
		})
	}
}

// S38, S43: one alias costs a transaction no round trip.
func TestS38SeveralNamesCost(t *testing.T) {
	m, pool := newMeter(t)
	createOrders(t, m.admin)
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, scopeChanges[0].then, func(_ pgx.Tx, w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
	})
	send := func(key string) func() {
		return func() {
			t.Helper()
			require.Equal(t, http.StatusCreated, s.do(t.Context(), call{key: key}).status)
			s.idle(t)
		}
	}
	send(`"warm"`)()
	first := m.of(t, send(`"first"`))
	require.EqualValues(t, 2, first.roundTrips)
	require.EqualValues(t, 1, first.transactions)
}

// S33, S38, S44: what another operation has done is answered from its record in the process
// whose transaction of a merged name is open as in any other.
func TestS38MergedNamesOfOthers(t *testing.T) {
	for _, tc := range []struct{ done, runs string }{{"A", "C"}, {"C", "A"}} {
		for _, elsewhere := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s while %s runs, elsewhere %t", tc.done, tc.runs, elsewhere), func(t *testing.T) {
				parallel(t)
				pool := newOrders(t)
				plain := newGuardedSite(t, idempotency.NewPostgresStore(pool), idempotency.Config{}, echo)
				done, runs := call{tenant: tc.done, body: tc.done}, call{tenant: tc.runs, body: tc.runs}
				require.Equal(t, http.StatusCreated, plain.do(t.Context(), done).status)
				entered, leave := make(chan struct{}), make(chan struct{})
				s := newTxSite(t, pool, idempotency.PostgresConfig{}, mergedIntoC("A"), func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
					entered <- struct{}{}
					stay(t, leave)
					ordered(tx, w, r)
				})
				other := s
				if elsewhere {
					other = newTxSite(t, newPool(t, pool.Config().ConnString()), idempotency.PostgresConfig{}, mergedIntoC("A"), ordered)
				}
				answer := make(chan reply, 1)
				go func() { answer <- s.do(t.Context(), runs) }()
				receive(t, entered)
				a := other.do(t.Context(), done)
				require.True(t, a.replayed(), a.body)
				close(leave)
				require.Equal(t, "attempt 1", receive(t, answer).body)
				require.Equal(t, 1, orders(t, pool))
			})
		}
	}
}

// S38, S44: the outcome of a transaction is withheld from the predecessor, too.
func TestS38MergedNameIsWithheld(t *testing.T) {
	pool := newOrders(t)
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, mergedIntoC("A"), ordered)
	require.Equal(t, "attempt 1", s.do(t.Context(), call{tenant: "C"}).body, s.logs)
	s.do(t.Context(), call{tenant: "A"}).requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable)
	require.True(t, s.do(t.Context(), call{tenant: "C"}).replayed())
	require.Equal(t, 1, count(t, pool, "tenant_id = 'A' AND response_body IS NULL AND response_headers IS NULL AND not_replayable"))
}

// S38, S43: where the answer to a commit of several names does not come, or the database
// isolates more strictly, one operation is committed.
func TestS38SeveralNamesWithoutAnswer(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, reached := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, reached %t", level, reached), func(t *testing.T) {
				parallel(t)
				db := newLifeDB(t)
				createOrders(t, db.Pool)
				armed := true
				s := newTxSite(t, newPool(t, db.proxy.URL()), idempotency.PostgresConfig{Isolation: level}, scopeChanges[0].then,
					func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
						switch {
						case armed && reached:
							db.proxy.CutAfterSending(requestKey)
						case armed:
							db.proxy.CutBeforeSending(requestKey)
						}
						armed = false
						ordered(tx, w, r)
					})
				a := s.do(t.Context(), call{})
				if !reached {
					a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
					a = s.do(t.Context(), call{})
				}
				require.Equal(t, "attempt 1", a.body, s.logs)
				require.Equal(t, 1, orders(t, db.Pool))
				require.Equal(t, 2, count(t, db.Pool, "status = 'completed'"))
				require.True(t, s.do(t.Context(), call{}).replayed())
			})
		}
	}
}
