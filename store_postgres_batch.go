package idempotency

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
)

// Limits of a batcher.
const (
	maxSenders     = 2
	maxBatch       = 128     // statements
	maxBatchBytes  = 1 << 20 // of statements; a larger one goes alone
	maxQueueClaims = 4096
)

var (
	// errNotSent is the error of a statement whose caller left before it was sent.
	errNotSent = errors.New("not sent")
	// errInDoubt is the error of a statement that failed, but may have been carried out
	// before, in a batch that was broken off.
	errInDoubt = errors.New("may have been carried out in a batch that was broken off")
	// errQueueFull is the error of a claim that found too many others waiting.
	errQueueFull = errors.New("too many claims wait for the database")
)

// A batcher sends the statements of concurrent calls together, in one transaction
// and one round trip: what comes while others are on their way waits, and goes with
// the next batch. There is no timer. A call that meets no other sends its statement
// itself, as if there were no batcher.
//
// At most one statement about a key is on its way. A batch has its statements in
// the order of their keys, so that no two wait for each other.
type batcher struct {
	db PostgresDB

	mu      sync.Mutex
	senders int                     // flushers, and callers that send their own statement
	apart   int                     // transactions on their way that no others join
	onWay   map[ScopedKey][]*queued // keys with a statement on its way, and what waits for it
	queue   dueQueue[*queued]       // what may be sent at once
	claims  int                     // of what waits
	idle    idleSignal
}

func newBatcher(db PostgresDB) *batcher {
	return &batcher{db: db, onWay: make(map[ScopedKey][]*queued)}
}

// run sends the statement, with others or alone, and returns when it is committed.
// If ctx ends first, it returns at once: with errNotSent, or not knowing what
// becomes of the statement.
func (b *batcher) run(ctx context.Context, st *statement) error {
	if err := ctx.Err(); err != nil {
		return notSent(err)
	}
	if b.goAhead(st) {
		defer b.arrived(st.key)
		return st.send(ctx, b.db)
	}
	q, err := b.enqueue(ctx, st)
	if err != nil {
		return err
	}
	select {
	case <-q.answered:
		return q.err
	case <-ctx.Done():
		return b.leave(q)
	}
}

func notSent(err error) error { return fmt.Errorf("%w: %w", errNotSent, err) }

// goAhead reports whether a call may send its statement itself. It is a sender
// then, until it calls arrived.
func (b *batcher) goAhead(st *statement) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, busy := b.onWay[st.key]; busy || b.senders == maxSenders || len(b.queue) > 0 {
		return false
	}
	b.senders++
	b.onWay[st.key] = nil
	return true
}

// arrived ends a call's own sending. What has come meanwhile is left to a flusher.
func (b *batcher) arrived(key ScopedKey) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.release(key)
	if len(b.queue) > 0 {
		go b.flush()
		return
	}
	b.endSender()
}

func (b *batcher) endSender() {
	b.senders--
	b.raiseIfIdle()
}

// beginApart begins a transaction that no others join.
func (b *batcher) beginApart() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.apart++
}

func (b *batcher) endApart() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.apart--
	b.raiseIfIdle()
}

func (b *batcher) isIdle() bool { return b.senders == 0 && b.apart == 0 }

func (b *batcher) raiseIfIdle() {
	if b.isIdle() {
		b.idle.raise()
	}
}

// release lets the next statements about a key go.
func (b *batcher) release(key ScopedKey) {
	for _, q := range b.onWay[key] {
		b.queue.push(q)
	}
	delete(b.onWay, key)
}

// enqueue makes a statement wait for its batch. Only claims may be too many: what
// ends an operation makes room, and is worth more than a new one.
func (b *batcher) enqueue(ctx context.Context, st *statement) (*queued, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if st.ofClaim {
		if b.claims >= maxQueueClaims {
			return nil, errQueueFull
		}
		b.claims++
	}
	q := &queued{statement: st, ctx: ctx, due: dueTime(ctx), place: notQueued, answered: make(chan struct{})}
	b.queue.push(q)
	b.wake()
	return q, nil
}

// wake starts a flusher if the last sender ended before the statement was queued.
func (b *batcher) wake() {
	if b.senders < maxSenders {
		b.senders++
		go b.flush()
	}
}

