// Package idempotency is a net/http middleware for the Idempotency-Key header
// (draft-ietf-httpapi-idempotency-key-header): a request that must not happen
// twice, such as a charge, can be sent again by a client that got no answer. The
// retry gets the stored answer, byte for byte, and the handler does not run.
//
// What a client sends in the header is not what its operation is stored under.
// The stored key is a tuple, a [ScopedKey]: scope version, tenant, principal,
// route, namespace and key. One customer's key therefore never finds another's
// answer, a refund is never taken for the duplicate of a charge, and no header
// reaches the keys that a server mints itself.
//
// A request goes one way:
//
//	header → scope → fingerprint → claim → run → record → settle → answer
//
// [New] makes a [Middleware] from a [Store], which is a [PostgresStore] in
// production, and a [Config]; [Middleware.Handler] guards a handler. A handler that
// wants to know more about the operation it runs for asks [FromContext].
//
// # What is guaranteed, and what is not
//
// While a record lives (24 hours by default) its operation is executed by one
// handler at a time, and an answer that a client has seen is the answer that
// every retry gets. A handler's process can still die between its effect and the
// storing of its outcome. The lease then runs out and the next retry runs again,
// as attempt 2, which the handler can see; or, with [Config].HoldAbandoned, it
// does not, and a person has to look. Where the effect is in the database of the
// records, [Config].Transactional commits it together with the outcome. Effects
// elsewhere cannot be undone: [Execution.DownstreamKey] lets those who have them
// recognise a second attempt.
package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"
)

