package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// A gatedDB remembers what is sent. While it is shut it lets nothing on.
type gatedDB struct {
	idempotency.PostgresDB

	mu    sync.Mutex
	gate  chan struct{} // nil while it is open
	sent  [][]string    // the keys of each query and batch, in their order
	spoil func() error  // of the next batches, instead of sending them
}

func newGatedDB(db idempotency.PostgresDB) *gatedDB {
	return &gatedDB{PostgresDB: db}
}

func (db *gatedDB) shut() {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.gate = make(chan struct{})
	db.sent = nil
}

func (db *gatedDB) open() {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.gate != nil {
		close(db.gate)
		db.gate = nil
	}
}

// log returns what was sent since the gate was shut.
func (db *gatedDB) log() [][]string {
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.sent)
}

// await waits until so much was sent.
func (db *gatedDB) await(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return len(db.log()) == n }, 10*time.Second, time.Millisecond)
}

func (db *gatedDB) pass(ctx context.Context, keys []string) error {
	db.mu.Lock()
	db.sent = append(db.sent, keys)
	gate := db.gate
	db.mu.Unlock()
	if gate == nil {
		return nil
	}
	select {
	case <-gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (db *gatedDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := db.pass(ctx, []string{args[5].(string)}); err != nil {
		return nil, err
	}
	return db.PostgresDB.Query(ctx, sql, args...)
}

func (db *gatedDB) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	keys := make([]string, 0, b.Len())
	for _, q := range b.QueuedQueries {
		keys = append(keys, q.Arguments[5].(string))
	}
	err := db.pass(ctx, keys)
	if err == nil && db.spoil != nil {
		err = db.spoil()
	}
	if err != nil {
		return failedBatch{err: err}
	}
	return db.PostgresDB.SendBatch(ctx, b)
}

// A failedBatch has only an error to tell.
type failedBatch struct {
	pgx.BatchResults
	err error
}

func (b failedBatch) Query() (pgx.Rows, error) { return nil, b.err }
func (b failedBatch) Close() error             { return b.err }

// A crowd is a store both senders of which are held up, by calls that will change
// nothing, so that all other statements have to wait until it is let go.
type crowd struct {
	*idempotency.PostgresStore
	t    *testing.T
	db   *gatedDB
	wg   sync.WaitGroup
	wait int // statements that wait, beside the two
}

func newCrowd(t *testing.T, db idempotency.PostgresDB) *crowd {
	t.Helper()
	gated := newGatedDB(db)
	c := &crowd{t: t, db: gated, PostgresStore: idempotency.NewPostgresStore(gated)}
	c.hold()
	return c
}

func (c *crowd) hold() {
	c.t.Helper()
	c.db.shut()
	for i := range 2 {
		lease := memoryLeaseOf(memoryClaim(c.t, "held "+uuid.NewString()))
		c.wg.Go(func() { errorIs(c.t, c.Extend(c.t.Context(), lease), idempotency.ErrLeaseLost) })
		c.db.await(c.t, i+1)
	}
}

// add makes a call and returns when its statement waits.
func (c *crowd) add(call func()) {
	c.t.Helper()
	c.wg.Go(call)
	c.wait++
	awaitQueued(c.t, c.PostgresStore, c.wait)
}

// awaitQueued waits until so many statements of a store wait.
func awaitQueued(t *testing.T, s *idempotency.PostgresStore, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return idempotency.QueuedStatements(s) == n }, 10*time.Second, 10*time.Microsecond)
}

// claim adds a claim.
func (c *crowd) claim(claim idempotency.Claim) *answer {
	c.t.Helper()
	a := &answer{}
	c.add(func() { a.Record, a.err = c.Claim(c.t.Context(), claim) })
	return a
}

// An answer is what a claim returned, once it has.
type answer struct {
	idempotency.Record
	err  error
	came chan struct{} // closed then, if the claim followed another
}

// letGo lets all statements on, waits for their answers, and returns what was sent
// after the two held ones.
func (c *crowd) letGo() [][]string {
	c.t.Helper()
	c.db.open()
	c.wg.Wait()
	c.wait = 0
	awaitIdle(c.t, c.PostgresStore)
	return c.db.log()[2:]
}

// awaitIdle waits until a store holds on to nothing: a flusher sees only after its
// last answer that there is nothing more to send.
func awaitIdle(t *testing.T, s *idempotency.PostgresStore) {
	t.Helper()
	require.Eventually(t, func() bool { return idempotency.IsIdle(s) }, 10*time.Second, time.Millisecond)
}

