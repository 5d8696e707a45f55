package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// requestKey is in each message that has the key of call{} as a parameter.
const requestKey = "8e03978e"

func cutAfterSending(p *pgtest.Proxy) (disarm func()) {
	p.CutAfterSending(requestKey)
	return func() {}
}

func cutBeforeSending(p *pgtest.Proxy) (disarm func()) {
	p.CutBeforeSending(requestKey)
	return func() {}
}

func holdAnswer(p *pgtest.Proxy) (disarm func()) {
	_, release := p.HoldAnswer(requestKey)
	return release
}

// S38: where the answer to a commit does not come, it is looked up what became of it
// before the client hears anything.
func TestS38CommitWithoutAnswer(t *testing.T) {
	for _, tc := range []struct {
		name    string
		arm     func(p *pgtest.Proxy) (disarm func())
		stored  bool
		outcome idempotency.Outcome
	}{
		{"committed", cutAfterSending, true, idempotency.OutcomeStored},
		{"never sent", cutBeforeSending, false, idempotency.OutcomeReleased},
		{"too late", holdAnswer, true, idempotency.OutcomeStored},
	} {
		for _, mode := range modes {
			t.Run(tc.name+", "+mode.String(), func(t *testing.T) {
				parallel(t)
				db := newLifeDB(t)
				createOrders(t, db.Pool)
				arm, disarm := true, func() {}
				s := newTxSite(t, newPool(t, db.proxy.URL(), withMode(mode)), idempotency.PostgresConfig{},
					idempotency.Config{StoreTimeout: 2 * time.Second}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
						if arm {
							disarm = tc.arm(db.proxy)
							arm = false
						}
						ordered(tx, w, r)
					})
				a := s.do(t.Context(), call{})
				disarm()
				e := s.ended(t)
				require.Equal(t, tc.outcome, e.Outcome, s.logs)
				if tc.stored {
					require.Equal(t, "attempt 1", a.body, s.logs)
					require.NoError(t, e.Err)
				} else {
					a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
					require.NotEmpty(t, a.header.Get("Retry-After"))
					require.ErrorIs(t, e.Err, idempotency.ErrNotCommitted)
					require.Zero(t, orders(t, db.Pool))
				}
				retry := s.do(t.Context(), call{})
				require.Equal(t, "attempt 1", retry.body)
				require.Equal(t, tc.stored, retry.replayed())
				require.Equal(t, 1, orders(t, db.Pool))
			})
		}
	}
}

// S38: the same, where the record of an earlier attempt is overwritten.
func TestS38CommitOverARecordWithoutAnswer(t *testing.T) {
	for _, stored := range []bool{true, false} {
		t.Run(fmt.Sprintf("committed=%t", stored), func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			createOrders(t, db.Pool)
			store := idempotency.NewPostgresStore(db.Pool)
			c := claimOf(t)
			_, err := store.Claim(t.Context(), c)
			require.NoError(t, err)
			require.NoError(t, store.Release(t.Context(), memoryLeaseOf(c)))
			var once sync.Once
			s := newTxSite(t, newPool(t, db.proxy.URL()), idempotency.PostgresConfig{}, idempotency.Config{},
				func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
					once.Do(func() {
						if stored {
							db.proxy.CutAfterSending(requestKey)
						} else {
							db.proxy.CutBeforeSending(requestKey)
						}
					})
					ordered(tx, w, r)
				})
			a := s.do(t.Context(), call{})
			require.Equal(t, 1, db.proxy.Cuts())
			if stored {
				require.Equal(t, "attempt 2", a.body, s.logs)
			} else {
				a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				require.Equal(t, "released 1", db.record(t))
			}
			require.Equal(t, "attempt 2", s.do(t.Context(), call{}).body)
			require.Equal(t, 1, orders(t, db.Pool))
			require.Equal(t, "completed 2", db.record(t))
		})
	}
}

// S38: where it cannot be found out, the client is told to ask again, and nothing is
// said to be undone.
func TestS38CommitOfUnknownFate(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	createOrders(t, db.Pool)
	var down atomic.Bool
	pool := newPool(t, db.proxy.URL(), func(cfg *pgxpool.Config) {
		cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if down.Load() {
				return errors.New("the network is down")
			}
			return nil
		}
	})
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{StoreTimeout: 500 * time.Millisecond},
		func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
			down.Store(true)
			db.proxy.CutAfterSending(requestKey)
			ordered(tx, w, r)
		})
	a := s.do(t.Context(), call{})
	a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
	e := s.ended(t)
	require.Equal(t, idempotency.OutcomeUnknown, e.Outcome)
	require.NotErrorIs(t, e.Err, idempotency.ErrNotCommitted)
	require.NotErrorIs(t, e.Err, idempotency.ErrCommitFailed)
	down.Store(false)
	retry := s.do(t.Context(), call{})
	require.Equal(t, "attempt 1", retry.body)
	require.True(t, retry.replayed())
	require.EqualValues(t, 1, s.runs.Load())
}

