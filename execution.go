package idempotency

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// An Execution is what a handler can ask and say about the operation it runs
// for. It is safe for concurrent use. It prints without the key's parts.
type Execution struct {
	key           ScopedKey
	names         []ScopedKey // that it has claimed; nil: the key
	origin        KeyDigest   // zero: the key's
	fingerprint   Fingerprint // that its record is bound to
	attempt       int
	outer         *Execution // of a guard around this one, for another tuple; or nil
	inTransaction bool
	mark          atomic.Int32
}

// What a handler can say about its outcome.
const (
	markNone int32 = iota
	markKeep
	markDiscard
)

type executionKey struct{}

// An executionContext is a handler's context: one that knows its execution.
type executionContext struct {
	context.Context
	exec *Execution
}

// Value returns the execution for its key, and the parent's value for others.
func (c *executionContext) Value(key any) any {
	if _, ok := key.(executionKey); ok {
		return c.exec
	}
	return c.Context.Value(key)
}

// FromContext returns the execution that a guarded handler runs for. There is
// none, and ok is false, where a handler runs unguarded.
func FromContext(ctx context.Context) (exec *Execution, ok bool) {
	exec, ok = ctx.Value(executionKey{}).(*Execution)
	return exec, ok
}

// Key returns the operation's key.
func (e *Execution) Key() ScopedKey { return e.key }

// holds reports whether the execution has claimed that name.
func (e *Execution) holds(name ScopedKey) bool {
	return e.key == name || slices.Contains(e.names, name)
}

// Attempt returns which attempt at the operation this is: 1, 2, … A number above
// 1 says that an earlier attempt was released or broke off, and may have had
// effects.
func (e *Execution) Attempt() int { return e.attempt }

// DownstreamKey returns the idempotency key for a call that the handler makes to
// another service, told apart from its other calls by name (S45). It is the same on
// every attempt at the operation, and another one for every other key, payload and
// name, so that the other service takes a retry's call for the one that it knows. It
// is a UUID of version 8 (RFC 9562, section 5.8).
//
// Of an operation with several names (see [Config].EarlierScopes) it is the one that
// belongs to the name that the operation was first recorded under, or, where it was under
// none, to the last that is free: it stays the same when another scope takes over.
//
// A record that has expired leaves no trace in it: the same key with the same payload
// has the same downstream keys again. Without [Config].FingerprintSecret, who knows
// tenant, principal, key and payload can compute it; with one, only who can read the
// store can.
func (e *Execution) DownstreamKey(name string) uuid.UUID {
	origin := e.origin
	if origin == (KeyDigest{}) {
		origin = e.key.Digest()
	}
	return downstreamKey(origin, e.fingerprint, name)
}

// Keep makes the outcome final, whatever its status: retries get this response
// (S24). The last of Keep and Discard counts; neither does after the handler has
// returned.
func (e *Execution) Keep() { e.mark.Store(markKeep) }

// Discard makes the outcome not final, whatever its status: the key is released
// and a retry runs again (S24).
func (e *Execution) Discard() { e.mark.Store(markDiscard) }

// String returns the key's digest and the attempt.
func (e *Execution) String() string { return fmt.Sprintf("%s attempt %d", e.key, e.attempt) }

// Format writes [Execution.String] for every verb.
func (e *Execution) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, e.String()) }

// LogValue returns [Execution.String] for package slog.
func (e *Execution) LogValue() slog.Value { return slog.StringValue(e.String()) }

// An executor takes operations from claim to settlement. It knows the store's
// contract and the life of a lease; what a request and a response are, it does
// not know.
type executor struct {
	store        Store
	txStore      TransactionalStore // nil: executions have no transactions
	ttl          time.Duration
	lease        time.Duration
	storeTimeout time.Duration
	maxExecution time.Duration // 0: unlimited
	wait         time.Duration // how long a retry waits for what it finds running
	hold         bool
	outlive      bool // executions outlive their caller
	logger       *slog.Logger
	onEvent      func(context.Context, Event)
	background   *background
	watches      watches
}

// An intent is what an executor must know of a request: the names of its operation,
// the fingerprints of its payload, and whether a record's is the same.
type intent struct {
	key         ScopedKey
	aliases     []Alias
	fingerprint Fingerprint
	others      []Fingerprint // by all other schemes, if there are aliases
	// equal also returns the payload's fingerprint by the record's scheme.
	equal func(record Fingerprint) (same bool, byScheme Fingerprint, err error)
}

// errUnclaimed is a store that does not keep its contract.
var errUnclaimed = errors.New("idempotency: store left a record unclaimed for its own fingerprint")

