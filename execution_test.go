package idempotency_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// The names of the store's calls.
const (
	execClaim    = "claim"
	execComplete = "complete"
	execRelease  = "release"
	execExtend   = "extend"
)

// What no log and no printed event may contain (S46).
const (
	execTenant    = "tenant-acme"
	execPrincipal = "principal-jane"
	execKey       = "key-of-order-42"
)

// Defaults of a Config, written out again.
const (
	execLease        = 30 * time.Second
	execStoreTimeout = 5 * time.Second
	execTTL          = 24 * time.Hour
	execLastRetry    = 2 * time.Second // the longest time between two tries at the store
)

var errExecStore = errors.New("store is down")

// An execCall is one call to an execStore.
type execCall struct {
	method   string
	n        int // of this method's calls: 1, 2, …
	at       time.Time
	claim    idempotency.Claim
	lease    idempotency.Lease
	response idempotency.Response
	won      bool // a claim that returned StateClaimed
}

// An execHook stands in for a call. apply carries the call out, whatever has
// become of ctx, and may be called later and from elsewhere.
type execHook func(ctx context.Context, call execCall, apply func() error) error

// An execStore is a store that does what a test's hooks want, and remembers its
// calls.
type execStore struct {
	t     *testing.T
	inner idempotency.Store

	mu      sync.Mutex
	timeout time.Duration // the longest that a call may be given
	hooks   map[string]execHook
	counts  map[string]int
	calls   []*execCall
}

func newExecStore(t *testing.T, inner idempotency.Store) *execStore {
	t.Helper()
	return &execStore{
		t: t, inner: inner, timeout: execStoreTimeout, hooks: make(map[string]execHook), counts: make(map[string]int),
	}
}

// on sets what a method does from now on.
func (s *execStore) on(method string, h execHook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hooks[method] = h
}

func (s *execStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	var rec idempotency.Record
	call := &execCall{method: execClaim, claim: c}
	err := s.call(ctx, call, func(ctx context.Context) error {
		r, err := s.inner.Claim(ctx, c)
		s.mu.Lock()
		defer s.mu.Unlock()
		rec = r
		call.won = r.State == idempotency.StateClaimed
		return err
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	return rec, err
}

func (s *execStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	return s.call(ctx, &execCall{method: execComplete, lease: l, response: r}, func(ctx context.Context) error {
		return s.inner.Complete(ctx, l, r)
	})
}

func (s *execStore) Release(ctx context.Context, l idempotency.Lease) error {
	return s.call(ctx, &execCall{method: execRelease, lease: l}, func(ctx context.Context) error {
		return s.inner.Release(ctx, l)
	})
}

func (s *execStore) Extend(ctx context.Context, l idempotency.Lease) error {
	return s.call(ctx, &execCall{method: execExtend, lease: l}, func(ctx context.Context) error {
		return s.inner.Extend(ctx, l)
	})
}

func (s *execStore) call(ctx context.Context, call *execCall, apply func(context.Context) error) error {
	s.checkContext(ctx, call.method)
	call.at = time.Now()
	s.mu.Lock()
	s.counts[call.method]++
	call.n = s.counts[call.method]
	s.calls = append(s.calls, call)
	seen := *call
	hook := s.hooks[call.method]
	s.mu.Unlock()
	if hook == nil {
		return apply(ctx)
	}
	return hook(ctx, seen, func() error { return apply(context.WithoutCancel(ctx)) })
}

// checkContext holds every call of every test to S26: a context with a deadline
// of its own that keeps the request's values.
func (s *execStore) checkContext(ctx context.Context, method string) {
	deadline, ok := ctx.Deadline()
	if !ok || time.Until(deadline) > s.timeout {
		s.t.Errorf("S26: %s has no deadline of its own: %v", method, deadline)
	}
	if ctx.Value(execMarker{}) != "kept" {
		s.t.Errorf("S26: %s lost the values of the request's context", method)
	}
}

// seen returns the calls of a method so far.
func (s *execStore) seen(method string) []execCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	var calls []execCall
	for _, c := range s.calls {
		if c.method == method {
			calls = append(calls, *c)
		}
	}
	return calls
}

func (s *execStore) count(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[method]
}

func (s *execStore) countAll() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}

// won returns the claims that won so far.
func (s *execStore) won() []idempotency.Claim {
	var claims []idempotency.Claim
	for _, c := range s.seen(execClaim) {
		if c.won {
			claims = append(claims, c.claim)
		}
	}
	return claims
}

// execFail fails without doing anything.
func execFail(context.Context, execCall, func() error) error { return errExecStore }

// execHang does nothing until the caller gives up.
func execHang(ctx context.Context, _ execCall, _ func() error) error {
	<-ctx.Done()
	return ctx.Err()
}

// execLoseAnswer does what it is asked to, but the acknowledgement is lost.
func execLoseAnswer(_ context.Context, _ execCall, apply func() error) error {
	_ = apply()
	return errExecStore
}

// execSlow takes d before it does what it is asked to, whatever becomes of its
// caller.
func execSlow(d time.Duration) execHook {
	return func(_ context.Context, _ execCall, apply func() error) error {
		time.Sleep(d)
		return apply()
	}
}

// execUntil is h for a time, and then the store is back.
func execUntil(d time.Duration, h execHook) execHook {
	end := time.Now().Add(d)
	return func(ctx context.Context, call execCall, apply func() error) error {
		if time.Now().Before(end) {
			return h(ctx, call, apply)
		}
		return apply()
	}
}

