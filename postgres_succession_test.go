package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// A countingDB counts queries, and fails them when it is told to.
type countingDB struct {
	idempotency.PostgresDB
	queries atomic.Int64
	down    atomic.Bool
}

var errNoAnswer = errors.New("down")

func (db *countingDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.queries.Add(1)
	if db.down.Load() {
		return nil, errNoAnswer
	}
	return db.PostgresDB.Query(ctx, sql, args...)
}

// A successionDB is a database with successions, as one process knows them.
type successionDB struct {
	*idempotency.PostgresSuccessions
	pool  *pgxpool.Pool
	db    *countingDB
	clock *printClock
}

func newSuccessions(t *testing.T, options ...func(*pgxpool.Config)) successionDB {
	t.Helper()
	s := successionDB{pool: migrated(t, options...), clock: &printClock{}}
	s.db = &countingDB{PostgresDB: s.pool}
	s.PostgresSuccessions = idempotency.NewPostgresSuccessions(s.db, idempotency.PostgresConfig{})
	idempotency.SetSuccessionsClock(s.PostgresSuccessions, s.clock.now)
	return s
}

// pass lets time pass, for the database and for the process.
func (s successionDB) pass(t *testing.T, d time.Duration) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), "UPDATE idempotency_successors SET begins_at = begins_at - $1::interval, ends_at = ends_at - $1::interval", d)
	require.NoError(t, err)
	s.clock.advance(d)
}

// declare makes one identity succeed another, for an hour.
func (s successionDB) declare(t *testing.T, from, to string) idempotency.Succession {
	t.Helper()
	declared, err := s.Declare(t.Context(), identity(from), identity(to), time.Hour)
	require.NoError(t, err)
	require.Equal(t, identity(from), declared.Old)
	require.Equal(t, identity(to), declared.New)
	return declared
}

func (s successionDB) predecessors(t *testing.T, today string) []string {
	t.Helper()
	ids, err := s.Predecessors(t.Context(), identity(today))
	require.NoError(t, err)
	var found []string
	for _, id := range ids {
		found = append(found, id.Tenant+"/"+id.Principal)
	}
	return found
}

// identity reads "tenant/principal", or "tenant".
func identity(s string) idempotency.Identity {
	tenant, principal, _ := strings.Cut(s, "/")
	return idempotency.Identity{Tenant: tenant, Principal: principal}
}

// S44: a succession counts from when every process knows it, to its end.
func TestS44SuccessionBeginsAndEnds(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			parallel(t)
			s := newSuccessions(t, withMode(mode))
			require.Empty(t, s.predecessors(t, "C/alice"))
			declared := s.declare(t, "A", "C")
			require.WithinDuration(t, declared.Begins.Add(time.Hour), declared.Ends, time.Millisecond)
			require.WithinDuration(t, queryOne[time.Time](t, s.pool, "SELECT now()").Add(idempotency.SuccessionDelay), declared.Begins, time.Minute)

			s.pass(t, idempotency.SuccessionDelay-time.Minute/60)
			require.Empty(t, s.predecessors(t, "C/alice"), "not every process knows yet")
			s.pass(t, time.Minute/60)
			for range 2 {
				require.Equal(t, []string{"A/alice"}, s.predecessors(t, "C/alice"))
				require.Empty(t, s.predecessors(t, "A/alice"))
				require.Empty(t, s.predecessors(t, "D/alice"))
				s.pass(t, time.Hour-2*time.Minute)
				require.Equal(t, []string{"A/alice"}, s.predecessors(t, "C/alice"))
				s.pass(t, 2*time.Minute)
				require.Empty(t, s.predecessors(t, "C/alice"), "it has ended")
				s.declare(t, "A", "C")
				s.pass(t, idempotency.SuccessionDelay-time.Second)
				require.Empty(t, s.predecessors(t, "C/alice"), "it is one as new")
				s.pass(t, time.Second)
			}
		})
	}
}

