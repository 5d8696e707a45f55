package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// newSet returns a claim of a key under several tenants, the first of which is the
// primary name's.
func newSet(t *testing.T, key string, tenants ...string) idempotency.Claim {
	t.Helper()
	c := memoryClaim(t, key)
	for i, tenant := range tenants {
		k, err := idempotency.ClientKey(idempotency.Scope{Version: "v1", Tenant: tenant, Principal: "alice", Route: "charge"}, key)
		require.NoError(t, err)
		if i == 0 {
			c.Key = k
		} else {
			c.Aliases = append(c.Aliases, idempotency.Alias{Key: k, Kind: idempotency.AliasRenamed})
		}
	}
	return c
}

func setLease(c idempotency.Claim, won idempotency.Record) idempotency.Lease {
	return idempotency.Lease{Keys: won.Keys, Owner: c.Owner, Duration: c.Lease}
}

// S36, S43: a first request with one alias costs one round trip more than one without,
// and as many commits; one that meets a record under either name costs one round trip
// and writes nothing. So does, without an alias, what did so before there were any.
func TestS43PostgresCost(t *testing.T) {
	m, pool := newMeter(t)
	plain := newGuardedSite(t, idempotency.NewPostgresStore(pool), scopeChanges[0].before, echo)
	var fails atomic.Bool
	s := newGuardedSite(t, idempotency.NewPostgresStore(pool), scopeChanges[0].then, func(w http.ResponseWriter, r *http.Request) {
		if fails.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		echo(w, r)
	})
	send := func(s *site, c call, status int) func() {
		return func() {
			t.Helper()
			require.Equal(t, status, s.do(t.Context(), c).status)
		}
	}
	failed := func(key string) {
		fails.Store(true)
		send(s, call{key: key}, http.StatusBadGateway)()
		fails.Store(false)
	}
	send(plain, call{key: `"old"`}, http.StatusCreated)()
	send(s, call{key: `"new"`}, http.StatusCreated)() // so that the statements are prepared
	failed(`"failed"`)
	send(s, call{key: `"failed"`}, http.StatusCreated)()

	first := m.of(t, send(s, call{key: `"first"`}, http.StatusCreated))
	require.EqualValues(t, 3, first.roundTrips)
	require.EqualValues(t, 2, first.transactions)

	failed(`"again"`)
	takeOver := m.of(t, send(s, call{key: `"again"`}, http.StatusCreated))
	require.EqualValues(t, 3, takeOver.roundTrips)
	require.EqualValues(t, 2, takeOver.transactions)

	for name, again := range map[string]func(){
		"replay":              send(s, call{key: `"new"`}, http.StatusCreated),
		"replay of the other": send(s, call{key: `"old"`}, http.StatusCreated),
		"reused":              send(s, call{key: `"new"`, body: "x"}, http.StatusUnprocessableEntity),
		"reused of the other": send(s, call{key: `"old"`, body: "x"}, http.StatusUnprocessableEntity),
		"replay by the other": send(plain, call{key: `"new"`}, http.StatusCreated),
	} {
		again() // the first look at a record may tidy its page
		require.Equal(t, cost{roundTrips: 1}, m.of(t, again), name)
	}
}

// S36, S43: writers of names that overlap do not wait for each other: whatever the order
// in which they list them, they lock them in one.
func TestS43PostgresWritersDoNotDeadlock(t *testing.T) {
	const sets, writers, turns = 8, 8, 40
	server := pgtest.Start(t, "deadlock_timeout=10ms")
	dbURL := server.Database(t)
	admin := newPool(t, dbURL)
	require.NoError(t, idempotency.Migrate(t.Context(), admin))
	pool := newPool(t, dbURL)
	tenants := make([]string, sets)
	for i := range tenants {
		tenants[i] = strconv.Itoa(i)
	}
	var wg sync.WaitGroup
	var wins [sets]atomic.Int64
	for w := range writers {
		store := idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{DisableBatching: w%2 == 0})
		wg.Go(func() {
			for turn := range turns * sets {
				i := (turn + w) % sets
				names := []string{tenants[i], tenants[(i+1)%sets], tenants[(i+2)%sets], tenants[(i+3)%sets]}
				if w%2 == 1 {
					names[1], names[3] = names[3], names[1]
				}
				c := newSet(t, "shared", names...)
				c.Owner = uuid.New()
				won, err := store.Claim(t.Context(), c)
				if !noError(t, err) {
					return
				}
				if won.State == idempotency.StateClaimed {
					wins[i].Add(1)
					l := setLease(c, won)
					if !noError(t, store.Extend(t.Context(), l)) || !noError(t, store.Release(t.Context(), l)) {
						return
					}
				}
			}
		})
	}
	wg.Wait()
	pool.Close()
	for i := range wins {
		require.Positive(t, wins[i].Load(), "a set that nobody got")
	}
	until(t, func() bool {
		return queryOne[int](t, admin, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()") == 0
	}, "sessions did not end")
	require.Zero(t, queryOne[int](t, admin, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))
}

