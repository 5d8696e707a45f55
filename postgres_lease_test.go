package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// A lifeDB is a database with the default table, where records are looked at past
// the middleware and its proxy.
type lifeDB struct {
	*pgxpool.Pool
	url   string
	proxy *pgtest.Proxy
}

func newLifeDB(t *testing.T) lifeDB {
	t.Helper()
	return lifeDBAt(t, pgtest.Database(t))
}

func lifeDBAt(t *testing.T, dbURL string) lifeDB {
	t.Helper()
	db := lifeDB{Pool: newPool(t, dbURL), url: dbURL, proxy: pgtest.NewProxy(t, dbURL)}
	require.NoError(t, idempotency.Migrate(t.Context(), db.Pool))
	return db
}

// empty makes a database that tests share one after the other new again.
func (db lifeDB) empty(t *testing.T) {
	t.Helper()
	_, err := db.Exec(t.Context(), "TRUNCATE idempotency_records")
	require.NoError(t, err)
}

// record says how the one record stands: status, attempt, and of one in progress
// whether its lease has ended.
func (db lifeDB) record(t *testing.T) string {
	t.Helper()
	return queryOne[string](t, db, `SELECT status || ' ' || attempt
		|| CASE WHEN status = 'in_progress' AND lease_expires_at <= now() THEN ', ended' ELSE '' END FROM idempotency_records`)
}

// version is another one after each write to the one record, be it with what is
// there already.
func (db lifeDB) version(t *testing.T) string {
	t.Helper()
	return queryOne[string](t, db, "SELECT ctid || ' ' || xmin FROM idempotency_records")
}

// leaseLeft is how long the lease of the one record still holds.
func (db lifeDB) leaseLeft(t *testing.T) time.Duration {
	t.Helper()
	return queryOne[time.Duration](t, db, "SELECT lease_expires_at - clock_timestamp() FROM idempotency_records")
}

// remember makes the database keep each version of each record in the table
// history.
func (db lifeDB) remember(t *testing.T) {
	t.Helper()
	_, err := db.Exec(t.Context(), `CREATE TABLE history (LIKE idempotency_records);
		CREATE FUNCTION remember() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO history SELECT NEW.*; RETURN NULL; END';
		CREATE TRIGGER remember AFTER INSERT OR UPDATE ON idempotency_records FOR EACH ROW EXECUTE FUNCTION remember()`)
	require.NoError(t, err)
}

// until waits for a condition.
func until(t *testing.T, condition func() bool, what string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !condition(); <-tick.C {
		require.True(t, time.Now().Before(deadline), what)
	}
}

func (db lifeDB) untilRecord(t *testing.T, want string) {
	t.Helper()
	until(t, func() bool { return db.record(t) == want }, want)
}

// manyEvents are more than a test makes, which may ask in a loop until something happens.
const manyEvents = 10_000

// A lifeSite is a pgSite that stands for one process, and tells how its requests
// ended.
type lifeSite struct {
	pgSite
	pool   *pgxpool.Pool
	events chan idempotency.Event // of EventExecuted and EventRefused
	faults atomic.Int64
	lost   atomic.Int64
}

// newLifeSite starts a site whose store is reached through a pool, or through
// wrap of it.
func newLifeSite(
	t *testing.T, dbURL string, cfg idempotency.Config, h http.HandlerFunc, wrap ...func(*pgxpool.Pool) idempotency.PostgresDB,
) *lifeSite {
	t.Helper()
	s := &lifeSite{pool: newPool(t, dbURL), events: make(chan idempotency.Event, manyEvents)}
	told := cfg.OnEvent
	cfg.OnEvent = func(ctx context.Context, e idempotency.Event) {
		switch e.Kind { //nolint:exhaustive // the others are not waited for
		case idempotency.EventStoreFault:
			s.faults.Add(1)
		case idempotency.EventLeaseLost:
			s.lost.Add(1)
		case idempotency.EventExecuted, idempotency.EventRefused:
			s.events <- e
		}
		if told != nil {
			told(ctx, e)
		}
	}
	var db idempotency.PostgresDB = s.pool
	for _, w := range wrap {
		db = w(s.pool)
	}
	s.pgSite = newPGSite(t, db, cfg, h)
	return s
}

