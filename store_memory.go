package idempotency

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
)

// ErrStoreFull reports that a [MemoryStore], or another bounded [Store], has
// reached its bound and holds nothing that is expired. The claim did not take its
// key.
var ErrStoreFull = errors.New("idempotency: memory store is full")

// DefaultMemoryBytes is the bound of a [MemoryStore] whose [MemoryConfig] sets
// none: 64 MiB.
const DefaultMemoryBytes = 64 << 20

const (
	// What a record takes beside its key and its outcome, and what a block of
	// header fields, a field and each of its values take beside their bytes: about
	// what the runtime allocates for them.
	recordOverhead = 640
	headerOverhead = 256
	fieldOverhead  = 64
	valueOverhead  = 16

	// evictionsPerClaim is more than one, so that expired records go faster than
	// new ones come.
	evictionsPerClaim = 2
)

var (
	_ AliasStore     = (*MemoryStore)(nil)
	_ ExpiredDeleter = (*MemoryStore)(nil)
)

// MemoryConfig configures a [MemoryStore]. The zero value is valid.
type MemoryConfig struct {
	_ [0]func()

	// MaxBytes bounds the memory that the records take, estimated from the lengths
	// of their keys and outcomes. A record beyond it is not admitted: Claim returns
	// [ErrStoreFull]. What was admitted can always be completed, so the outcomes of
	// running operations can exceed the bound. Zero or less means
	// [DefaultMemoryBytes].
	MaxBytes int64

	// Now is the store's clock (S28). It must be safe for concurrent use and must
	// not call the store. Nil means the system's clock.
	Now func() time.Time
}

// A MemoryStore is a [Store] for one process: tests, first steps, and services
// that run as a single instance and may forget everything on a restart. Two
// processes with a MemoryStore each do not see one another's records.
//
// It starts no goroutine. Each claim of a new key removes a few expired records,
// so memory follows use; [MemoryStore.DeleteExpired] removes them at once. A
// record that is not expired is never removed to make room, since its operation
// would run again.
//
// It is safe for concurrent use. Make one with [NewMemoryStore] or
// [NewMemoryStoreWith]; the zero value is not usable. A context that is done
// makes every method fail before it touches anything.
type MemoryStore struct {
	maxBytes int64
	now      func() time.Time

	mu      sync.Mutex
	records map[ScopedKey]*memoryRecord
	expiry  dueQueue[*memoryRecord] // all records that can expire
	bytes   int64                   // sum of the sizes of records
}

// NewMemoryStore returns an empty store with the defaults of [MemoryConfig].
func NewMemoryStore() *MemoryStore { return NewMemoryStoreWith(MemoryConfig{}) }

// NewMemoryStoreWith returns an empty store.
func NewMemoryStoreWith(cfg MemoryConfig) *MemoryStore {
	if cfg.MaxBytes <= 0 {
		cfg.MaxBytes = DefaultMemoryBytes
	}
	if cfg.Now == nil {
		cfg.Now = now
	}
	return &MemoryStore{
		maxBytes: cfg.MaxBytes,
		now:      cfg.Now,
		records:  make(map[ScopedKey]*memoryRecord),
	}
}

// CheckAliases implements [AliasStore]: every MemoryStore can.
func (s *MemoryStore) CheckAliases() error { return nil }

