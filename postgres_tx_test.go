package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A txHandler writes to the database in the transaction of its operation.
type txHandler func(tx pgx.Tx, w http.ResponseWriter, r *http.Request)

// A txSite is a site whose handler runs in transactions. It stands for one process.
type txSite struct {
	pgSite
	pool   *pgxpool.Pool
	store  *idempotency.PostgresStore
	events chan idempotency.Event
}

func newTxSite(t *testing.T, pool *pgxpool.Pool, pg idempotency.PostgresConfig, cfg idempotency.Config, h txHandler) *txSite {
	t.Helper()
	s := &txSite{pool: pool, store: idempotency.NewPostgresStoreWith(pool, pg), events: make(chan idempotency.Event, manyEvents)}
	cfg.OnEvent = func(_ context.Context, e idempotency.Event) {
		if e.Kind != idempotency.EventStoreFault && e.Kind != idempotency.EventLeaseLost {
			s.events <- e
		}
	}
	cfg.Transactional = true
	s.logs = &syncBuffer{}
	cfg.Logger = slog.New(slog.NewTextHandler(s.logs, nil))
	s.m = newMiddleware(t, s.store, cfg)
	s.site = newSite(t, http1, s.m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.runs.Add(1)
		tx, ok := idempotency.PostgresTx(r.Context())
		if assert.True(t, ok, "a handler must find its transaction") {
			h(tx, w, r)
		}
	})))
	return s
}

// idle waits until no connection is in use.
func (s *txSite) idle(t *testing.T) {
	t.Helper()
	until(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, "a connection is still in use")
}

// ended returns how the oldest request ended of which that was not asked.
func (s *txSite) ended(t *testing.T) idempotency.Event {
	t.Helper()
	return receive(t, s.events)
}

// newOrders returns a pool of connections to a new database, which has a table of
// orders.
func newOrders(t *testing.T, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	pool := migrated(t, options...)
	createOrders(t, pool)
	return pool
}

