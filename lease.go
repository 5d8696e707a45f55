package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrExecutionTooLong is the cause of a handler's context that was cancelled
// because the longest execution time was over (S27).
var ErrExecutionTooLong = errors.New("idempotency: longest execution time is over")

// errNotRenewed is the cause of a handler's context that was cancelled because
// the lease ran out without an answer from the store. It wraps ErrLeaseLost.
var errNotRenewed = fmt.Errorf("%w: not renewed in time", ErrLeaseLost)

// A lease is renewed when this part of it is over: two more tries fit in before
// it ends.
const renewAfter = 3

// A keeper renews the lease of an operation while it runs, and cancels the
// operation's context when the lease can no longer be counted on (S27).
type keeper struct {
	mu       sync.Mutex
	stopped  bool
	ctx      executionContext // the handler's
	cancel   context.CancelCauseFunc
	deadline time.Time   // when the lease ends, by this process's clock
	renewal  *time.Timer // sends the next renewal
	expiry   *time.Timer // cancels at the deadline; nil before the first renewal
	longest  *time.Timer // cancels after the longest execution time; or nil
}

// run returns the context for the operation's handler, and keeps the lease until
// stop is called. A transaction has none: it lives as long as its connection.
func (op *operation) run(parent context.Context) context.Context {
	if op.x.outlive {
		parent = op.detached
	}
	ctx, cancel := context.WithCancelCause(parent)

	op.mu.Lock()
	defer op.mu.Unlock()
	op.cancel = cancel
	op.exec.outer, _ = FromContext(parent)
	if op.tx != nil {
		op.exec.inTransaction = true
		ctx = op.tx.Context(ctx)
	} else {
		op.deadline = op.sent.Add(op.x.lease)
		op.renewal = time.AfterFunc(op.x.lease/renewAfter-now().Sub(op.sent), op.renew)
	}
	if op.x.maxExecution > 0 {
		op.longest = time.AfterFunc(op.x.maxExecution, op.overrun)
	}
	op.ctx = executionContext{Context: ctx, exec: &op.exec}
	return &op.ctx
}

// stop ends the keeping of the lease, and the handler's context.
func (op *operation) stop() {
	op.mu.Lock()
	defer op.mu.Unlock()
	op.stopRenewing()
	op.cancel(context.Canceled)
}

func (op *operation) stopRenewing() {
	op.stopped = true
	for _, t := range [...]*time.Timer{op.renewal, op.expiry, op.longest} {
		if t != nil {
			t.Stop()
		}
	}
}

// overrun cancels a handler that runs for too long. The lease is left to run
// out, so that a handler that ignores it does not keep the key for ever.
func (op *operation) overrun() {
	op.mu.Lock()
	defer op.mu.Unlock()
	if op.stopped {
		return
	}
	op.stopRenewing()
	op.cancel(ErrExecutionTooLong)
}

// lapse cancels a handler whose lease ran out without a renewal.
func (op *operation) lapse() {
	op.mu.Lock()
	defer op.mu.Unlock()
	if now().Before(op.deadline) {
		return // renewed while the timer's goroutine was on its way here
	}
	op.lose(errNotRenewed)
}

func (op *operation) lose(cause error) {
	if op.stopped {
		return
	}
	op.stopRenewing()
	op.cancel(cause)
}

// renew sends one renewal. Only one is under way at a time: the next is planned
// when its answer is here.
func (op *operation) renew() {
	deadline, running := op.watchDeadline()
	if !running {
		return
	}
	sent := now()
	timeout := min(op.x.storeTimeout, deadline.Sub(sent))
	ctx, cancel := context.WithTimeout(op.detached, timeout)
	err := op.x.store.Extend(ctx, op.lease())
	cancel()
	if op.renewed(sent, err) {
		op.x.fault(op.detached, "extend", op.exec.key, err)
	}
}

// watchDeadline makes sure that a renewal that does not come back in time is
// noticed. The common, short execution never gets here.
func (op *operation) watchDeadline() (deadline time.Time, running bool) {
	op.mu.Lock()
	defer op.mu.Unlock()
	if !op.stopped && op.expiry == nil {
		op.expiry = time.AfterFunc(op.deadline.Sub(now()), op.lapse)
	}
	return op.deadline, !op.stopped
}

// renewed takes the answer to a renewal and plans the next one. It reports
// whether the answer is a fault of the store.
func (op *operation) renewed(sent time.Time, err error) (fault bool) {
	op.mu.Lock()
	defer op.mu.Unlock()
	switch {
	case op.stopped:
		return false
	case err == nil:
		op.deadline = sent.Add(op.x.lease)
		op.expiry.Reset(op.deadline.Sub(now()))
		op.renewal.Reset(op.x.lease/renewAfter - now().Sub(sent))
		return false
	case errors.Is(err, ErrLeaseLost):
		op.lose(err)
		return false
	default:
		op.renewal.Reset(op.x.lease / (4 * renewAfter))
		return true
	}
}
