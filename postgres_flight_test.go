package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A queryContext tells when somebody first waits for its end: for the claim that
// leads, when it is on its way, for all others when they wait for that.
type queryContext struct {
	context.Context //nolint:containedctx // it is one
	waits           func()
}

func (c queryContext) Done() <-chan struct{} {
	c.waits()
	return c.Context.Done()
}

// Duplicates are claims of one key that a store gets while the first of them is on
// its way.
type duplicates struct {
	*idempotency.PostgresStore
	t  *testing.T
	db *gatedDB
	wg sync.WaitGroup
}

// lead makes the claim that all others will meet.
func lead(t *testing.T, db idempotency.PostgresDB, c idempotency.Claim) (*duplicates, *answer) {
	t.Helper()
	d := &duplicates{t: t, db: newGatedDB(db)}
	d.PostgresStore = idempotency.NewPostgresStore(d.db)
	d.db.shut()
	a := &answer{}
	d.wg.Go(func() { a.Record, a.err = d.Claim(t.Context(), c) })
	d.db.await(t, 1)
	return d, a
}

// follow makes one more claim and returns when it waits.
func (d *duplicates) follow(ctx context.Context, c idempotency.Claim) *answer {
	d.t.Helper()
	c.Owner = uuid.New()
	a := &answer{came: make(chan struct{})}
	waits := make(chan struct{})
	waiting := queryContext{ctx, sync.OnceFunc(func() { close(waits) })}
	d.wg.Go(func() { //nolint:contextcheck // it has a child of ctx
		defer close(a.came)
		a.Record, a.err = d.Claim(waiting, c)
	})
	<-waits
	return a
}

// land lets the claims on, and returns how many statements there were.
func (d *duplicates) land() int {
	d.t.Helper()
	d.db.open()
	d.wg.Wait()
	awaitIdle(d.t, d.PostgresStore)
	return len(d.db.log())
}

// S09, S16: duplicates that are on their way at the same time share one claim, and
// each judges the record for itself. Those whom it does not answer go again.
func TestS09PostgresDuplicatesShareAClaim(t *testing.T) {
	one, other := idempotency.Fingerprint{1}, idempotency.Fingerprint{2}
	const (
		claimed    = idempotency.StateClaimed
		inProgress = idempotency.StateInProgress
		completed  = idempotency.StateCompleted
		released   = idempotency.StateReleased
		abandoned  = idempotency.StateAbandoned
	)
	type ask struct {
		fp    idempotency.Fingerprint
		hold  bool
		state idempotency.State
	}
	outcome := idempotency.Response{Status: http.StatusCreated, Body: []byte("done")}
	keep := func(t *testing.T, s *idempotency.PostgresStore, c idempotency.Claim) {
		t.Helper()
		require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(c), outcome))
	}
	release := func(t *testing.T, s *idempotency.PostgresStore, c idempotency.Claim) {
		t.Helper()
		require.NoError(t, s.Release(t.Context(), memoryLeaseOf(c)))
	}
	abandon := func(t *testing.T, s *idempotency.PostgresStore, c idempotency.Claim) {
		t.Helper()
		l := memoryLeaseOf(c)
		l.Duration = 0
		require.NoError(t, s.Extend(t.Context(), l))
	}
	run := func(*testing.T, *idempotency.PostgresStore, idempotency.Claim) {}
	for _, tc := range []struct {
		name       string
		before     func(*testing.T, *idempotency.PostgresStore, idempotency.Claim) // what became of a claim with fingerprint one
		held       bool
		asks       []ask // the leader's first
		statements int
	}{
		{"new", nil, false, []ask{{one, false, claimed}, {one, false, inProgress}, {other, false, inProgress}, {one, true, inProgress}}, 1},
		{"running", run, false, []ask{{one, false, inProgress}, {one, false, inProgress}, {other, false, inProgress}}, 1},
		{"done", keep, false, []ask{{one, false, completed}, {one, false, completed}, {other, false, completed}}, 1},
		{"led by a reuse", keep, false, []ask{{other, false, completed}, {one, false, completed}}, 1},
		{"released", release, false, []ask{{one, false, claimed}, {one, false, inProgress}, {other, false, inProgress}}, 2},
		{"released, led by a reuse", release, false, []ask{{other, false, released}, {other, false, released}, {one, false, claimed}}, 3},
		{"abandoned", abandon, false, []ask{{one, false, claimed}, {one, false, inProgress}}, 2},
		{"abandoned, led by a reuse", abandon, false, []ask{{other, false, abandoned}, {other, true, abandoned}, {one, false, claimed}}, 3},
		{"abandoned, led by one with hold", abandon, false, []ask{{one, true, abandoned}, {one, true, abandoned}, {other, false, abandoned}, {one, false, claimed}}, 3},
		{"held", abandon, true, []ask{{one, false, abandoned}, {one, false, abandoned}, {one, true, abandoned}, {other, false, abandoned}}, 1},
		{"held, led by a reuse", abandon, true, []ask{{other, false, abandoned}, {other, false, abandoned}, {one, false, abandoned}}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pool := migrated(t)
			c := memoryClaim(t, "k")
			attempt := 1
			if tc.before != nil {
				first := c
				first.Fingerprint, first.Hold = one, tc.held
				before := idempotency.NewPostgresStore(pool)
				_, err := before.Claim(t.Context(), first)
				require.NoError(t, err)
				tc.before(t, before, first)
				c.Owner = uuid.New()
			}
			claim := func(a ask) idempotency.Claim {
				c := c
				c.Fingerprint, c.Hold = a.fp, a.hold
				return c
			}
			d, leader := lead(t, pool, claim(tc.asks[0]))
			answers := []*answer{leader}
			for _, a := range tc.asks[1:] {
				answers = append(answers, d.follow(t.Context(), claim(a)))
			}
			require.Equal(t, tc.statements, d.land())
			for i, a := range answers {
				require.NoError(t, a.err)
				require.Equal(t, tc.asks[i].state, a.State, i)
				if a.State != claimed {
					require.Equal(t, one, a.Fingerprint)
				}
				if a.State == claimed && tc.before != nil {
					attempt = 2
				}
			}
			for _, a := range answers {
				switch a.State {
				case claimed:
					require.Equal(t, attempt, a.Attempt)
				case inProgress:
					require.Equal(t, attempt, a.Attempt)
					require.Positive(t, a.LeaseLeft)
					require.LessOrEqual(t, a.LeaseLeft, memoryLease)
				case completed:
					require.Equal(t, outcome, a.Response)
				case released, abandoned:
				}
			}
		})
	}
}