// start sends the request that call{} is without waiting for the reply.
func (s *site) start(ctx context.Context) (await func(*testing.T) reply) {
	replies := make(chan reply, 1)
	go func() { replies <- s.do(ctx, call{}) }()
	return func(t *testing.T) reply {
		t.Helper()
		return receive(t, replies)
	}
}

// receive receives from a channel, but not for ever.
func receive[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(30 * time.Second):
		require.FailNow(t, "there is nothing to receive")
		return *new(T)
	}
}

// stay keeps a handler until it may leave, or its test has failed.
func stay(t *testing.T, leave <-chan struct{}) {
	t.Helper()
	select {
	case <-leave:
	case <-t.Context().Done():
	}
}

// ended waits until the next request that ran or was refused has ended.
func (s *lifeSite) ended(t *testing.T) idempotency.Event {
	t.Helper()
	return receive(t, s.events)
}

// refused expects a problem.
func (s *lifeSite) refused(t *testing.T, c call, status int, code idempotency.Code) reply {
	t.Helper()
	a := s.do(t.Context(), c)
	a.requireProblem(t, status, code)
	return a
}

func (a reply) requireProblem(t *testing.T, status int, code idempotency.Code) {
	t.Helper()
	require.NoError(t, a.err)
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, string(code), a.code(t))
}

// takesOver retries call{} until it runs, which it does when the lease of the
// record has ended, and not before.
func (s *lifeSite) takesOver(t *testing.T, db lifeDB) reply {
	t.Helper()
	var a reply
	until(t, func() bool {
		started := time.Now()
		left := db.leaseLeft(t)
		if a = s.do(t.Context(), call{}); a.status == http.StatusConflict {
			a.requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
			return false
		}
		require.LessOrEqual(t, left, time.Since(started), "taken over while the lease was live")
		return true
	}, "the lease does not end")
	require.Equal(t, http.StatusCreated, a.status, a.body)
	require.False(t, a.replayed())
	return a
}

// quiet expects that at the end nothing is left to be settled, and no connection
// is left in use.
func (s *lifeSite) quiet(t *testing.T) {
	t.Helper()
	s.settled(t)
	until(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, "a connection is still in use")
}

// attempt answers 201 with the attempt that it is.
func attempt(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, "attempt %d", attemptOf(r))
}

func attemptOf(r *http.Request) int {
	exec, ok := idempotency.FromContext(r.Context())
	if !ok {
		return 0
	}
	return exec.Attempt()
}

// S27: a handler that runs for several leases keeps its key. Nobody else ever owns
// it.
func TestS27PostgresRenewalKeepsTheKey(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	db.remember(t)
	leave := make(chan struct{})
	cfg := idempotency.Config{Lease: shortLease}
	s := newLifeSite(t, db.url, cfg, func(w http.ResponseWriter, r *http.Request) {
		stay(t, leave)
		attempt(w, r)
	})
	other := newLifeSite(t, db.url, cfg, attempt)
	await := s.start(t.Context())
	until(t, func() bool { return s.runs.Load() == 1 }, "the handler runs")
	until(t, func() bool {
		other.refused(t, call{}, http.StatusConflict, idempotency.CodeInFlight)
		return count(t, db.Pool, "created_at + 3 * $1::interval < now()", shortLease) == 1
	}, "three leases pass")
	close(leave)
	first := await(t)
	require.Equal(t, "attempt 1", first.body)
	require.Equal(t, first.body, other.created(t, call{}, true).body)
	require.Equal(t, "completed 1", db.record(t))
	require.Equal(t, 1, queryOne[int](t, db, "SELECT count(DISTINCT owner) FROM history"))
	renewals := queryOne[int](t, db, "SELECT count(*) - 2 FROM history")
	require.GreaterOrEqual(t, renewals, 4)
	require.LessOrEqual(t, renewals, 12, "each third of a lease")
	require.EqualValues(t, 1, s.runs.Load())
	require.Zero(t, other.runs.Load())
	s.quiet(t)
	other.quiet(t)
}

