//go:build unix

package idempotency_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A guarantee is a way to guard a handler, by what it promises.
type guarantee string

const (
	leased        guarantee = "lease"
	held          guarantee = "HoldAbandoned"
	downstream    guarantee = "downstream key"
	transactional guarantee = "Transactional"
)

// A moment is one at which a process is killed.
type moment string

const (
	beforeClaim   moment = "before the claim"
	claimSent     moment = "claim made not acknowledged"
	handlerBegins moment = "handler begins"
	effectMade    moment = "effect made"
	outcomeSent   moment = "outcome stored not acknowledged"
	outcomeStored moment = "answer about to leave"
	answered      moment = "answer has left"
)

// A crashConfig makes a process one that is to be killed.
type crashConfig struct {
	Guarantee guarantee
	StopAt    moment // it says so then, and waits for a line of input
}

const crashLease = time.Minute

// An effectful server has a guarded handler that writes a row into the table effects.
type effectful struct {
	crashConfig

	pool    *pgxpool.Pool
	reached func(moment)
}

func (e effectful) middleware() (*idempotency.Middleware, error) {
	cfg := identified(idempotency.Config{
		Lease: crashLease, HoldAbandoned: e.Guarantee == held, Transactional: e.Guarantee == transactional,
		OnEvent: func(_ context.Context, event idempotency.Event) {
			if event.Kind == idempotency.EventExecuted {
				e.reached(outcomeStored)
			}
		},
	})
	tenant := cfg.KeyScope
	cfg.KeyScope = func(r *http.Request) string {
		e.reached(beforeClaim)
		return tenant(r)
	}
	return idempotency.New(idempotency.NewPostgresStore(e.pool), cfg)
}

func (e effectful) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.reached(handlerBegins)
	if err := e.act(r.Context()); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	e.reached(effectMade)
	attempt(w, r)
}

// act has the handler's effect. With a downstream key, it is a call to somebody who
// has that effect once for a key.
func (e effectful) act(ctx context.Context) error {
	const sql = "INSERT INTO effects (id) VALUES ($1) ON CONFLICT DO NOTHING"
	id := uuid.New()
	if e.Guarantee == downstream {
		exec, _ := idempotency.FromContext(ctx)
		id = exec.DownstreamKey("effect")
	}
	if tx, ok := idempotency.PostgresTx(ctx); ok {
		_, err := tx.Exec(ctx, sql, id.String())
		return err
	}
	_, err := e.pool.Exec(ctx, sql, id.String())
	return err
}

// serveToBeKilled serves until standard input ends.
func serveToBeKilled(ctx context.Context, cfg processConfig) error {
	pool, err := pgxpool.New(ctx, cfg.DatabaseURL)
	if err != nil {
		return err
	}
	input := bufio.NewScanner(os.Stdin)
	e := effectful{*cfg.Crash, pool, func(m moment) {
		if m != cfg.Crash.StopAt {
			return
		}
		fmt.Println("at:", m)
		if !input.Scan() {
			os.Exit(1)
		}
	}}
	m, err := e.middleware()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("http://" + listener.Addr().String())
	return (&http.Server{Handler: m.Handler(e)}).Serve(listener)
}

// kill ends a process as a crash does.
func (p *process) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Kill())
	require.Error(t, p.cmd.Wait())
}

// lastStopBefore is where a process stops before a moment at which it waits for the
// database.
var lastStopBefore = map[moment]moment{claimSent: beforeClaim, outcomeSent: effectMade}

// killedAt sends a request to a process that is killed at m, and returns what its
// client got.
func killedAt(t *testing.T, db lifeDB, g guarantee, m moment) reply {
	t.Helper()
	stop := m
	if before, found := lastStopBefore[m]; found {
		stop = before
	}
	p := startProcess(t, processConfig{DatabaseURL: db.proxy.URL(), Crash: &crashConfig{Guarantee: g, StopAt: stop}})
	await := p.start(t.Context())
	if m == answered {
		a := await(t)
		p.kill(t)
		return a
	}
	p.says(t, "at: "+string(stop))
	if m != stop {
		onItsWay, release := db.proxy.HoldAnswer("8e03978e")
		defer release()
		p.proceed(t)
		receive(t, onItsWay)
	}
	p.kill(t)
	return await(t)
}

// What a retry gets after a crash.
type fate string

const (
	runs        fate = "runs, as attempt 1"
	takesOver   fate = "409 `in-flight` until the lease ends; then runs, as attempt 2"
	staysUnsure fate = "409 `in-flight` until the lease ends; then 409 `outcome-unknown`"
	replays     fate = "gets the stored answer"
)

// A crash is what is promised for a process that is killed at a moment.
type crash struct {
	at       moment
	record   string // as it is found then
	effects  int
	retry    fate
	inTheEnd int // effects, after the retry
}