// A turningDB calls turn before it sends the n-th batch.
type turningDB struct {
	idempotency.PostgresDB
	batches atomic.Int64
	turn    func(n int64)
}

func (db *turningDB) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	db.turn(db.batches.Add(1))
	return db.PostgresDB.SendBatch(ctx, b)
}

// S27, S43: a claim of several names, and their settlement, whose answer does not come
// are sent again, and know their own records.
func TestS43PostgresAnswersLost(t *testing.T) {
	for step, name := range []string{"look", "claim", "complete"} {
		for _, reached := range []bool{true, false} {
			for _, mode := range modes {
				t.Run(fmt.Sprintf("%s, reached %t, %v", name, reached, mode), func(t *testing.T) {
					parallel(t)
					dbURL := pgtest.Database(t)
					admin := newPool(t, dbURL)
					require.NoError(t, idempotency.Migrate(t.Context(), admin))
					proxy := pgtest.NewProxy(t, dbURL)
					db := &turningDB{PostgresDB: newPool(t, proxy.URL(), withMode(mode)), turn: func(int64) {}}
					s := newPGSite(t, db, scopeChanges[0].then, attempt)
					s.created(t, call{key: `"warm"`}, false)
					db.batches.Store(0)
					db.turn = func(n int64) {
						switch {
						case n != int64(step+1):
						case reached:
							proxy.CutAfterSending(requestKey)
						default:
							proxy.CutBeforeSending(requestKey)
						}
					}
					require.Equal(t, "attempt 1", s.created(t, call{}, false).body)
					require.Equal(t, 1, proxy.Cuts())
					s.created(t, call{}, true)
					require.EqualValues(t, 2, s.runs.Load())
					require.Equal(t, 2, count(t, admin, "idem_key = '8e03978e' AND status = 'completed' AND attempt = 1"))
					s.settled(t)
				})
			}
		}
	}
}

// S36, S43: whoever is faster between a claim's look and its taking, nothing is taken,
// and the claim looks again.
func TestS43PostgresOvertaken(t *testing.T) {
	for _, tc := range []struct {
		name  string
		stood string // the alias's record, if any
		rival func(t *testing.T, store idempotency.Store, stood idempotency.Claim)
		want  idempotency.State
	}{
		{"free name taken", "", func(t *testing.T, store idempotency.Store, _ idempotency.Claim) {
			t.Helper()
			rival := newSet(t, "k", "old")
			_, err := store.Claim(t.Context(), rival)
			require.NoError(t, err)
		}, idempotency.StateInProgress},
		{"free name done", "", func(t *testing.T, store idempotency.Store, _ idempotency.Claim) {
			t.Helper()
			rival := newSet(t, "k", "old")
			_, err := store.Claim(t.Context(), rival)
			require.NoError(t, err)
			require.NoError(t, store.Complete(t.Context(), memoryLeaseOf(rival), idempotency.Response{Status: 200}))
		}, idempotency.StateCompleted},
		{"released name taken over", "released", func(t *testing.T, store idempotency.Store, _ idempotency.Claim) {
			t.Helper()
			rec, err := store.Claim(t.Context(), newSet(t, "k", "old"))
			require.NoError(t, err)
			require.Equal(t, 2, rec.Attempt)
		}, idempotency.StateInProgress},
		{"released name taken over and released", "released", func(t *testing.T, store idempotency.Store, _ idempotency.Claim) {
			t.Helper()
			rival := newSet(t, "k", "old")
			_, err := store.Claim(t.Context(), rival)
			require.NoError(t, err)
			require.NoError(t, store.Release(t.Context(), memoryLeaseOf(rival)))
		}, idempotency.StateClaimed},
		{"abandoned name completed late", "abandoned", func(t *testing.T, store idempotency.Store, stood idempotency.Claim) {
			t.Helper()
			require.NoError(t, store.Complete(t.Context(), memoryLeaseOf(stood), idempotency.Response{Status: 200}))
		}, idempotency.StateCompleted},
		{"abandoned name renewed late", "abandoned", func(t *testing.T, store idempotency.Store, stood idempotency.Claim) {
			t.Helper()
			require.NoError(t, store.Extend(t.Context(), memoryLeaseOf(stood)))
		}, idempotency.StateInProgress},
	} {
		for _, level := range []string{"read committed", "serializable"} {
			t.Run(tc.name+", "+level, func(t *testing.T) {
				parallel(t)
				pool := migrated(t, withSetting("default_transaction_isolation", level))
				rivals := idempotency.NewPostgresStore(pool)
				stood := newSet(t, "k", "old")
				if tc.stood != "" {
					_, err := rivals.Claim(t.Context(), stood)
					require.NoError(t, err)
				}
				switch tc.stood {
				case "released":
					require.NoError(t, rivals.Release(t.Context(), memoryLeaseOf(stood)))
				case "abandoned":
					ended := memoryLeaseOf(stood)
					ended.Duration = 0
					require.NoError(t, rivals.Extend(t.Context(), ended))
				}
				c := newSet(t, "k", "new", "old")
				db := &turningDB{PostgresDB: pool}
				db.turn = func(n int64) {
					if n == 2 { // the look was the first
						tc.rival(t, rivals, stood)
					}
				}
				rec, err := idempotency.NewPostgresStore(db).Claim(t.Context(), c)
				require.NoError(t, err)
				require.Equal(t, tc.want, rec.State)
				if tc.want == idempotency.StateClaimed {
					require.Equal(t, 3, rec.Attempt)
					require.Equal(t, 2, count(t, pool, "owner = $1", c.Owner.String()))
					return
				}
				require.Zero(t, count(t, pool, "owner = $1", c.Owner.String()), "all or nothing")
				require.Zero(t, count(t, pool, "tenant_id = 'new'"))
			})
		}
	}
}