// S27: renewals that fail while the database is away do no harm if one succeeds
// before the lease is over.
func TestS27PostgresRenewalRecovers(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	db.remember(t)
	const lease = 2 * shortLease
	leave := make(chan struct{})
	var faults atomic.Int64
	var cancelled error
	s := newLifeSite(t, db.proxy.URL(), idempotency.Config{
		Lease: lease,
		OnEvent: func(_ context.Context, e idempotency.Event) {
			if e.Kind == idempotency.EventStoreFault && faults.Add(1) == 3 {
				db.proxy.Refuse(false)
			}
		},
	}, func(w http.ResponseWriter, r *http.Request) {
		db.proxy.Refuse(true)
		stay(t, leave)
		cancelled = context.Cause(r.Context())
		attempt(w, r)
	})
	other := newLifeSite(t, db.url, idempotency.Config{Lease: lease}, attempt)
	await := s.start(t.Context())
	until(t, func() bool { return s.runs.Load() == 1 }, "the handler runs")
	until(t, func() bool {
		other.refused(t, call{}, http.StatusConflict, idempotency.CodeInFlight)
		return count(t, db.Pool, "created_at + $1::interval < now()", lease) == 1
	}, "the first lease passes")
	close(leave)
	require.Equal(t, "attempt 1", await(t).body)
	require.NoError(t, cancelled)
	require.Equal(t, idempotency.OutcomeStored, s.ended(t).Outcome)
	other.created(t, call{}, true)
	require.GreaterOrEqual(t, s.faults.Load(), int64(3))
	require.Equal(t, 1, queryOne[int](t, db, "SELECT count(DISTINCT owner) FROM history"))
	require.Zero(t, other.runs.Load())
	s.quiet(t)
}

// S27, S30: the database is away for longer than a lease while a handler runs. The
// handler is told that its lease can no longer be counted on.
func TestS27PostgresAwayForLongerThanTheLease(t *testing.T) {
	parallel(t)
	silent := func(http.ResponseWriter, *http.Request) {}
	for _, tc := range []struct {
		name    string
		crash   bool // of the server; else the network is away
		hold    bool
		handler http.HandlerFunc // when its context is cancelled
		code    idempotency.Code // that the client gets; else the handler's answer
		status  int
		record  string // when the database is back
		retry   string // body of
	}{
		{"handler goes on", false, false, attempt, "", http.StatusCreated, "completed 1", "attempt 1"},
		{"server crashes, handler gives up", true, false, silent, idempotency.CodeRetry, http.StatusServiceUnavailable, "released 1", "attempt 2"},
		{"hold, handler gives up", false, true, silent, idempotency.CodeOutcomeUnknown, http.StatusConflict, "in_progress 1, ended", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			var db lifeDB
			down, up := func() { db.proxy.Refuse(true) }, func() { db.proxy.Refuse(false) }
			if tc.crash {
				server := pgtest.Start(t)
				db = lifeDBAt(t, server.Database(t))
				down, up = func() { server.Stop(t) }, func() { server.Restart(t) }
			} else {
				db = newLifeDB(t)
			}
			var cause error
			cfg := idempotency.Config{Lease: shortLease, HoldAbandoned: tc.hold}
			s := newLifeSite(t, db.proxy.URL(), cfg, func(w http.ResponseWriter, r *http.Request) {
				if attemptOf(r) > 1 {
					attempt(w, r)
					return
				}
				down()
				<-r.Context().Done()
				cause = context.Cause(r.Context())
				tc.handler(w, r)
			})
			first := s.do(t.Context(), call{})
			require.ErrorIs(t, cause, idempotency.ErrLeaseLost)
			require.Equal(t, idempotency.OutcomePending, s.ended(t).Outcome)
			if tc.code == "" {
				require.Equal(t, "attempt 1", first.body)
			} else {
				first.requireProblem(t, tc.status, tc.code)
			}
			up()
			db.untilRecord(t, tc.record)
			if tc.retry == "" {
				s.refused(t, call{}, tc.status, tc.code)
			} else {
				require.Equal(t, tc.retry, s.created(t, call{}, tc.retry == first.body).body)
			}
			require.Zero(t, s.lost.Load(), "S46: it was not lost after all")
			s.quiet(t)
		})
	}
}