// S44: what is known counts to the second, without asking again.
func TestS44SuccessionIsCached(t *testing.T) {
	s := newSuccessions(t)
	s.declare(t, "A", "C")
	s.clock.advance(idempotency.SuccessionDelay)
	_, err := s.pool.Exec(t.Context(), "UPDATE idempotency_successors SET begins_at = now() + '2 s', ends_at = now() + '4 s'")
	require.NoError(t, err)
	s.db.queries.Store(0)
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{{0, nil}, {1900 * time.Millisecond, nil}, {100 * time.Millisecond, []string{"A/p"}}, {1800 * time.Millisecond, []string{"A/p"}}, {200 * time.Millisecond, nil}} {
		s.clock.advance(step.after)
		require.Equal(t, step.want, s.predecessors(t, "C/p"), step.after)
	}
	require.EqualValues(t, 1, s.db.queries.Load())
	s.clock.advance(idempotency.SuccessionsMaxAge - 4*time.Second - 1)
	s.predecessors(t, "C/p")
	require.EqualValues(t, 1, s.db.queries.Load())
	s.clock.advance(1)
	s.predecessors(t, "C/p")
	require.EqualValues(t, 2, s.db.queries.Load(), "older than that it is not to be")
}

// S44: a lookup that fails or is stale fails closed; one process asks once, however many
// requests there are.
func TestS44SuccessionLookupFailsClosed(t *testing.T) {
	s := newSuccessions(t)
	s.db.down.Store(true)
	_, err := s.Predecessors(t.Context(), identity("C/p"))
	require.ErrorIs(t, err, errNoAnswer)
	s.db.down.Store(false)
	require.Empty(t, s.predecessors(t, "C/p"))
	s.db.down.Store(true)
	s.clock.advance(idempotency.SuccessionsMaxAge - 1)
	require.Empty(t, s.predecessors(t, "C/p"), "young enough")
	s.clock.advance(1)
	_, err = s.Predecessors(t.Context(), identity("C/p"))
	require.ErrorIs(t, err, errNoAnswer)
	s.db.down.Store(false)

	s.db.queries.Store(0)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			_, err := s.Predecessors(t.Context(), identity("C/p"))
			noError(t, err)
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, s.db.queries.Load())

	s.clock.advance(idempotency.SuccessionsMaxAge)
	left, leave := context.WithCancel(t.Context())
	leave()
	_, err = s.Predecessors(left, identity("C/p"))
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, s.predecessors(t, "C/p"), "one that left stops no other")
}