func claimsOf(t *testing.T, n int) []idempotency.Claim {
	t.Helper()
	claims := make([]idempotency.Claim, n)
	for i := range claims {
		claims[i] = memoryClaim(t, fmt.Sprintf("k %d", (i*7919)%n)) // in no order
	}
	return claims
}

func sizes(sent [][]string) []int {
	var n []int
	for _, keys := range sent {
		n = append(n, len(keys))
	}
	slices.Sort(n)
	return n
}

// S36: what waits travels together, at most so many at once, in the order of the
// keys. Claims, completions, renewals and releases do, and new claims as well as
// such as meet a record.
func TestS36BatchesOfConcurrentCalls(t *testing.T) {
	c := newCrowd(t, migrated(t))
	claims := claimsOf(t, idempotency.MaxBatch+40)
	answers := make([]*answer, len(claims))
	for i, claim := range claims {
		answers[i] = c.claim(claim)
	}
	sent := c.letGo()
	require.Equal(t, []int{40, idempotency.MaxBatch}, sizes(sent))
	for _, keys := range sent {
		require.True(t, slices.IsSorted(keys), keys)
	}
	for i, a := range answers {
		require.NoError(t, a.err)
		require.Equal(t, idempotency.Record{State: idempotency.StateClaimed, Fingerprint: claims[i].Fingerprint, Attempt: 1}, a.Record)
	}

	c.hold()
	done := idempotency.Response{Status: http.StatusCreated, Body: []byte("done")}
	for i, claim := range claims[:100] {
		lease := memoryLeaseOf(claim)
		c.add(func() {
			switch i % 4 {
			case 0:
				noError(t, c.Complete(t.Context(), lease, done))
			case 1:
				noError(t, c.Extend(t.Context(), lease))
			case 2:
				noError(t, c.Release(t.Context(), lease))
			case 3:
				lease.Owner = uuid.New()
				errorIs(t, c.Extend(t.Context(), lease), idempotency.ErrLeaseLost)
			}
		})
	}
	require.Equal(t, []int{100}, sizes(c.letGo()))

	c.hold()
	for i := range answers[:100] {
		claims[i].Owner = uuid.New()
		answers[i] = c.claim(claims[i])
	}
	sent = c.letGo()
	require.Len(t, sent[0], 100)
	require.Len(t, slices.Concat(sent...), 125, "those that take over go once more")
	for i, a := range answers[:100] {
		require.NoError(t, a.err)
		switch i % 4 {
		case 0:
			require.Equal(t, idempotency.StateCompleted, a.State)
			require.Equal(t, done, a.Response)
		case 1, 3:
			require.Equal(t, idempotency.StateInProgress, a.State)
		case 2:
			require.Equal(t, idempotency.StateClaimed, a.State)
			require.Equal(t, 2, a.Attempt)
		}
	}
}

func errorIs(t *testing.T, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%v is not %v", err, target)
	}
}

// S36: a batch is one round trip and one commit, and none that writes if all it
// meets are records.
func TestS36PostgresCostOfABatch(t *testing.T) {
	m, pool := newMeter(t)
	one, two := claimInTx(t, pool, memoryClaim(t, "one")), claimInTx(t, pool, memoryClaim(t, "two"))
	require.NoError(t, errors.Join(one.Rollback(t.Context()), two.Rollback(t.Context()))) // both connections know the statement
	const calls = 100
	c := newCrowd(t, pool)
	claims := claimsOf(t, calls)
	const held = 2 // round trips of the two that hold the crowd up
	run := func(add func(idempotency.Claim)) cost {
		return m.of(t, func() {
			for _, claim := range claims {
				add(claim)
			}
			require.Equal(t, []int{calls}, sizes(c.letGo()))
		})
	}
	replayed := idempotency.Response{Status: http.StatusCreated}
	claim := func(claim idempotency.Claim) { c.claim(claim) }
	complete := func(claim idempotency.Claim) {
		c.add(func() { noError(t, c.Complete(t.Context(), memoryLeaseOf(claim), replayed)) })
	}
	got := run(claim)
	require.EqualValues(t, 1, got.transactions)
	c.hold()
	got = run(complete)
	require.EqualValues(t, 1, got.transactions)
	require.LessOrEqual(t, got.roundTrips, int64(held+2), "one may be to prepare the statement")
	for range 2 { // the first look at a record may tidy its page
		c.hold()
		got = run(claim)
	}
	require.Equal(t, cost{roundTrips: held + 1}, got, "a replay writes nothing")
}

