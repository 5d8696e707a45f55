package idempotency

import "time"

// An EventKind says what became of a request.
type EventKind string

// What can become of a request. A request that reaches the middleware on a
// guarded method ends in exactly one of the first six, unless its client leaves
// before that, or it is passed through to an outer guard's execution. One whose
// transaction was undone because another process was faster ends as what it met then.
const (
	// EventExecuted: the handler ran under a claim. Count usage by this one: a
	// replay is not a second use.
	EventExecuted EventKind = "executed"
	// EventReplayed: a stored outcome was sent.
	EventReplayed EventKind = "replayed"
	// EventInFlight: refused, since the first request is still running.
	EventInFlight EventKind = "in_flight"
	// EventKeyReused: refused, since the key belongs to another payload.
	EventKeyReused EventKind = "key_reused"
	// EventRefused: refused for another reason; Code tells.
	EventRefused EventKind = "refused"
	// EventUnguarded: the handler ran without deduplication; Code tells why.
	EventUnguarded EventKind = "unguarded"
	// EventLeaseLost: an execution lost its lease; sent in addition.
	EventLeaseLost EventKind = "lease_lost"
	// EventStoreFault: a call to the store failed; sent in addition.
	EventStoreFault EventKind = "store_fault"
)

// An Outcome says how an execution was settled.
type Outcome string

// How an execution can be settled.
const (
	// OutcomeStored: retries get its response.
	OutcomeStored Outcome = "stored"
	// OutcomeReleased: nothing is kept; a retry runs.
	OutcomeReleased Outcome = "released"
	// OutcomeHeld: whether it took effect is unknown, and retries are held off.
	OutcomeHeld Outcome = "held"
	// OutcomePending: the store did not answer; settling goes on in the background.
	OutcomePending Outcome = "pending"
	// OutcomeUnknown: a commit was sent, and its answer did not come. A retry finds out.
	OutcomeUnknown Outcome = "unknown"
	// OutcomeLost: another owner has taken over; this outcome counts for nothing.
	OutcomeLost Outcome = "lost"
)

// An Event tells an observer what happened to one request (S46). Fields that do
// not apply are zero. Events print without tenant, principal or key; who needs
// them, for metering say, asks Key for its parts.
type Event struct {
	Kind EventKind
	// Key of the operation; zero if the request was refused before it had one.
	Key ScopedKey
	// Attempt that was executed or replayed: 1, 2, …
	Attempt int
	// Status of the response executed or replayed; 0 if the handler did not return.
	Status int
	// Outcome of an execution.
	Outcome Outcome
	// Code of a refusal, of the problem that was sent in place of an execution's response
	// that could not be committed, or of the refusal that running unguarded stood in for.
	Code Code
	// Err is the cause of a store fault, a refusal or a lost lease.
	Err error
	// ClaimTime is how long it took to claim the key, waiting for another execution
	// included.
	ClaimTime time.Duration
	// RunTime is how long the handler ran.
	RunTime time.Duration
	// SettleTime is how long the answer waited for its outcome to be stored.
	SettleTime time.Duration
}