// S44: who waits for another's lookup waits no longer than its own request.
func TestS44SuccessionLookupIsLeft(t *testing.T) {
	s := newSuccessions(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	slow := idempotency.NewPostgresSuccessions(&slowDB{s.pool, entered, leave}, idempotency.PostgresConfig{})
	first := make(chan error, 1)
	go func() {
		_, err := slow.Predecessors(t.Context(), identity("C/p"))
		first <- err
	}()
	receive(t, entered)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := slow.Predecessors(ctx, identity("C/p"))
	require.ErrorIs(t, err, context.Canceled)
	close(leave)
	require.NoError(t, receive(t, first))
}

// A slowDB keeps its queries waiting.
type slowDB struct {
	idempotency.PostgresDB
	entered chan<- struct{}
	leave   <-chan struct{}
}

func (db *slowDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.entered <- struct{}{}
	<-db.leave
	return db.PostgresDB.Query(ctx, sql, args...)
}

// S44: a whole tenant's callers keep their names; a caller's succession is its own. They
// do not chain.
func TestS44SuccessionOfTenantsAndCallers(t *testing.T) {
	s := newSuccessions(t)
	for from, to := range map[string]string{
		"A": "C", "B": "C", "C": "D", // tenants
		"T/old": "T/new", "A/bob": "C/robert", "X/svc": "C/alice", // callers
		"a%": "c_", "acme": "C2",
	} {
		s.declare(t, from, to)
	}
	s.pass(t, idempotency.SuccessionDelay)
	for today, want := range map[string][]string{
		"C/alice":  {"A/alice", "B/alice", "X/svc"},
		"C/bob":    {"A/bob", "B/bob"},
		"C/robert": {"A/robert", "B/robert", "A/bob"},
		"D/alice":  {"C/alice"}, // and nothing of A and B
		"T/new":    {"T/old"},
		"T/old":    nil,
		"A/alice":  nil,
		"X/svc":    nil,
		"c_/p":     {"a%/p"},
		"cx/p":     nil,
		"C2/p":     {"acme/p"},
		"c/alice":  nil,
	} {
		require.ElementsMatch(t, want, s.predecessors(t, today), today)
	}
}

// S44: what cannot be is refused, with its reason, and leaves nothing behind.
func TestS44SuccessionRefused(t *testing.T) {
	s := newSuccessions(t)
	long := strings.Repeat("x", 256)
	for _, tc := range []struct {
		name     string
		from, to idempotency.Identity
		lasting  time.Duration
		want     []error
	}{
		{"no tenant", identity(""), identity("C"), time.Hour, []error{idempotency.ErrBadSuccession, idempotency.ErrMissingScope}},
		{"no new tenant", identity("A"), identity(""), time.Hour, []error{idempotency.ErrBadSuccession, idempotency.ErrMissingScope}},
		{"NUL", identity("A\x00"), identity("C"), time.Hour, []error{idempotency.ErrBadSuccession, idempotency.ErrBadScope}},
		{"no UTF-8", identity("A/x"), identity("C/\xff"), time.Hour, []error{idempotency.ErrBadSuccession, idempotency.ErrScopeEncoding}},
		{"too long", identity("A/" + long), identity("C/x"), time.Hour, []error{idempotency.ErrBadSuccession, idempotency.ErrScopeTooLong}},
		{"caller by tenant", identity("A/x"), identity("C"), time.Hour, []error{idempotency.ErrBadSuccession}},
		{"tenant by caller", identity("A"), identity("C/x"), time.Hour, []error{idempotency.ErrBadSuccession}},
		{"no time", identity("A"), identity("C"), 0, []error{idempotency.ErrBadSuccession}},
		{"less than no time", identity("A"), identity("C"), -time.Hour, []error{idempotency.ErrBadSuccession}},
		{"itself", identity("A"), identity("A"), time.Hour, []error{idempotency.ErrSuccessionCycle}},
		{"itself as a caller", identity("A/x"), identity("A/x"), time.Hour, []error{idempotency.ErrSuccessionCycle}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := s.Declare(t.Context(), tc.from, tc.to, tc.lasting)
			for _, want := range tc.want {
				require.ErrorIs(t, err, want)
			}
			require.NotContains(t, err.Error(), "\xff")
			require.NotContains(t, err.Error(), long)
		})
	}
	all, err := s.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
}