// execFirst is h for the method's first call.
func execFirst(h execHook) execHook {
	return func(ctx context.Context, call execCall, apply func() error) error {
		if call.n == 1 {
			return h(ctx, call, apply)
		}
		return apply()
	}
}

// execMarker is the key of a value that every request's context has.
type execMarker struct{}

// An execRig is a guarded handler with its store, and what became of it. A test
// runs in a bubble of package synctest, which fails on goroutines left behind. At the
// end of the test it holds what must be true of all: one event for each request,
// and neither tenant, principal nor key in log and events (S46).
type execRig struct {
	t       *testing.T
	store   *execStore
	m       *idempotency.Middleware
	handler http.Handler // the guarded one

	requests atomic.Int32 // that must have an event of their own

	mu       sync.Mutex
	attempts []int // of the runs of the inner handler
	events   []idempotency.Event
	log      bytes.Buffer
}

func newExecRig(t *testing.T, handler http.HandlerFunc, edit func(*idempotency.Config)) *execRig {
	t.Helper()
	return newExecRigOn(newExecStore(t, idempotency.NewMemoryStore()), handler, edit)
}

// newExecRigOn is another process on the same store.
func newExecRigOn(store *execStore, handler http.HandlerFunc, edit func(*idempotency.Config)) *execRig {
	t := store.t
	t.Helper()
	g := &execRig{t: t, store: store}
	cfg := idempotency.Config{
		KeyScope:  func(*http.Request) string { return execTenant },
		Principal: func(*http.Request) string { return execPrincipal },
		Logger:    slog.New(slog.NewTextHandler(execWriter{g}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		OnEvent: func(ctx context.Context, e idempotency.Event) {
			if ctx.Value(execMarker{}) != "kept" {
				t.Errorf("S46: %s lost the values of the request's context", e.Kind)
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			g.events = append(g.events, e)
		},
	}
	if edit != nil {
		edit(&cfg)
	}
	if cfg.StoreTimeout > 0 {
		store.timeout = cfg.StoreTimeout
	}
	var err error
	g.m, err = idempotency.New(store, cfg)
	require.NoError(t, err)
	g.handler = g.m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		attempt := 0
		if exec, ok := idempotency.FromContext(r.Context()); ok {
			attempt = exec.Attempt()
		}
		g.mu.Lock()
		g.attempts = append(g.attempts, attempt)
		g.mu.Unlock()
		handler(w, r)
	}))
	t.Cleanup(g.check)
	return g
}

// An execWriter is where the log of a rig goes.
type execWriter struct{ g *execRig }

func (w execWriter) Write(p []byte) (int, error) {
	w.g.mu.Lock()
	defer w.g.mu.Unlock()
	return w.g.log.Write(p)
}

func (g *execRig) check() {
	require.NoError(g.t, g.m.Shutdown(context.WithoutCancel(g.t.Context())))
	synctest.Wait()
	own := 0
	for _, e := range g.seenEvents() {
		switch e.Kind {
		case idempotency.EventExecuted, idempotency.EventReplayed, idempotency.EventInFlight,
			idempotency.EventKeyReused, idempotency.EventRefused, idempotency.EventUnguarded:
			own++
		case idempotency.EventLeaseLost, idempotency.EventStoreFault:
		default:
			g.t.Errorf("S46: event of an unknown kind: %+v", e)
		}
		execRequireAnonymous(g.t, fmt.Sprintf("%+v", e))
	}
	if int(g.requests.Load()) != own {
		g.t.Errorf("S46: %d requests, but %d events", g.requests.Load(), own)
	}
	execRequireAnonymous(g.t, g.logged())
	require.Zero(g.t, idempotency.WatchedKeys(g.m))
}

func execRequireAnonymous(t *testing.T, text string) {
	t.Helper()
	for _, secret := range [...]string{execTenant, execPrincipal, execKey} {
		if strings.Contains(text, secret) {
			t.Errorf("S46: %q is in the clear in: %s", secret, text)
		}
	}
}

func (g *execRig) seenEvents() []idempotency.Event {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.events)
}

func (g *execRig) kinds() []idempotency.EventKind {
	var kinds []idempotency.EventKind
	for _, e := range g.seenEvents() {
		kinds = append(kinds, e.Kind)
	}
	return kinds
}

// countEvents returns how many events of a kind there were.
func (g *execRig) countEvents(kind idempotency.EventKind) int {
	n := 0
	for _, k := range g.kinds() {
		if k == kind {
			n++
		}
	}
	return n
}

// last returns the last event, store faults aside: they can come at any time.
func (g *execRig) last() idempotency.Event {
	events := slices.DeleteFunc(g.seenEvents(), func(e idempotency.Event) bool { return e.Kind == idempotency.EventStoreFault })
	require.NotEmpty(g.t, events)
	return events[len(events)-1]
}

func (g *execRig) logged() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.log.String()
}

// ran returns the attempts that the handler has seen so far, one for each run.
func (g *execRig) ran() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.attempts)
}

func execRequest(ctx context.Context, body string) *http.Request {
	ctx = context.WithValue(ctx, execMarker{}, "kept")
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/charges", strings.NewReader(body))
	r.Header.Set(idempotency.HeaderKey, `"`+execKey+`"`)
	return r
}

// An execAnswer is what a client got.
type execAnswer struct {
	status   int
	header   http.Header
	body     string
	took     time.Duration
	returned bool // ServeHTTP returned, and did not panic or exit
}