// S27: the same, but another process has taken over when the database is back.
func TestS27PostgresAwayAndTakenOver(t *testing.T) {
	parallel(t)
	for _, tc := range []struct {
		name string
		late http.HandlerFunc
	}{
		{"late outcome to keep", attempt},
		{"late outcome not to keep", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			cfg := idempotency.Config{Lease: shortLease}
			cancelled, leave := make(chan error, 1), make(chan struct{})
			s := newLifeSite(t, db.proxy.URL(), cfg, func(w http.ResponseWriter, r *http.Request) {
				db.proxy.Refuse(true)
				<-r.Context().Done()
				cancelled <- context.Cause(r.Context())
				stay(t, leave)
				tc.late(w, r)
			})
			other := newLifeSite(t, db.url, cfg, attempt)
			await := s.start(t.Context())
			require.ErrorIs(t, receive(t, cancelled), idempotency.ErrLeaseLost)
			second := other.takesOver(t, db)
			require.Equal(t, "attempt 2", second.body)
			db.proxy.Refuse(false)
			version := db.version(t)
			close(leave)
			await(t).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
			lost := s.ended(t)
			require.Equal(t, idempotency.OutcomeLost, lost.Outcome)
			require.ErrorIs(t, lost.Err, idempotency.ErrLeaseLost)
			require.EqualValues(t, 1, s.lost.Load())
			require.Equal(t, version, db.version(t), "a late outcome was written")
			for _, process := range []*lifeSite{s, other} {
				require.Equal(t, second.body, process.created(t, call{}, true).body)
				require.EqualValues(t, 1, process.runs.Load())
				process.quiet(t)
			}
		})
	}
}

// A patientDB waits for the answer to a query for as long as it takes.
type patientDB struct{ *pgxpool.Pool }

func (db patientDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return db.Pool.Query(context.WithoutCancel(ctx), sql, args...)
}

func patient(pool *pgxpool.Pool) idempotency.PostgresDB { return patientDB{pool} }

// S26, S27: a claim whose answer is late is not run. Given up or over by then, it is
// released, be it one to be held, and touches nobody who has taken over.
func TestS27PostgresClaimAcknowledgedLate(t *testing.T) {
	parallel(t)
	for _, hold := range []bool{false, true} {
		t.Run(fmt.Sprintf("later than the store's time/hold=%v", hold), func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			s := newLifeSite(t, db.proxy.URL(), idempotency.Config{
				Lease: 30 * shortLease, StoreTimeout: shortLease / 2, HoldAbandoned: hold,
			}, attempt)
			held, release := db.proxy.HoldAnswer("8e03978e")
			await := s.start(t.Context())
			receive(t, held)
			require.Equal(t, "in_progress 1", db.record(t))
			await(t).requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
			db.untilRecord(t, "released 1") // while the answer is still on its way
			release()
			require.Zero(t, s.runs.Load())
			require.Equal(t, "attempt 2", s.created(t, call{}, false).body)
			s.quiet(t)
		})
		t.Run(fmt.Sprintf("later than its lease/hold=%v", hold), func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			s := newLifeSite(t, db.proxy.URL(), idempotency.Config{Lease: shortLease, HoldAbandoned: hold}, attempt, patient)
			held, release := db.proxy.HoldAnswer("8e03978e")
			await := s.start(t.Context())
			receive(t, held)
			db.untilRecord(t, "in_progress 1, ended")
			release()
			await(t).requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
			db.untilRecord(t, "released 1")
			require.Zero(t, s.runs.Load())
			require.Equal(t, "attempt 2", s.created(t, call{}, false).body)
			s.quiet(t)
		})
	}
	t.Run("taken over", func(t *testing.T) {
		parallel(t)
		db := newLifeDB(t)
		cfg := idempotency.Config{Lease: shortLease}
		s := newLifeSite(t, db.proxy.URL(), cfg, attempt, patient)
		other := newLifeSite(t, db.url, cfg, attempt)
		held, release := db.proxy.HoldAnswer("8e03978e")
		await := s.start(t.Context())
		receive(t, held)
		second := other.takesOver(t, db)
		require.Equal(t, "attempt 2", second.body)
		version := db.version(t)
		release()
		await(t).requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
		s.quiet(t)
		require.Equal(t, version, db.version(t), "a claim given up was written")
		require.Zero(t, s.runs.Load())
		require.Equal(t, second.body, other.created(t, call{}, true).body)
		require.EqualValues(t, 1, other.runs.Load())
	})
}