// With nothing on its way, the caller's own goroutine sends, and a call that finds
// one other on its way does not wait for it either.
func TestPostgresLoneCallsAreSentByTheirCallers(t *testing.T) {
	db := newGatedDB(migrated(t))
	spy := &stackDB{gatedDB: db}
	store := idempotency.NewPostgresStore(spy)
	claim := memoryClaim(t, "k")
	call := func() {
		_, err := store.Claim(t.Context(), claim)
		noError(t, err)
		noError(t, store.Complete(t.Context(), memoryLeaseOf(claim), idempotency.Response{Status: http.StatusOK}))
	}
	call()
	require.EqualValues(t, 2, spy.own.Load())

	db.shut()
	var wg sync.WaitGroup
	for i, key := range []string{"second", "third"} {
		wg.Go(func() {
			_, err := store.Claim(t.Context(), memoryClaim(t, key))
			noError(t, err)
		})
		db.await(t, i+1)
	}
	db.open()
	wg.Wait()
}

// A stackDB counts the queries that are sent on the goroutine of a test.
type stackDB struct {
	*gatedDB
	own atomic.Int64
}

func (db *stackDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	stack := make([]byte, 1<<16)
	if bytes.Contains(stack[:runtime.Stack(stack, false)], []byte("testing.tRunner")) {
		db.own.Add(1)
	}
	return db.gatedDB.Query(ctx, sql, args...)
}

// S36: an answer counts only after the commit. A row that the database refuses, at
// once or at the commit, is its caller's error; all others go again, one by one.
func TestS36PostgresBadRowFailsAlone(t *testing.T) {
	for _, when := range []string{
		"TRIGGER refuse BEFORE INSERT ON idempotency_records",
		"CONSTRAINT TRIGGER refuse AFTER INSERT ON idempotency_records DEFERRABLE INITIALLY DEFERRED",
	} {
		t.Run(when, func(t *testing.T) {
			pool := migrated(t)
			for _, sql := range []string{
				"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused' USING ERRCODE = '23514'; END $$",
				"CREATE " + when + " FOR EACH ROW WHEN (NEW.idem_key = 'k 5') EXECUTE FUNCTION refuse()",
			} {
				_, err := pool.Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			c := newCrowd(t, pool)
			claims := claimsOf(t, 20)
			answers := make([]*answer, len(claims))
			for i, claim := range claims {
				answers[i] = c.claim(claim)
			}
			require.Equal(t, append(slices.Repeat([]int{1}, 20), 20), sizes(c.letGo()))
			for i, a := range answers {
				if claims[i].Key.Key() == "k 5" {
					require.ErrorContains(t, a.err, "refused")
					require.ErrorIs(t, a.err, idempotency.ErrNotClaimed)
					continue
				}
				require.NoError(t, a.err)
				require.Equal(t, idempotency.StateClaimed, a.State)
				require.Equal(t, 1, count(t, pool, "owner = $1 AND attempt = 1", claims[i].Owner.String()))
			}
			require.Zero(t, count(t, pool, "idem_key = 'k 5'"))
		})
	}
}

// S36: nobody is answered before the commit is acknowledged.
func TestS36PostgresNoAnswerBeforeTheCommit(t *testing.T) {
	db := &commitDB{PostgresDB: migrated(t), reached: make(chan struct{}), commit: make(chan struct{})}
	c := newCrowd(t, db)
	var answered atomic.Int64
	for _, claim := range claimsOf(t, 10) {
		c.add(func() {
			_, err := c.Claim(t.Context(), claim)
			noError(t, err)
			answered.Add(1)
		})
	}
	c.db.open()
	<-db.reached // all answers are read
	require.Zero(t, answered.Load())
	close(db.commit)
	c.wg.Wait()
	require.EqualValues(t, 10, answered.Load())
}

// A commitDB stops its batches at their end.
type commitDB struct {
	idempotency.PostgresDB
	reached, commit chan struct{}
}

func (db *commitDB) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return &commitResults{BatchResults: db.PostgresDB.SendBatch(ctx, b), db: db}
}

type commitResults struct {
	pgx.BatchResults
	db *commitDB
}