// Claim implements [Store] and [AliasStore]. For a key without a record it returns
// [ErrStoreFull] if the store has reached its bound.
func (s *MemoryStore) Claim(ctx context.Context, c Claim) (Record, error) {
	if err := c.Validate(); err != nil {
		return Record{}, err
	}
	if err := ctx.Err(); err != nil {
		return Record{}, memoryContextError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()

	now := s.now()
	if len(c.Aliases) > 0 {
		return s.claimAll(c, now)
	}
	r := s.records[c.Key]
	switch {
	case r == nil:
		if !s.makeRoom(now) {
			return Record{}, ErrStoreFull
		}
		r = s.add(c.Key)
	case r.expired(now):
		r.forget()
	case !r.free(c, now):
		return r.view(now), nil
	}
	won := Record{State: StateClaimed, Fingerprint: c.Fingerprint, Attempt: r.attempt + 1, Origin: r.origin}
	r.aliasOf = KeyDigest{}
	s.take(r, c, won, now)
	return won, nil
}

// claimAll makes a claim that has aliases.
func (s *MemoryStore) claimAll(c Claim, now time.Time) (Record, error) {
	names := c.names()
	met := make([]standing, len(names))
	for i, name := range names {
		if r := s.records[name]; r != nil && !r.expired(now) {
			met[i] = standing{record: r.view(now), held: r.held, aliasOf: r.aliasOf, origin: r.origin}
		}
	}
	plan := c.plan(met)
	if isNew := func(i int) bool { return s.records[names[i]] == nil }; slices.ContainsFunc(plan.taken, isNew) && !s.makeRoom(now) {
		return Record{}, ErrStoreFull
	}
	for _, i := range plan.taken {
		r := s.records[names[i]] // anew: what is expired may have been removed to make room
		if r == nil {
			r = s.add(names[i])
		}
		r.aliasOf, r.origin = c.aliasOf(i), plan.record.Origin
		s.take(r, c, plan.record, now)
	}
	return plan.record, nil
}

func (s *MemoryStore) add(k ScopedKey) *memoryRecord {
	r := &memoryRecord{key: k, position: notQueued}
	s.records[k] = r
	return r
}

// take makes r a record in progress, as won says.
func (s *MemoryStore) take(r *memoryRecord, c Claim, won Record, now time.Time) {
	r.fingerprint = won.Fingerprint
	r.owner = c.Owner
	r.attempt = won.Attempt
	r.state = StateInProgress
	r.held = c.Hold
	r.leaseEnd = now.Add(c.Lease)
	r.ttlEnd = now.Add(c.TTL)
	s.put(r, Response{})
}

// Complete implements [Store]. It keeps r itself, not a copy.
func (s *MemoryStore) Complete(ctx context.Context, l Lease, r Response) error {
	return s.settle(ctx, l, StateCompleted, r)
}

// Release implements [Store].
func (s *MemoryStore) Release(ctx context.Context, l Lease) error {
	return s.settle(ctx, l, StateReleased, Response{})
}

// Extend implements [Store].
func (s *MemoryStore) Extend(ctx context.Context, l Lease) error {
	if err := l.Validate(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return memoryContextError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()

	if !s.all(l, StateInProgress) {
		return ErrLeaseLost
	}
	now := s.now()
	end := now.Add(l.Duration)
	for _, k := range l.Keys {
		if r := s.records[k]; r.held && !r.live(now) && l.Duration > 0 {
			return ErrLeaseLost
		}
	}
	for _, k := range l.Keys {
		r := s.records[k]
		r.leaseEnd = end
		s.enqueue(r)
	}
	return nil
}

// DeleteExpired implements [ExpiredDeleter]. A limit of zero or less deletes
// nothing.
func (s *MemoryStore) DeleteExpired(ctx context.Context, limit int) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, memoryContextError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()

	now := s.now()
	n := 0
	for n < limit && s.evict(now) {
		n++
	}
	return n, nil
}

// Len returns the number of records held, those expired but not yet removed
// among them.
func (s *MemoryStore) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.records)
}

// Format writes how many records are held, whatever the verb: never whose.
func (s *MemoryStore) Format(f fmt.State, _ rune) {
	_, _ = fmt.Fprintf(f, "idempotency.MemoryStore with %d records", s.Len())
}