// S27: the deadline counts from the sending of the claim, or of the renewal, and not
// from its answer: a handler is cancelled when the database's lease ends, however
// late the answer was.
func TestS27PostgresDeadlineCountsFromSending(t *testing.T) {
	parallel(t)
	const lease = 2 * shortLease
	for _, tc := range []struct {
		name    string
		claim   bool          // the answer to the claim is late; else that to the first renewal
		late    time.Duration // how much of the lease is left then
		renewed bool
	}{
		{"claim", true, lease / 4, false},
		{"renewal", false, lease * 6 / 10, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			hold := func() (letGo func()) {
				held, release := db.proxy.HoldAnswer("8e03978e")
				return func() {
					receive(t, held)
					until(t, func() bool { return db.leaseLeft(t) <= tc.late }, "the lease passes")
					db.proxy.CutBeforeSending("8e03978e") // the next renewal
					release()
				}
			}
			cancelled := make(chan error, 1)
			s := newLifeSite(t, db.proxy.URL(), idempotency.Config{
				Lease: lease, StoreTimeout: lease - shortLease/10,
				OnEvent: func(_ context.Context, e idempotency.Event) {
					if e.Kind == idempotency.EventStoreFault {
						db.proxy.Refuse(true) // all further ones
					}
				},
			}, func(_ http.ResponseWriter, r *http.Request) {
				if !tc.claim {
					hold()()
				}
				<-r.Context().Done()
				cancelled <- context.Cause(r.Context())
			})
			letGo := func() {}
			if tc.claim {
				letGo = hold()
			}
			await := s.start(t.Context())
			letGo()
			require.ErrorIs(t, receive(t, cancelled), idempotency.ErrLeaseLost)
			require.InDelta(t, 0, db.leaseLeft(t).Seconds(), lease.Seconds()/4)
			db.proxy.Refuse(false)
			await(t).requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
			require.Equal(t, tc.renewed, count(t, db.Pool, "lease_expires_at > created_at + 1.2 * $1::interval", lease) == 1)
			require.Equal(t, 1, db.proxy.Cuts())
			require.Equal(t, "released 1", db.record(t))
			s.quiet(t)
		})
	}
}

// S27: a handler that hangs is cancelled after the longest execution time, and its
// lease is left to run out. What it ends with after a take-over touches nothing.
func TestS27PostgresHungHandler(t *testing.T) {
	parallel(t)
	for _, tc := range []struct {
		name     string
		takeOver bool
		late     int // status of the late outcome
	}{
		{"taken over, late outcome to keep", true, http.StatusCreated},
		{"taken over, late outcome not to keep", true, http.StatusBadGateway},
		{"not taken over", false, http.StatusCreated},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			cfg := idempotency.Config{Lease: shortLease, MaxExecution: shortLease / 2}
			cancelled, leave := make(chan error, 1), make(chan struct{})
			s := newLifeSite(t, db.url, cfg, func(w http.ResponseWriter, r *http.Request) {
				<-r.Context().Done()
				cancelled <- context.Cause(r.Context())
				stay(t, leave)
				w.WriteHeader(tc.late)
				_, _ = io.WriteString(w, "late")
			})
			other := newLifeSite(t, db.url, cfg, attempt)
			await := s.start(t.Context())
			require.Equal(t, idempotency.ErrExecutionTooLong, receive(t, cancelled))
			if !tc.takeOver {
				db.untilRecord(t, "in_progress 1, ended")
				close(leave)
				require.Equal(t, "late", await(t).body)
				require.Equal(t, "late", other.created(t, call{}, true).body)
				require.Zero(t, other.runs.Load())
				return
			}
			second := other.takesOver(t, db)
			require.Equal(t, "attempt 2", second.body)
			version := db.version(t)
			close(leave)
			await(t).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
			require.Equal(t, idempotency.OutcomeLost, s.ended(t).Outcome)
			require.Equal(t, version, db.version(t), "a late outcome was written")
			for _, process := range []*lifeSite{s, other} {
				require.Equal(t, second.body, process.created(t, call{}, true).body)
				require.EqualValues(t, 1, process.runs.Load())
				process.quiet(t)
			}
		})
	}
}