func (r *commitResults) Close() error {
	r.db.reached <- struct{}{}
	<-r.db.commit
	return r.BatchResults.Close()
}

// S36: a batch that was broken off is redone; what it had done before is not done
// twice.
func TestS36PostgresBatchBrokenOff(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprintf("before it is sent=%t", before), func(t *testing.T) {
			dbURL := pgtest.Database(t)
			admin := newPool(t, dbURL)
			require.NoError(t, idempotency.Migrate(t.Context(), admin))
			proxy := pgtest.NewProxy(t, dbURL)
			c := newCrowd(t, newPool(t, proxy.URL()))
			claims := claimsOf(t, 20)
			answers := make([]*answer, len(claims))
			for i, claim := range claims {
				answers[i] = c.claim(claim)
			}
			if before {
				proxy.CutBeforeSending("k 19") // the last one's key
			} else {
				proxy.CutAfterSending("k 19")
			}
			c.letGo()
			require.Equal(t, 1, proxy.Cuts())
			for i, a := range answers {
				require.NoError(t, a.err)
				require.Equal(t, idempotency.StateClaimed, a.State)
				require.Equal(t, 1, count(t, admin, "owner = $1 AND attempt = 1", claims[i].Owner.String()))
			}

			c.hold()
			for i, claim := range claims {
				c.add(func() {
					noError(t, c.Complete(t.Context(), memoryLeaseOf(claim), idempotency.Response{Status: 200 + i, Body: []byte(claim.Key.Key())}))
				})
			}
			if before {
				proxy.CutBeforeSending("k 19")
			} else {
				proxy.CutAfterSending("k 19")
			}
			c.letGo()
			require.Equal(t, 2, proxy.Cuts())
			require.Equal(t, len(claims), count(t, admin, "status = 'completed' AND convert_from(response_body, 'UTF8') = idem_key"))
		})
	}
}

// S36: a session that an administrator ends in the middle of a batch costs nobody
// an answer.
func TestS36PostgresSessionKilledInABatch(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	claims := claimsOf(t, 20)
	tx := claimInTx(t, pool, claims[7])
	answers := make([]*answer, len(claims))
	for i := range claims {
		claims[i].Owner = uuid.New()
		answers[i] = c.claim(claims[i])
	}
	c.db.open()
	awaitBlocked(t, pool) // the batch waits for the eighth row
	require.True(t, queryOne[bool](t, pool, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"+
		" WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"))
	awaitBlocked(t, pool) // one by one now, and again at that row
	require.NoError(t, tx.Rollback(t.Context()))
	c.letGo()
	for i, a := range answers {
		require.NoError(t, a.err)
		require.Equal(t, idempotency.StateClaimed, a.State, i)
	}
	require.Equal(t, len(claims), count(t, pool, "attempt = 1 AND idem_key LIKE 'k %'"))
}

// S30: while the database cannot be reached, a batch is not tried again one by one.
func TestS30PostgresBatchInAnOutage(t *testing.T) {
	c := newCrowd(t, migrated(t))
	c.db.spoil = func() error { return &pgconn.ConnectError{} }
	answers := make([]*answer, 20)
	for i, claim := range claimsOf(t, len(answers)) {
		answers[i] = c.claim(claim)
	}
	require.Equal(t, []int{20}, sizes(c.letGo()))
	for _, a := range answers {
		require.ErrorIs(t, a.err, idempotency.ErrNotClaimed)
		var refused *pgconn.ConnectError
		require.ErrorAs(t, a.err, &refused)
	}
}

// S26, S30: an outage begins between a batch and what is sent again. One statement
// tells for all; but what the batch may have done is not said to be undone.
func TestS26PostgresOutageAfterABatch(t *testing.T) {
	for _, tc := range []struct {
		name   string
		err    error // of the batch
		inside bool  // the keys may have been taken
	}{
		{"undone", &pgconn.PgError{Severity: "ERROR", Code: "40001"}, false},
		{"broken off", io.ErrUnexpectedEOF, true},
		{"session ended", &pgconn.PgError{Severity: "FATAL", Code: "57P01"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCrowd(t, migrated(t))
			c.db.spoil = func() error {
				c.db.PostgresDB = unreachableDB{}
				return tc.err
			}
			answers := make([]*answer, 20)
			for i, claim := range claimsOf(t, len(answers)) {
				answers[i] = c.claim(claim)
			}
			require.Equal(t, []int{1, 20}, sizes(c.letGo()))
			for _, a := range answers {
				var refused *pgconn.ConnectError
				require.ErrorAs(t, a.err, &refused)
				require.Equal(t, !tc.inside, errors.Is(a.err, idempotency.ErrNotClaimed), a.err)
			}
		})
	}
}