// serve sends the rig's one request, with this body.
func (g *execRig) serve(body string) execAnswer {
	return g.start(execRequest(g.t.Context(), body))()
}

// start sends a request without waiting for the answer.
func (g *execRig) start(r *http.Request) (await func() execAnswer) {
	g.requests.Add(1)
	started := time.Now()
	w := httptest.NewRecorder()
	done := make(chan struct{})
	var a execAnswer
	go func() {
		defer func() {
			a.took = time.Since(started)
			close(done)
		}()
		g.handler.ServeHTTP(w, r)
		a.returned = true
	}()
	return func() execAnswer {
		<-done
		resp := w.Result()
		body, err := io.ReadAll(resp.Body)
		require.NoError(g.t, err)
		a.status, a.header, a.body = resp.StatusCode, resp.Header, string(body)
		return a
	}
}

// startMany sends the same request n times at once.
func (g *execRig) startMany(n int) (await func() []execAnswer) {
	awaits := make([]func() execAnswer, n)
	for i := range awaits {
		awaits[i] = g.start(execRequest(g.t.Context(), "a"))
	}
	return func() []execAnswer {
		answers := make([]execAnswer, n)
		for i := range awaits {
			answers[i] = awaits[i]()
		}
		return answers
	}
}

// crash claims the key as a process does that dies before it has settled.
func (g *execRig) crash(hold bool) {
	g.t.Helper()
	store := newExecStore(g.t, g.store.inner)
	store.on(execClaim, func(_ context.Context, _ execCall, apply func() error) error {
		if err := apply(); err != nil {
			g.t.Errorf("claim of a process that dies: %v", err)
		}
		panic(errExecStore) // between claim and handler: nothing is deferred yet
	})
	other := newExecRigOn(store, nil, func(c *idempotency.Config) { c.HoldAbandoned = hold })
	require.Panics(g.t, func() {
		other.handler.ServeHTTP(httptest.NewRecorder(), execRequest(g.t.Context(), "a"))
	})
	require.Len(g.t, store.won(), 1)
}

func (a execAnswer) requireReplay(t *testing.T, of execAnswer) {
	t.Helper()
	require.Equal(t, of.status, a.status)
	require.Equal(t, of.body, a.body)
	require.Equal(t, "true", a.header.Get(idempotency.HeaderReplayed), "S20: not marked as replayed")
}

func (a execAnswer) requireRun(t *testing.T, status int, body string) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, body, a.body)
	require.Empty(t, a.header.Get(idempotency.HeaderReplayed))
	require.Empty(t, a.header.Get(idempotency.HeaderDeduplicated))
}

func (a execAnswer) requireProblem(t *testing.T, status int, code idempotency.Code) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	var p idempotency.Problem
	require.NoError(t, json.Unmarshal([]byte(a.body), &p))
	require.Equal(t, code, p.Code)
}

func (a execAnswer) requireInFlight(t *testing.T) {
	t.Helper()
	a.requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
	require.Equal(t, "1", a.header.Get("Retry-After"), "S21")
}

// execWrite answers with a status and a body.
func execWrite(w http.ResponseWriter, status int, body string) {
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// An execScript is a handler whose nth run answers with the nth status, the last
// one from there on, and "run n". Each run takes its time.
type execScript struct {
	takes    time.Duration
	statuses []int
	runs     atomic.Int32
}

func (s *execScript) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	n := int(s.runs.Add(1))
	time.Sleep(s.takes)
	execWrite(w, s.statuses[min(n, len(s.statuses))-1], fmt.Sprintf("run %d", n))
}

// execRuns is an execScript.
func execRuns(takes time.Duration, statuses ...int) http.HandlerFunc {
	return (&execScript{takes: takes, statuses: statuses}).ServeHTTP
}

// S19, S21: of any number of concurrent duplicates one runs. The others are told
// so at once, or wait for its outcome.
func TestS19ConcurrentDuplicatesRunOnce(t *testing.T) {
	const duplicates = 100
	for _, tc := range []struct {
		name string
		wait time.Duration
	}{
		{"refused", 0},
		{"waiting", time.Minute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(2*time.Second, http.StatusCreated), func(c *idempotency.Config) {
					c.WaitInFlight = tc.wait
				})
				var first []execAnswer
				for _, a := range g.startMany(duplicates)() {
					switch {
					case a.header.Get(idempotency.HeaderReplayed) == "" && a.status == http.StatusCreated:
						a.requireRun(t, http.StatusCreated, "run 1")
						first = append(first, a)
					case tc.wait > 0:
						require.Equal(t, "run 1", a.body)
					default:
						a.requireInFlight(t)
					}
				}
				require.Len(t, first, 1)
				for _, a := range g.startMany(duplicates)() {
					a.requireReplay(t, first[0])
				}
				require.Equal(t, []int{1}, g.ran())
				require.Len(t, g.store.won(), 1)
			})
		})
	}
}

// S19, S20, S21: a retry while the first runs gets 409 with a short Retry-After,
// however much of the lease is left; afterwards it gets the outcome.
func TestS21RetryWhileFirstRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(25*time.Second, http.StatusCreated), nil)
		first := g.start(execRequest(t.Context(), "a"))
		for _, after := range []time.Duration{0, time.Second, 10 * time.Second, 13 * time.Second} {
			time.Sleep(after)
			synctest.Wait()
			retry := g.serve("a")
			retry.requireInFlight(t)
			require.Zero(t, retry.took)
		}
		a := first()
		a.requireRun(t, http.StatusCreated, "run 1")
		g.serve("a").requireReplay(t, a)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S18: another payload under the key of a running operation is refused as such,