// S27: where nothing may run twice, what broke off is in doubt at once, and stays
// so for every process.
func TestS27PostgresHold(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	discarded := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			exec, _ := idempotency.FromContext(r.Context())
			exec.Discard()
			h(w, r)
		}
	}
	badGateway := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
		status  int // of the first reply; 0: none
		held    bool
	}{
		{"panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0, true},
		{"Goexit", func(http.ResponseWriter, *http.Request) { runtime.Goexit() }, 0, true},
		{"5xx", badGateway, http.StatusBadGateway, true},
		{"5xx, discarded", discarded(badGateway), http.StatusBadGateway, false},
		{"longest execution time", silent, http.StatusConflict, true},
		{"longest execution time, discarded", discarded(silent), http.StatusServiceUnavailable, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			db.empty(t)
			cfg := idempotency.Config{HoldAbandoned: true, MaxExecution: shortLease / 10}
			s := newLifeSite(t, db.url, cfg, tc.handler)
			other := newLifeSite(t, db.url, cfg, attempt)
			require.Equal(t, tc.status, s.do(t.Context(), call{}).status)
			outcome := s.ended(t).Outcome
			if tc.held {
				require.Equal(t, idempotency.OutcomeHeld, outcome)
				require.Equal(t, "in_progress 1, ended", db.record(t))
				for range 2 {
					version := db.version(t)
					a := other.refused(t, call{}, http.StatusConflict, idempotency.CodeOutcomeUnknown)
					require.Empty(t, a.header.Get("Retry-After"), "there is nothing to wait for")
					other.refused(t, call{body: "other"}, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
					require.Equal(t, version, db.version(t))
					advance(t, db.Pool, "idempotency_records", 100*24*time.Hour) // S29: it does not expire
				}
				require.Zero(t, other.runs.Load())
			} else {
				require.Equal(t, idempotency.OutcomeReleased, outcome)
				require.Equal(t, "released 1", db.record(t))
				require.Equal(t, "attempt 2", other.created(t, call{}, false).body)
			}
			require.EqualValues(t, 1, s.runs.Load())
			s.quiet(t)
		})
	}
}

// S27: a handler that hangs where nothing may run twice is in doubt from the end of
// its lease on, until it ends after all.
func TestS27PostgresHoldHungHandler(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	cfg := idempotency.Config{Lease: shortLease, MaxExecution: shortLease / 10, HoldAbandoned: true}
	leave := make(chan struct{})
	s := newLifeSite(t, db.url, cfg, func(w http.ResponseWriter, r *http.Request) {
		stay(t, leave)
		attempt(w, r)
	})
	other := newLifeSite(t, db.url, cfg, attempt)
	await := s.start(t.Context())
	until(t, func() bool { return s.runs.Load() == 1 }, "the handler runs")
	until(t, func() bool {
		a := other.do(t.Context(), call{})
		require.Equal(t, http.StatusConflict, a.status)
		return a.code(t) == string(idempotency.CodeOutcomeUnknown)
	}, "the lease ends")
	require.Equal(t, "in_progress 1, ended", db.record(t))
	close(leave)
	require.Equal(t, "attempt 1", await(t).body)
	require.Equal(t, "attempt 1", other.created(t, call{}, true).body)
	require.Zero(t, other.runs.Load())
	s.quiet(t)
}