// judge returns what a record means for the intent whose claim, made with the
// fingerprint claimed, met it. No verdict says to claim again, with the fingerprint
// that comes along.
func (in *intent) judge(rec Record, claimed Fingerprint) (verdict, Fingerprint, error) {
	switch {
	case rec.State == StateClaimed:
		return verdictRun, claimed, nil
	case rec.State == StateInProgress && rec.Fingerprint == Fingerprint{}: // its transaction is open
		return verdictInFlight, claimed, nil
	}
	same, byScheme, err := in.equal(rec.Fingerprint)
	switch {
	case err != nil:
		return 0, claimed, err
	case !same:
		return verdictReused, claimed, nil
	case rec.State == StateCompleted:
		return verdictReplay, claimed, nil
	case rec.State == StateInProgress:
		return verdictInFlight, claimed, nil
	case byScheme != claimed && len(in.aliases) == 0:
		return 0, byScheme, nil // free for this payload, but bound by an earlier scheme
	case rec.State == StateAbandoned:
		return verdictUnknown, claimed, nil
	}
	return 0, claimed, fmt.Errorf("%w: %v", errUnclaimed, rec.State)
}

// A verdict says what is to be done about a request.
type verdict int

const (
	verdictRun      verdict = iota + 1
	verdictReplay           // the outcome is stored
	verdictInFlight         // another execution is running
	verdictReused           // the key is bound to another payload
	verdictUnknown          // an execution broke off, and its record is held
	verdictGone             // nobody waits for an answer any more
)

// begin claims the names of an operation, or finds out why that is not to be. With
// verdictRun comes the operation, which must be settled; with verdictReplay the
// record. An error is the store's, or the payload's.
func (x *executor) begin(ctx context.Context, in *intent) (verdict, Record, *operation, error) {
	fp := in.fingerprint
	rec, op, err := x.claim(ctx, in, fp)
	var waiting *waiter
	for {
		switch {
		case errors.Is(err, errWaitOver) && isOver(ctx):
			return verdictGone, rec, nil, nil
		case err != nil && waiting != nil:
			return verdictInFlight, rec, nil, nil // it was running a moment ago, and must not be run beside that
		case err != nil:
			return 0, rec, nil, err
		}
		decided, byScheme, fault := in.judge(rec, fp)
		switch {
		case errors.Is(fault, errUnclaimed):
			x.fault(ctx, "claim", in.key, fault)
			return 0, rec, nil, fault
		case fault != nil:
			return 0, rec, nil, fault
		case decided == verdictRun && op == nil:
			return verdictGone, rec, nil, nil
		case decided == verdictInFlight && x.wait > 0:
			if waiting == nil {
				waiting = x.watches.join(in.watched(), x.wait)
				defer waiting.leave()
			}
			rec, op, err = waiting.next(ctx, fp, func(fp Fingerprint) (Record, *operation, error) { return x.claim(ctx, in, fp) })
		case decided == 0:
			fp = byScheme
			rec, op, err = x.claim(ctx, in, fp)
		default:
			return decided, rec, op, nil
		}
	}
}

// claim makes one claim with an owner of its own. A won claim comes with its
// operation, or without where it is no use any more and was given up: its caller
// has left, or the lease was over before the store's answer was here.
func (x *executor) claim(ctx context.Context, in *intent, fp Fingerprint) (Record, *operation, error) {
	c := Claim{
		Key: in.key, Aliases: in.aliases, Fingerprint: fp, OtherFingerprints: in.others,
		Owner: uuid.New(), Lease: x.lease, TTL: x.ttl, Hold: x.hold,
	}
	if x.txStore != nil {
		return x.claimInTransaction(ctx, c)
	}
	detached := context.WithoutCancel(ctx)
	sent := now()
	rec, err := x.sendClaim(detached, c)
	if err == nil && rec.State != StateClaimed {
		return rec, nil, nil
	}
	op := newOperation(detached, x, c, sent)
	if err != nil {
		if !claimSurelyFailed(err) {
			op.giveUp(false) // first: a hook of the application's may panic
		}
		x.fault(ctx, "claim", c.Key, err)
		return Record{}, nil, fmt.Errorf("idempotency: claim: %w", err)
	}
	op.won(c, rec)
	if isOver(ctx) || now().Sub(sent) >= x.lease {
		op.giveUp(true)
		return rec, nil, nil
	}
	return rec, op, nil
}