// not as a retry.
func TestS18OtherPayloadWhileFirstRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(time.Second, http.StatusCreated), nil)
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		first().requireRun(t, http.StatusCreated, "run 1")
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S24: which outcomes are kept by default, for every status that a handler can
// answer with. Beyond 599, RFC 9110 (section 15) has a client see a 5xx.
func TestS24KeptStatuses(t *testing.T) {
	released := map[int]bool{401: true, 403: true, 408: true, 409: true, 423: true, 425: true, 429: true}
	for status := 200; status <= 999; status++ {
		kept := status < 500 && !released[status]
		require.Equal(t, kept, idempotency.DefaultKeep(status), status)
	}
	synctest.Test(t, func(t *testing.T) {
		for status := 200; status <= 599; status++ {
			g := newExecRig(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }, nil)
			require.Equal(t, status, g.serve("a").status)
			require.Equal(t, status, g.serve("a").status)
			if status < 500 && !released[status] {
				require.Equal(t, []int{1}, g.ran(), status)
				require.Equal(t, []idempotency.EventKind{idempotency.EventExecuted, idempotency.EventReplayed}, g.kinds())
			} else {
				require.Equal(t, []int{1, 2}, g.ran(), status)
				require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
			}
		}
	})
}

// S24: after an outcome that is not kept the key is free for the same payload, as
// the next attempt, and stays bound to it.
func TestS24ReleasedOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(time.Second, http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusCreated), nil)
		g.serve("a").requireRun(t, http.StatusServiceUnavailable, "run 1")
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		g.serve("a").requireRun(t, http.StatusTooManyRequests, "run 2")
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		a := g.serve("a")
		a.requireRun(t, http.StatusCreated, "run 3")
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		g.serve("a").requireReplay(t, a)
		require.Equal(t, []int{1, 2, 3}, g.ran())

		won := g.store.won()
		require.Len(t, won, 3)
		for _, c := range won[1:] {
			require.Equal(t, won[0].Fingerprint, c.Fingerprint)
		}
	})
}

// S24: the configuration decides, and for one request the handler.
func TestS24KeepAndDiscard(t *testing.T) {
	mark := func(status int, marks ...func(*idempotency.Execution)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			exec, ok := idempotency.FromContext(r.Context())
			if !ok {
				panic("no execution")
			}
			w.WriteHeader(status)
			for _, m := range marks {
				m(exec)
			}
		}
	}
	keep, discard := (*idempotency.Execution).Keep, (*idempotency.Execution).Discard
	only404 := func(status int) bool { return status == http.StatusNotFound }
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
		keep    func(int) bool
		kept    bool
	}{
		{"500 kept", mark(500, keep), nil, true},
		{"429 kept", mark(429, keep), nil, true},
		{"201 discarded", mark(201, discard), nil, false},
		{"404 discarded", mark(404, discard), nil, false},
		{"kept, then discarded", mark(201, keep, discard), nil, false},
		{"discarded, then kept", mark(500, discard, keep), nil, true},
		{"201 by configuration", mark(201), only404, false},
		{"404 by configuration", mark(404), only404, true},
		{"201 kept against the configuration", mark(201, keep), only404, true},
		{"404 discarded against the configuration", mark(404, discard), only404, false},
		{"503 by configuration", mark(503), func(int) bool { return true }, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, tc.handler, func(c *idempotency.Config) { c.Keep = tc.keep })
				first := g.serve("a")
				retry := g.serve("a")
				require.Equal(t, first.status, retry.status)
				if tc.kept {
					require.Equal(t, []int{1}, g.ran())
					retry.requireReplay(t, first)
				} else {
					require.Equal(t, []int{1, 2}, g.ran())
				}
			})
		})
	}
}

// S24: a mark that comes after the handler has returned changes nothing.
func TestS24MarkAfterReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late *idempotency.Execution
		g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
			late, _ = idempotency.FromContext(r.Context())
			execWrite(w, http.StatusCreated, "done")
		}, nil)
		g.store.on(execComplete, func(_ context.Context, _ execCall, apply func() error) error {
			late.Discard()
			return apply()
		})
		first := g.serve("a")
		g.serve("a").requireReplay(t, first)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S25, S27: a handler that does not return releases its key, or, where nothing may
// run twice, leaves it in doubt. Its panic goes on as it is.
func TestS25HandlerDoesNotReturn(t *testing.T) {
	boom := errors.New("boom")
	for _, tc := range []struct {
		name  string
		end   func()
		value any // what an outer recover sees; nil for Goexit
	}{
		{"panic with an error", func() { panic(boom) }, boom},
		{"panic with a string", func() { panic("boom") }, "boom"},
		{"abort", func() { panic(http.ErrAbortHandler) }, http.ErrAbortHandler},
		{"Goexit", runtime.Goexit, nil},
	} {
		for _, written := range []bool{false, true} {
			for _, hold := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/written=%v/hold=%v", tc.name, written, hold), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						broken := true
						g := newExecRig(t, func(w http.ResponseWriter, _ *http.Request) {
							if broken && !written {
								tc.end()
							}
							execWrite(w, http.StatusCreated, "done")
							if broken {
								tc.end()
							}
						}, func(c *idempotency.Config) { c.HoldAbandoned = hold })
						g.requireNoReturn("a", tc.value)
						want := idempotency.OutcomeReleased
						if hold {
							want = idempotency.OutcomeHeld
						}
						require.Equal(t, idempotency.EventExecuted, g.last().Kind)
						require.Equal(t, want, g.last().Outcome)
						require.Zero(t, g.last().Status)

						broken = false
						retry := g.serve("a")
						if hold {
							retry.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
							require.Empty(t, retry.header.Get("Retry-After"), "there is nothing to wait for")
							require.Equal(t, []int{1}, g.ran())
							return
						}
						retry.requireRun(t, http.StatusCreated, "done")
						require.Equal(t, []int{1, 2}, g.ran())
					})
				})
			}
		}
	}
}