// S25, S26: a handler that does not return releases its key, whether its client is
// still there or not.
func TestS25PostgresHandlerDoesNotReturn(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	for _, tc := range []struct {
		name string
		end  func()
	}{
		{"panic", func() { panic(errors.New("boom")) }},
		{"abort", func() { panic(http.ErrAbortHandler) }},
		{"Goexit", runtime.Goexit},
	} {
		for _, leaves := range []bool{false, true} {
			for _, written := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/client leaves=%v/written=%v", tc.name, leaves, written), func(t *testing.T) {
					db.empty(t)
					entered := make(chan struct{})
					s := newLifeSite(t, db.url, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
						if attemptOf(r) > 1 {
							attempt(w, r)
							return
						}
						close(entered)
						if leaves {
							<-r.Context().Done()
						}
						if written {
							attempt(w, r)
						}
						tc.end()
					})
					ctx, hangUp := context.WithCancel(t.Context())
					defer hangUp()
					await := s.start(ctx)
					receive(t, entered)
					if leaves {
						hangUp()
					}
					require.Error(t, await(t).err)
					event := s.ended(t)
					require.Equal(t, idempotency.OutcomeReleased, event.Outcome)
					require.Zero(t, event.Status)
					require.Equal(t, "released 1", db.record(t))
					s.refused(t, call{body: "other"}, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
					require.Equal(t, "attempt 2", s.created(t, call{}, false).body)
					require.Equal(t, "attempt 2", s.created(t, call{}, true).body)
					require.EqualValues(t, 2, s.runs.Load())
					s.quiet(t)
				})
			}
		}
	}
}

// A leaving is a site one of whose requests loses its client.
type leaving struct {
	*lifeSite
	db      lifeDB
	asked   chan context.Context // of the request, once it is asked for its fingerprint
	early   atomic.Bool          // whether it waits there until its client has left
	entered chan struct{}        // closed when the handler runs
	proceed chan struct{}        // the handler goes on when it is closed
	gone    atomic.Bool          // whether the request is another one: the client has left
	hangUp  context.CancelFunc
}

// leave hangs up, and waits until the server has seen it.
func (l *leaving) leave(t *testing.T) {
	t.Helper()
	ctx := receive(t, l.asked)
	l.hangUp()
	receive(t, ctx.Done())
	l.gone.Store(true)
}

// lock keeps the table, or its record, from being written until unlock is called.
func (l *leaving) lock(t *testing.T, sql string) (unlock func()) {
	t.Helper()
	tx, err := l.db.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), sql)
	require.NoError(t, err)
	return func() { require.NoError(t, tx.Commit(t.Context())) }
}

const (
	lockTable  = "LOCK TABLE idempotency_records IN EXCLUSIVE MODE"
	lockRecord = "SELECT FROM idempotency_records FOR UPDATE"
)

// blocked waits until a statement waits for a lock.
func (l *leaving) blocked(t *testing.T) {
	t.Helper()
	until(t, func() bool {
		return queryOne[bool](t, l.db, `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND datname = current_database())`)
	}, "no statement waits for a lock")
}

