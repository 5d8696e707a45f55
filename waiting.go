package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"
)

// How long waiting retries leave between two looks at a record.
const (
	firstLook = 10 * time.Millisecond
	lastLook  = 500 * time.Millisecond
	// A retry at its limit takes a last look, unless the latest is as young as this.
	freshLook = 50 * time.Millisecond
)

// errWaitOver ends a wait: its limit is reached, or nobody waits any more.
var errWaitOver = errors.New("idempotency: waiting is over")

// Watches are the records that retries are waiting for (S21). However many wait
// for one, it is looked at once at a time, and all hear what the look has found.
// The zero value is ready.
type watches struct {
	mu    sync.Mutex
	byKey map[watched]*watch
}

// watched is what retries wait for: a key's record. With aliases, which record it is
// depends on the payload, too.
type watched struct {
	key         ScopedKey
	fingerprint Fingerprint // zero without aliases
}

func (in *intent) watched() watched {
	if len(in.aliases) == 0 {
		return watched{key: in.key}
	}
	return watched{key: in.key, fingerprint: in.fingerprint}
}

// A watch is what the waiters for one key share. Its fields are guarded by the
// mutex of its watches.
type watch struct {
	waiters int
	backoff *backoff
	due     time.Time     // of the next look
	looks   int           // how many have begun
	sent    time.Time     // when the latest did
	looking bool          // it is under way
	looked  chan struct{} // closed at the end of the look under way, or of the next
	found   finding       // of the latest look that ended
}

// A finding is what a look has found out for all who wait.
type finding struct {
	look  int  // 1, 2, …
	known bool // false: somebody runs the operation now, or each must see for himself
	rec   Record
	err   error
}

// A look is a claim that is made to see how a record stands. It may win.
type look func(Fingerprint) (Record, *operation, error)

// A waiter is one waiting retry.
type waiter struct {
	all   *watches
	what  watched
	watch *watch
	until time.Time
	seen  int // the latest look that was its own, that it heard of, or that began before it came
}

// join makes a waiter for a record that was met in progress. It must leave.
func (ws *watches) join(what watched, limit time.Duration) *waiter {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w := ws.byKey[what]
	if w == nil {
		w = &watch{looked: make(chan struct{})}
		w.schedule(true)
		if ws.byKey == nil {
			ws.byKey = make(map[watched]*watch)
		}
		ws.byKey[what] = w
	}
	w.waiters++
	return &waiter{all: ws, what: what, watch: w, until: now().Add(limit), seen: w.looks}
}

func (w *waiter) leave() {
	w.all.mu.Lock()
	defer w.all.mu.Unlock()
	w.watch.waiters--
	if w.watch.waiters == 0 {
		delete(w.all.byKey, w.what)
	}
}

// schedule plans the next look: soon where the execution is another one than
// before.
func (w *watch) schedule(anew bool) {
	if anew {
		w.backoff = newBackoff(firstLook, lastLook)
	}
	w.due = now().Add(w.backoff.next())
}

// next waits for the next look at the record, be it another's or this waiter's
// turn, and returns what that found. The error is errWaitOver, or the look's.
func (w *waiter) next(ctx context.Context, fp Fingerprint, claim look) (Record, *operation, error) {
	for {
		what, found, looked, pause := w.step()
		switch what {
		case stepHear:
			return found.rec, nil, found.err
		case stepLook:
			return w.look(fp, claim)
		case stepEnd:
			return Record{}, nil, errWaitOver
		case stepWait:
		}
		timer := time.NewTimer(pause)
		select {
		case <-looked:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Record{}, nil, errWaitOver
		}
		timer.Stop()
	}
}

// A step is what a waiter has to do next.
type step int

const (
	stepWait step = iota
	stepHear      // take what another has found
	stepLook      // it is this waiter's turn
	stepEnd       // its limit is reached
)

// step returns what is to be done; with stepHear the finding, with stepWait what
// to wait for: the end of a look, or a time.
func (w *waiter) step() (what step, found finding, looked <-chan struct{}, pause time.Duration) {
	w.all.mu.Lock()
	defer w.all.mu.Unlock()
	t, watch := now(), w.watch
	atLimit := !t.Before(w.until)
	isDue := !t.Before(watch.due) || atLimit && t.Sub(watch.sent) > freshLook
	switch {
	case watch.found.look > w.seen && watch.found.known:
		w.seen = watch.found.look
		return stepHear, watch.found, nil, 0
	case isDue && !watch.looking:
		watch.looking = true
		watch.looks++
		watch.sent, w.seen = t, watch.looks
		return stepLook, finding{}, nil, 0
	case atLimit:
		return stepEnd, finding{}, nil, 0
	}
	wake := w.until
	if !watch.looking && watch.due.Before(wake) {
		wake = watch.due
	}
	return stepWait, finding{}, watch.looked, wake.Sub(t)
}

// look looks, and lets the others know.
func (w *waiter) look(fp Fingerprint, claim look) (rec Record, op *operation, err error) {
	var found finding
	defer func() { w.tell(found) }() // also if the claim panics
	rec, op, err = claim(fp)
	found = finding{known: err != nil || isForAll(rec, fp), rec: rec, err: err}
	return rec, op, err
}

// isForAll reports whether any other claim would have met the same record as this
// one, which was made with the fingerprint fp. A record that was not free for this
// one's payload may be so for another's.
func isForAll(rec Record, fp Fingerprint) bool {
	switch rec.State {
	case StateInProgress, StateCompleted:
		return true
	case StateReleased, StateAbandoned:
		return rec.Fingerprint == fp
	case StateClaimed:
	}
	return false
}

func (w *waiter) tell(found finding) {
	w.all.mu.Lock()
	defer w.all.mu.Unlock()
	found.look = w.watch.looks
	w.watch.found = found
	w.watch.looking = false
	w.watch.schedule(!found.known)
	close(w.watch.looked)
	w.watch.looked = make(chan struct{})
}