// claimSurelyFailed reports whether the error of a claim says, by the contract of
// [Store], that the claim did not take its key and never will.
func claimSurelyFailed(err error) bool {
	return errors.Is(err, ErrInvalidClaim) || errors.Is(err, ErrStoreFull) || errors.Is(err, ErrNotClaimed)
}

func isOver(ctx context.Context) bool { return ctx.Err() != nil }

func (x *executor) sendClaim(detached context.Context, c Claim) (Record, error) {
	var ctx callContext
	ctx.begin(detached, x.storeTimeout)
	defer ctx.end()
	return x.store.Claim(&ctx, c) //nolint:contextcheck // a callContext is a child of detached
}

// giveUp releases, in the background, a claim that nobody will run (S26). Where
// the claim is not known to have arrived, it may still be on its way: the store
// not knowing the owner is no answer then, until the lease would be over.
func (op *operation) giveUp(arrived bool) {
	s := settlement{end: endGiveUp}
	if !arrived {
		s.insistUntil = op.sent.Add(op.x.lease)
	}
	op.settleLater(s)
}

// fault reports a failed call to the store.
func (x *executor) fault(ctx context.Context, call string, key ScopedKey, err error) {
	x.logger.LogAttrs(ctx, slog.LevelError, "idempotency: store fault",
		slog.String("call", call), slog.Any("key", key), slog.Any("error", err))
	x.emit(ctx, Event{Kind: EventStoreFault, Key: key, Err: err})
}

func (x *executor) emit(ctx context.Context, e Event) {
	if x.onEvent != nil {
		x.onEvent(ctx, e)
	}
}

// An operation is one claimed execution, from its claim to its settlement.
type operation struct {
	exec     Execution
	x        *executor
	owner    uuid.UUID
	key      [1]ScopedKey // what keys are where there is only one
	keys     []ScopedKey  // that it has claimed, or, until it is known, that it may have claimed
	withhold []ScopedKey  // of keys
	sent     time.Time    // when the claim was sent: the lease counts from here (S27)
	tx       Transaction  // nil: it has a lease
	// detached is the caller's context without its end, for all that must go on.
	detached     context.Context
	settling     bool // settle was called
	settlingCall callContext
	keeper
}

func newOperation(detached context.Context, x *executor, c Claim, sent time.Time) *operation {
	op := &operation{x: x, owner: c.Owner, key: [1]ScopedKey{c.Key}, detached: detached, sent: sent}
	op.exec.key = c.Key
	op.keys = op.key[:]
	if len(c.Aliases) > 0 {
		op.keys = c.names()
	}
	return op
}

// won says how the operation stands once its claim has won.
func (op *operation) won(c Claim, rec Record) {
	op.exec.attempt, op.exec.fingerprint, op.exec.origin = rec.Attempt, rec.Fingerprint, rec.Origin
	if rec.Keys != nil {
		op.keys, op.exec.names = rec.Keys, rec.Keys
		op.withhold = c.withheld(rec.Keys)
	}
}

func (op *operation) lease() Lease {
	return Lease{Keys: op.keys, Withhold: op.withhold, Owner: op.owner, Duration: op.x.lease}
}

// An ending is how an operation is to be settled.
type ending int

const (
	endKeep    ending = iota + 1 // store the outcome
	endRelease                   // keep nothing
	endHold                      // leave the record abandoned: held
	endGiveUp                    // release a claim that nobody ran
)

// String returns the step of the store's contract that does it.
func (e ending) String() string {
	switch e {
	case endKeep:
		return "complete"
	case endHold:
		return "extend"
	case endRelease, endGiveUp:
		return "release"
	}
	return "unknown"
}

// A settlement is what is to be told to the store about an operation.
type settlement struct {
	end         ending
	response    Response  // of endKeep
	insistUntil time.Time // of endGiveUp: how long the claim may still arrive
	refused     error     // why the response cannot be kept: see recorder.refused
}

// settle ends the operation in the store. It tries for the time of one store
// call; if the store has not answered by then, settling goes on in the
// background (S30), but for a transaction. With OutcomeLost comes ErrLeaseLost.
func (op *operation) settle(s settlement) (Outcome, error) {
	op.settling = true
	op.settlingCall.begin(op.detached, op.x.storeTimeout)
	defer op.settlingCall.end()
	if op.tx != nil {
		return op.conclude(&op.settlingCall, s)
	}
	err := op.persist(&op.settlingCall, s, op.tell)
	switch {
	case errors.Is(err, ErrLeaseLost):
		op.reportLost(op.detached, err)
		return OutcomeLost, err
	case err != nil:
		op.settleLater(s) // first: a hook of the application's may panic
		op.x.fault(op.detached, s.end.String(), op.exec.key, err)
		return OutcomePending, err
	}
	switch s.end {
	case endKeep:
		return OutcomeStored, nil
	case endHold:
		return OutcomeHeld, nil
	case endRelease, endGiveUp:
	}
	return OutcomeReleased, nil
}