// A Config says whose requests are told apart and how, and what is kept. The
// zero value of each field but KeyScope and Principal means its default.
// Changing a Config, or what its slices hold, has no effect after [New].
//
// All functions must be safe for concurrent use.
type Config struct {
	_ [0]func() // keyed literals only

	// KeyScope returns the tenant. Required.
	KeyScope KeyScopeFunc
	// Principal returns the caller within the tenant. Required. Where callers are
	// not told apart, say so by returning the tenant again.
	Principal PrincipalFunc
	// Route names the operation (S08). Default: the method and the http.ServeMux
	// pattern, if the middleware wraps one route whose pattern names one operation,
	// that is, does not end in "/", "*" or "{x...}"; else the method and the escaped
	// path as received, as always where the middleware wraps a whole mux. The host is
	// part of it only where the pattern names one. Give operations a fixed name in
	// production, by [RouteName] or [Middleware.Named].
	Route RouteFunc
	// Version of the meaning of tenant, principal and route (S06). Default: "v1".
	Version string
	// EarlierScopes are scopes that operations may be recorded under already, the latest
	// first: what Version, KeyScope, Principal and Route meant before they were changed
	// (S43), and other identities that the request's has taken over (S44). An operation
	// that is recorded under one of them is not run again. At most [MaxAliases]. It needs
	// an [AliasStore]. How to change a scope while it is in use is told in
	// docs/scope-changes.md.
	EarlierScopes []EarlierScope
	// Predecessors returns identities that the request's identity has taken over, where
	// that is data and not code: [PostgresSuccessions].Predecessors does. Each is as if it
	// were an EarlierScope that is AliasMerged, beside today's Version and Route. It is
	// called for each guarded request, within StoreTimeout. Its error refuses the request
	// with 503 store-unavailable, whatever UnguardedWhenStoreDown says. Default: none.
	Predecessors PredecessorsFunc

	// Methods that are guarded, in capital letters; all others pass through
	// untouched (S15). Default: POST and PATCH.
	Methods []string
	// OptionalKeys lets requests without the header run unguarded, where they would
	// be refused with 400 missing-key (S13).
	OptionalKeys bool
	// AcceptBareKeys accepts keys without quotes, as most clients send them today:
	// one or more visible ASCII characters other than `"`, `\`, `,` and `;`. The bare
	// and the quoted form of a key are one key (S14).
	AcceptBareKeys bool
	// UnguardedWithoutIdentity lets requests that have no tenant or no principal run
	// without deduplication, with a warning in the log and HeaderDeduplicated on the
	// response, where they would be refused with 403 no-identity (S09).
	UnguardedWithoutIdentity bool

	// Fingerprint replaces the default: method, target, content headers and body,
	// byte for byte (S16).
	Fingerprint FingerprintFunc
	// FingerprintSecret keys the fingerprints, so that whoever can read the store
	// cannot guess small payloads. At least 16 bytes. Records from before it was
	// configured are still recognised; after changing it, retries of operations
	// recorded under the old one get 422 key-reused until those expire, and so do,
	// while it is rolled out, retries that reach an instance without it. Default: none.
	FingerprintSecret []byte

	// Keep reports whether an outcome with this status is final and stored; all
	// others release the key, and the next request with the same payload runs (S24).
	// A handler can decide for one request by [Execution.Keep] and
	// [Execution.Discard]. Default: [DefaultKeep].
	Keep func(status int) bool
	// StoreCookies stores and replays Set-Cookie, too (S20).
	StoreCookies bool
	// CheckReplay is asked before a stored outcome is sent, with the retry's request:
	// the caller's rights may have been revoked since. An error refuses with 403
	// replay-refused; it is logged, not sent. Default: no check.
	CheckReplay func(*http.Request) error
	// TTL is how long a record is kept, from its last claim (S29). An operation that
	// takes longer keeps its key while it runs, but its outcome is forgotten as soon
	// as it is stored: choose more than that. Default: 24 hours.
	TTL time.Duration

	// Lease is how long a claim holds without being renewed, which is done while the
	// handler runs: how long a retry has to wait after a process died (S27).
	// Default: 30 seconds.
	Lease time.Duration
	// HoldAbandoned refuses retries of an operation that broke off (409
	// outcome-unknown) instead of letting the next one run as a further attempt: for
	// handlers that must not run twice whatever happens (S27).
	HoldAbandoned bool
	// MaxExecution cancels the context of a handler that runs for longer, with the
	// cause [ErrExecutionTooLong], and stops renewing its lease. Default: no limit.
	MaxExecution time.Duration
	// HandlerOutlivesClient keeps the handler's context alive when the client hangs
	// up, so that what was begun is finished (S26).
	HandlerOutlivesClient bool
	// WaitInFlight lets a retry that meets a running execution wait this long for its
	// outcome instead of getting 409 in-flight at once (S21). However many wait for one
	// operation, its record is looked at by one of them at a time, after a moment only
	// a few times a second. Default: 0, no waiting.
	WaitInFlight time.Duration

	// StoreTimeout bounds each call to the store, and how long an answer waits for a
	// store that fails to take its outcome (S26, S30). Shorter than Lease. Default:
	// 5 seconds, at most half a Lease.
	StoreTimeout time.Duration
	// UnguardedWhenStoreDown lets requests run without deduplication, with a warning
	// in the log and HeaderDeduplicated on the response, when the store cannot be
	// reached, where they would be refused with 503 store-unavailable (S30).
	UnguardedWhenStoreDown bool

	// MaxRequestBytes is the largest request body; above it: 413 request-too-large
	// (S17). Default: 10 MiB.
	MaxRequestBytes int64
	// SpoolThreshold is the largest request body that is kept in memory; larger ones
	// are kept in a temporary file (S17). Default: 64 KiB.
	SpoolThreshold int64
	// MaxResponseBytes is the largest response body that is held back and stored.
	// A larger one is sent as it is written, and a retry learns only that the
	// operation is done (S23). Default: 1 MiB.
	MaxResponseBytes int64

	// DocumentationURL is where problems point to, without a fragment (S32). Default:
	// [DefaultDocumentationURL].
	DocumentationURL string
	// RenderProblem writes problems in the application's own shape (S34). Default:
	// [RenderProblem].
	RenderProblem ProblemRenderer

	// Transactional runs each guarded handler in a transaction of the store's database.
	// What it writes with that, see [PostgresTx], is committed together with its outcome,
	// before the answer leaves; where no outcome is kept (a 5xx, a panic), nothing is
	// (S38). It needs a [TransactionalStore], and excludes OptionalKeys,
	// UnguardedWithoutIdentity and UnguardedWhenStoreDown, under which a handler might
	// find no transaction, and HoldAbandoned, since nothing is left behind. A handler
	// cannot flush, nor write more than MaxResponseBytes. Attempts that were undone are
	// not counted. Lease has no meaning then, but for records of other middlewares.
	Transactional bool

	// Logger gets what an operator should know. Nothing it gets names a tenant,
	// principal or key in clear text (S46). Default: no logging.
	Logger *slog.Logger
	// OnEvent is told what became of each request, on the goroutine that serves it,
	// with the request's context: it must be quick (S46). Lost leases and faults of the
	// store are also told from other goroutines, during the request and after it, where
	// a panic of its ends the process. Default: none.
	OnEvent func(context.Context, Event)
}