// S38: a database that cannot be reached is told so before the handler runs; one that
// loses the connection at the claim is asked again.
func TestS38ClaimWithoutAnswer(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	s := newTxSite(t, newPool(t, db.proxy.URL()), idempotency.PostgresConfig{MaxTransactions: 1},
		idempotency.Config{StoreTimeout: 5 * time.Second}, func(_ pgx.Tx, w http.ResponseWriter, r *http.Request) { attempt(w, r) })
	db.proxy.CutAfterSending(requestKey)
	require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body, s.logs)
	require.Equal(t, 1, db.proxy.Cuts())
	require.EqualValues(t, 1, s.runs.Load())

	db.proxy.Refuse(true)
	s.unavailable(t, call{key: `"second"`})
	db.proxy.Refuse(false)
	require.EqualValues(t, 1, s.runs.Load())
	require.True(t, s.do(t.Context(), call{}).replayed())
	require.Equal(t, "attempt 1", s.do(t.Context(), call{key: `"second"`}).body, "which finds the place free")
}

// S38: a session that the server ends while a handler runs has undone its transaction.
// The client is told to ask again, and a retry runs.
func TestS38SessionEnds(t *testing.T) {
	for _, tc := range []struct {
		name    string
		timeout string // of a session that is idle in its transaction
		end     string // sent by another session, with the number of the one to be ended
	}{
		{"by an operator", "0", "SELECT pg_terminate_backend($1)"},
		{"by its timeout", "100ms", "SELECT $1 > 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			admin := newOrders(t)
			pool := newPool(t, admin.Config().ConnString(), withSetting("idle_in_transaction_session_timeout", tc.timeout))
			first := true
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{},
				func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
					if !first {
						ordered(tx, w, r)
						return
					}
					first = false
					assert.NoError(t, order(tx, r))
					pid := tx.Conn().PgConn().PID()
					queryOne[bool](t, admin, tc.end, pid)
					until(t, func() bool {
						return queryOne[bool](t, admin, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
					}, "the session does not end")
					w.WriteHeader(http.StatusCreated)
				})
			s.do(t.Context(), call{}).requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
			e := s.ended(t)
			require.Equal(t, idempotency.OutcomeReleased, e.Outcome)
			require.ErrorIs(t, e.Err, idempotency.ErrNotCommitted)
			require.Zero(t, orders(t, admin))
			require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body)
			require.Equal(t, 1, orders(t, admin))
			s.idle(t)
		})
	}
}