// S26: whenever a client leaves, its key is not left claimed, and a finished outcome
// not lost.
func TestS26PostgresClientLeaves(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	leaveInHandler := func(t *testing.T, l *leaving) func() {
		t.Helper()
		return func() {
			receive(t, l.entered)
			close(l.proceed)
			l.leave(t)
		}
	}
	leaveBefore := func(t *testing.T, l *leaving) func() {
		t.Helper()
		return func() {
			receive(t, l.entered)
			l.leave(t)
			close(l.proceed)
		}
	}
	leaveInSettling := func(t *testing.T, l *leaving) func() {
		t.Helper()
		return func() {
			receive(t, l.entered)
			unlock := l.lock(t, lockRecord)
			close(l.proceed)
			l.blocked(t)
			l.leave(t)
			unlock()
		}
	}
	gone := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	writes := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	unlessCancelled := func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Err() == nil {
			w.WriteHeader(http.StatusCreated)
		}
	}
	then := func(handlers ...http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for _, h := range handlers {
				h(w, r)
			}
		}
	}
	for _, tc := range []struct {
		name string
		// prepare is called before the request; what it returns makes the client leave.
		prepare  func(t *testing.T, l *leaving) (leave func())
		handler  http.HandlerFunc // of the request; nil: it must not run
		outlives bool
		outcome  idempotency.Outcome
		record   string
		retry    string // body of; empty: that of the handler
	}{
		{"before the claim", func(t *testing.T, l *leaving) func() {
			t.Helper()
			l.early.Store(true)
			return func() { l.leave(t) }
		}, nil, false, "", "released 1", "attempt 2"},
		{"during the claim, before its answer", func(t *testing.T, l *leaving) func() {
			t.Helper()
			held, release := l.db.proxy.HoldAnswer("8e03978e")
			return func() {
				receive(t, held)
				l.leave(t)
				release()
			}
		}, nil, false, "", "released 1", "attempt 2"},
		{"during the claim, which waits for a lock", func(t *testing.T, l *leaving) func() {
			t.Helper()
			unlock := l.lock(t, lockTable)
			return func() {
				l.blocked(t)
				l.leave(t)
				unlock()
			}
		}, nil, false, "", "released 1", "attempt 2"},
		{"during a take-over", func(t *testing.T, l *leaving) func() {
			t.Helper()
			l.gone.Store(true)
			l.created(t, call{}, false)
			receive(t, l.asked)
			l.gone.Store(false)
			_, err := l.db.Exec(t.Context(), "UPDATE idempotency_records SET status = 'released'")
			require.NoError(t, err)
			l.runs.Store(0)
			l.ended(t)
			unlock := l.lock(t, lockRecord)
			return func() {
				l.blocked(t)
				l.leave(t)
				unlock()
			}
		}, nil, false, "", "released 2", "attempt 3"},
		{"during the handler, nothing written", leaveInHandler, gone, false, idempotency.OutcomeReleased, "released 1", "attempt 2"},
		{"during the handler, written before", leaveInHandler, then(writes(201), gone), false, idempotency.OutcomeStored, "completed 1", ""},
		{"during the handler, written after", leaveInHandler, then(gone, writes(201)), false, idempotency.OutcomeStored, "completed 1", ""},
		{"during the handler, error written", leaveInHandler, then(gone, writes(502)), false, idempotency.OutcomeReleased, "released 1", "attempt 2"},
		{"during a handler that outlives it", leaveBefore, unlessCancelled, true, idempotency.OutcomeStored, "completed 1", ""},
		{"during the completion", leaveInSettling, writes(201), false, idempotency.OutcomeStored, "completed 1", ""},
		{"during the release", leaveInSettling, writes(502), false, idempotency.OutcomeReleased, "released 1", "attempt 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			db.empty(t)
			l := &leaving{
				db: db, asked: make(chan context.Context, 10), entered: make(chan struct{}), proceed: make(chan struct{}),
			}
			l.lifeSite = newLifeSite(t, l.db.proxy.URL(), idempotency.Config{
				HandlerOutlivesClient: tc.outlives,
				Fingerprint: func(r *http.Request, _ io.Reader) ([]byte, error) {
					l.asked <- r.Context()
					if l.early.Load() && !l.gone.Load() {
						<-r.Context().Done()
					}
					return nil, nil
				},
			}, func(w http.ResponseWriter, r *http.Request) {
				if l.gone.Load() {
					attempt(w, r)
					return
				}
				close(l.entered)
				stay(t, l.proceed)
				tc.handler(w, r)
			})
			leave := tc.prepare(t, l)
			ctx, hangUp := context.WithCancel(t.Context())
			l.hangUp = hangUp
			await := l.start(ctx)
			leave()
			require.ErrorIs(t, await(t).err, context.Canceled)
			event := l.ended(t)
			require.Equal(t, tc.outcome, event.Outcome)
			if tc.handler == nil {
				require.Equal(t, idempotency.CodeRetry, event.Code)
			}
			l.db.untilRecord(t, tc.record)
			ran := l.runs.Load()
			require.Equal(t, tc.handler != nil, ran == 1)

			retry := l.created(t, call{}, tc.retry == "")
			require.Equal(t, tc.retry, retry.body)
			if tc.retry != "" {
				ran++
			}
			require.Equal(t, ran, l.runs.Load())
			l.created(t, call{}, true)
			require.True(t, strings.HasPrefix(l.db.record(t), "completed"))
			l.quiet(t)
		})
	}
}