// S44: no identity comes to succeed itself, by however many others, as a tenant or as one
// of its callers. What has ended is in nobody's way.
func TestS44SuccessionCycles(t *testing.T) {
	for _, tc := range []struct {
		declared []string
		added    string
		cycle    bool
	}{
		{[]string{"A>B"}, "B>A", true},
		{[]string{"A>B", "B>C"}, "C>A", true},
		{[]string{"A>B", "B>C", "C>D"}, "D>B", true},
		{[]string{"A>B", "B>C"}, "A>C", false},
		{[]string{"A>C", "B>C"}, "C>D", false},
		{[]string{"A/x>B/y"}, "B/y>A/x", true},
		{[]string{"A/x>B/y"}, "B/z>A/x", false},
		{[]string{"A/x>B/y", "B/y>C/z"}, "C/z>A/x", true},
		{[]string{"A>B"}, "B/x>A/x", true},
		{[]string{"A>B"}, "B/x>A/y", false}, // A/x becomes B/x, A/y, and B/y
		{[]string{"A/x>B/y"}, "B>A", true},
		{[]string{"A/x>B/y", "B/y>C/z"}, "C>A", true},
		{[]string{"T/x>T/y"}, "T/y>T/x", true},
		{[]string{"T/x>T/y"}, "T/y>T/z", false},
	} {
		t.Run(strings.Join(append(tc.declared, tc.added), " "), func(t *testing.T) {
			parallel(t)
			s := newSuccessions(t)
			declare := func(edge string) error {
				from, to, _ := strings.Cut(edge, ">")
				_, err := s.Declare(t.Context(), identity(from), identity(to), time.Hour)
				return err
			}
			for _, edge := range tc.declared {
				require.NoError(t, declare(edge))
			}
			before, err := s.List(t.Context())
			require.NoError(t, err)
			err = declare(tc.added)
			if !tc.cycle {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, idempotency.ErrSuccessionCycle)
			after, err := s.List(t.Context())
			require.NoError(t, err)
			require.Equal(t, before, after)
			s.pass(t, time.Hour+idempotency.SuccessionDelay)
			require.NoError(t, declare(tc.added), "what has ended is no part of a cycle")
		})
	}
}

// S44: of declarations at the same time that would close a cycle together, one is refused.
func TestS44SuccessionCycleAtOnce(t *testing.T) {
	for _, level := range []string{"read committed", "repeatable read"} {
		t.Run(level, func(t *testing.T) {
			parallel(t)
			s := newSuccessions(t, withSetting("default_transaction_isolation", level))
			for round := range 10 {
				names := []string{fmt.Sprint("A", round), fmt.Sprint("B", round), fmt.Sprint("C", round)}
				errs := make([]error, len(names))
				var wg sync.WaitGroup
				for i := range names {
					wg.Go(func() {
						_, errs[i] = s.Declare(t.Context(), identity(names[i]), identity(names[(i+1)%3]), time.Hour)
					})
				}
				wg.Wait()
				refused := 0
				for _, err := range errs {
					if err != nil {
						require.ErrorIs(t, err, idempotency.ErrSuccessionCycle)
						refused++
					}
				}
				require.Equal(t, 1, refused)
			}
		})
	}
}

// S44: a succession that is ended is over when every process knows, and not before.
func TestS44SuccessionEnded(t *testing.T) {
	s := newSuccessions(t)
	_, err := s.End(t.Context(), identity("A"), identity("C"))
	require.ErrorIs(t, err, idempotency.ErrNoSuccession)
	declared := s.declare(t, "A", "C")
	s.pass(t, idempotency.SuccessionDelay)
	ended, err := s.End(t.Context(), identity("A"), identity("C"))
	require.NoError(t, err)
	require.WithinDuration(t, declared.Begins.Add(-idempotency.SuccessionDelay), ended.Begins, time.Millisecond)
	require.Less(t, ended.Ends.Sub(ended.Begins), time.Hour/2)
	s.pass(t, idempotency.SuccessionDelay-time.Second)
	require.Equal(t, []string{"A/p"}, s.predecessors(t, "C/p"))
	again, err := s.End(t.Context(), identity("A"), identity("C"))
	require.NoError(t, err)
	require.Less(t, again.Ends.Sub(again.Begins), ended.Ends.Sub(ended.Begins)+time.Second, "not put off")
	s.pass(t, time.Second)
	require.Empty(t, s.predecessors(t, "C/p"))
	_, err = s.End(t.Context(), identity("A"), identity("C"))
	require.ErrorIs(t, err, idempotency.ErrNoSuccession)

	all, err := s.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1, "what has ended is still told")
}