// S27, S43: a set whose lease was lost under one name is settled under none.
func TestS43PostgresSetIsSettledAllOrNothing(t *testing.T) {
	for _, level := range []string{"read committed", "serializable"} {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("%s, %v", level, mode), func(t *testing.T) {
				parallel(t)
				pool := migrated(t, withSetting("default_transaction_isolation", level), withMode(mode))
				store := idempotency.NewPostgresStore(pool)
				c := newSet(t, "k", "a", "b", "c")
				won, err := store.Claim(t.Context(), c)
				require.NoError(t, err)
				_, err = pool.Exec(t.Context(), "UPDATE idempotency_records SET owner = gen_random_uuid() WHERE tenant_id = 'c'")
				require.NoError(t, err)
				const all = "SELECT string_agg(r::text, E'\n' ORDER BY tenant_id) FROM idempotency_records r"
				before := queryOne[string](t, pool, all)
				l := setLease(c, won)
				require.ErrorIs(t, store.Complete(t.Context(), l, idempotency.Response{Status: 200}), idempotency.ErrLeaseLost)
				require.ErrorIs(t, store.Release(t.Context(), l), idempotency.ErrLeaseLost)
				require.ErrorIs(t, store.Extend(t.Context(), l), idempotency.ErrLeaseLost)
				require.Equal(t, before, queryOne[string](t, pool, all))
				require.Zero(t, pool.Stat().AcquiredConns())
				require.EqualValues(t, pool.Stat().NewConnsCount(), pool.Stat().TotalConns(), "no connection is lost over it")
			})
		}
	}
}

// S43: what a store cannot have written is an error, and nothing is taken.
func TestS43PostgresDamagedRows(t *testing.T) {
	for column, damage := range map[string]string{
		"alias_of": "alias_of = '\\x00'", "origin": "origin = '\\x0000'", "fingerprint": "fingerprint = '\\x00'", "status": "status = 'lost'",
	} {
		t.Run(column, func(t *testing.T) {
			pool := migrated(t)
			store := idempotency.NewPostgresStore(pool)
			_, err := store.Claim(t.Context(), newSet(t, "k", "old"))
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "UPDATE idempotency_records SET "+damage)
			require.NoError(t, err)
			_, err = store.Claim(t.Context(), newSet(t, "k", "new", "old"))
			require.ErrorContains(t, err, "stored ")
			require.Equal(t, 1, count(t, pool, "true"))
		})
	}
}