// DefaultKeep is the default of [Config].Keep: every status is final but those
// that invite a retry: 5xx, 401, 403, 408, 409, 423, 425 and 429 (S24). A status
// beyond 599 counts as 5xx, as which clients take it (RFC 9110, section 15).
func DefaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusConflict,
		http.StatusLocked, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < http.StatusInternalServerError
}

// A Middleware guards handlers against running twice for one idempotency key. It
// is safe for concurrent use.
type Middleware struct {
	cfg    Config
	prints fingerprinter
	exec   *executor
}

// New returns a Middleware that keeps its records in store. The error joins a
// [*ConfigError] for each fault.
func New(store Store, cfg Config) (*Middleware, error) {
	cfg = cfg.withDefaults()
	faults := cfg.validate()
	if err := checkStore(store); err != nil {
		faults = slices.Insert(faults, 0, err)
	}
	if err := checkAliases(store, cfg); err != nil {
		faults = append(faults, err)
	}
	var txStore TransactionalStore
	if cfg.Transactional && store != nil {
		var err error
		if txStore, err = transactional(store); err != nil {
			faults = append(faults, err)
		}
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	prints := newFingerprinter(cfg.Fingerprint, cfg.FingerprintSecret)
	cfg.FingerprintSecret = nil
	return &Middleware{
		cfg:    cfg,
		prints: prints,
		exec: &executor{
			store: store, txStore: txStore, ttl: cfg.TTL, lease: cfg.Lease, storeTimeout: cfg.StoreTimeout,
			maxExecution: cfg.MaxExecution, wait: cfg.WaitInFlight, hold: cfg.HoldAbandoned,
			outlive: cfg.HandlerOutlivesClient, logger: cfg.Logger, onEvent: cfg.OnEvent,
			background: &background{},
		},
	}, nil
}

func checkStore(store Store) error {
	if store == nil {
		return &ConfigError{Field: "store", Reason: "is required"}
	}
	if c, ok := store.(ConfigChecker); ok {
		return c.CheckConfig()
	}
	return nil
}

// checkAliases makes sure that the store can claim several names at once, if it must.
func checkAliases(store Store, cfg Config) error {
	field := "EarlierScopes"
	switch {
	case store == nil, len(cfg.EarlierScopes) == 0 && cfg.Predecessors == nil:
		return nil
	case len(cfg.EarlierScopes) == 0:
		field = "Predecessors"
	}
	as, ok := store.(AliasStore)
	if !ok {
		return &ConfigError{Field: field, Reason: "is set, but the store cannot claim several names at once"}
	}
	return as.CheckAliases()
}

// Named returns a copy of m whose route is the fixed name: [RouteName] for one
// handler. Both share their store and their Shutdown. A name that is no scope
// component (empty, too long, not UTF-8, with U+0000) fails closed: every request
// gets 500 bad-identity.
func (m *Middleware) Named(route string) *Middleware {
	named := *m
	named.cfg.Route = RouteName(route)
	return &named
}

// Shutdown waits until what is still to be stored of outcomes already answered
// is stored (S30). If ctx ends first, it gives the rest up and returns an error
// that wraps the context's. Call it after http.Server.Shutdown: outcomes that
// could not be stored at once are not tried again afterwards.
func (m *Middleware) Shutdown(ctx context.Context) error {
	return m.exec.background.shutdown(ctx)
}

var _ func(http.Handler) http.Handler = (*Middleware)(nil).Handler

// Handler returns a handler that calls next once for an idempotency key, and
// answers retries from the store. Wrap one route, inside authentication and
// outside of what makes the response; but keep [http.TimeoutHandler] outside: it
// answers 503 while the handler still runs, which would release the key under it.
// [Config].MaxExecution bounds a handler from the inside.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(m.cfg.Methods, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		x := exchange{m: m, w: w, r: r, next: next}
		x.identify() //nolint:contextcheck // an exchange carries its request, and with it the context
	})
}