// S09: those who waited for a claim that failed, whose caller left, or that was
// broken off, do not fail with it: one of them leads.
func TestS09PostgresLeaderIsReplaced(t *testing.T) {
	const followers = 20
	check := func(t *testing.T, answers []*answer, wantClaimed int) {
		t.Helper()
		claimed := 0
		for _, a := range answers {
			require.NoError(t, a.err)
			if a.State == idempotency.StateClaimed {
				claimed++
			} else {
				require.Equal(t, idempotency.StateInProgress, a.State)
			}
		}
		require.Equal(t, wantClaimed, claimed)
	}
	t.Run("failed", func(t *testing.T) {
		db := &onceDB{PostgresDB: migrated(t), fail: func() error { return errors.New("once") }}
		d, leader := lead(t, db, memoryClaim(t, "k"))
		answers := make([]*answer, followers)
		for i := range answers {
			answers[i] = d.follow(t.Context(), memoryClaim(t, "k"))
		}
		require.LessOrEqual(t, d.land(), 3, "the failed one, and seldom one that came late")
		require.ErrorContains(t, leader.err, "once")
		check(t, answers, 1)
	})
	t.Run("broken off", func(t *testing.T) {
		db := &onceDB{PostgresDB: migrated(t), fail: func() error { panic("once") }}
		gated := newGatedDB(db)
		d := &duplicates{t: t, db: gated, PostgresStore: idempotency.NewPostgresStore(gated)}
		gated.shut()
		d.wg.Go(func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			_, _ = d.Claim(t.Context(), memoryClaim(t, "k"))
		})
		gated.await(t, 1)
		follower := d.follow(t.Context(), memoryClaim(t, "k"))
		require.Equal(t, 2, d.land())
		check(t, []*answer{follower}, 1)
	})
	t.Run("left", func(t *testing.T) {
		pool := migrated(t)
		c := newCrowd(t, pool) // so that the leader's claim is not its own goroutine's
		ctx, leave := context.WithCancel(t.Context())
		commit := &commitDB{PostgresDB: pool, reached: make(chan struct{}), commit: make(chan struct{})}
		c.db.PostgresDB = commit
		leader := &answer{}
		left := make(chan struct{})
		first := memoryClaim(t, "k")
		c.add(func() {
			defer close(left)
			leader.Record, leader.err = c.Claim(ctx, first)
		})
		c.claim(memoryClaim(t, "another")) // or else it would be no batch
		c.db.open()
		<-commit.reached
		d := &duplicates{t: t, db: c.db, PostgresStore: c.PostgresStore}
		answers := make([]*answer, followers)
		for i := range answers {
			answers[i] = d.follow(t.Context(), memoryClaim(t, "k"))
		}
		leave()
		<-left
		require.ErrorIs(t, leader.err, context.Canceled)
		require.NotErrorIs(t, leader.err, idempotency.ErrNotClaimed)
		awaitQueued(t, c.PostgresStore, 1) // one of them leads, and waits for the claim on its way
		close(commit.commit)
		d.land()
		c.letGo()
		check(t, answers, 0)
		require.Equal(t, 1, count(t, pool, "owner = $1", first.Owner.String()))
	})
	t.Run("lease over before it landed", func(t *testing.T) {
		c := memoryClaim(t, "k")
		c.Lease = time.Nanosecond
		d, leader := lead(t, migrated(t), c)
		follower := d.follow(t.Context(), memoryClaim(t, "k"))
		require.Equal(t, 3, d.land())
		check(t, []*answer{leader, follower}, 2)
		require.Equal(t, 2, follower.Attempt)
	})
}