// S44: declared again, a succession goes on without a gap, as long as it is said now.
func TestS44SuccessionDeclaredAgain(t *testing.T) {
	s := newSuccessions(t)
	first := s.declare(t, "A", "C")
	s.pass(t, 30*time.Minute)
	second := s.declare(t, "A", "C")
	require.WithinDuration(t, first.Begins.Add(-30*time.Minute), second.Begins, time.Millisecond)
	require.Greater(t, second.Ends.Sub(first.Ends), -time.Minute)
	require.Equal(t, []string{"A/p"}, s.predecessors(t, "C/p"))
	s.pass(t, time.Hour)
	require.Equal(t, []string{"A/p"}, s.predecessors(t, "C/p"))

	// One that has not begun begins anew: whoever knew it first is not to be alone.
	one := s.declare(t, "B", "C")
	s.pass(t, idempotency.SuccessionDelay/2)
	two := s.declare(t, "B", "C")
	require.Greater(t, two.Begins.Sub(one.Begins), -time.Second)
	all, err := s.List(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 2)
}

// Every method tells what is wrong with how they were made, and what the database says.
func TestPostgresSuccessionsFaults(t *testing.T) {
	unmigrated := newPool(t, pgtest.Database(t))
	for _, tc := range []struct {
		name string
		s    *idempotency.PostgresSuccessions
		want string
	}{
		{"no database", idempotency.NewPostgresSuccessions(nil, idempotency.PostgresConfig{}), "db: is required"},
		{"bad name", idempotency.NewPostgresSuccessions(unmigrated, idempotency.PostgresConfig{Table: "a$"}), "dollar sign"},
		{"no table", idempotency.NewPostgresSuccessions(unmigrated, idempotency.PostgresConfig{}), "is the table migrated?"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, declareErr := tc.s.Declare(t.Context(), identity("A"), identity("C"), time.Hour)
			_, endErr := tc.s.End(t.Context(), identity("A"), identity("C"))
			_, listErr := tc.s.List(t.Context())
			_, lookupErr := tc.s.Predecessors(t.Context(), identity("C/p"))
			for _, err := range []error{declareErr, endErr, listErr, lookupErr} {
				require.ErrorContains(t, err, tc.want)
			}
		})
	}
}

// Tables with names of their own have successors of their own.
func TestPostgresSuccessionsTable(t *testing.T) {
	pool := newPool(t, pgtest.Database(t))
	cfg := idempotency.PostgresConfig{Schema: "pay", Table: strings.Repeat("ü", 26)}
	require.NoError(t, idempotency.MigrateWith(t.Context(), pool, cfg))
	s := idempotency.NewPostgresSuccessions(pool, cfg)
	_, err := s.Declare(t.Context(), identity("A"), identity("C"), time.Hour)
	require.NoError(t, err)
	require.Equal(t, 1, queryOne[int](t, pool, `SELECT count(*) FROM pay."`+cfg.Table+`_successors"`))
}

// S44: successions as data, from end to end: what was done under the old identity is
// replayed to the new one from when they begin until they end, and nobody else's.
func TestS44SuccessionsInAMiddleware(t *testing.T) {
	s := newSuccessions(t)
	store := idempotency.NewPostgresStore(s.pool)
	site := newGuardedSite(t, store, idempotency.Config{Predecessors: s.Predecessors}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, "done for ", tenantOf(r))
	})
	do := func(tenant, key string) reply {
		t.Helper()
		return site.do(t.Context(), call{tenant: tenant, key: `"` + key + `"`, body: key})
	}
	for _, key := range []string{"k", "l", "m"} {
		require.Equal(t, "done for A", do("A", key).body)
	}
	s.declare(t, "A", "C")
	require.Equal(t, "done for C", do("C", "k").body, "too early: the docs say when to switch")
	s.pass(t, idempotency.SuccessionDelay)
	a := do("C", "l")
	require.Equal(t, "done for A", a.body)
	require.True(t, a.replayed())
	require.Equal(t, "done for D", do("D", "l").body)
	require.True(t, do("A", "l").replayed(), "the old credentials work on")

	require.Equal(t, "done for C", do("C", "after").body)
	do("A", "after").requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable) // it is not run again by the old credentials

	s.pass(t, time.Hour)
	require.Equal(t, "done for C", do("C", "m").body, "it has ended: the old one's are the old one's")
	require.True(t, do("C", "after").replayed(), "its own are its own")
	do("A", "after").requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable) // and never were the other's
}