// S43: the table of an earlier version of this package has no room for aliases.
func TestS43PostgresWithoutMigration(t *testing.T) {
	pool := newPool(t, pgtest.Database(t))
	migrations, err := idempotency.Migrations(idempotency.PostgresConfig{})
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), migrations[0].SQL)
	require.NoError(t, err)
	store := idempotency.NewPostgresStore(pool)
	_, err = store.Claim(t.Context(), newSet(t, "k", "new", "old"))
	require.ErrorContains(t, err, "is the table migrated?")
	require.ErrorIs(t, err, idempotency.ErrNotClaimed)

	_, err = store.Claim(t.Context(), newSet(t, "k", "old"))
	require.NoError(t, err, "claims as before are none of its business")
	_, err = pool.Exec(t.Context(), migrations[1].SQL)
	require.NoError(t, err)
	rec, err := store.Claim(t.Context(), newSet(t, "k", "new", "old"))
	require.NoError(t, err)
	require.Equal(t, idempotency.StateInProgress, rec.State)
}

// S40, S43: what belongs to one version of a tenant's keys can be listed and deleted
// exactly, whatever other names its operations have.
func TestS40VersionOfATenantIsFenced(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	before, then := scopeChanges[0].before, scopeChanges[0].then
	old, s := newGuardedSite(t, store, before, echo), newGuardedSite(t, store, then, echo)
	for _, tenant := range []string{"acme", "acme2", "acme%"} {
		require.Equal(t, http.StatusCreated, old.do(t.Context(), call{tenant: tenant, key: `"old"`}).status)
		require.Equal(t, http.StatusCreated, s.do(t.Context(), call{tenant: tenant, key: `"new"`}).status)
	}
	const fence = "scope_version = 'v1' AND tenant_id = 'acme'"
	require.Equal(t, 2, count(t, pool, fence))
	_, err := pool.Exec(t.Context(), "DELETE FROM idempotency_records WHERE "+fence)
	require.NoError(t, err)
	require.Equal(t, 7, count(t, pool, "true"))
	require.True(t, s.do(t.Context(), call{tenant: "acme", key: `"new"`}).replayed(), "v2's own record is there")
	require.False(t, s.do(t.Context(), call{tenant: "acme", key: `"old"`}).replayed(), "v1's is not")
	require.True(t, s.do(t.Context(), call{tenant: "acme2", key: `"old"`}).replayed())
}

// S45: a take-over whose answer was lost keeps the downstream keys, too.
func TestS45PostgresTakeOverWithoutAnswer(t *testing.T) {
	both := scopeChanges[0].then
	alone := both
	alone.EarlierScopes = nil
	dbURL := pgtest.Database(t)
	require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
	proxy := pgtest.NewProxy(t, dbURL)
	pool := newPool(t, proxy.URL())
	var keys []string
	handler := func(w http.ResponseWriter, r *http.Request) {
		exec, _ := idempotency.FromContext(r.Context())
		keys = append(keys, fmt.Sprint(exec.Attempt(), exec.DownstreamKey("provider"))[1:])
		w.WriteHeader(http.StatusBadGateway)
	}
	db := &queryDB{PostgresDB: pool, turn: func(int64) {}}
	first := newGuardedSite(t, idempotency.NewPostgresStore(pool), both, handler)
	second := newGuardedSite(t, idempotency.NewPostgresStore(db), alone, handler)
	first.do(t.Context(), call{})
	second.do(t.Context(), call{}) // prepares the statements
	db.queries.Store(0)
	db.turn = func(n int64) {
		if n == 2 { // the claim was the first
			proxy.CutAfterSending(requestKey)
		}
	}
	second.do(t.Context(), call{})
	require.Equal(t, 1, proxy.Cuts())
	require.Equal(t, []string{keys[0], keys[0], keys[0]}, keys)
}

// A queryDB calls turn before it sends the n-th query.
type queryDB struct {
	idempotency.PostgresDB
	queries atomic.Int64
	turn    func(n int64)
}

func (db *queryDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.turn(db.queries.Add(1))
	return db.PostgresDB.Query(ctx, sql, args...)
}

