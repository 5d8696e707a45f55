package idempotency

import (
	"container/heap"
	"context"
	"time"
)

// A queued statement waits for a batch, or travels in one.
type queued struct {
	*statement
	ctx      context.Context // its caller's
	due      time.Time
	seq      uint64
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

// A statementQueue is a heap of statements, the one that is due first at its root.
type statementQueue []*queued

func (s *statementQueue) push(q *queued)   { heap.Push(s, q) }
func (s *statementQueue) pop() *queued     { return heap.Pop(s).(*queued) }
func (s *statementQueue) remove(q *queued) { heap.Remove(s, q.place) }

// Len, Less and Swap are for package heap.
func (s statementQueue) Len() int { return len(s) }

func (s statementQueue) Less(i, j int) bool {
	if order := s[i].due.Compare(s[j].due); order != 0 {
		return order < 0
	}
	return s[i].seq < s[j].seq
}

func (s statementQueue) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].place, s[j].place = i, j
}

// Push adds a statement at the end, for package heap.
func (s *statementQueue) Push(x any) {
	q := x.(*queued)
	q.place = len(*s)
	*s = append(*s, q)
}

// Pop removes the last statement, for package heap.
func (s *statementQueue) Pop() any {
	last := len(*s) - 1
	q := (*s)[last]
	q.place = notQueued
	(*s)[last] = nil
	*s = (*s)[:last]
	return q
}