// settleLater settles in the background, until it is decided: done, taken over by
// another owner, or expired (S30), which a held record never is (S29). Shutdown
// ends it, too. However late it is, there is time for one try.
func (op *operation) settleLater(s settlement) {
	started := op.x.background.start(op.detached, func(ctx context.Context) {
		expiring := ctx
		if !op.x.hold {
			left := op.x.settleWithin(s.end) - now().Sub(op.sent)
			within, cancel := context.WithTimeout(ctx, max(left, op.x.storeTimeout))
			defer cancel()
			expiring = within
		}
		op.reportSettled(ctx, s.end, op.persist(expiring, s, op.tellInTime))
	})
	if !started {
		op.reportSettled(op.detached, s.end, errShutDown)
	}
}

// settleWithin is how long after its claim an operation that is not held is still
// worth settling. A claim that nobody ran is free once its lease is over: while the
// store is down, and every request's claim fails, they must not pile up.
func (x *executor) settleWithin(end ending) time.Duration {
	if end == endGiveUp {
		return x.lease
	}
	return x.ttl
}

// persist tells the store until it is decided or ctx ends.
func (op *operation) persist(ctx context.Context, s settlement, tell func(context.Context, settlement) error) error {
	retry := newBackoff(firstRetry, lastRetry)
	for {
		err := tell(ctx, s)
		if err == nil || errors.Is(err, ErrLeaseLost) || !retry.sleep(ctx) {
			return err
		}
	}
}

// tellInTime is tell with a deadline for the one call.
func (op *operation) tellInTime(ctx context.Context, s settlement) error {
	ctx, cancel := context.WithTimeout(ctx, op.x.storeTimeout)
	defer cancel()
	return op.tell(ctx, s)
}

// tell makes one call to the store.
func (op *operation) tell(ctx context.Context, s settlement) error {
	lease := op.lease()
	switch s.end {
	case endKeep:
		err := op.x.store.Complete(ctx, lease, s.response)
		if errors.Is(err, ErrBadResponse) { // the operation is done all the same
			err = op.x.store.Complete(ctx, lease, s.response.withoutAnswer())
		}
		return err
	case endHold:
		lease.Duration = 0
		return op.x.store.Extend(ctx, lease)
	case endGiveUp:
		return s.giveUp(ctx, op.x.store, lease)
	case endRelease:
	}
	return op.x.store.Release(ctx, lease)
}

// giveUp releases each name of a claim that nobody ran: which of them it has taken may
// not be known.
func (s settlement) giveUp(ctx context.Context, store Store, lease Lease) error {
	var errs []error
	for i := range lease.Keys {
		one := lease
		one.Keys, one.Withhold = lease.Keys[i:i+1], nil
		errs = append(errs, s.judgeGivenUp(store.Release(ctx, one)))
	}
	return errors.Join(errs...)
}

// judgeGivenUp judges the release of a name that may have been claimed: it need not be
// there any more, but it must not come later.
func (s settlement) judgeGivenUp(err error) error {
	switch {
	case !errors.Is(err, ErrLeaseLost):
		return err
	case now().Before(s.insistUntil):
		return errStillOnItsWay
	}
	return nil
}

var errStillOnItsWay = errors.New("idempotency: claim of unknown fate")

func (op *operation) reportSettled(ctx context.Context, end ending, err error) {
	if errors.Is(err, errStillOnItsWay) && !isOver(ctx) {
		err = nil // it did not arrive while it could have mattered
	}
	switch {
	case err == nil:
		op.x.logger.LogAttrs(ctx, slog.LevelInfo, "idempotency: settled in the background",
			slog.String("call", end.String()), slog.Any("execution", &op.exec))
	case errors.Is(err, ErrLeaseLost):
		op.reportLost(ctx, err)
	default:
		op.x.logger.LogAttrs(ctx, slog.LevelError, "idempotency: not settled",
			slog.String("call", end.String()), slog.Any("execution", &op.exec), slog.Any("error", err))
	}
}

func (op *operation) reportLost(ctx context.Context, err error) {
	op.x.logger.LogAttrs(ctx, slog.LevelWarn, "idempotency: lease lost", slog.Any("execution", &op.exec))
	op.x.emit(ctx, Event{Kind: EventLeaseLost, Key: op.exec.key, Attempt: op.exec.attempt, Err: err})
}