// An unreachableDB is down.
type unreachableDB struct{ idempotency.PostgresDB }

func (unreachableDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, &pgconn.ConnectError{}
}

// S36: at most one statement about a key is on its way, whatever it is.
func TestS36PostgresOneStatementForAKey(t *testing.T) {
	pool := migrated(t)
	db := newGatedDB(pool)
	store := idempotency.NewPostgresStore(db)
	claim := memoryClaim(t, "k")
	db.shut()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := store.Claim(t.Context(), claim)
		noError(t, err)
	})
	db.await(t, 1)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	for i, call := range []func(){ // in this order, or else not all would end so
		func() { noError(t, store.Extend(t.Context(), memoryLeaseOf(claim))) },
		func() { left <- store.Complete(ctx, memoryLeaseOf(claim), idempotency.Response{Status: http.StatusOK}) },
		func() { noError(t, store.Release(t.Context(), memoryLeaseOf(claim))) },
		func() { errorIs(t, store.Extend(t.Context(), memoryLeaseOf(claim)), idempotency.ErrLeaseLost) },
	} {
		wg.Go(call)
		awaitQueued(t, store, i+1)
	}
	leave()
	require.ErrorIs(t, <-left, context.Canceled, "it is not sent, and nobody waits for it")
	awaitQueued(t, store, 3)
	require.Len(t, db.log(), 1, "there is room for another sender, but not for this key")
	db.open()
	wg.Wait()
	require.Equal(t, slices.Repeat([][]string{{"k"}}, 4), db.log())
	awaitIdle(t, store)
}

// S26: a caller leaves at once. What was not sent by then never is, and is known not
// to be; what is on its way may arrive. The others of its batch lose nothing.
func TestS26PostgresLeavingABatch(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	claims := claimsOf(t, 10)
	leaving := func(claim idempotency.Claim) (a *answer, leave context.CancelFunc, left chan struct{}) {
		ctx, cancel := context.WithCancel(t.Context())
		a, left = &answer{}, make(chan struct{})
		c.add(func() {
			defer close(left)
			a.Record, a.err = c.Claim(ctx, claim)
		})
		return a, cancel, left
	}

	early, leave, left := leaving(claims[0])
	parked := memoryLeaseOf(claims[1])
	ctx, leaveParked := context.WithCancel(t.Context())
	stays := c.claim(claims[1])
	c.add(func() { errorIs(t, c.Release(ctx, parked), context.Canceled) })
	leave()
	<-left
	require.ErrorIs(t, early.err, context.Canceled)
	require.ErrorIs(t, early.err, idempotency.ErrNotClaimed)
	leaveParked()
	c.wait -= 2
	awaitQueued(t, c.PostgresStore, c.wait)

	late, leaveLate, leftLate := leaving(claims[2])
	batch := make(chan struct{})
	commit := make(chan struct{})
	c.db.PostgresDB = &commitDB{PostgresDB: pool, reached: batch, commit: commit}
	c.db.open()
	<-batch
	leaveLate()
	<-leftLate
	require.ErrorIs(t, late.err, context.Canceled)
	require.NotErrorIs(t, late.err, idempotency.ErrNotClaimed)
	released := make(chan error)
	go func() { released <- c.Release(t.Context(), memoryLeaseOf(claims[2])) }() // waits for the claim
	awaitQueued(t, c.PostgresStore, 1)
	close(commit)
	require.NoError(t, <-released)
	c.letGo()
	require.NoError(t, stays.err)
	require.Equal(t, 1, count(t, pool, "status = 'in_progress' AND idem_key = $1", claims[1].Key.Key()))
	require.Equal(t, 1, count(t, pool, "status = 'released' AND idem_key = $1", claims[2].Key.Key()))
	require.Zero(t, count(t, pool, "idem_key = $1", claims[0].Key.Key()))
}

