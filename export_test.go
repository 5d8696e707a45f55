package idempotency

import (
	"time"

	"github.com/google/uuid"
)

// What the tests in package idempotency_test need of the inside.
var (
	ClientKeyFromHeader = clientKey
	Scoped              = scoped

	ErrKeyLines  = errKeyLines
	ErrKeyFormat = errKeyFormat
	ErrKeyEmpty  = errKeyEmpty
	ErrKeyLong   = errKeyLong
)

// DownstreamKeyOf returns the downstream key of an operation that stands under k.
func DownstreamKeyOf(k ScopedKey, fp Fingerprint, name string) uuid.UUID {
	return downstreamKey(k.Digest(), fp, name)
}

// SuccessionsMaxAge is how old what a process knows of successions may be.
const SuccessionsMaxAge = successionsMaxAge

// SetSuccessionsClock gives s another clock than the system's.
func SetSuccessionsClock(s *PostgresSuccessions, now func() time.Time) { s.now = now }

// Limits of an encoded Response.
const (
	MaxResponseFields = maxResponseFields
	MaxFieldValues    = maxFieldValues
	MaxResponseBody   = maxResponseBody
)

// WatchedKeys returns how many records the retries of m wait for.
func WatchedKeys(m *Middleware) int {
	m.exec.watches.mu.Lock()
	defer m.exec.watches.mu.Unlock()
	return len(m.exec.watches.byKey)
}

// Unsettled returns how much m still has to tell its store in the background.
func Unsettled(m *Middleware) int {
	m.exec.background.mu.Lock()
	defer m.exec.background.mu.Unlock()
	return len(m.exec.background.tasks)
}

// Limits of a PostgresStore's batches.
const (
	MaxBatch       = maxBatch
	MaxBatchBytes  = maxBatchBytes
	MaxQueueClaims = maxQueueClaims
)

// QueuedStatements returns how many statements of s wait for a batch.
func QueuedStatements(s *PostgresStore) int {
	s.batcher.mu.Lock()
	defer s.batcher.mu.Unlock()
	n := len(s.batcher.queue)
	for _, waiting := range s.batcher.onWay {
		n += len(waiting)
	}
	return n
}

// IsIdle reports whether s holds on to nothing.
func IsIdle(s *PostgresStore) bool {
	s.batcher.mu.Lock()
	defer s.batcher.mu.Unlock()
	s.flights.mu.Lock()
	defer s.flights.mu.Unlock()
	return s.batcher.senders == 0 && s.batcher.claims == 0 && len(s.batcher.queue) == 0 &&
		len(s.batcher.onWay) == 0 && len(s.flights.byKey) == 0
}