// S25, S26: whether its client is still there makes no difference to a handler that
// does not return.
func TestS25HandlerDoesNotReturnAfterClientLeft(t *testing.T) {
	for _, tc := range []struct {
		name  string
		end   func()
		value any
	}{
		{"panic", func() { panic("boom") }, "boom"},
		{"abort", func() { panic(http.ErrAbortHandler) }, http.ErrAbortHandler},
		{"Goexit", runtime.Goexit, nil},
	} {
		for _, hold := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/hold=%v", tc.name, hold), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					left := false
					g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
						execWrite(w, http.StatusCreated, "done")
						if !left {
							<-r.Context().Done()
							left = true
							tc.end()
						}
					}, func(c *idempotency.Config) { c.HoldAbandoned = hold })
					guarded := g.handler
					g.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						ctx, hangUp := context.WithTimeout(r.Context(), time.Second)
						defer hangUp()
						guarded.ServeHTTP(w, r.WithContext(ctx))
					})
					g.requireNoReturn("a", tc.value)
					g.handler = guarded
					if hold {
						require.Equal(t, idempotency.OutcomeHeld, g.last().Outcome)
						g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
						require.Equal(t, []int{1}, g.ran())
						return
					}
					require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
					g.serve("a").requireRun(t, http.StatusCreated, "done")
					require.Equal(t, []int{1, 2}, g.ran())
				})
			})
		}
	}
}

// S25: the same goes for a Config.Keep that does not return.
func TestS25KeepDoesNotReturn(t *testing.T) {
	for _, tc := range []struct {
		name  string
		end   func()
		value any
	}{
		{"panic", func() { panic("boom") }, "boom"},
		{"Goexit", runtime.Goexit, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broken := true
				g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) {
					c.Keep = func(int) bool {
						if broken {
							tc.end()
						}
						return true
					}
				})
				g.requireNoReturn("a", tc.value)
				require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
				broken = false
				g.serve("a").requireRun(t, http.StatusCreated, "run 2")
				require.Equal(t, []int{1, 2}, g.ran())
			})
		})
	}
}

// requireNoReturn serves a request whose handler ends in a panic with value, or
// in Goexit.
func (g *execRig) requireNoReturn(body string, value any) {
	g.t.Helper()
	inner := g.handler
	var recovered any
	g.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { recovered = recover() }()
		inner.ServeHTTP(w, r)
		g.t.Error("S25: the handler returned")
	})
	a := g.serve(body)
	g.handler = inner
	require.Equal(g.t, value, recovered)
	require.Equal(g.t, value != nil, a.returned)
	require.Empty(g.t, a.body, "S25: an answer that never was")
}

// S26: a claim whose caller has left by the time that it is won is not run. It is
// released in the background.
func TestS26ClientLeavesBeforeHandler(t *testing.T) {
	for _, tc := range []struct {
		name string
		hook func(hangUp func()) execHook
		late bool // whether the claim takes longer than the store's time
	}{
		{"before the claim", nil, false},
		{"during the claim", func(hangUp func()) execHook {
			return func(ctx context.Context, _ execCall, apply func() error) error {
				hangUp()
				time.Sleep(time.Second)
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return apply()
			}
		}, false},
		{"during a claim that is acknowledged late", func(hangUp func()) execHook {
			return func(ctx context.Context, _ execCall, apply func() error) error {
				hangUp()
				<-ctx.Done() // the store's time, not the client's
				return apply()
			}
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				ctx, hangUp := context.WithCancel(t.Context())
				defer hangUp()
				if tc.hook == nil {
					hangUp()
				} else {
					g.store.on(execClaim, execFirst(tc.hook(hangUp)))
				}
				a := g.start(execRequest(ctx, "a"))()
				if tc.late {
					require.Equal(t, execStoreTimeout, a.took)
				}
				a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				synctest.Wait()
				require.Empty(t, g.ran())
				won := g.store.won()
				require.Len(t, won, 1)
				released := g.store.seen(execRelease)
				require.Len(t, released, 1)
				require.Equal(t, won[0].Owner, released[0].lease.Owner)

				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, []int{2}, g.ran())
			})
		})
	}
}