// S26: a caller that leaves does not break off the batch of the others.
func TestS26PostgresOneLeavesABatch(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	claims := claimsOf(t, 10)
	tx := claimInTx(t, pool, claims[3])
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	c.add(func() {
		defer close(left)
		_, err := c.Claim(ctx, claims[0])
		errorIs(t, err, context.Canceled)
	})
	var stay []*answer
	for _, claim := range claims[1:] {
		claim.Owner = uuid.New()
		stay = append(stay, c.claim(claim))
	}
	c.db.open()
	awaitBlocked(t, pool)
	leave()
	<-left
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, []int{10}, sizes(c.letGo()), "none went again")
	for _, a := range stay {
		require.NoError(t, a.err)
	}
}

// S26: a batch that nobody waits for any more is broken off.
func TestS26PostgresAllLeaveABatch(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	claims := claimsOf(t, 10)
	tx := claimInTx(t, pool, claims[3])
	ctx, leave := context.WithCancel(t.Context())
	for _, claim := range claims {
		claim.Owner = uuid.New()
		c.add(func() {
			_, err := c.Claim(ctx, claim)
			errorIs(t, err, context.Canceled)
		})
	}
	c.db.open()
	awaitBlocked(t, pool)
	leave()
	require.Equal(t, []int{10}, sizes(c.letGo()), "and none goes again")
	require.Eventually(t, func() bool {
		return queryOne[bool](t, pool, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"+
			" WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0)")
	}, 10*time.Second, time.Millisecond, "the server is told")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, count(t, pool, "idem_key LIKE 'k %'"))
}

// S26: closing waits for what is on its way and refuses what is new, but for what
// ends an operation.
func TestS26PostgresCloseDrains(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	claims := claimsOf(t, 10)
	answers := make([]*answer, len(claims))
	for i, claim := range claims {
		answers[i] = c.claim(claim)
	}
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, c.Close(impatient), context.Canceled)
	closed := make(chan error)
	go func() { closed <- c.Close(t.Context()) }()
	_, err := c.Claim(t.Context(), memoryClaim(t, "new"))
	require.ErrorIs(t, err, idempotency.ErrNotClaimed)
	require.ErrorContains(t, err, "store is closed")
	c.add(func() { noError(t, c.Release(t.Context(), memoryLeaseOf(claims[0]))) })
	select {
	case err := <-closed:
		t.Fatal("closed before all are answered:", err)
	default:
	}
	c.letGo()
	require.NoError(t, <-closed)
	for _, a := range answers {
		require.NoError(t, a.err)
	}
	require.NoError(t, c.Complete(t.Context(), memoryLeaseOf(claims[1]), idempotency.Response{Status: http.StatusOK}))
	require.NoError(t, c.Close(t.Context()), "again")

	alone := idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{DisableBatching: true})
	require.NoError(t, alone.Close(t.Context()))
	_, err = alone.Claim(t.Context(), memoryClaim(t, "new"))
	require.ErrorIs(t, err, idempotency.ErrNotClaimed)
	require.Zero(t, count(t, pool, "idem_key = 'new'"))
}

// S30: of claims only so many wait. What ends an operation, or keeps one, always may.
func TestS30PostgresTooManyClaims(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	running := memoryClaim(t, "running")
	_, err := idempotency.NewPostgresStore(pool).Claim(t.Context(), running)
	require.NoError(t, err)
	var mu sync.Mutex
	var failed int
	claims := make([]idempotency.Claim, idempotency.MaxQueueClaims)
	for i := range claims {
		claims[i] = memoryClaim(t, strconv.Itoa(i))
		c.wg.Go(func() {
			if _, err := c.Claim(t.Context(), claims[i]); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed++
			}
		})
		c.wait++
	}
	awaitQueued(t, c.PostgresStore, c.wait)
	_, err = c.Claim(t.Context(), memoryClaim(t, "one more"))
	require.ErrorIs(t, err, idempotency.ErrNotClaimed)
	require.ErrorContains(t, err, "too many claims")

	s := newSite(t, http1, newMiddleware(t, c.PostgresStore, idempotency.Config{}).Handler(http.HandlerFunc(echo)))
	a := s.do(t.Context(), call{})
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, string(idempotency.CodeStoreUnavailable), a.code(t))

	c.add(func() { noError(t, c.Extend(t.Context(), memoryLeaseOf(running))) })
	c.add(func() {
		noError(t, c.Complete(t.Context(), memoryLeaseOf(running), idempotency.Response{Status: http.StatusOK}))
	})
	c.letGo()
	require.Zero(t, failed)
	require.Equal(t, len(claims)+1, count(t, pool, "true"))
	_, err = c.Claim(t.Context(), memoryClaim(t, "one more"))
	require.NoError(t, err, "there is room again")
}

