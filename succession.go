package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// An Identity is whose operations are told apart: a tenant, and a caller within it.
type Identity struct {
	// Tenant is the customer account, as [Scope].Tenant.
	Tenant string
	// Principal is the caller within the tenant. In a [Succession], "" stands for every
	// one of the tenant.
	Principal string
}

// A PredecessorsFunc returns the identities whose operations are today's by now: those
// that were merged into it, say, or that its caller had before (S44). Neither may be
// today's. It must be safe for concurrent use. An error means that it is not known, and
// refuses the request.
type PredecessorsFunc func(ctx context.Context, today Identity) ([]Identity, error)

// A Succession makes the operations of one identity those of another: their retries may
// come from that one (S44). See [PostgresSuccessions].
type Succession struct {
	// Old is the identity that is succeeded. It keeps its own operations as well.
	Old Identity
	// New is the identity that takes over.
	New Identity
	// Begins is from when on it counts, by the database's clock.
	Begins time.Time
	// Ends is when it counts no more.
	Ends time.Time
}

// Errors of a succession.
var (
	// ErrSuccessionCycle reports that an identity would succeed itself, directly or by
	// others.
	ErrSuccessionCycle = errors.New("idempotency: an identity would succeed itself")
	// ErrBadSuccession reports a succession that cannot be: of an identity that is no
	// part of a scope, of one caller by a whole tenant or the other way round, or without
	// a time.
	ErrBadSuccession = errors.New("idempotency: bad succession")
	// ErrNoSuccession reports that there is no such succession, or that it has ended.
	ErrNoSuccession = errors.New("idempotency: no such succession")
)

// validate returns an error that wraps ErrBadSuccession or ErrSuccessionCycle if s
// cannot be.
func (s Succession) validate() error {
	if (s.Old.Principal == "") != (s.New.Principal == "") {
		return fmt.Errorf("%w: of one caller by a tenant, or of a tenant by one caller", ErrBadSuccession)
	}
	for _, id := range []Identity{s.Old, s.New} {
		if err := id.validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrBadSuccession, err)
		}
	}
	if s.Old == s.New {
		return ErrSuccessionCycle
	}
	return nil
}

// validate returns a *ScopeError if the identity can be in no scope.
func (id Identity) validate() error {
	if err := checkComponent(id.Tenant, MaxTenantLen); err != nil {
		return &ScopeError{Component: ComponentTenant, Err: err}
	}
	if id.Principal == "" {
		return nil
	}
	if err := checkComponent(id.Principal, MaxPrincipalLen); err != nil {
		return &ScopeError{Component: ComponentPrincipal, Err: err}
	}
	return nil
}

// errSuccessionDuration is a succession that would end before it begins.
var errSuccessionDuration = fmt.Errorf("%w: it lasts no time", ErrBadSuccession)

// across returns what becomes of id on the way from one side of a succession to the other:
// where a whole tenant is succeeded, its callers keep their names. ok is false where id
// has no part in it.
func across(from, to, id Identity) (other Identity, ok bool) {
	switch {
	case from.Tenant != id.Tenant:
		return Identity{}, false
	case from.Principal == "":
		return Identity{Tenant: to.Tenant, Principal: id.Principal}, true
	case id.Principal == "", id.Principal == from.Principal:
		return to, true
	}
	return Identity{}, false
}

// predecessor returns whom id has succeeded by s.
func (s Succession) predecessor(id Identity) (Identity, bool) { return across(s.New, s.Old, id) }

// successor returns who succeeds id, or some callers of it, by s.
func (s Succession) successor(id Identity) (Identity, bool) { return across(s.Old, s.New, id) }

// closesCycle reports whether s, beside all, lets an identity succeed itself. Where a
// whole tenant meets some callers of another one, it may see a cycle that is none.
func (s Succession) closesCycle(all []Succession) bool {
	seen := map[Identity]bool{s.New: true}
	for next := []Identity{s.New}; len(next) > 0; next = next[1:] {
		if _, meets := s.successor(next[0]); meets {
			return true
		}
		for _, other := range all {
			if id, ok := other.successor(next[0]); ok && !seen[id] {
				seen[id] = true
				next = append(next, id)
			}
		}
	}
	return false
}