// An exchange is one guarded request on its way through a Middleware.
type exchange struct {
	m         *Middleware
	w         http.ResponseWriter
	r         *http.Request
	next      http.Handler
	key       ScopedKey     // zero until identified
	aliases   []Alias       // other names of the operation
	body      spool         // empty until read
	print     Fingerprint   // of the request; zero until the body is read
	prints    []Fingerprint // by all other schemes, if there are aliases
	claimTime time.Duration // how long the claim took
}

// identify takes the request from its header to its scope. One that has no key
// of its own ends here, before its body is asked for.
func (x *exchange) identify() {
	cfg := &x.m.cfg
	sent, present, err := clientKey(x.r.Header, cfg.AcceptBareKeys)
	switch {
	case err != nil:
		x.refuse(Problem{Code: CodeInvalidKey, Detail: "Idempotency-Key: " + err.Error() + "."}, err)
		return
	case !present && cfg.OptionalKeys:
		x.runUnguarded(CodeMissingKey)
		return
	case !present:
		x.refuse(Problem{Code: CodeMissingKey}, nil)
		return
	}
	key, err := ClientKey(Scope{
		Version: cfg.Version, Tenant: cfg.KeyScope(x.r), Principal: cfg.Principal(x.r), Route: cfg.Route(x.r),
	}, sent)
	switch {
	case isNoIdentity(err) && cfg.UnguardedWithoutIdentity:
		x.warnUnguarded(err)
		x.runUnguarded(CodeNoIdentity)
	case isNoIdentity(err):
		x.refuse(Problem{Code: CodeNoIdentity}, err)
	case err != nil:
		x.log(slog.LevelError, "unusable scope", err)
		x.refuse(Problem{Code: CodeBadIdentity}, err)
	default:
		x.key = key
		if outer := runningFor(x.r.Context(), key); outer != nil {
			x.passThrough(outer)
			return
		}
		x.findAliases(sent)
	}
}

// findAliases takes the request from its scope to those that came before it.
func (x *exchange) findAliases(sent string) {
	ids, err := x.predecessors()
	if err != nil {
		x.m.exec.fault(x.r.Context(), "predecessors", x.key, err)
		x.refuse(Problem{Code: CodeStoreUnavailable}, err)
		return
	}
	if x.aliases, err = x.m.cfg.aliases(x.r, x.key, sent, ids); err != nil {
		x.log(slog.LevelError, "unusable earlier scope", err)
		x.refuse(Problem{Code: CodeBadIdentity}, err)
		return
	}
	for _, a := range x.aliases {
		if outer := runningFor(x.r.Context(), a.Key); outer != nil {
			x.passThrough(outer)
			return
		}
	}
	x.deduplicate()
}

// predecessors returns the identities that today's has taken over.
func (x *exchange) predecessors() ([]Identity, error) {
	if x.m.cfg.Predecessors == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), x.m.cfg.StoreTimeout)
	defer cancel()
	return x.m.cfg.Predecessors(ctx, Identity{Tenant: x.key.tenant, Principal: x.key.principal})
}

// isNoIdentity tells a request without tenant or principal (S09) from one whose
// scope the deployment made unusable (S10).
func isNoIdentity(err error) bool {
	if !errors.Is(err, ErrMissingScope) {
		return false
	}
	var scope *ScopeError
	return errors.As(err, &scope) && (scope.Component == ComponentTenant || scope.Component == ComponentPrincipal)
}

// runningFor returns the execution of an outer guard, be it the next or one around
// that, which has claimed the very same tuple (S15); or nil.
func runningFor(ctx context.Context, name ScopedKey) *Execution {
	outer, _ := FromContext(ctx)
	for outer != nil && !outer.holds(name) {
		outer = outer.outer
	}
	return outer
}

// deduplicate takes the request from its fingerprint to its claim, and does what
// the record says.
func (x *exchange) deduplicate() {
	body, err := spoolBody(x.w, x.r, x.m.cfg.MaxRequestBytes, x.m.cfg.SpoolThreshold)
	if err != nil {
		x.refuseBody(err)
		return
	}
	defer body.close()
	x.body = body
	prints := &x.m.prints
	x.print, err = prints.sum(prints.scheme(), x.r, body)
	if err == nil && len(x.aliases) > 0 {
		x.prints, err = prints.others(x.r, body)
	}
	if err != nil {
		x.refuseBody(err)
		return
	}
	decided, rec, op, err := x.begin()
	switch {
	case isBodyFault(err):
		x.refuseBody(err)
	case err != nil && x.m.cfg.UnguardedWhenStoreDown:
		x.warnUnguarded(err)
		received := x.r
		x.r = withBody(x.r.Context(), x.r, body)
		defer removeForm(received, x.r)
		x.runUnguarded(CodeStoreUnavailable)
	case err != nil:
		x.refuse(Problem{Code: CodeStoreUnavailable}, err)
	default:
		x.follow(decided, rec, op)
	}
}