// S26: a claim of which nobody knows whether it arrived is released in the
// background, also if it arrives only later.
func TestS26ClaimOfUnknownFate(t *testing.T) {
	for _, tc := range []struct {
		name     string
		claim    execHook
		answered time.Duration // when the client gets its 503
		free     time.Duration // by when a retry must be able to run
		attempt  int           // that it is
	}{
		{"applied, acknowledgement lost", execLoseAnswer, 0, 0, 2},
		{"applied, answer hangs", func(ctx context.Context, _ execCall, apply func() error) error {
			_ = apply()
			<-ctx.Done()
			return ctx.Err()
		}, execStoreTimeout, 0, 2},
		{"arrives late", func(_ context.Context, _ execCall, apply func() error) error {
			go func() {
				time.Sleep(8 * time.Second)
				_ = apply()
			}()
			return errExecStore
		}, 0, 10 * time.Second, 2},
		{"never arrives", execFail, 0, 0, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execClaim, execFirst(tc.claim))
				first := g.serve("a")
				first.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
				require.Equal(t, tc.answered, first.took)
				require.Equal(t, []idempotency.EventKind{idempotency.EventStoreFault, idempotency.EventRefused}, g.kinds())
				require.Empty(t, g.ran())
				time.Sleep(tc.free)
				synctest.Wait()

				a := g.serve("a")
				a.requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, []int{tc.attempt}, g.ran())
				unknown := g.store.seen(execClaim)[0].claim.Owner
				for _, c := range g.store.seen(execRelease) {
					require.Equal(t, unknown, c.lease.Owner)
				}

				// Past the lease nothing can be on its way any more.
				time.Sleep(execLease + execLastRetry)
				calls := g.store.countAll()
				time.Sleep(time.Hour)
				require.Equal(t, calls, g.store.countAll())
				g.serve("a").requireReplay(t, a)
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost), "nobody ran, so nobody lost")
			})
		})
	}
}

// S26: while the store is down, claims of unknown fate do not pile up: once the
// lease is over, the key is free anyway. Where it would be held, it is not, and
// they are released when the store is back.
func TestS26UnknownClaimsInAnOutage(t *testing.T) {
	for _, hold := range []bool{false, true} {
		t.Run(fmt.Sprintf("hold=%v", hold), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.HoldAbandoned = hold })
				g.store.on(execClaim, execFirst(execLoseAnswer))
				g.store.on(execRelease, execUntil(time.Hour, execFail))
				g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
				time.Sleep(execLease)
				synctest.Wait()
				tries := g.store.count(execRelease)
				time.Sleep(time.Hour)
				synctest.Wait()
				if !hold {
					require.Equal(t, tries, g.store.count(execRelease))
				}
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, []int{2}, g.ran())
			})
		})
	}
}

// S26: what a handler has written before its client left is an outcome; an empty
// 200 that it never wrote is not.
func TestS26ClientLeavesDuringHandler(t *testing.T) {
	for _, tc := range []struct {
		name   string
		write  func(http.ResponseWriter)
		stored bool
	}{
		{"nothing written", func(http.ResponseWriter) {}, false},
		{"header set, nothing written", func(w http.ResponseWriter) { w.Header().Set("X-Charge", "1") }, false},
		{"status written", func(w http.ResponseWriter) { w.WriteHeader(http.StatusOK) }, true},
		{"body written", func(w http.ResponseWriter) { execWrite(w, http.StatusCreated, "done") }, true},
		{"error written", func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, hangUp := context.WithCancel(t.Context())
				defer hangUp()
				left := false
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					if !left {
						left = true
						time.AfterFunc(time.Second, hangUp)
						<-r.Context().Done()
					}
					tc.write(w)
				}, nil)
				first := g.start(execRequest(ctx, "a"))()
				require.Equal(t, time.Second, first.took, "the handler's context ends with the request's")
				event := g.last()
				if tc.stored {
					require.Equal(t, idempotency.OutcomeStored, event.Outcome)
					g.serve("a").requireReplay(t, first)
					require.Equal(t, []int{1}, g.ran())
					return
				}
				require.Equal(t, idempotency.OutcomeReleased, event.Outcome)
				if first.status != event.Status {
					require.Zero(t, event.Status, "no answer of the handler's")
					first.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				}
				g.serve("a")
				require.Equal(t, []int{1, 2}, g.ran())
			})
		})
	}
}

// S26: a request's deadline that passes is like a client that leaves.
func TestS26RequestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var cause error
		g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			cause = context.Cause(r.Context())
		}, nil)
		g.start(execRequest(ctx, "a"))().requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
		require.ErrorIs(t, cause, context.DeadlineExceeded)
		require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
	})
}

// S26: by configuration a handler goes on when its client has left, and then what
// it ends with is an outcome, be it an empty 200.
func TestS26HandlerOutlivesClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, hangUp := context.WithCancel(t.Context())
		var during, after error
		var value any
		g := newExecRig(t, func(_ http.ResponseWriter, r *http.Request) {
			hangUp()
			time.Sleep(5 * time.Minute)
			during, value = r.Context().Err(), r.Context().Value(execMarker{})
			context.AfterFunc(r.Context(), func() { after = r.Context().Err() })
		}, func(c *idempotency.Config) { c.HandlerOutlivesClient = true })
		first := g.start(execRequest(ctx, "a"))()
		synctest.Wait()
		require.NoError(t, during)
		require.Equal(t, "kept", value)
		require.ErrorIs(t, after, context.Canceled, "the context ends with the handler")
		require.Equal(t, idempotency.OutcomeStored, g.last().Outcome)
		require.Equal(t, http.StatusOK, first.status)
		g.serve("a").requireReplay(t, first)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S26: a client that leaves while its outcome is being stored does not lose it, nor
