package idempotency

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Errors of the Store contract that a caller must tell apart.
var (
	// ErrLeaseLost reports that the owner in a [Lease] does not hold the record
	// (any more). Nothing was touched (S27).
	ErrLeaseLost = errors.New("idempotency: lease lost")
	// ErrInvalidClaim reports a [Claim] or [Lease] that no store may accept:
	// a zero key, no owner, or a duration out of range.
	ErrInvalidClaim = errors.New("idempotency: invalid claim")
	// ErrNotClaimed reports that a store failed before a [Claim] could take its key,
	// and that none is on its way any more: the server could not be reached, or
	// answered with an error. A store that does not know leaves it out.
	ErrNotClaimed = errors.New("idempotency: key not taken")
)

// A Store keeps one record for each operation. Its four methods are atomic
// steps, safe for concurrent use by any number of processes. It knows neither
// HTTP nor policy: it compares fingerprints in one place only, the take-over of
// a released or abandoned record. Package storetest is this contract as a test.
//
// What stands under a key is a result; an error means that the store failed or
// could not be reached. All times are judged by the store's own clock (S28).
//
// A record is expired once its TTL has passed and it is completed, released, or
// in progress with its lease ended; a record that is held (see [Claim]) does not
// expire while it is in progress. An expired record is as good as none (S29).
// Until somebody claims or deletes it, a store may or may not let its owner
// settle it.
//
// Abilities that not every store has are separate interfaces: [AliasStore],
// [TransactionalStore], [ExpiredDeleter], [ConfigChecker].
type Store interface {
	// Claim takes c.Key for c.Owner if it is free, and returns the record as it
	// then stands. The key is free, and the claim wins, when there is no record or
	// an expired one (attempt 1), or one that is released, or abandoned and not
	// held, with the fingerprint of this claim (the record's attempt + 1). In all
	// other cases nothing is changed. Of any number of concurrent claims one wins.
	//
	// After an error the owner is dead: it may or may not hold the record. The
	// caller releases it and tries again with a new one. An error that wraps
	// [ErrInvalidClaim], [ErrStoreFull] or [ErrNotClaimed] says that the key was not
	// taken and will not be: nothing is to be released.
	Claim(ctx context.Context, c Claim) (Record, error)

	// Complete stores r as the outcome of the lease's operation and ends the lease. Under
	// those of its keys that are to be withheld, only the status is stored, not replayable.
	// It returns [ErrLeaseLost] and touches nothing unless every key of the lease is
	// in progress under its owner, be the lease's time over or not. Repeated by the
	// owner that completed, it succeeds and changes nothing. An error that wraps
	// [ErrBadResponse] says that the store cannot hold such an outcome; the caller then
	// completes with its status alone, not replayable.
	Complete(ctx context.Context, l Lease, r Response) error

	// Release gives the keys of the lease up without an outcome. The records stay,
	// released, with fingerprint, attempt and expiry, so that the same request may
	// run again and another payload is still refused (S24). Errors as for Complete.
	Release(ctx context.Context, l Lease) error

	// Extend makes the lease end l.Duration from now. A Duration of zero ends it
	// now: the record is abandoned. It returns [ErrLeaseLost] and touches nothing
	// unless every key of the lease is in progress under its owner, be the lease's
	// time over or not. A held record that is abandoned stays so, whatever renewal
	// was still on its way: for it, a Duration other than zero gets ErrLeaseLost.
	Extend(ctx context.Context, l Lease) error
}

// An ExpiredDeleter is a [Store] that can be told to delete expired records.
type ExpiredDeleter interface {
	// DeleteExpired deletes at most limit expired records and returns how many. It
	// never deletes one that is not expired, and never blocks a claim for longer
	// than one such batch takes (S29).
	DeleteExpired(ctx context.Context, limit int) (int, error)
}

// A ConfigChecker is a [Store] that can be misconfigured. [New] asks it.
type ConfigChecker interface {
	// CheckConfig returns what is wrong with how the store was made, without calling
	// it: a [*ConfigError] for each fault, joined; nil if there is none.
	CheckConfig() error
}

// A Claim asks for the right to run one operation.
type Claim struct {
	// Key names the operation.
	Key ScopedKey
	// Aliases are other names that it may be recorded under, the latest first. Only an
	// [AliasStore] gets claims that have any.
	Aliases []Alias
	// Fingerprint of the request's payload.
	Fingerprint Fingerprint
	// OtherFingerprints are the payload's by all other schemes that it has one by. Only
	// claims with Aliases have any: a record under one of their names may have been made
	// by another scheme.
	OtherFingerprints []Fingerprint
	// Owner is a fresh random UUID, used for this claim only (S27).
	Owner uuid.UUID
	// Lease is how long the claim holds without being extended.
	Lease time.Duration
	// TTL is how long the record is kept, counted from this claim.
	TTL time.Duration
	// Hold marks the record: if it is abandoned, no claim takes it over. A claim
	// with Hold takes no abandoned record over, marked or not.
	Hold bool
}

