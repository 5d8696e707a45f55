package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A callContext is the context of one call to the store: the values of a
// detached context, and a deadline (S26). It is context.WithDeadline at the cost
// of one allocation or, as a part of something else, none, for stores that answer
// without waiting for anything: the timer, and all that goes with it, is made when
// Done is first asked for.
type callContext struct {
	detached context.Context
	deadline time.Time

	mu     sync.Mutex
	timed  context.Context // nil until Done is asked for
	cancel context.CancelFunc
	ended  error // why the context is done, if that came before Done was asked for
}

// begin makes c a context that ends at the deadline, or when end is called, which
// the caller must do. detached must never end by itself.
func (c *callContext) begin(detached context.Context, timeout time.Duration) {
	c.detached, c.deadline = detached, now().Add(timeout)
}

// end releases what the context holds.
func (c *callContext) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.timed != nil:
		c.cancel()
	case c.ended == nil:
		c.ended = context.Canceled
	}
}

// Deadline returns the call's deadline.
func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, true }

// Done returns a channel that is closed at the deadline or at the call's end.
func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.timed != nil:
	case errors.Is(c.ended, context.Canceled):
		c.timed, c.cancel = context.WithCancel(c.detached)
		c.cancel()
	default:
		c.timed, c.cancel = context.WithDeadline(c.detached, c.deadline)
	}
	return c.timed.Done()
}

// Err returns why the context is done, or nil.
func (c *callContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.timed != nil:
		return c.timed.Err()
	case c.ended == nil && !now().Before(c.deadline):
		c.ended = context.DeadlineExceeded
	}
	return c.ended
}

// Value returns the detached context's value for key. Package context finds its
// own kind of context through it, so that children of this one cost no goroutine.
func (c *callContext) Value(key any) any {
	c.mu.Lock()
	timed := c.timed
	c.mu.Unlock()
	if timed != nil {
		return timed.Value(key)
	}
	return c.detached.Value(key)
}