// killed kills a process at each moment, and requires what docs/guarantees.md says.
func killed(t *testing.T, g guarantee, crashes []crash) {
	t.Helper()
	parallel(t)
	page, err := os.ReadFile("docs/guarantees.md")
	require.NoError(t, err)
	for _, c := range crashes {
		t.Run(string(c.at), func(t *testing.T) {
			parallel(t)
			require.Contains(t, string(page), c.row(t.Name()))
			db := newLifeDB(t)
			_, err := db.Exec(t.Context(), "CREATE TABLE effects (id text PRIMARY KEY)")
			require.NoError(t, err)
			e := effectful{crashConfig{Guarantee: g}, db.Pool, func(moment) {}}
			m, err := e.middleware()
			require.NoError(t, err)
			other := newSite(t, http1, m.Handler(e))

			first := killedAt(t, db, g, c.at)
			if c.at == answered {
				require.Equal(t, "attempt 1", first.body)
			} else {
				require.Error(t, first.err, "its client hears nothing")
			}
			require.Equal(t, c.record, db.standing(t))
			require.Equal(t, c.effects, db.effects(t))
			other.requireFate(t, db, c.retry)
			require.Equal(t, c.inTheEnd, db.effects(t))
		})
	}
}

// row is what the documentation says about c.
func (c crash) row(test string) string {
	client, record := "nothing", c.record
	if c.at == answered {
		client = "its answer"
	}
	if status, number, found := strings.Cut(c.record, " "); found && c.record != noRecord {
		record = fmt.Sprintf("record `%s`, attempt %s", status, number)
	}
	return fmt.Sprintf("| %s | %s | %s; effects: %d | %s; effects: %d | `%s` |",
		c.at, client, record, c.effects, c.retry, c.inTheEnd, test)
}

// standing says how the record stands, if there is one.
func (db lifeDB) standing(t *testing.T) string {
	t.Helper()
	if count(t, db.Pool, "true") == 0 {
		return "no record"
	}
	return db.record(t)
}

func (db lifeDB) effects(t *testing.T) int {
	t.Helper()
	return queryOne[int](t, db, "SELECT count(*) FROM effects")
}

// requireFate sends retries, and requires that they get f, and that for good.
func (s *site) requireFate(t *testing.T, db lifeDB, f fate) {
	t.Helper()
	if f == takesOver || f == staysUnsure {
		s.do(t.Context(), call{}).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
		advance(t, db.Pool, "idempotency_records", crashLease)
	}
	a, again := s.decided(t), s.decided(t)
	if f == staysUnsure {
		a.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		again.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		return
	}
	require.Equal(t, http.StatusCreated, a.status, a.body)
	require.Equal(t, f == takesOver, a.body == "attempt 2")
	require.Equal(t, f == replays, a.replayed())
	require.True(t, again.replayed())
	require.Equal(t, a.body, again.body)
}

// decided sends the request until it is not in flight: the database may take a moment
// to notice that the process that had a transaction is gone.
func (s *site) decided(t *testing.T) reply {
	t.Helper()
	var a reply
	until(t, func() bool {
		a = s.do(t.Context(), call{})
		require.NoError(t, a.err)
		return a.status != http.StatusConflict || a.code(t) != string(idempotency.CodeInFlight)
	}, "it stays in flight")
	return a
}

const (
	noRecord  = "no record"
	running   = "in_progress 1"
	completed = "completed 1"
)

// S27: with a lease alone, an effect can be had twice: by a process that dies after
// it, before the outcome is stored, and by the one that takes over.
func TestS27PostgresKilledWithLease(t *testing.T) {
	killed(t, leased, []crash{
		{beforeClaim, noRecord, 0, runs, 1},
		{claimSent, running, 0, takesOver, 1},
		{handlerBegins, running, 0, takesOver, 1},
		{effectMade, running, 1, takesOver, 2},
		{outcomeSent, completed, 1, replays, 1},
		{outcomeStored, completed, 1, replays, 1},
		{answered, completed, 1, replays, 1},
	})
}

// S27: where nothing may run twice, nothing does.
func TestS27PostgresKilledWithHold(t *testing.T) {
	killed(t, held, []crash{
		{beforeClaim, noRecord, 0, runs, 1},
		{claimSent, running, 0, staysUnsure, 0},
		{handlerBegins, running, 0, staysUnsure, 0},
		{effectMade, running, 1, staysUnsure, 1},
		{outcomeSent, completed, 1, replays, 1},
		{outcomeStored, completed, 1, replays, 1},
		{answered, completed, 1, replays, 1},
	})
}

// S45: an effect that somebody else has once for a key is had once.
func TestS45PostgresKilledWithDownstreamKey(t *testing.T) {
	killed(t, downstream, []crash{
		{beforeClaim, noRecord, 0, runs, 1},
		{claimSent, running, 0, takesOver, 1},
		{handlerBegins, running, 0, takesOver, 1},
		{effectMade, running, 1, takesOver, 1},
		{outcomeSent, completed, 1, replays, 1},
		{outcomeStored, completed, 1, replays, 1},
		{answered, completed, 1, replays, 1},
	})
}

// S38: in a transaction, a crash leaves all or nothing, and nobody waits for a lease.
func TestS38PostgresKilledInTransaction(t *testing.T) {
	killed(t, transactional, []crash{
		{beforeClaim, noRecord, 0, runs, 1},
		{claimSent, noRecord, 0, runs, 1},
		{handlerBegins, noRecord, 0, runs, 1},
		{effectMade, noRecord, 0, runs, 1},
		{outcomeSent, completed, 1, replays, 1},
		{outcomeStored, completed, 1, replays, 1},
		{answered, completed, 1, replays, 1},
	})
}
