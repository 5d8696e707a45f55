package idempotency

import "container/heap"

// A dueQueue is a heap of things that know their place in it, the one that is due
// first at the front.
type dueQueue[T due[T]] []T

// due is what a dueQueue holds.
type due[T any] interface {
	// dueBefore reports whether it is due before other.
	dueBefore(other T) bool
	// put tells its place, or notQueued once it has left the queue.
	put(place int)
}

// notQueued is the place of what is in no queue.
const notQueued = -1

func (q *dueQueue[T]) push(x T)         { heap.Push(q, x) }
func (q *dueQueue[T]) pop() T           { return heap.Pop(q).(T) }
func (q *dueQueue[T]) remove(place int) { heap.Remove(q, place) }
func (q *dueQueue[T]) moved(place int)  { heap.Fix(q, place) }

func (q dueQueue[T]) Len() int           { return len(q) }
func (q dueQueue[T]) Less(i, j int) bool { return q[i].dueBefore(q[j]) }

func (q dueQueue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].put(i)
	q[j].put(j)
}

// Push implements [heap.Interface].
func (q *dueQueue[T]) Push(x any) {
	added := x.(T)
	added.put(len(*q))
	*q = append(*q, added)
}

// Pop implements [heap.Interface].
func (q *dueQueue[T]) Pop() any {
	last := len(*q) - 1
	removed := (*q)[last]
	clear((*q)[last:])
	*q = (*q)[:last]
	removed.put(notQueued)
	return removed
}