// does one that leaves during a release keep its key.
func TestS26ClientLeavesDuringSettlement(t *testing.T) {
	for _, tc := range []struct {
		name    string
		method  string
		status  int
		outcome idempotency.Outcome
	}{
		{"completion", execComplete, http.StatusCreated, idempotency.OutcomeStored},
		{"release", execRelease, http.StatusBadGateway, idempotency.OutcomeReleased},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, hangUp := context.WithCancel(t.Context())
				g := newExecRig(t, execRuns(0, tc.status), nil)
				g.store.on(tc.method, func(ctx context.Context, _ execCall, apply func() error) error {
					hangUp()
					time.Sleep(time.Second)
					if ctx.Err() != nil {
						return ctx.Err()
					}
					return apply()
				})
				first := g.start(execRequest(ctx, "a"))()
				require.Equal(t, time.Second, first.took)
				require.Equal(t, tc.outcome, g.last().Outcome)
				if tc.outcome == idempotency.OutcomeStored {
					g.serve("a").requireReplay(t, first)
					require.Equal(t, []int{1}, g.ran())
					return
				}
				g.serve("a").requireRun(t, tc.status, "run 2")
				require.Equal(t, []int{1, 2}, g.ran())
			})
		})
	}
}

// S26: each call to the store has a context that outlives the request, keeps its
// values and ends by a deadline: see also execStore.checkContext.
func TestS26StoreContexts(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		calls  int           // that hang
		status int           // of the handler's answer
		hold   bool          // abandoned operations are held
		takes  time.Duration // the handler
	}{
		{"claim", execClaim, 1, http.StatusCreated, false, 0},
		{"complete, then in the background", execComplete, 3, http.StatusCreated, false, 0},
		{"release, then in the background", execRelease, 3, http.StatusServiceUnavailable, false, 0},
		{"hold, then in the background", execExtend, 3, http.StatusServiceUnavailable, true, 0},
		{"extend", execExtend, 1, http.StatusCreated, false, 20 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, hangUp := context.WithCancel(t.Context())
				g := newExecRig(t, execRuns(tc.takes, tc.status), func(c *idempotency.Config) { c.HoldAbandoned = tc.hold })
				var lasted []time.Duration
				g.store.on(tc.method, func(ctx context.Context, call execCall, apply func() error) error {
					hangUp()
					if call.n > tc.calls {
						return apply()
					}
					<-ctx.Done()
					lasted = append(lasted, time.Since(call.at))
					return ctx.Err()
				})
				g.start(execRequest(ctx, "a"))()
				time.Sleep(execLease)
				synctest.Wait()
				require.Len(t, lasted, tc.calls)
				for _, d := range lasted {
					require.Equal(t, execStoreTimeout, d)
				}
			})
		})
	}
}

// S29: records are kept for a day. Then the key is free for any payload, from
// attempt 1.
func TestS29ExpiredKeyIsFree(t *testing.T) {
	for _, status := range []int{http.StatusCreated, http.StatusServiceUnavailable} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, status), nil)
				g.serve("a").requireRun(t, status, "run 1")
				time.Sleep(execTTL - 1)
				g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
				time.Sleep(time.Nanosecond)
				g.serve("b").requireRun(t, status, "run 2")
				require.Equal(t, []int{1, 1}, g.ran())
				g.serve("a").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			})
		})
	}
}

// S29: a handler that outlasts its record's time keeps its key, and its outcome is
// gone with it.
func TestS29HandlerOutlastsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(10*time.Minute, http.StatusCreated), func(c *idempotency.Config) { c.TTL = time.Minute })
		first := g.start(execRequest(t.Context(), "a"))
		time.Sleep(9 * time.Minute)
		g.serve("a").requireInFlight(t)
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		first().requireRun(t, http.StatusCreated, "run 1")
		require.Equal(t, idempotency.OutcomeStored, g.last().Outcome)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S29: a held record does not expire.
func TestS29HeldNeverExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusInternalServerError), func(c *idempotency.Config) { c.HoldAbandoned = true })
		g.serve("a").requireRun(t, http.StatusInternalServerError, "run 1")
		time.Sleep(30 * execTTL)
		g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S15: a guard inside another one for the same tuple passes through; one for
// another tuple claims its own. What lies between them does not matter.
func TestS15NestedGuards(t *testing.T) {
	charge, refund := "charge", "refund"
	for _, tc := range []struct {
		name   string
		routes []string // of the guards, the outermost first
		claims []string // the routes claimed
	}{
		{"same tuple", []string{charge, charge}, []string{charge}},
		{"same tuple three times", []string{charge, charge, charge}, []string{charge}},
		{"another tuple", []string{charge, refund}, []string{charge, refund}},
		{"same tuple around another", []string{charge, refund, charge}, []string{charge, refund}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				h := http.Handler(execRuns(0, http.StatusCreated))
				for _, route := range slices.Backward(tc.routes) {
					h = g.m.Named(route).Handler(h)
				}
				g.handler = h
				g.requests.Add(int32(len(tc.claims) - 1)) // the inner ones have events of their own
				first := g.serve("a")
				first.requireRun(t, http.StatusCreated, "run 1")
				g.serve("a").requireReplay(t, first)
				var claims []string
				for _, c := range g.store.won() {
					claims = append(claims, c.Key.Route())
				}
				require.Equal(t, tc.claims, claims)
			})
		})
	}
}

// S27: what a handler can ask about its execution.
func TestExecutionOfHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var exec *idempotency.Execution
		g := newExecRig(t, func(_ http.ResponseWriter, r *http.Request) {
			exec, _ = idempotency.FromContext(r.Context())
		}, nil)
		g.serve("a")
		require.Equal(t, g.store.won()[0].Key, exec.Key())
		require.Equal(t, 1, exec.Attempt())
		require.Contains(t, exec.String(), "attempt 1")
		_, ok := idempotency.FromContext(t.Context())
		require.False(t, ok)
	})
}