// begin claims the request's key, or finds out why that is not to be.
func (x *exchange) begin() (verdict, Record, *operation, error) {
	started := now()
	defer func() { x.claimTime += now().Sub(started) }()
	return x.m.exec.begin(x.r.Context(), &intent{
		key: x.key, aliases: x.aliases, fingerprint: x.print, others: x.prints,
		equal: func(record Fingerprint) (bool, Fingerprint, error) {
			return x.m.prints.equal(record, x.print, x.r, x.body)
		},
	})
}

func (x *exchange) follow(decided verdict, rec Record, op *operation) {
	switch decided {
	case verdictRun:
		x.execute(op)
	case verdictReplay:
		x.replay(rec)
	case verdictInFlight:
		x.refuse(Problem{Code: CodeInFlight}, nil)
	case verdictReused:
		x.refuse(Problem{Code: CodeKeyReused}, nil)
	case verdictUnknown:
		x.refuse(Problem{Code: CodeOutcomeUnknown}, nil)
	case verdictGone:
		x.refuse(Problem{Code: CodeRetry}, context.Cause(x.r.Context()))
	}
}

// execute runs the handler, and settles and answers when it returns. A panic or
// runtime.Goexit goes on as it is (S25).
func (x *exchange) execute(op *operation) {
	ctx := op.run(x.r.Context())
	r := withBody(ctx, x.r, x.body)
	rec := newRecorder(x.w, x.r.Method, x.m.cfg.MaxResponseBytes, x.m.cfg.StoreCookies)
	rec.hold = op.tx != nil
	started := now()
	defer func() {
		removeForm(x.r, r)
		if !op.settling { // the handler did not return, or Config.Keep did not
			rec.close()
			x.abort(op, now().Sub(started))
		}
	}()
	x.next.ServeHTTP(rec, r)
	x.finish(op, rec, ctx.Err() != nil, now().Sub(started))
}

// finish settles an operation whose handler has returned, then answers (S22).
// cancelled says whether the handler's context was over by then.
func (x *exchange) finish(op *operation, rec *recorder, cancelled bool, runTime time.Duration) {
	// A handler that wrote nothing because its context was over has no outcome: the
	// empty 200 that net/http would send for it is not one (S26).
	silent := cancelled && rec.untouched()
	op.stop()
	resp, streamed := rec.finish()
	end := x.ending(op.exec.mark.Load(), resp.Status, silent)
	settling := now()
	outcome, err := op.settle(settlement{end: end, response: resp, refused: rec.refused})
	if op.tx != nil && outcome == OutcomeLost {
		x.lookAgain(err)
		return
	}
	event := Event{
		Kind: EventExecuted, Key: x.key, Attempt: op.exec.attempt, Status: resp.Status, Outcome: outcome, Err: err,
		ClaimTime: x.claimTime, RunTime: runTime, SettleTime: now().Sub(settling),
	}
	silent = silent && end != endKeep
	if silent {
		event.Status = 0
	}
	if op.tx != nil && err != nil {
		event.Code = uncommitted(err)
	}
	x.m.exec.emit(x.r.Context(), event)
	switch {
	case streamed:
		rec.release()
	case event.Code != "":
		x.m.writeProblem(x.w, x.r, Problem{Code: event.Code})
	case outcome == OutcomeLost: // nobody would ever see this answer again (S27)
		x.m.writeProblem(x.w, x.r, Problem{Code: CodeInFlight})
	case silent && end == endHold:
		x.m.writeProblem(x.w, x.r, Problem{Code: CodeOutcomeUnknown})
	case silent:
		x.m.writeProblem(x.w, x.r, Problem{Code: CodeRetry})
	default:
		rec.release()
	}
}