// S38: what the database says when it refuses a commit decides whether a client is told
// to ask again. Nothing is committed, and nothing remembered.
func TestS38CommitRefused(t *testing.T) {
	for _, tc := range []struct {
		sqlState string
		status   int
		code     idempotency.Code
		err      error
	}{
		{"40001", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // serialization failure
		{"40P01", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // deadlock
		{"53100", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // disk full
		{"57014", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // cancelled
		{"55P03", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // lock not available
		{"25006", http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.ErrNotCommitted}, // read only
		{"23505", http.StatusInternalServerError, idempotency.CodeCommitFailed, idempotency.ErrCommitFailed},
		{"23514", http.StatusInternalServerError, idempotency.CodeCommitFailed, idempotency.ErrCommitFailed},
		{"P0001", http.StatusInternalServerError, idempotency.CodeCommitFailed, idempotency.ErrCommitFailed},
	} {
		t.Run(tc.sqlState, func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			_, err := pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
				'BEGIN RAISE EXCEPTION USING ERRCODE = TG_ARGV[0]; END';
				CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
				FOR EACH ROW EXECUTE FUNCTION refuse('`+tc.sqlState+`')`)
			require.NoError(t, err)
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, ordered)
			s.do(t.Context(), call{}).requireProblem(t, tc.status, tc.code)
			e := s.ended(t)
			require.Equal(t, idempotency.OutcomeReleased, e.Outcome)
			require.ErrorIs(t, e.Err, tc.err)
			require.Contains(t, s.logs.String(), tc.sqlState)
			require.Zero(t, orders(t, pool))
			require.Zero(t, count(t, pool, "true"))
			_, err = pool.Exec(t.Context(), "DROP TRIGGER refuse ON orders")
			require.NoError(t, err)
			require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body, "a retry runs")
			s.idle(t)
		})
	}
}

// rivalOrder reads and writes what a serializable transaction under way has read.
func rivalOrder(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, "SELECT count(*) FROM orders").Scan(&n); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ('of the rival')")
		return err
	})
}

// S38: what a stricter isolation level refuses at the commit may be retried, and the
// client is told so.
func TestS38SerializationFailure(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	ctx := t.Context()
	interfere := true
	s := newTxSite(t, pool, idempotency.PostgresConfig{Isolation: pgx.Serializable}, idempotency.Config{},
		func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
			var level string
			var n int
			err := tx.QueryRow(r.Context(), "SELECT current_setting('transaction_isolation'), count(*) FROM orders").Scan(&level, &n)
			assert.NoError(t, err)
			assert.Equal(t, "serializable", level)
			assert.NoError(t, order(tx, r))
			if interfere {
				assert.NoError(t, rivalOrder(r.Context(), pool))
			}
			w.WriteHeader(http.StatusCreated)
		})
	a := s.do(ctx, call{})
	a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
	require.NotEmpty(t, a.header.Get("Retry-After"))
	require.Contains(t, s.logs.String(), "40001")
	require.Equal(t, 1, orders(t, pool))
	require.Zero(t, count(t, pool, "true"))
	interfere = false
	require.Equal(t, http.StatusCreated, s.do(ctx, call{}).status)
}

// S26, S38: a client that leaves cancels the handler, and what that wrote is undone.
// One that does not heed it is committed all the same, since it has an outcome.
func TestS38ClientLeaves(t *testing.T) {
	for _, heeds := range []bool{true, false} {
		t.Run(fmt.Sprintf("heeds=%t", heeds), func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			entered := make(chan struct{}, 1)
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				assert.NoError(t, order(tx, r))
				if len(entered) == 0 && r.Header.Get("Retry") == "" {
					entered <- struct{}{}
					if heeds {
						_, err := tx.Exec(r.Context(), "SELECT pg_sleep(60)")
						assert.ErrorIs(t, err, context.Canceled)
						return
					}
					<-r.Context().Done()
				}
				w.WriteHeader(http.StatusCreated)
			})
			ctx, leave := context.WithCancel(t.Context())
			await := s.start(ctx)
			receive(t, entered)
			if heeds {
				awaitSleep(t, pool)
			}
			leave()
			require.Error(t, await(t).err)
			want := idempotency.OutcomeStored
			if heeds {
				want = idempotency.OutcomeReleased
			}
			require.Equal(t, want, s.ended(t).Outcome)
			s.idle(t)
			require.Equal(t, !heeds, count(t, pool, "status = 'completed'") == 1)
			var retry reply
			until(t, func() bool {
				retry = s.do(t.Context(), call{header: http.Header{"Retry": {"1"}}})
				return retry.status != http.StatusConflict
			}, "the server does not notice")
			require.Equal(t, http.StatusCreated, retry.status, retry.body)
			require.Equal(t, !heeds, retry.replayed())
			require.Equal(t, 1, orders(t, pool))
		})
	}
}

// orderSlowly writes an order, for a minute.
func orderSlowly(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "INSERT INTO orders SELECT 'stray' FROM pg_sleep(60)")
	return err
}

// awaitSleep waits until a statement sleeps in the database. Only from then on is it
// sure to be cancelled: the server ignores a cancellation that arrives before it.
func awaitSleep(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	until(t, func() bool {
		return queryOne[bool](t, pool, "SELECT EXISTS (SELECT FROM pg_stat_activity"+
			" WHERE datname = current_database() AND wait_event = 'PgSleep')")
	}, "it does not begin")
}

// S38: a statement that a goroutine of the handler's has under way when that returns
// can do no harm: neither its connection nor its place goes to anybody else before it
// is over.
func TestS38StrayStatement(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	stray := make(chan error, 1)
	first := true
	s := newTxSite(t, pool, idempotency.PostgresConfig{MaxTransactions: 1}, idempotency.Config{},
		func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
			if first {
				first = false
				go func() { stray <- orderSlowly(context.WithoutCancel(r.Context()), tx) }()
				awaitSleep(t, pool)
				w.WriteHeader(http.StatusCreated)
				return
			}
			ordered(tx, w, r)
		})
	s.do(t.Context(), call{}).requireProblem(t, http.StatusInternalServerError, idempotency.CodeCommitFailed)
	require.Error(t, receive(t, stray))
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{key: `"another"`}).status, s.logs)
	require.Equal(t, "of the handler", queryOne[string](t, pool, "SELECT id FROM orders"))
	s.idle(t)
}

// S38: no more transactions are open than the configuration says. Who finds no place
// waits for the time of a call to the store; what has a record is answered meanwhile.
func TestS38MaxTransactions(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newTxSite(t, pool, idempotency.PostgresConfig{MaxTransactions: 1}, idempotency.Config{StoreTimeout: time.Second},
		func(_ pgx.Tx, w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				entered <- struct{}{}
				stay(t, leave)
			}
			w.WriteHeader(http.StatusCreated)
		})
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{}).status)
	require.True(t, s.do(t.Context(), call{}).replayed(), "whose place is free again")
	slow := make(chan reply, 1)
	go func() { slow <- s.do(t.Context(), call{path: "/slow"}) }()
	receive(t, entered)
	require.True(t, s.do(t.Context(), call{}).replayed())
	s.do(t.Context(), call{body: "other"}).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
	s.do(t.Context(), call{path: "/slow"}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
	s.unavailable(t, call{key: `"another"`})
	waiting := make(chan reply, 1)
	go func() { waiting <- s.do(t.Context(), call{key: `"another"`}) }()
	close(leave)
	require.Equal(t, http.StatusCreated, receive(t, slow).status)
	require.Equal(t, http.StatusCreated, receive(t, waiting).status)
	s.idle(t)
}

// S38: on one table, a long transaction never holds up those that have none, be it
// their batches or their claims of its own key.
func TestS38MixedUse(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
		assert.NoError(t, order(tx, r))
		entered <- struct{}{}
		stay(t, leave)
		w.WriteHeader(http.StatusCreated)
	})
	await := s.start(t.Context())
	receive(t, entered)

	others := newGuardedSite(t, s.store, idempotency.Config{}, attempt)
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			for i := range 20 {
				c := call{key: fmt.Sprintf(`"%d %d"`, worker, i)}
				for range 2 {
					if a := others.do(t.Context(), c); !assert.Equal(t, http.StatusCreated, a.status, a.body) {
						return
					}
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 16*20, others.runs.Load())
	require.Equal(t, "attempt 1", others.do(t.Context(), call{}).body, "another mode may run the same key")
	close(leave)
	a := await(t)
	require.Equal(t, "attempt 1", a.body, "but one of them is committed")
	require.True(t, a.replayed())
	require.Zero(t, orders(t, pool))
}

// S36, S38: an operation in a transaction costs one round trip to begin, one to end,
// and one commit.
func TestS38Cost(t *testing.T) {
	server := pgtest.Start(t, quiet...)
	dbURL := server.Database(t)
	admin := newPool(t, server.Database(t))
	db := newPool(t, dbURL)
	require.NoError(t, idempotency.Migrate(t.Context(), db))
	createOrders(t, db)
	name := queryOne[string](t, db, "SELECT current_database()")
	db.Close()
	proxy := pgtest.NewProxy(t, dbURL)
	commits := func() int {
		return queryOne[int](t, admin, "SELECT xact_commit FROM pg_stat_database WHERE datname = $1", name)
	}

	// What a session adds to that of its operations is the same for both.
	const few, many = 10, 60
	var of [2]int
	n := 0
	for i, requests := range [...]int{few, many} {
		before := commits()
		pool := newPool(t, proxy.URL(), withoutPings)
		s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
			_, err := tx.Exec(r.Context(), "INSERT INTO orders (id) VALUES ($1)", r.Header.Get(idempotency.HeaderKey))
			assert.NoError(t, err)
			w.WriteHeader(http.StatusCreated)
		})
		var prepared int64
		for i := range requests {
			if i == 1 {
				prepared = proxy.RoundTrips()
			}
			n++
			require.Equal(t, http.StatusCreated, s.do(t.Context(), call{key: fmt.Sprintf(`"%d"`, n)}).status, s.logs)
		}
		require.EqualValues(t, 3*(requests-1), proxy.RoundTrips()-prepared, "one of three is the handler's")
		pool.Close() // sessions report what they did at their end
		until(t, func() bool { return commits() >= before+requests }, "the commits are not reported")
		of[i] = commits() - before
	}
	require.Equal(t, many-few, of[1]-of[0])
}
