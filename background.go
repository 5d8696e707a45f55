package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// errShutDown is what becomes of work that would outlive Shutdown.
var errShutDown = errors.New("idempotency: shut down")

// A background holds the work that goes on after a request is answered. The
// zero value is ready.
type background struct {
	mu     sync.Mutex
	tasks  map[*backgroundTask]struct{}
	closed bool
	idle   idleSignal
}

type backgroundTask struct{ cancel context.CancelFunc }

// start runs f on a goroutine of its own, with a child of the context detached
// that ends with shutdown. It reports false, and does not run f, after that.
func (b *background) start(detached context.Context, f func(context.Context)) bool {
	ctx, cancel := context.WithCancel(detached)
	task := &backgroundTask{cancel: cancel}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		cancel()
		return false
	}
	if b.tasks == nil {
		b.tasks = make(map[*backgroundTask]struct{})
	}
	b.tasks[task] = struct{}{}
	go func() {
		defer b.end(task)
		f(ctx)
	}()
	return true
}

func (b *background) end(task *backgroundTask) {
	task.cancel()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.tasks, task)
	if len(b.tasks) == 0 {
		b.idle.raise()
	}
}

// shutdown waits for all tasks. When ctx ends first, it cancels those that are
// left and says how many. Either way no task starts afterwards.
func (b *background) shutdown(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.idle.wait(ctx, &b.mu, func() bool { return len(b.tasks) == 0 })
	b.closed = true
	left := len(b.tasks)
	for task := range b.tasks {
		task.cancel()
	}
	if left == 0 {
		return nil
	}
	return fmt.Errorf("%w with %d outcomes not settled: %w", errShutDown, left, context.Cause(ctx))
}

// An idleSignal wakes those who wait until nothing is going on. It is guarded by
// the mutex of what it is a part of. The zero value is ready.
type idleSignal struct{ raised chan struct{} } // nil while nobody waits

// raise wakes those who wait.
func (s *idleSignal) raise() {
	if s.raised != nil {
		close(s.raised)
		s.raised = nil
	}
}

// wait returns when idle reports true or ctx ends, and unlocks mu while it waits.
func (s *idleSignal) wait(ctx context.Context, mu *sync.Mutex, idle func() bool) {
	for !idle() && ctx.Err() == nil {
		if s.raised == nil {
			s.raised = make(chan struct{})
		}
		raised := s.raised
		mu.Unlock()
		select {
		case <-raised:
		case <-ctx.Done():
		}
		mu.Lock()
	}
}

// How long to wait between two tries at the store.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// A backoff waits longer each time, up to a limit, with jitter.
type backoff struct{ delay, limit time.Duration }

func newBackoff(first, last time.Duration) *backoff { return &backoff{delay: first, limit: last} }

// sleep waits for the next try. It reports false, early, if ctx ends.
func (b *backoff) sleep(ctx context.Context) bool { return sleep(ctx, b.next()) }

// next returns how long to wait this time.
func (b *backoff) next() time.Duration {
	delay := b.delay/2 + rand.N(b.delay/2+1) //nolint:gosec // jitter, not a secret
	b.delay = min(2*b.delay, b.limit)
	return delay
}

// sleep waits for d. It reports false, early, if ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