// ending decides what becomes of an outcome (S24, S27).
func (x *exchange) ending(mark int32, status int, silent bool) ending {
	broken := endRelease
	if x.m.cfg.HoldAbandoned {
		broken = endHold
	}
	switch {
	case mark == markKeep:
		return endKeep
	case mark == markDiscard:
		return endRelease
	case silent:
		return broken
	case x.m.cfg.Keep(status):
		return endKeep
	case status >= http.StatusInternalServerError:
		return broken
	}
	return endRelease
}

// abort settles an operation whose handler did not return (S25, S27).
func (x *exchange) abort(op *operation, runTime time.Duration) {
	op.stop()
	end := endRelease
	if x.m.cfg.HoldAbandoned {
		end = endHold
	}
	settling := now()
	outcome, err := op.settle(settlement{end: end})
	x.m.exec.emit(x.r.Context(), Event{
		Kind: EventExecuted, Key: x.key, Attempt: op.exec.attempt, Outcome: outcome, Err: err,
		ClaimTime: x.claimTime, RunTime: runTime, SettleTime: now().Sub(settling),
	})
}

// replay sends the stored outcome, if this caller may still see it.
func (x *exchange) replay(rec Record) {
	if check := x.m.cfg.CheckReplay; check != nil {
		r := withBody(x.r.Context(), x.r, x.body)
		defer removeForm(x.r, r)
		if err := check(r); err != nil {
			x.log(slog.LevelWarn, "replay refused", err)
			x.refuse(Problem{Code: CodeReplayRefused}, err)
			return
		}
	}
	if rec.Response.NotReplayable {
		x.refuse(Problem{Code: CodeNotReplayable, OriginalStatus: rec.Response.Status}, nil)
		return
	}
	x.m.exec.emit(x.r.Context(), Event{
		Kind: EventReplayed, Key: x.key, Attempt: rec.Attempt, Status: rec.Response.Status, ClaimTime: x.claimTime,
	})
	replay(x.w, rec.Response)
}

// runUnguarded runs the handler as if there were no guard, in place of the
// refusal that instead names.
func (x *exchange) runUnguarded(instead Code) {
	x.m.exec.emit(x.r.Context(), Event{Kind: EventUnguarded, Key: x.key, Code: instead, ClaimTime: x.claimTime})
	x.next.ServeHTTP(x.w, x.r)
}

// warnUnguarded says, in the log and on the response, that a request which was to
// be guarded is not (S09, S30).
func (x *exchange) warnUnguarded(err error) {
	x.log(slog.LevelWarn, "running without deduplication", err)
	x.w.Header().Set(HeaderDeduplicated, "false")
}

func (x *exchange) refuseBody(err error) {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		x.refuse(Problem{Code: CodeRequestTooLarge}, err)
	case errors.Is(err, errBrokenBody):
		x.refuse(Problem{Code: CodeBrokenBody}, err)
	default:
		x.log(slog.LevelError, "cannot keep a request body", err)
		x.refuse(Problem{Code: CodeRetry}, err)
	}
}

// refuse answers with a problem and tells the observer.
func (x *exchange) refuse(p Problem, err error) {
	event := Event{
		Kind: EventRefused, Key: x.key, Code: p.Code, Status: p.Code.problem().Status, Err: err, ClaimTime: x.claimTime,
	}
	switch p.Code { //nolint:exhaustive // two refusals have a kind of their own
	case CodeInFlight:
		event.Kind = EventInFlight
	case CodeKeyReused:
		event.Kind = EventKeyReused
	}
	x.m.exec.emit(x.r.Context(), event)
	x.m.writeProblem(x.w, x.r, p)
}

func (x *exchange) log(level slog.Level, message string, err error) {
	x.m.cfg.Logger.LogAttrs(x.r.Context(), level, "idempotency: "+message, slog.Any("key", x.key), slog.Any("error", err))
}

// withBody returns the request for the handler: r with another context and its
// body from the first byte.
func withBody(ctx context.Context, r *http.Request, body spool) *http.Request {
	r = r.WithContext(ctx)
	r.Body = body.reader()
	return r
}

// removeForm removes the files of a multipart form that was parsed from a copy of
// the request. net/http does that for the request it made, and knows of no copy.
func removeForm(received, copied *http.Request) {
	if received.MultipartForm == nil && copied.MultipartForm != nil {
		_ = copied.MultipartForm.RemoveAll()
	}
}