// S27, S43: a claim that learns that it had won its names only when its lease is over has
// not won: one of them may have been taken over.
func TestS27PostgresWonTooLongAgo(t *testing.T) {
	for _, overtaken := range []bool{true, false} {
		t.Run(fmt.Sprintf("overtaken %t", overtaken), func(t *testing.T) {
			parallel(t)
			dbURL := pgtest.Database(t)
			admin := newPool(t, dbURL)
			require.NoError(t, idempotency.Migrate(t.Context(), admin))
			proxy := pgtest.NewProxy(t, dbURL)
			db := &turningDB{PostgresDB: newPool(t, proxy.URL()), turn: func(int64) {}}
			store := idempotency.NewPostgresStore(db)
			_, err := store.Claim(t.Context(), newSet(t, "warm", "new", "old"))
			require.NoError(t, err)
			db.batches.Store(0)
			c := newSet(t, "k", "new", "old")
			db.turn = func(n int64) {
				switch n {
				case 2: // the look was the first
					proxy.CutAfterSending("alice")
				case 3:
					advance(t, admin, "idempotency_records", 2*c.Lease)
					if overtaken {
						rec, err := idempotency.NewPostgresStore(admin).Claim(t.Context(), newSet(t, "k", "old"))
						require.NoError(t, err)
						require.Equal(t, 2, rec.Attempt)
					}
				}
			}
			rec, err := store.Claim(t.Context(), c)
			require.NoError(t, err)
			require.Equal(t, 1, proxy.Cuts())
			require.Equal(t, 2, rec.Attempt)
			if overtaken {
				require.Equal(t, idempotency.StateInProgress, rec.State)
				return
			}
			require.Equal(t, idempotency.StateClaimed, rec.State)
			require.Equal(t, 2, count(t, admin, "idem_key = 'k' AND attempt = 2 AND lease_expires_at > now()"))
		})
	}
}

// Close waits for claims of several names as it does for others.
func TestPostgresCloseWaitsForSeveralNames(t *testing.T) {
	pool := migrated(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	db := &turningDB{PostgresDB: pool, turn: func(n int64) {
		if n == 2 {
			close(entered)
			<-leave
		}
	}}
	store := idempotency.NewPostgresStore(db)
	claimed := make(chan error, 1)
	go func() {
		_, err := store.Claim(t.Context(), newSet(t, "k", "new", "old"))
		claimed <- err
	}()
	receive(t, entered)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, store.Close(ctx), context.Canceled)
	closed := make(chan error, 1)
	go func() { closed <- store.Close(t.Context()) }()
	close(leave)
	require.NoError(t, receive(t, closed))
	require.NoError(t, receive(t, claimed))
	require.Equal(t, 2, count(t, pool, "true"))
}

// S27: the release and the renewal of several names whose answer does not come are done
// when they are sent again.
func TestS27PostgresSetSettledTwice(t *testing.T) {
	store := idempotency.NewPostgresStore(migrated(t))
	c := newSet(t, "k", "new", "old")
	won, err := store.Claim(t.Context(), c)
	require.NoError(t, err)
	l := setLease(c, won)
	for range 2 {
		require.NoError(t, store.Extend(t.Context(), l))
	}
	for range 2 {
		require.NoError(t, store.Release(t.Context(), l))
	}
	require.ErrorIs(t, store.Complete(t.Context(), l, idempotency.Response{Status: 200}), idempotency.ErrLeaseLost)
	require.ErrorIs(t, store.Extend(t.Context(), l), idempotency.ErrLeaseLost)
}

// A statementLog remembers the text of the statements that are sent by themselves.
type statementLog struct {
	idempotency.PostgresDB
	mu  sync.Mutex
	sql []string
}

func (db *statementLog) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.sql = append(db.sql, sql)
	return db.PostgresDB.Query(ctx, sql, args...)
}

// S43: a request without another name costs the same statements, whatever scopes and
// predecessors are configured; and they know of no aliases.
func TestS43PostgresWithoutAliasesAsBefore(t *testing.T) {
	pool := migrated(t)
	configured := mergedIntoC("A")
	configured.Predecessors = func(context.Context, idempotency.Identity) ([]idempotency.Identity, error) { return nil, nil }
	var sent [][]string
	for i, cfg := range []idempotency.Config{{}, configured} {
		db := &statementLog{PostgresDB: pool}
		s := newGuardedSite(t, idempotency.NewPostgresStore(db), cfg, echo)
		c := call{key: strconv.Quote(strconv.Itoa(i))}
		require.Equal(t, http.StatusCreated, s.do(t.Context(), c).status)
		require.True(t, s.do(t.Context(), c).replayed())
		require.Len(t, db.sql, 3, "claim, complete, claim")
		sent = append(sent, db.sql)
	}
	require.Equal(t, sent[0], sent[1])
	for _, sql := range sent[0] {
		require.NotContains(t, sql, "alias_of")
		require.NotContains(t, sql, "origin")
	}
}