// S16, S24: an operation whose record is bound by an earlier scheme is recognised,
// replayed and run again all the same, and stays bound by that scheme.
func TestS16SecretConfiguredLater(t *testing.T) {
	for _, tc := range []struct {
		name   string
		before func(g *execRig) // without the secret
		run    bool
	}{
		{"completed", func(g *execRig) { g.serve("a") }, false},
		{"released", func(g *execRig) {
			g.store.on(execComplete, func(ctx context.Context, call execCall, _ func() error) error {
				return g.store.inner.Release(ctx, call.lease)
			})
			g.serve("a")
			g.store.on(execComplete, nil)
		}, true},
		{"abandoned", func(g *execRig) {
			g.crash(false)
			time.Sleep(execLease)
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				plain := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				tc.before(plain)
				g := newExecRigOn(plain.store, execRuns(0, http.StatusCreated), func(c *idempotency.Config) {
					c.FingerprintSecret = []byte("0123456789abcdef")
				})
				g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
				first := g.serve("a")
				require.Equal(t, http.StatusCreated, first.status)
				g.serve("a").requireReplay(t, first)
				plain.serve("a").requireReplay(t, first)
				g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
				if tc.run {
					require.Equal(t, []int{2}, g.ran())
				} else {
					require.Empty(t, g.ran())
				}
			})
		})
	}
}

// An execBrokenStore does not let a released record be claimed again.
type execBrokenStore struct{ idempotency.Store }

func (s execBrokenStore) Claim(_ context.Context, c idempotency.Claim) (idempotency.Record, error) {
	return idempotency.Record{State: idempotency.StateReleased, Fingerprint: c.Fingerprint}, nil
}

// S30: a store that breaks its contract is a fault of the store's.
func TestS30StoreBreaksItsContract(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRigOn(newExecStore(t, execBrokenStore{}), execRuns(0, http.StatusCreated), nil)
		g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
		require.Equal(t, []idempotency.EventKind{idempotency.EventStoreFault, idempotency.EventRefused}, g.kinds())
		require.Contains(t, g.logged(), "unclaimed for its own fingerprint: released")
		require.Empty(t, g.ran())
	})
}

// S27: an owner is used for one claim call only.
func TestS27OwnerIsFreshForEachClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(10*time.Second, http.StatusServiceUnavailable), execWaiting(5*time.Second))
		g.store.on(execClaim, execFirst(execLoseAnswer))
		g.serve("a")
		synctest.Wait()
		g.startMany(5)()
		g.serve("a")
		owners := make(map[uuid.UUID]bool)
		for _, c := range g.store.seen(execClaim) {
			require.Equal(t, uuid.Version(4), c.claim.Owner.Version())
			require.False(t, owners[c.claim.Owner], "an owner came twice")
			owners[c.claim.Owner] = true
		}
		require.Greater(t, len(owners), 20)
	})
}

// S26: a claim whose error says that it took nothing is not released.
func TestS26ClaimThatSurelyFailed(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		sure bool
	}{
		{"store full", idempotency.ErrStoreFull, true},
		{"invalid claim", fmt.Errorf("store: %w", idempotency.ErrInvalidClaim), true},
		{"not reached", fmt.Errorf("store: %w: %w", idempotency.ErrNotClaimed, errExecStore), true},
		{"any other error", errExecStore, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execClaim, func(context.Context, execCall, func() error) error { return tc.err })
				g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
				require.Equal(t, []idempotency.EventKind{idempotency.EventStoreFault, idempotency.EventRefused}, g.kinds())
				time.Sleep(execLease)
				synctest.Wait()
				require.Equal(t, tc.sure, g.store.count(execRelease) == 0)
			})
		})
	}
}

// S26: a claim that never arrived is settled when its time is over, and no fault.
// Cut short by Shutdown, it is not: it may still arrive.
func TestS26ClaimThatNeverArrived(t *testing.T) {
	for _, tc := range []struct {
		name     string
		patience time.Duration
		settled  bool
	}{{"its time is over", execLease, true}, {"shut down", time.Second, false}} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execClaim, execFail)
				g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
				ctx, cancel := context.WithTimeout(t.Context(), tc.patience+1)
				defer cancel()
				require.Equal(t, tc.settled, g.m.Shutdown(ctx) == nil)
				synctest.Wait()
				require.Equal(t, tc.settled, !strings.Contains(g.logged(), "not settled"), g.logged())
			})
		})
	}
}

// S26: a claim that is acknowledged after its lease is released all the same, by a store that
// heeds its context: nobody ran it, so not even a process that holds may call its
// outcome unknown.
func TestS26LateClaimIsReleased(t *testing.T) {
	for _, after := range []time.Duration{execLease, 3 * execLease} {
		t.Run(after.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execClaim, execFirst(func(_ context.Context, _ execCall, apply func() error) error {
					err := apply()
					time.Sleep(after)
					return err
				}))
				g.store.on(execRelease, func(ctx context.Context, _ execCall, apply func() error) error {
					if ctx.Err() != nil {
						return ctx.Err()
					}
					return apply()
				})
				g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				synctest.Wait()
				holding := newExecRigOn(g.store, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.HoldAbandoned = true })
				holding.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.NotContains(t, g.logged(), "not settled")
			})
		})
	}
}