func (s *MemoryStore) settle(ctx context.Context, l Lease, to State, outcome Response) error {
	if err := l.Validate(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return memoryContextError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.all(l, to) {
		return nil // repeated by the owner that did it
	}
	if !s.all(l, StateInProgress) {
		return ErrLeaseLost
	}
	for _, k := range l.Keys {
		r := s.records[k]
		r.state = to
		s.put(r, l.outcome(k, outcome))
	}
	return nil
}

// all reports whether every record of l is in that state under its owner.
func (s *MemoryStore) all(l Lease, state State) bool {
	for _, k := range l.Keys {
		if r := s.records[k]; r == nil || r.owner != l.Owner || r.state != state {
			return false
		}
	}
	return true
}

// put gives r its outcome and accounts for it.
func (s *MemoryStore) put(r *memoryRecord, outcome Response) {
	r.outcome = outcome
	s.bytes -= r.size
	r.size = recordOverhead + keySize(r.key) + responseSize(outcome)
	s.bytes += r.size
	s.enqueue(r)
}

// enqueue gives r the place in the queue that its state and times call for.
func (s *MemoryStore) enqueue(r *memoryRecord) {
	due := r.ttlEnd
	if r.state == StateInProgress {
		if r.held {
			if r.position != notQueued {
				s.expiry.remove(r.position)
			}
			return
		}
		if r.leaseEnd.After(due) {
			due = r.leaseEnd
		}
	}
	if r.position == notQueued {
		r.due = due
		s.expiry.push(r)
		return
	}
	if !due.Equal(r.due) {
		r.due = due
		s.expiry.moved(r.position)
	}
}

// makeRoom removes some expired records, and reports whether there is room for
// another record.
func (s *MemoryStore) makeRoom(now time.Time) bool {
	for n := 0; n < evictionsPerClaim || s.bytes >= s.maxBytes; n++ {
		if !s.evict(now) {
			break
		}
	}
	return s.bytes < s.maxBytes
}

// evict removes the record that expired first, and reports whether there was one.
func (s *MemoryStore) evict(now time.Time) bool {
	if len(s.expiry) == 0 || !s.expiry[0].expired(now) {
		return false
	}
	r := s.expiry[0]
	s.expiry.pop()
	delete(s.records, r.key)
	s.bytes -= r.size
	return true
}

// A memoryRecord is in progress, completed or released; whether it is abandoned
// or expired is a question of the time.
type memoryRecord struct {
	key         ScopedKey
	fingerprint Fingerprint
	aliasOf     KeyDigest // the primary name that it was last claimed with; zero: its own key
	origin      KeyDigest // zero: its own key
	owner       uuid.UUID
	attempt     int
	state       State
	held        bool
	leaseEnd    time.Time
	ttlEnd      time.Time
	outcome     Response
	size        int64

	due      time.Time // when it expires, if it is queued
	position int       // in the store's expiry queue
}

func (r *memoryRecord) expired(now time.Time) bool {
	return r.position != notQueued && !now.Before(r.due)
}

// forget makes an expired record as good as none.
func (r *memoryRecord) forget() { r.attempt, r.origin = 0, KeyDigest{} }

func (r *memoryRecord) live(now time.Time) bool { return now.Before(r.leaseEnd) }

// free reports whether c may take over r, which is not expired.
func (r *memoryRecord) free(c Claim, now time.Time) bool {
	if subtle.ConstantTimeCompare(r.fingerprint[:], c.Fingerprint[:]) == 0 {
		return false
	}
	if r.state == StateInProgress {
		return !r.live(now) && !r.held && !c.Hold
	}
	return r.state == StateReleased
}

// view returns r as it stands towards a claim that did not win.
func (r *memoryRecord) view(now time.Time) Record {
	v := Record{State: r.state, Fingerprint: r.fingerprint, Attempt: r.attempt, Response: r.outcome}
	if r.state != StateInProgress {
		return v
	}
	if r.live(now) {
		v.LeaseLeft = r.leaseEnd.Sub(now)
		return v
	}
	v.State = StateAbandoned
	return v
}

func (r *memoryRecord) dueBefore(other *memoryRecord) bool { return r.due.Before(other.due) }
func (r *memoryRecord) put(place int)                      { r.position = place }

func keySize(k ScopedKey) int64 {
	return int64(len(k.version) + len(k.tenant) + len(k.principal) + len(k.route) + len(k.namespace) + len(k.key))
}

// responseSize counts the capacity of the body: the store keeps all of it alive.
func responseSize(r Response) int64 {
	n := cap(r.Body)
	for _, h := range [...]http.Header{r.Header, r.AddedHeader, r.Trailer} {
		if len(h) > 0 {
			n += headerOverhead
		}
		for name, values := range h {
			n += fieldOverhead + len(name)
			for _, v := range values {
				n += valueOverhead + len(v)
			}
		}
	}
	return int64(n)
}

func memoryContextError(err error) error { return fmt.Errorf("idempotency: memory store: %w", err) }