// S27: a renewal near the end of its lease goes before what has waited for longer,
// and nothing waits for ever: what is due later, since it came later, goes later.
func TestS27PostgresNearestDeadlineGoesFirst(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	running := memoryClaim(t, "running")
	_, err := idempotency.NewPostgresStore(pool).Claim(t.Context(), running)
	require.NoError(t, err)
	within := func(d time.Duration, call func(context.Context)) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		t.Cleanup(cancel)
		c.add(func() { call(ctx) })
	}
	const early = 3 * idempotency.MaxBatch
	for i := range early {
		claim := memoryClaim(t, fmt.Sprintf("early %d", i))
		within(time.Minute, func(ctx context.Context) {
			_, err := c.Claim(ctx, claim)
			noError(t, err)
		})
	}
	within(30*time.Second, func(ctx context.Context) { noError(t, c.Extend(ctx, memoryLeaseOf(running))) })
	for i := range idempotency.MaxBatch {
		claim := memoryClaim(t, fmt.Sprintf("late %d", i))
		within(time.Minute, func(ctx context.Context) {
			_, err := c.Claim(ctx, claim)
			noError(t, err)
		})
	}
	sent := c.letGo()
	require.Len(t, sent, 5)
	inTime := slices.DeleteFunc(sent, func(keys []string) bool { // two send at once, so their order is not that of the queue
		return slices.ContainsFunc(keys, func(key string) bool { return strings.HasPrefix(key, "late") })
	})
	require.Len(t, inTime, 3, "those who came early and do not fill a fourth")
	require.Contains(t, slices.Concat(inTime...), "running")
}

// A statement without a deadline is due as if it had one.
func TestPostgresNoDeadlineIsNoPrivilege(t *testing.T) {
	c := newCrowd(t, migrated(t))
	for i := range 3 * idempotency.MaxBatch {
		c.claim(memoryClaim(t, fmt.Sprintf("first %03d", i)))
	}
	c.claim(memoryClaim(t, "last"))
	require.Contains(t, c.letGo(), []string{"last"})
}

// A batch is bounded in bytes, too; what is larger by itself goes alone.
func TestPostgresBatchIsBoundedInBytes(t *testing.T) {
	pool := migrated(t)
	c := newCrowd(t, pool)
	sizesOf := map[string]int{}
	for i, size := range []int{2 * idempotency.MaxBatchBytes, 10, 10, idempotency.MaxBatchBytes / 2, idempotency.MaxBatchBytes / 2, 10} {
		claim := memoryClaim(t, strconv.Itoa(i))
		_, err := idempotency.NewPostgresStore(pool).Claim(t.Context(), claim)
		require.NoError(t, err)
		sizesOf[claim.Key.Key()] = size
		response := idempotency.Response{Status: http.StatusOK, Body: bytes.Repeat([]byte("x"), size)}
		c.add(func() { noError(t, c.Complete(t.Context(), memoryLeaseOf(claim), response)) })
	}
	sent := c.letGo()
	for _, keys := range sent {
		total := 0
		for _, key := range keys {
			total += sizesOf[key]
		}
		require.True(t, len(keys) == 1 || total <= idempotency.MaxBatchBytes, keys)
	}
	require.Equal(t, [][]string{{"0"}, {"1", "2", "3"}, {"4", "5"}}, slices.SortedFunc(slices.Values(sent), slices.Compare[[]string]))
	require.Equal(t, 6, count(t, pool, "status = 'completed'"))
}

// S36: processes whose batches hold the same keys do not wait for each other in a
// circle.
func TestS36PostgresBatchesDoNotDeadlock(t *testing.T) {
	pool := migrated(t)
	const processes, keys, rounds = 8, 8, 20
	claims := claimsOf(t, keys)
	for _, claim := range claims {
		_, err := idempotency.NewPostgresStore(pool).Claim(t.Context(), claim)
		require.NoError(t, err)
	}
	var wg sync.WaitGroup
	for range processes {
		store := idempotency.NewPostgresStore(pool)
		for _, claim := range claims {
			wg.Go(func() {
				for range rounds {
					if !noError(t, store.Extend(t.Context(), memoryLeaseOf(claim))) {
						return
					}
				}
			})
		}
	}
	wg.Wait()
	pool.Close()
	require.Zero(t, queryOne[int](t, newPool(t, pool.Config().ConnString()), "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))
}
