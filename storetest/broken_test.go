package storetest_test

import (
	"bytes"
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// A brokenStore keeps the contract in the plainest way there is, except for its
// fault.
type brokenStore struct {
	fault string
	clock *clock
	mu    sync.Mutex
	rows  map[any]*row
}

type row struct {
	fingerprint idempotency.Fingerprint
	owner       uuid.UUID
	attempt     int
	state       idempotency.State
	held        bool
	leaseEnd    time.Time
	ttl         time.Duration
	ttlEnd      time.Time
	response    idempotency.Response
}

func newBrokenStore(fault string, clock *clock) *brokenStore {
	return &brokenStore{fault: fault, clock: clock, rows: make(map[any]*row)}
}

func (s *brokenStore) has(fault string) bool { return s.fault == fault }

func (s *brokenStore) key(k idempotency.ScopedKey) any {
	switch s.fault {
	case "key joined by U+001E":
		return strings.Join([]string{k.Version(), k.Tenant(), k.Principal(), k.Route(), k.Namespace(), k.Key()}, "\x1e")
	case "key without namespace":
		return [...]string{k.Version(), k.Tenant(), k.Principal(), k.Route(), k.Key()}
	case "key without tenant":
		return [...]string{k.Version(), k.Principal(), k.Route(), k.Namespace(), k.Key()}
	case "key folded":
		return strings.ToLower(k.Flat())
	case "key trimmed":
		return strings.TrimSpace(k.Flat())
	case "key cut":
		return [...]string{k.Version(), k.Tenant()[:min(200, len(k.Tenant()))], k.Principal(), k.Route(), k.Namespace(), k.Key()}
	}
	return k
}

func (s *brokenStore) expired(r *row) bool {
	now := s.clock.Now()
	switch {
	case now.Before(r.ttlEnd):
		return false
	case r.state != idempotency.StateInProgress:
		return !r.held || !s.has("held record never expires")
	case r.held:
		return s.has("held record expires in progress")
	}
	return !now.Before(r.leaseEnd) || s.has("live lease expires")
}

// free reports whether c takes over r, which is not expired.
func (s *brokenStore) free(r *row, c idempotency.Claim) bool {
	if r.fingerprint != c.Fingerprint && !s.has("take-over by any fingerprint") {
		return false
	}
	if r.state != idempotency.StateInProgress {
		return r.state == idempotency.StateReleased
	}
	ended := !s.clock.Now().Before(r.leaseEnd) || s.has("live lease is stolen")
	held := r.held && !s.has("hold is ignored")
	return ended && !held && (!c.Hold || s.has("claim with Hold takes over"))
}

func (s *brokenStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	if err := c.Validate(); err != nil && !s.has("claim is not validated") {
		return idempotency.Record{}, err
	}
	if err := ctx.Err(); err != nil && !s.has("cancelled claim keeps the key") {
		return idempotency.Record{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()

	r := s.rows[s.key(c.Key)]
	if s.has("claim is not atomic") {
		s.mu.Unlock()
		for range 20 {
			runtime.Gosched()
		}
		s.mu.Lock()
	}
	now := s.clock.Now()
	switch {
	case r == nil:
		r = &row{}
	case s.expired(r):
		if !s.has("expired record is taken over") {
			r = &row{}
		}
	case s.free(r, c):
	case s.has("every claim wins"):
	default:
		return s.view(r, c)
	}
	ttlEnd := now.Add(c.TTL)
	if r.attempt > 0 && s.has("take-over keeps the TTL") {
		ttlEnd = r.ttlEnd
	}
	attempt := r.attempt + 1
	if s.has("attempts are not counted") {
		attempt = 1
	}
	s.rows[s.key(c.Key)] = &row{
		fingerprint: c.Fingerprint,
		owner:       c.Owner,
		attempt:     attempt,
		state:       idempotency.StateInProgress,
		held:        c.Hold,
		leaseEnd:    now.Add(c.Lease),
		ttl:         c.TTL,
		ttlEnd:      ttlEnd,
	}
	if ctx.Err() != nil { // the fault "cancelled claim keeps the key"
		s.rows[s.key(c.Key)].owner = uuid.New()
		return idempotency.Record{}, ctx.Err()
	}
	return idempotency.Record{State: idempotency.StateClaimed, Fingerprint: c.Fingerprint, Attempt: attempt}, nil
}

// view answers a claim that did not win.
func (s *brokenStore) view(r *row, c idempotency.Claim) (idempotency.Record, error) {
	now := s.clock.Now()
	switch s.fault {
	case "losing claim moves the lease":
		r.leaseEnd = now.Add(c.Lease)
	case "mismatch renews the TTL":
		if r.fingerprint != c.Fingerprint {
			r.ttlEnd = now.Add(c.TTL)
		}
	case "mismatch rebinds the record":
		r.fingerprint = c.Fingerprint
	case "losing claim marks the record":
		r.held = r.held || c.Hold
	case "taken key is an error":
		return idempotency.Record{}, idempotency.ErrLeaseLost
	}
	v := idempotency.Record{State: r.state, Fingerprint: r.fingerprint, Attempt: r.attempt, Response: r.response}
	if s.has("scheme of the fingerprint is lost") {
		v.Fingerprint[0] = 1
	}
	if r.state != idempotency.StateInProgress {
		return v, nil
	}
	v.LeaseLeft = r.leaseEnd.Sub(now)
	if s.has("lease left is the whole lease") {
		v.LeaseLeft = c.Lease
	}
	if v.LeaseLeft <= 0 {
		v.State, v.LeaseLeft = idempotency.StateAbandoned, 0
	}
	return v, nil
}

func (s *brokenStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	err := s.settle(ctx, l, idempotency.StateCompleted, func(row *row) {
		row.response = s.stored(r)
		switch s.fault {
		case "completion renews the TTL":
			row.ttlEnd = s.clock.Now().Add(row.ttl)
		case "completion counts as an attempt":
			row.attempt++
		}
	})
	if s.has("given response is modified") {
		clear(r.Body)
	}
	return err
}

// stored returns what is kept of r.
func (s *brokenStore) stored(r idempotency.Response) idempotency.Response {
	switch s.fault {
	case "body ends at NUL":
		r.Body, _, _ = bytes.Cut(r.Body, []byte{0})
	case "body becomes UTF-8":
		r.Body = bytes.ToValidUTF8(r.Body, []byte("\ufffd"))
	case "body ends at 64 KiB":
		r.Body = r.Body[:min(len(r.Body), 64<<10)]
	case "values joined by commas":
		r.Header = r.Header.Clone()
		for name, values := range r.Header {
			if len(values) > 1 {
				r.Header[name] = []string{strings.Join(values, ", ")}
			}
		}
	case "names without values are lost":
		r.Header = r.Header.Clone()
		for name, values := range r.Header {
			if len(values) == 0 {
				delete(r.Header, name)
			}
		}
	case "names made canonical":
		header := r.Header.Clone()
		clear(header)
		for name, values := range r.Header {
			for _, v := range values {
				header.Add(name, v)
			}
		}
		r.Header = header
	case "added headers are lost":
		r.AddedHeader = nil
	case "trailers are lost":
		r.Trailer = nil
	case "not replayable is lost":
		r.NotReplayable = false
	case "given response is modified":
		r.Body = slices.Clone(r.Body)
	}
	return r
}

func (s *brokenStore) Release(ctx context.Context, l idempotency.Lease) error {
	err := s.settle(ctx, l, idempotency.StateReleased, func(r *row) {
		switch s.fault {
		case "release resets the attempt":
			r.attempt = 0
		case "release renews the TTL":
			r.ttlEnd = s.clock.Now().Add(r.ttl)
		case "release forgets the fingerprint":
			r.fingerprint = idempotency.Fingerprint{}
		}
	})
	if err == nil && s.has("release deletes the record") {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, k := range l.Keys {
			delete(s.rows, s.key(k))
		}
	}
	return err
}

func (s *brokenStore) settle(ctx context.Context, l idempotency.Lease, to idempotency.State, apply func(*row)) error {
	if err := l.Validate(); err != nil && !s.has("lease is not validated") {
		return err
	}
	half := ctx.Err() != nil && s.has("cancelled call is half done")
	if err := ctx.Err(); err != nil && !half {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := func(state idempotency.State) bool {
		return !slices.ContainsFunc(l.Keys, func(k idempotency.ScopedKey) bool { return !s.owns(l, k, state, to) })
	}
	switch {
	case all(to):
		switch s.fault {
		case "repeated call is lost":
			return idempotency.ErrLeaseLost
		case "repeated completion overwrites":
			s.each(l, to, to, apply)
		}
		return nil
	case all(idempotency.StateInProgress):
	case s.has("completion after release") && all(idempotency.StateReleased):
		s.each(l, idempotency.StateReleased, to, apply)
		return nil
	case s.has("release after completion") && all(idempotency.StateCompleted):
		s.each(l, idempotency.StateCompleted, to, apply)
		return nil
	case s.has("keys of a lease one by one"):
		s.each(l, idempotency.StateInProgress, to, apply)
		return idempotency.ErrLeaseLost
	default:
		return idempotency.ErrLeaseLost
	}
	if half {
		s.each(l, idempotency.StateInProgress, to, func(*row) {})
		return ctx.Err()
	}
	s.each(l, idempotency.StateInProgress, to, apply)
	return nil
}

// owns reports whether the record of k is in that state under the owner of l,
// which wants it in the state to.
func (s *brokenStore) owns(l idempotency.Lease, k idempotency.ScopedKey, state, to idempotency.State) bool {
	r := s.rows[s.key(k)]
	if r == nil || r.state != state {
		return false
	}
	call := map[idempotency.State]string{
		idempotency.StateCompleted:  "complete",
		idempotency.StateReleased:   "release",
		idempotency.StateInProgress: "extend",
	}[to]
	if state == idempotency.StateInProgress && s.has("late "+call+" is refused") && !s.clock.Now().Before(r.leaseEnd) {
		return false
	}
	return r.owner == l.Owner || s.has(call+" ignores the owner")
}

// each applies a change to the records of l in the state from.
func (s *brokenStore) each(l idempotency.Lease, from, to idempotency.State, apply func(*row)) {
	for _, k := range l.Keys {
		if s.owns(l, k, from, to) {
			r := s.rows[s.key(k)]
			r.state = to
			apply(r)
		}
	}
}

func (s *brokenStore) Extend(ctx context.Context, l idempotency.Lease) error {
	if err := l.Validate(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range l.Keys {
		if s.owns(l, k, idempotency.StateInProgress, idempotency.StateInProgress) {
			r := s.rows[s.key(k)]
			over := r.held && !s.clock.Now().Before(r.leaseEnd) && l.Duration > 0
			if over && !s.has("extension revives a held record") {
				return idempotency.ErrLeaseLost
			}
			continue
		}
		if s.has("extension revives") && s.owns(l, k, idempotency.StateReleased, idempotency.StateInProgress) {
			continue
		}
		return idempotency.ErrLeaseLost
	}
	for _, k := range l.Keys {
		r := s.rows[s.key(k)]
		r.state = idempotency.StateInProgress
		switch {
		case s.has("extension adds to the lease"):
			r.leaseEnd = r.leaseEnd.Add(l.Duration)
		case s.has("extension never shortens"):
			if end := s.clock.Now().Add(l.Duration); end.After(r.leaseEnd) {
				r.leaseEnd = end
			}
		case l.Duration > 0 || !s.has("extension by zero does nothing"):
			r.leaseEnd = s.clock.Now().Add(l.Duration)
		}
	}
	return nil
}

func (s *brokenStore) DeleteExpired(_ context.Context, limit int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []any
	for k, r := range s.rows {
		past := !s.clock.Now().Before(r.ttlEnd)
		switch {
		case len(keys) >= limit && !s.has("sweep ignores the limit"):
		case s.expired(r),
			past && !r.held && s.has("sweep deletes live leases"),
			past && r.held && s.has("sweep deletes held records"),
			r.state == idempotency.StateReleased && s.has("sweep deletes released records"):
			keys = append(keys, k)
		}
	}
	if s.has("sweep is not atomic") {
		s.mu.Unlock()
		for range 50 {
			runtime.Gosched()
		}
		s.mu.Lock()
	}
	for _, k := range keys {
		delete(s.rows, k)
	}
	if s.has("sweep counts wrongly") {
		return limit, nil
	}
	return len(keys), nil
}