// S44, S30: a lookup that fails refuses the request, with nothing claimed or run, whatever
// is configured for a store that is down; one without end is cut off.
func TestS44LookupFails(t *testing.T) {
	for _, tc := range []struct {
		name   string
		lookup idempotency.PredecessorsFunc
		code   idempotency.Code
		status int
	}{
		{"error", func(context.Context, idempotency.Identity) ([]idempotency.Identity, error) {
			return nil, errors.New("secret reason")
		}, idempotency.CodeStoreUnavailable, http.StatusServiceUnavailable},
		{"no answer", func(ctx context.Context, _ idempotency.Identity) ([]idempotency.Identity, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, idempotency.CodeStoreUnavailable, http.StatusServiceUnavailable},
		{"no tenant", func(context.Context, idempotency.Identity) ([]idempotency.Identity, error) {
			return []idempotency.Identity{{Principal: "alice"}}, nil
		}, idempotency.CodeBadIdentity, http.StatusInternalServerError},
		{"too many", func(context.Context, idempotency.Identity) ([]idempotency.Identity, error) {
			var ids []idempotency.Identity
			for i := range idempotency.MaxAliases + 1 {
				ids = append(ids, idempotency.Identity{Tenant: strconv.Itoa(i), Principal: "alice"})
			}
			return ids, nil
		}, idempotency.CodeBadIdentity, http.StatusInternalServerError},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := &claimLog{MemoryStore: idempotency.NewMemoryStore()}
			events := make(chan idempotency.Event, manyEvents)
			s := newGuardedSite(t, store, idempotency.Config{
				Predecessors: tc.lookup, UnguardedWhenStoreDown: true, StoreTimeout: 50 * time.Millisecond,
				OnEvent: func(_ context.Context, e idempotency.Event) { events <- e },
			}, echo)
			a := s.do(t.Context(), call{})
			a.requireProblem(t, tc.status, tc.code)
			require.NotContains(t, a.body, "secret")
			require.Zero(t, s.runs.Load())
			require.Empty(t, store.claims)
			if tc.code == idempotency.CodeStoreUnavailable {
				require.Equal(t, idempotency.EventStoreFault, receive(t, events).Kind)
			}
			require.Equal(t, idempotency.EventRefused, receive(t, events).Kind)
		})
	}
}

// S44: today's identity, and one that is found twice, are one name each.
func TestS44PredecessorsAreNames(t *testing.T) {
	store := &claimLog{MemoryStore: idempotency.NewMemoryStore()}
	var asked idempotency.Identity
	cfg := mergedIntoC("A")
	cfg.Predecessors = func(_ context.Context, today idempotency.Identity) ([]idempotency.Identity, error) {
		asked = today
		return []idempotency.Identity{today, {Tenant: "B", Principal: "bob"}, {Tenant: "B", Principal: "bob"}, {Tenant: "A", Principal: "alice"}}, nil
	}
	s := newGuardedSite(t, store, cfg, echo)
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{tenant: "C"}).status)
	require.Equal(t, idempotency.Identity{Tenant: "C", Principal: "alice"}, asked)
	var names []string
	for _, a := range store.claims[0].Aliases {
		require.Equal(t, idempotency.AliasMerged, a.Kind)
		names = append(names, a.Key.Tenant()+"/"+a.Key.Principal())
	}
	require.Equal(t, []string{"B/bob", "A/alice"}, names)
}
