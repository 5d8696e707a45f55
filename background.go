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
	idle   chan struct{} // closed when the last task ends; nil while nobody waits
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
	if len(b.tasks) == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
}

// shutdown waits for all tasks. When ctx ends first, it cancels those that are
// left and says how many. Either way no task starts afterwards.
func (b *background) shutdown(ctx context.Context) error {
	if b.waitIdle(ctx) {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
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

func (b *background) waitIdle(ctx context.Context) bool {
	for {
		b.mu.Lock()
		if len(b.tasks) == 0 {
			b.closed = true
			b.mu.Unlock()
			return true
		}
		if b.idle == nil {
			b.idle = make(chan struct{})
		}
		idle := b.idle
		b.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return false
		}
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