// leave takes a statement back whose caller does not wait any longer. One that is
// on its way goes on, unless nobody waits for any of its batch.
func (b *batcher) leave(q *queued) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := q.ctx.Err()
	switch {
	case q.isAnswered():
		return q.err
	case q.batch != nil:
		q.batch.leave()
		return err
	case q.place != notQueued:
		b.queue.remove(q.place)
	default:
		b.onWay[q.key] = slices.DeleteFunc(b.onWay[q.key], func(other *queued) bool { return other == q })
	}
	b.dequeued(q)
	return notSent(err)
}

func (b *batcher) dequeued(q *queued) {
	if q.ofClaim {
		b.claims--
	}
}

// flush sends one batch after the other until nothing waits.
func (b *batcher) flush() {
	for bt := b.nextBatch(); bt != nil; bt = b.nextBatch() {
		b.send(bt)
		// Those who were answered may have their next statements ready: without this, the
		// next batch is what came before, and the first of them fills a place alone.
		runtime.Gosched()
	}
}

// nextBatch takes what is due first. Where there is nothing, the caller is no
// sender any more.
func (b *batcher) nextBatch() *batch {
	b.mu.Lock()
	defer b.mu.Unlock()
	var members []*queued
	for size := 0; len(b.queue) > 0 && len(members) < maxBatch; {
		q := b.queue[0]
		if waiting, busy := b.onWay[q.key]; busy {
			b.onWay[q.key] = append(waiting, b.queue.pop())
			continue
		}
		if size += q.size(); size > maxBatchBytes && len(members) > 0 {
			break
		}
		members = append(members, b.queue.pop())
		b.onWay[q.key] = nil
		b.dequeued(q)
	}
	if len(members) == 0 {
		b.endSender()
		return nil
	}
	return newBatch(members)
}

// send sends a batch and answers its members. Where it fails, it was undone as a
// whole, for the sake of one member perhaps: each goes again, alone.
func (b *batcher) send(bt *batch) {
	defer bt.cancel()
	err := bt.send(b.db)
	if err == nil || len(bt.members) == 1 || isOutage(err) {
		b.answer(err, bt.members...)
		return
	}
	inDoubt := !isWithoutEffect(err)
	for i, q := range bt.members {
		err := q.ctx.Err()
		if err == nil {
			err = q.send(q.ctx, b.db)
		}
		again := bt.members[i : i+1]
		if isOutage(err) {
			again = bt.members[i:]
		}
		if err != nil && inDoubt { // the batch may have done what the statement could not do again
			err = fmt.Errorf("%w: %w", errInDoubt, err)
		}
		b.answer(err, again...)
		if len(again) > 1 {
			return
		}
	}
}

// answer tells the callers of statements how they ended.
func (b *batcher) answer(err error, answered ...*queued) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, q := range answered {
		q.err = err
		close(q.answered)
		b.release(q.key)
	}
}

// drain waits until nothing waits or is on its way.
func (b *batcher) drain(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.idle.wait(ctx, &b.mu, b.isIdle)
	if !b.isIdle() {
		return context.Cause(ctx)
	}
	return nil
}

// A batch is what is sent together.
type batch struct {
	members []*queued
	ctx     context.Context // ends when all members' callers have left
	cancel  context.CancelFunc
	staying int // members whose callers still wait, guarded by the batcher's mutex
}

func newBatch(members []*queued) *batch {
	bt := &batch{members: members, staying: len(members)}
	bt.ctx, bt.cancel = context.WithCancel(context.WithoutCancel(members[0].ctx))
	for _, q := range members {
		q.batch = bt
	}
	return bt
}

func (bt *batch) leave() {
	bt.staying--
	if bt.staying == 0 {
		bt.cancel()
	}
}

// send sends the batch and reads its answers. They count once it returns nil: only
// then is the transaction committed.
func (bt *batch) send(db PostgresDB) error {
	if len(bt.members) == 1 {
		return bt.members[0].send(bt.ctx, db)
	}
	statements := make([]*statement, len(bt.members))
	for i, q := range bt.members {
		statements[i] = q.statement
	}
	return sendTogether(bt.ctx, db, statements)
}