// createOrders makes the handler's table. What an order refers to is checked at the
// commit only.
func createOrders(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id text UNIQUE,
		refers_to text REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)`)
	require.NoError(t, err)
}

func orders(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return queryOne[int](t, pool, "SELECT count(*) FROM orders")
}

// order writes one.
func order(tx pgx.Tx, r *http.Request) error {
	_, err := tx.Exec(r.Context(), "INSERT INTO orders (id) VALUES ($1)", "of the handler")
	return err
}

// orderTwice fails.
func orderTwice(tx pgx.Tx, r *http.Request) error { return errors.Join(order(tx, r), order(tx, r)) }

// ordered writes an order and answers 201 with the attempt.
func ordered(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
	if err := order(tx, r); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	attempt(w, r)
}

// S38: what a handler writes is committed together with an outcome that is kept, or
// not at all, whatever it does in which order.
func TestS38WritesAndOutcomeStandOrFallTogether(t *testing.T) {
	const none = ""
	for _, tc := range []struct {
		name    string
		handler func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request)
		status  int              // 0: the connection breaks off
		code    idempotency.Code // of a problem in place of the handler's answer
		orders  int
		record  string
		log     string
	}{
		{
			name: "success",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusCreated)
			},
			status: 201, orders: 1, record: "completed 1",
		}, {
			name: "success without writes",
			handler: func(_ *assert.Assertions, _ pgx.Tx, w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusCreated)
			},
			status: 201, record: "completed 1",
		}, {
			name: "kept refusal with writes",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusUnprocessableEntity)
			},
			status: 422, orders: 1, record: "completed 1",
		}, {
			name: "commit, and a deferred rollback",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				ctx := r.Context()
				defer func() { is.ErrorIs(tx.Rollback(ctx), pgx.ErrTxClosed) }()
				is.NoError(order(tx, r))
				is.NoError(tx.Commit(r.Context()))
				is.ErrorIs(tx.Commit(r.Context()), pgx.ErrTxClosed)
				w.WriteHeader(http.StatusCreated)
			},
			status: 201, orders: 1, record: "completed 1",
		}, {
			name: "nested transactions, one of them undone",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				ctx := r.Context()
				is.Error(pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error { return orderTwice(nested, r) }))
				is.NoError(pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
					return pgx.BeginFunc(ctx, nested, func(inner pgx.Tx) error { return order(inner, r) })
				}))
				w.WriteHeader(http.StatusCreated)
			},
			status: 201, orders: 1, record: "completed 1",
		}, {
			name: "server error",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusBadGateway)
			},
			status: 502, record: none,
		}, {
			name: "status that is not kept",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusTooManyRequests)
			},
			status: 429, record: none,
		}, {
			name: "outcome discarded",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				exec, _ := idempotency.FromContext(r.Context())
				exec.Discard()
				w.WriteHeader(http.StatusCreated)
			},
			status: 201, record: none,
		}, {
			name: "server error that is kept",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				exec, _ := idempotency.FromContext(r.Context())
				exec.Keep()
				w.WriteHeader(http.StatusInternalServerError)
			},
			status: 500, orders: 1, record: "completed 1",
		}, {
			name: "panic",
			handler: func(is *assert.Assertions, tx pgx.Tx, _ http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				panic(http.ErrAbortHandler)
			},
			record: none,
		}, {
			name: "panic after commit and answer",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				is.NoError(tx.Commit(r.Context()))
				w.WriteHeader(http.StatusCreated)
				panic(http.ErrAbortHandler)
			},
			record: none,
		}, {
			name: "Goexit",
			handler: func(is *assert.Assertions, tx pgx.Tx, _ http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				runtime.Goexit()
			},
			record: none,
		}, {
			name: "kept refusal after a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				w.WriteHeader(http.StatusUnprocessableEntity)
			},
			status: 422, record: "completed 1",
		}, {
			name: "success after a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "reports success",
		}, {
			name: "redirection after a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				w.WriteHeader(http.StatusSeeOther)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "reports success",
		}, {
			name: "server error after a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				w.WriteHeader(http.StatusInternalServerError)
			},
			status: 500, record: none,
		}, {
			name: "commit after a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				is.ErrorIs(tx.Commit(r.Context()), pgx.ErrTxCommitRollback)
				w.WriteHeader(http.StatusUnprocessableEntity)
			},
			status: 422, record: "completed 1",
		}, {
			name: "kept refusal after a rollback",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				is.NoError(tx.Rollback(r.Context()))
				is.ErrorIs(tx.Rollback(r.Context()), pgx.ErrTxClosed)
				w.WriteHeader(http.StatusUnprocessableEntity)
			},
			status: 422, record: "completed 1",
		}, {
			name: "success after a rollback",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				is.NoError(tx.Rollback(r.Context()))
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "reports success",
		}, {
			name: "success after a rollback of a failed statement",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.Error(orderTwice(tx, r))
				is.NoError(tx.Rollback(r.Context()))
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "reports success",
		}, {
			name: "COMMIT by SQL",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				_, err := tx.Exec(r.Context(), "COMMIT")
				is.NoError(err)
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, orders: 1, record: none, log: "ended the transaction by SQL",
		}, {
			name: "COMMIT AND CHAIN by SQL",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				_, err := tx.Exec(r.Context(), "COMMIT AND CHAIN")
				is.NoError(err)
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, orders: 1, record: none, log: "ended the transaction by SQL",
		}, {
			name: "ROLLBACK by SQL, and a refusal that would be kept",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				_, err := tx.Exec(r.Context(), "ROLLBACK AND CHAIN")
				is.NoError(err)
				is.Error(tx.Rollback(r.Context()))
				w.WriteHeader(http.StatusUnprocessableEntity)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "ended the transaction by SQL",
		}, {
			name: "constraint that fails at the commit",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				_, err := tx.Exec(r.Context(), "INSERT INTO orders (id, refers_to) VALUES ('a', 'b')")
				is.NoError(err)
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "23503",
		}, {
			name: "rows left open",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				rows, err := tx.Query(r.Context(), "SELECT generate_series(1, 100000)") //nolint:sqlclosecheck // that is the point
				is.NoError(err)
				is.True(rows.Next())
				w.WriteHeader(http.StatusCreated)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "unfinished",
		}, {
			name: "flush",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusCreated)
				is.ErrorIs(http.NewResponseController(w).Flush(), http.ErrNotSupported)
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "cannot be flushed",
		}, {
			name: "answer over the limit",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				w.WriteHeader(http.StatusCreated)
				_, err := io.WriteString(w, strings.Repeat("x", 101))
				is.ErrorContains(err, "larger than MaxResponseBytes")
			},
			status: 500, code: idempotency.CodeCommitFailed, record: none, log: "larger than MaxResponseBytes",
		}, {
			name: "connection closed",
			handler: func(is *assert.Assertions, tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				is.NoError(order(tx, r))
				is.NoError(tx.Conn().Close(r.Context()))
				w.WriteHeader(http.StatusCreated)
			},
			status: 503, code: idempotency.CodeRetry, record: none, log: "connection broke",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{MaxResponseBytes: 100},
				func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) { tc.handler(assert.New(t), tx, w, r) })
			a := s.do(t.Context(), call{})
			switch {
			case tc.status == 0:
				require.Error(t, a.err)
			case tc.code != "":
				a.requireProblem(t, tc.status, tc.code)
			default:
				require.NoError(t, a.err)
				require.Equal(t, tc.status, a.status, a.body)
			}
			e := s.ended(t)
			require.Equal(t, idempotency.EventExecuted, e.Kind)
			require.Equal(t, tc.code, e.Code)
			require.Contains(t, s.logs.String(), tc.log)
			s.idle(t)
			require.Equal(t, tc.orders, orders(t, pool))
			if tc.record == none {
				require.Equal(t, idempotency.OutcomeReleased, e.Outcome)
				require.Zero(t, count(t, pool, "true"))
				_, err := pool.Exec(t.Context(), "DELETE FROM orders")
				require.NoError(t, err)
				s.do(t.Context(), call{})
				require.EqualValues(t, 2, s.runs.Load(), "a retry runs")
				return
			}
			require.Equal(t, idempotency.OutcomeStored, e.Outcome)
			require.NoError(t, e.Err)
			require.Equal(t, tc.record, lifeDB{Pool: pool}.record(t))
			retry := s.do(t.Context(), call{})
			require.True(t, retry.replayed())
			require.Equal(t, tc.status, retry.status)
			s.do(t.Context(), call{body: "other"}).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			require.EqualValues(t, 1, s.runs.Load())
		})
	}
}

// S38: what ends a handler's transaction ends all that the handler has of it.
func TestS38NothingOfATransactionOutlivesIt(t *testing.T) {
	for name, end := range map[string]func(context.Context, pgx.Tx) error{
		"commit":   func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) },
		"rollback": func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
		"return":   func(context.Context, pgx.Tx) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			parallel(t)
			pool := newOrders(t)
			var kept []pgx.Tx
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				nested, err := tx.Begin(r.Context())
				assert.NoError(t, err)
				kept = []pgx.Tx{tx, nested}
				assert.NoError(t, end(r.Context(), tx))
				w.WriteHeader(http.StatusUnprocessableEntity)
			})
			require.Equal(t, http.StatusUnprocessableEntity, s.do(t.Context(), call{}).status)
			ctx := t.Context()
			const sql = "INSERT INTO orders (id) VALUES ('too late') RETURNING id"
			for _, tx := range kept {
				_, err := tx.Exec(ctx, sql)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				rows, err := tx.Query(ctx, sql)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				require.False(t, rows.Next())
				require.ErrorIs(t, rows.Err(), pgx.ErrTxClosed)
				var id string
				require.ErrorIs(t, tx.QueryRow(ctx, sql).Scan(&id), pgx.ErrTxClosed)
				_, err = tx.Begin(ctx)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				_, err = tx.Prepare(ctx, "late", sql)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				_, err = tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"id"}, pgx.CopyFromRows([][]any{{"too late"}}))
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				b := &pgx.Batch{}
				b.Queue(sql)
				require.ErrorIs(t, tx.SendBatch(ctx, b).Close(), pgx.ErrTxClosed)
				require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxClosed)
				require.ErrorIs(t, tx.Rollback(ctx), pgx.ErrTxClosed)
			}
			require.Zero(t, orders(t, pool))
		})
	}
}

// S38: a handler's transaction can do what any can.
func TestS38HandlerTransactionIsWhole(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			parallel(t)
			pool := newOrders(t, withMode(mode))
			s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
				ctx := r.Context()
				_, err := tx.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"id"}, pgx.CopyFromRows([][]any{{"a"}, {"b"}}))
				assert.NoError(t, err)
				b := &pgx.Batch{}
				b.Queue("INSERT INTO orders (id) VALUES ($1)", "c")
				b.Queue("INSERT INTO orders (id) VALUES ($1)", "d")
				assert.NoError(t, tx.SendBatch(ctx, b).Close())
				prepared, err := tx.Prepare(ctx, "count", "SELECT count(*) FROM orders")
				assert.NoError(t, err)
				var n int
				assert.NoError(t, tx.QueryRow(ctx, prepared.Name).Scan(&n))
				assert.Equal(t, 4, n)
				large := tx.LargeObjects()
				oid, err := large.Create(ctx, 0)
				assert.NoError(t, err)
				assert.NoError(t, large.Unlink(ctx, oid))
				assert.NoError(t, tx.Conn().Ping(ctx))
				attempt(w, r)
			})
			require.Equal(t, http.StatusCreated, s.do(t.Context(), call{}).status, s.logs)
			require.True(t, s.do(t.Context(), call{}).replayed())
			require.Equal(t, 4, orders(t, pool))
		})
	}
}

// S38: while a transaction is open, a duplicate is told so at once, by this process
// and by any other, and whatever its payload, which cannot be compared yet.
func TestS38DuplicateOfAnOpenTransaction(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		stay(t, leave)
		ordered(tx, w, r)
	})
	other := newTxSite(t, newPool(t, pool.Config().ConnString()), idempotency.PostgresConfig{}, idempotency.Config{}, ordered)
	await := s.start(t.Context())
	receive(t, entered)
	for _, process := range []*txSite{s, other} {
		for _, c := range []call{{}, {body: "another payload"}} {
			process.do(t.Context(), c).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
		}
	}
	require.Equal(t, http.StatusCreated, other.do(t.Context(), call{key: `"another"`}).status, "other keys run")
	_, err := pool.Exec(t.Context(), "DELETE FROM orders")
	require.NoError(t, err)
	close(leave)
	require.Equal(t, "attempt 1", await(t).body)
	for _, process := range []*txSite{s, other} {
		require.True(t, process.do(t.Context(), call{}).replayed())
		process.do(t.Context(), call{body: "another payload"}).
			requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
	}
	require.EqualValues(t, 1, s.runs.Load())
	require.EqualValues(t, 1, other.runs.Load())
}

// S21, S38: with the wait option, a duplicate of an open transaction waits, and gets
// what that ends with: its answer, or the news that the payload is another one, or its
// own turn.
func TestS38DuplicateWaits(t *testing.T) {
	for _, tc := range []struct {
		name   string
		first  int // status
		second call
		expect func(t *testing.T, a reply)
	}{
		{"and replays", http.StatusCreated, call{}, func(t *testing.T, a reply) {
			t.Helper()
			require.True(t, a.replayed(), a.body)
		}},
		{"and is another payload", http.StatusCreated, call{body: "other"}, func(t *testing.T, a reply) {
			t.Helper()
			a.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		}},
		{"and runs", http.StatusBadGateway, call{body: "other"}, func(t *testing.T, a reply) {
			t.Helper()
			require.Equal(t, http.StatusCreated, a.status)
			require.False(t, a.replayed())
		}},
	} {
		for _, elsewhere := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, elsewhere %t", tc.name, elsewhere), func(t *testing.T) {
				parallel(t)
				pool := newOrders(t)
				entered, leave := make(chan struct{}), make(chan struct{})
				handler := func(_ pgx.Tx, w http.ResponseWriter, r *http.Request) {
					if body, _ := io.ReadAll(r.Body); len(body) > 0 {
						w.WriteHeader(http.StatusCreated)
						return
					}
					entered <- struct{}{}
					stay(t, leave)
					w.WriteHeader(tc.first)
				}
				cfg := idempotency.Config{WaitInFlight: time.Minute}
				s := newTxSite(t, pool, idempotency.PostgresConfig{}, cfg, handler)
				second := s
				if elsewhere {
					second = newTxSite(t, newPool(t, pool.Config().ConnString()), idempotency.PostgresConfig{}, cfg, handler)
				}
				await := s.start(t.Context())
				receive(t, entered)
				waiting := make(chan reply, 1)
				go func() { waiting <- second.do(t.Context(), tc.second) }()
				until(t, func() bool { return idempotency.WatchedKeys(second.m) == 1 }, "it does not wait")
				close(leave)
				require.Equal(t, tc.first, await(t).status)
				tc.expect(t, receive(t, waiting))
			})
		}
	}
}

// S38: a transaction takes over what another mode has left, and nothing else, and
// only when it commits.
func TestS38TransactionOverOtherRecords(t *testing.T) {
	const table = "idempotency_records"
	for _, tc := range []struct {
		name   string
		leave  func(t *testing.T, pool *pgxpool.Pool, c idempotency.Claim, l idempotency.Lease, s *idempotency.PostgresStore)
		hold   bool
		status int
		code   idempotency.Code // of a refusal
		body   string
		record string
	}{
		{
			name: "released",
			leave: func(t *testing.T, _ *pgxpool.Pool, _ idempotency.Claim, l idempotency.Lease, s *idempotency.PostgresStore) {
				t.Helper()
				require.NoError(t, s.Release(t.Context(), l))
			},
			status: 201, body: "attempt 2", record: "completed 2",
		}, {
			name: "abandoned",
			leave: func(t *testing.T, pool *pgxpool.Pool, _ idempotency.Claim, l idempotency.Lease, _ *idempotency.PostgresStore) {
				t.Helper()
				advance(t, pool, table, l.Duration)
			},
			status: 201, body: "attempt 2", record: "completed 2",
		}, {
			name: "expired",
			leave: func(t *testing.T, pool *pgxpool.Pool, c idempotency.Claim, l idempotency.Lease, s *idempotency.PostgresStore) {
				t.Helper()
				require.NoError(t, s.Complete(t.Context(), l, idempotency.Response{Status: http.StatusAccepted}))
				advance(t, pool, table, c.TTL)
			},
			status: 201, body: "attempt 1", record: "completed 1",
		}, {
			name: "completed",
			leave: func(t *testing.T, _ *pgxpool.Pool, _ idempotency.Claim, l idempotency.Lease, s *idempotency.PostgresStore) {
				t.Helper()
				require.NoError(t, s.Complete(t.Context(), l, idempotency.Response{Status: http.StatusAccepted, Body: []byte("before")}))
			},
			status: 202, body: "before", record: "completed 1",
		}, {
			name:   "live",
			leave:  func(*testing.T, *pgxpool.Pool, idempotency.Claim, idempotency.Lease, *idempotency.PostgresStore) {},
			status: 409, code: idempotency.CodeInFlight, record: "in_progress 1",
		}, {
			name: "held",
			hold: true,
			leave: func(t *testing.T, pool *pgxpool.Pool, _ idempotency.Claim, l idempotency.Lease, _ *idempotency.PostgresStore) {
				t.Helper()
				advance(t, pool, table, l.Duration)
			},
			status: 409, code: idempotency.CodeOutcomeUnknown, record: "in_progress 1, ended",
		},
	} {
		for _, mode := range modes {
			t.Run(tc.name+", "+mode.String(), func(t *testing.T) {
				parallel(t)
				pool := newOrders(t, withMode(mode))
				db := lifeDB{Pool: pool}
				status := http.StatusBadGateway
				s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
					assert.NoError(t, order(tx, r))
					w.WriteHeader(status)
					_, _ = fmt.Fprintf(w, "attempt %d", attemptOf(r))
				})
				c := claimOf(t)
				c.Hold = tc.hold
				rec, err := s.store.Claim(t.Context(), c)
				require.NoError(t, err)
				require.Equal(t, idempotency.StateClaimed, rec.State)
				tc.leave(t, pool, c, memoryLeaseOf(c), s.store)
				version := db.version(t)

				s.do(t.Context(), call{})
				require.Equal(t, version, db.version(t), "an outcome that is not kept writes nothing")
				status = http.StatusCreated
				a := s.do(t.Context(), call{})
				require.Equal(t, tc.status, a.status, a.body)
				require.Equal(t, tc.record, db.record(t))
				if tc.code != "" {
					a.requireProblem(t, tc.status, tc.code)
					require.Zero(t, s.runs.Load())
					return
				}
				require.Equal(t, tc.body, a.body)
				retry := s.do(t.Context(), call{})
				require.True(t, retry.replayed())
				require.Equal(t, tc.body, retry.body)
			})
		}
	}
}

// S38: what a transaction is to be recorded over must be, at its end, what it was at its
// beginning. Else nothing is committed, and the client gets what a retry would get.
func TestS38RecordThatChangesMeanwhile(t *testing.T) {
	type meanwhile func(ctx context.Context, s *idempotency.PostgresStore, first, second idempotency.Claim) error
	claimAgain := func(ctx context.Context, s *idempotency.PostgresStore, _, second idempotency.Claim) error {
		_, err := s.Claim(ctx, second)
		return err
	}
	for _, tc := range []struct {
		name      string
		meanwhile meanwhile
		status    int
		code      idempotency.Code // of a problem; else a replay
		record    string
	}{
		{"claimed", claimAgain, http.StatusConflict, idempotency.CodeInFlight, "in_progress 2"},
		{"claimed, and released again", func(ctx context.Context, s *idempotency.PostgresStore, first, second idempotency.Claim) error {
			return errors.Join(claimAgain(ctx, s, first, second), s.Release(ctx, memoryLeaseOf(second)))
		}, http.StatusServiceUnavailable, idempotency.CodeRetry, "released 2"},
		{"completed by its owner", func(ctx context.Context, s *idempotency.PostgresStore, first, _ idempotency.Claim) error {
			return s.Complete(ctx, memoryLeaseOf(first), idempotency.Response{Status: http.StatusAccepted})
		}, http.StatusAccepted, "", "completed 1"},
		{"extended by its owner", func(ctx context.Context, s *idempotency.PostgresStore, first, _ idempotency.Claim) error {
			return s.Extend(ctx, memoryLeaseOf(first))
		}, http.StatusConflict, idempotency.CodeInFlight, "in_progress 1"},
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
			t.Run(fmt.Sprintf("%s, %s", tc.name, level), func(t *testing.T) {
				parallel(t)
				pool := newOrders(t)
				first, second := claimOf(t), claimOf(t)
				var s *txSite
				s = newTxSite(t, pool, idempotency.PostgresConfig{Isolation: level}, idempotency.Config{},
					func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
						assert.NoError(t, tc.meanwhile(r.Context(), s.store, first, second))
						ordered(tx, w, r)
					})
				_, err := s.store.Claim(t.Context(), first)
				require.NoError(t, err)
				advance(t, pool, "idempotency_records", first.Lease) // it is abandoned
				a := s.do(t.Context(), call{})
				if tc.code == "" {
					require.Equal(t, tc.status, a.status, a.body)
					require.True(t, a.replayed())
				} else {
					a.requireProblem(t, tc.status, tc.code)
				}
				require.EqualValues(t, 1, s.runs.Load())
				require.Zero(t, orders(t, pool))
				require.Equal(t, tc.record, lifeDB{Pool: pool}.record(t))
			})
		}
	}
}

// S38: a handler that commits by itself, and goes on in a new transaction, is not
// recorded as done over another record either.
func TestS38CommitBySQLOverARecord(t *testing.T) {
	parallel(t)
	pool := newOrders(t)
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{},
		func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
			_, err := tx.Exec(r.Context(), "COMMIT AND CHAIN")
			assert.NoError(t, err)
			ordered(tx, w, r)
		})
	c := claimOf(t)
	_, err := s.store.Claim(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, s.store.Release(t.Context(), memoryLeaseOf(c)))
	s.do(t.Context(), call{}).requireProblem(t, http.StatusInternalServerError, idempotency.CodeCommitFailed)
	require.Equal(t, "released 1", lifeDB{Pool: pool}.record(t))
	require.Zero(t, orders(t, pool))
}

// claimOnly is a store that remembers the claim that it refuses.
type claimOnly struct{ claim *idempotency.Claim }

func (s claimOnly) Claim(_ context.Context, c idempotency.Claim) (idempotency.Record, error) {
	*s.claim = c
	return idempotency.Record{}, fmt.Errorf("%w: never", idempotency.ErrNotClaimed)
}

func (claimOnly) Complete(context.Context, idempotency.Lease, idempotency.Response) error { return nil }

func (claimOnly) Release(context.Context, idempotency.Lease) error { return nil }

func (claimOnly) Extend(context.Context, idempotency.Lease) error { return nil }

// claimOf returns the claim that a guard makes for call{}.
func claimOf(t *testing.T) idempotency.Claim {
	t.Helper()
	var claim idempotency.Claim
	s := newGuardedSite(t, claimOnly{&claim}, idempotency.Config{}, echo)
	require.Equal(t, http.StatusServiceUnavailable, s.do(t.Context(), call{}).status)
	return claim
}

// S38: where the lock is of no use, the record alone makes it exactly once, at any
// isolation level: who commits second has done nothing, and answers from the first
// one's record. The lock is taken out of the way by naming the table in another way.
func TestS38PrimaryKeyDecides(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{"", pgx.ReadUncommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, tc := range []struct {
			name   string
			over   bool // a released record
			loser  call
			expect func(t *testing.T, a reply)
		}{
			{"no record", false, call{}, requireWinner},
			{"released record", true, call{}, requireWinner},
			{"another payload", false, call{body: "other"}, func(t *testing.T, a reply) {
				t.Helper()
				a.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			}},
		} {
			t.Run(fmt.Sprintf("%s, %s", level, tc.name), func(t *testing.T) {
				parallel(t)
				pool := newOrders(t)
				entered, leave := make(chan struct{}), make(chan struct{})
				s := newTxSite(t, pool, idempotency.PostgresConfig{Isolation: level}, idempotency.Config{},
					func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
						_, err := tx.Exec(r.Context(), "INSERT INTO orders VALUES ('of the loser')")
						assert.NoError(t, err)
						entered <- struct{}{}
						stay(t, leave)
						w.WriteHeader(http.StatusCreated)
						_, _ = io.WriteString(w, "loser")
					})
				winner := newTxSite(t, pool, idempotency.PostgresConfig{Isolation: level, Schema: "public"}, idempotency.Config{},
					func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
						assert.NoError(t, order(tx, r))
						w.WriteHeader(http.StatusCreated)
						_, _ = io.WriteString(w, "winner")
					})
				if tc.over {
					c := claimOf(t)
					_, err := s.store.Claim(t.Context(), c)
					require.NoError(t, err)
					require.NoError(t, s.store.Release(t.Context(), memoryLeaseOf(c)))
				}
				loser := make(chan reply, 1)
				go func() { loser <- s.do(t.Context(), tc.loser) }()
				receive(t, entered)
				require.Equal(t, "winner", winner.do(t.Context(), call{}).body)
				close(leave)
				tc.expect(t, receive(t, loser))
				require.NotEqual(t, idempotency.EventExecuted, s.ended(t).Kind)
				require.Equal(t, "of the handler", queryOne[string](t, pool, "SELECT id FROM orders"))
				requireWinner(t, s.do(t.Context(), call{}))
				require.EqualValues(t, 1, s.runs.Load())
			})
		}
	}
}

func requireWinner(t *testing.T, a reply) {
	t.Helper()
	require.Equal(t, http.StatusCreated, a.status, a.body)
	require.Equal(t, "winner", a.body)
	require.True(t, a.replayed())
}