// Validate returns an error that wraps [ErrInvalidClaim] if no store may accept
// c. Every store calls it first.
func (c Claim) Validate() error {
	switch {
	case c.Key.IsZero():
		return invalidClaim("zero key")
	case c.Owner == uuid.Nil:
		return invalidClaim("no owner")
	case c.Lease <= 0:
		return invalidClaim("lease is not positive")
	case c.TTL <= 0:
		return invalidClaim("TTL is not positive")
	}
	return c.validateAliases()
}

// A Lease is what the winner of a claim holds.
type Lease struct {
	// Keys are all the names of the operation that the owner claimed.
	Keys []ScopedKey
	// Withhold are those of Keys that are another identity's, too: it is to find there that
	// the operation is done, and not its answer, which may never have been its own (S44).
	Withhold []ScopedKey
	// Owner is the owner of the claim that won.
	Owner uuid.UUID
	// Duration is how long the lease holds from the claim, or from an Extend.
	Duration time.Duration
}

// outcome returns what is to be stored under one of the keys where r is the outcome.
func (l Lease) outcome(k ScopedKey, r Response) Response {
	if slices.Contains(l.Withhold, k) {
		return r.withoutAnswer()
	}
	return r
}

// withoutAnswer returns r as one that cannot be replayed.
func (r Response) withoutAnswer() Response { return Response{Status: r.Status, NotReplayable: true} }

// Validate returns an error that wraps [ErrInvalidClaim] if no store may accept
// l. Every store calls it first.
func (l Lease) Validate() error {
	if len(l.Keys) == 0 {
		return invalidClaim("lease without keys")
	}
	for _, k := range l.Keys {
		if k.IsZero() {
			return invalidClaim("zero key")
		}
	}
	for _, k := range l.Withhold {
		if !slices.Contains(l.Keys, k) {
			return invalidClaim("key to be withheld is none of the lease")
		}
	}
	switch {
	case l.Owner == uuid.Nil:
		return invalidClaim("no owner")
	case l.Duration < 0:
		return invalidClaim("negative duration")
	}
	return nil
}

// State says how a record stands towards the claim that met it.
type State int

// The states of a [Record]. The zero State is none of them.
const (
	// StateClaimed: this claim won; its owner runs the operation.
	StateClaimed State = iota + 1
	// StateInProgress: another owner runs the operation and its lease is live.
	StateInProgress
	// StateCompleted: the operation is done; Response is its outcome.
	StateCompleted
	// StateReleased: given up without an outcome, bound to another fingerprint.
	StateReleased
	// StateAbandoned: the lease ended without an outcome, and the record is held,
	// bound to another fingerprint, or met by a claim with Hold.
	StateAbandoned
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case StateClaimed:
		return "claimed"
	case StateInProgress:
		return "in progress"
	case StateCompleted:
		return "completed"
	case StateReleased:
		return "released"
	case StateAbandoned:
		return "abandoned"
	}
	return "unknown"
}

// A Record is what stands under a key after a [Claim].
type Record struct {
	// State towards this claim.
	State State
	// Fingerprint the record is bound to; one of the claim's own if State is StateClaimed.
	Fingerprint Fingerprint
	// Attempt counts the claims that won since the record was made: 1, 2, …
	Attempt int
	// LeaseLeft is how long the lease of a record in progress still holds. Zero for
	// other states.
	LeaseLeft time.Duration
	// Response is the outcome of a completed record. Do not modify it.
	Response Response

	// Keys are the names that the claim has taken, if State is StateClaimed and the claim
	// has aliases: what its [Lease] is to name.
	Keys []ScopedKey
	// Origin is the digest of the name that the operation stands under, or, at its first
	// attempt, of the last of the names that the claim takes, if State is StateClaimed.
	// Every later attempt gets the same, whatever names it is claimed by: downstream keys
	// are derived from it (S45). Zero stands for Claim.Key.
	Origin KeyDigest
}

// A Fingerprint tells whether two requests with one key are the same request
// (S16). Its first byte is the scheme it was made by, the rest a digest. Stores
// keep it as it is.
type Fingerprint [1 + sha256.Size]byte

// A Response is the stored outcome of an operation. A Store keeps it byte for
// byte; [Response.MarshalBinary] is one way to. Once handed over, neither side
// modifies what its slices and maps point at.
type Response struct {
	// Status is the HTTP status code.
	Status int
	// Header holds the fields that the handler set, each standing for the whole of
	// its values. A name without values is one that must not appear: the handler
	// deleted it.
	Header http.Header
	// AddedHeader holds values that the handler appended to fields that were
	// already on the response when it was called.
	AddedHeader http.Header
	// Trailer holds the trailer fields.
	Trailer http.Header
	// Body is the whole body.
	Body []byte
	// NotReplayable marks an outcome too large to be stored, whose body is shorter than the
	// handler declared, or that is withheld (see [Lease]): only Status is kept, and a retry learns that the
	// operation is done, but not its answer (S23).
	NotReplayable bool
}

func invalidClaim(reason string) error { return fmt.Errorf("%w: %s", ErrInvalidClaim, reason) }