// A onceDB fails its first query.
type onceDB struct {
	idempotency.PostgresDB
	failed atomic.Bool
	fail   func() error
}

func (db *onceDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if db.failed.CompareAndSwap(false, true) {
		return nil, db.fail()
	}
	return db.PostgresDB.Query(ctx, sql, args...)
}

// S26: who waits for another's claim and leaves has claimed nothing.
func TestS26PostgresLeavingAClaimOfAnother(t *testing.T) {
	d, leader := lead(t, migrated(t), memoryClaim(t, "k"))
	ctx, leave := context.WithCancel(t.Context())
	leaves, stays := d.follow(ctx, memoryClaim(t, "k")), d.follow(t.Context(), memoryClaim(t, "k"))
	leave()
	<-leaves.came
	require.ErrorIs(t, leaves.err, context.Canceled)
	require.ErrorIs(t, leaves.err, idempotency.ErrNotClaimed)
	require.Equal(t, 1, d.land())
	require.NoError(t, leader.err)
	require.NoError(t, stays.err)
}

// S09, S36: a thousand duplicates at once cost a handful of statements, and one runs.
func TestS09PostgresThousandDuplicates(t *testing.T) {
	const requests = 1000
	d, leader := lead(t, migrated(t), memoryClaim(t, "k"))
	answers := []*answer{leader}
	for range requests - 1 {
		answers = append(answers, d.follow(t.Context(), memoryClaim(t, "k")))
	}
	require.Equal(t, 1, d.land())
	won := 0
	for _, a := range answers {
		require.NoError(t, a.err)
		if a.State == idempotency.StateClaimed {
			won++
		}
	}
	require.Equal(t, 1, won)
}

// S09: the same over HTTP, as they come.
func TestS09PostgresDuplicatesOverHTTP(t *testing.T) {
	db := newGatedDB(migrated(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 4 }))
	const requests = 200
	entered, leave := make(chan struct{}), make(chan struct{})
	s := newPGSite(t, db, idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-leave
		echo(w, r)
	})
	send := func(n int) (statuses map[int]int) {
		var mu sync.Mutex
		var wg sync.WaitGroup
		statuses = make(map[int]int)
		for i := range n {
			body := "pay"
			if i%4 == 3 {
				body = "pay more"
			}
			wg.Go(func() {
				status := s.do(t.Context(), call{body: body}).status
				mu.Lock()
				defer mu.Unlock()
				statuses[status]++
			})
		}
		wg.Wait()
		return statuses
	}
	first := make(chan int)
	go func() { first <- s.do(t.Context(), call{body: "pay"}).status }()
	<-entered
	require.Equal(t, map[int]int{http.StatusConflict: requests * 3 / 4, http.StatusUnprocessableEntity: requests / 4}, send(requests))
	close(leave)
	require.Equal(t, http.StatusCreated, <-first)
	db.shut()
	db.open()
	require.Equal(t, map[int]int{http.StatusCreated: requests * 3 / 4, http.StatusUnprocessableEntity: requests / 4}, send(requests))
	require.Less(t, len(db.log()), requests, "they share")
	require.EqualValues(t, 1, s.runs.Load())
	s.settled(t)
}
