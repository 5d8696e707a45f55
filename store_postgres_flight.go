package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"
)

// claimFlights lets the claims that a process makes of one key at the same time
// share one: the first leads, the others wait for the record that it gets, and
// judge it for themselves. A thousand duplicates cost the database what one does.
// The zero value is ready.
type claimFlights struct {
	mu    sync.Mutex
	byKey map[ScopedKey]*claimFlight
}

// A claimFlight is a claim on its way, and those that wait for it.
type claimFlight struct {
	claim  Claim // the leader's
	sent   time.Time
	landed chan struct{} // closed once record and err are there
	record Record
	err    error
}

// errNotLanded is the error of a leader that never came back.
var errNotLanded = errors.New("claim was broken off")

// claim makes the claim, or waits for one on its way. A leader that failed, whose
// caller left, or whose record does not decide is replaced by one of those who
// waited.
func (f *claimFlights) claim(ctx context.Context, c Claim, send func(context.Context, Claim) (Record, error)) (Record, error) {
	for {
		flight, leads := f.join(c)
		if leads {
			return f.lead(ctx, flight, send)
		}
		select {
		case <-flight.landed:
		case <-ctx.Done():
			return Record{}, postgresError("claim", notClaimed(ctx.Err()))
		}
		if rec, decided := flight.judge(c); decided {
			return rec, nil
		}
	}
}

func (f *claimFlights) join(c Claim) (flight *claimFlight, leads bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if flight := f.byKey[c.Key]; flight != nil {
		return flight, false
	}
	flight = &claimFlight{claim: c, sent: now(), landed: make(chan struct{}), err: errNotLanded}
	if f.byKey == nil {
		f.byKey = make(map[ScopedKey]*claimFlight)
	}
	f.byKey[c.Key] = flight
	return flight, true
}

func (f *claimFlights) lead(
	ctx context.Context, flight *claimFlight, send func(context.Context, Claim) (Record, error),
) (Record, error) {
	defer f.land(flight)
	flight.record, flight.err = send(ctx, flight.claim)
	return flight.record, flight.err
}

func (f *claimFlights) land(flight *claimFlight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byKey, flight.claim.Key)
	close(flight.landed)
}

// judge returns how the leader's record stands towards another claim, unless that
// claim might get another one.
func (f *claimFlight) judge(c Claim) (rec Record, decided bool) {
	rec = f.record
	if f.err != nil {
		return rec, false
	}
	matches := rec.Fingerprint == c.Fingerprint
	switch rec.State {
	case StateClaimed:
		rec.State, rec.LeaseLeft = StateInProgress, f.claim.Lease-now().Sub(f.sent)
		return rec, rec.LeaseLeft > 0
	case StateInProgress, StateCompleted:
		return rec, true
	case StateReleased:
		return rec, !matches
	case StateAbandoned: // held, or met by a claim with Hold, or bound to another fingerprint than the leader's
		return rec, !matches || c.Hold || !f.claim.Hold && f.claim.Fingerprint == c.Fingerprint
	}
	return rec, false
}
