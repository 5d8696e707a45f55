package idempotency

import (
	"context"
	"time"
)

// A queued statement waits for a batch, or travels in one.
type queued struct {
	*statement
	ctx      context.Context // its caller's
	due      time.Time
	place    int           // in the queue, or notQueued
	batch    *batch        // that it travels in; nil before
	answered chan struct{} // closed once err says how it ended
	err      error
}

func (q *queued) isAnswered() bool {
	select {
	case <-q.answered:
		return true
	default:
		return false
	}
}

// dueTime is when a statement should be done: its place in the queue. A renewal
// has until the end of its lease, all others the time of a call to the store, so
// what came first goes first, but for a lease that is near its end. Each is passed
// by only so many.
func dueTime(ctx context.Context) time.Time {
	if deadline, ok := ctx.Deadline(); ok {
		return deadline
	}
	return now().Add(defaultStoreTimeout)
}

func (q *queued) dueBefore(other *queued) bool { return q.due.Before(other.due) }
func (q *queued) put(place int)                { q.place = place }
