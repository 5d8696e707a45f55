package idempotency

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

// An EarlierScope is a scope that an operation may be recorded under already. What is
// not set is as in the [Config], and so one part may have changed, or all.
//
// A function that returns "" says that this request has no name under this scope: its
// tenant is none that was merged, say. So does a route that is too long for a scope.
type EarlierScope struct {
	_ [0]func() // keyed literals only

	// Kind says what the scope has become. Required.
	//
	//   - AliasRenamed: the requests are the same, only named otherwise now. A request whose
	//     key is bound to another payload there is refused with 422 key-reused.
	//   - AliasMerged: the requests were another identity's. A key that is bound to another
	//     payload there is that one's, and free for this one.
	Kind AliasKind
	// Version of the scope.
	Version string
	// KeyScope returns the tenant that the request's would have been.
	KeyScope KeyScopeFunc
	// Principal returns the caller that the request's would have been.
	Principal PrincipalFunc
	// Route returns the name that the operation would have had. What [Middleware.Named]
	// gives is as if it were in the [Config].
	Route RouteFunc
}

// isOther reports whether anything of the scope is set.
func (e *EarlierScope) isOther() bool {
	return e.Version != "" || e.KeyScope != nil || e.Principal != nil || e.Route != nil
}

// scope returns the request's scope as it would have been; ok is false if it has none.
func (e *EarlierScope) scope(r *http.Request, today ScopedKey) (s Scope, ok bool) {
	s = Scope{
		Version: orDefault(e.Version, today.version), Tenant: today.tenant, Principal: today.principal, Route: today.route,
	}
	if e.KeyScope != nil {
		s.Tenant = e.KeyScope(r)
	}
	if e.Principal != nil {
		s.Principal = e.Principal(r)
	}
	if e.Route != nil {
		s.Route = e.Route(r)
	}
	return s, s.Tenant != "" && s.Principal != "" && s.Route != ""
}

// errTooManyNames is an operation that may be recorded under more names than a claim can
// have.
var errTooManyNames = fmt.Errorf("idempotency: an operation has more than %d earlier names", MaxAliases)

// aliases returns the names that the request's operation may be recorded under beside
// today's, the predecessors' among them.
func (c *Config) aliases(r *http.Request, today ScopedKey, sent string, predecessors []Identity) ([]Alias, error) {
	var aliases []Alias
	add := func(s Scope, kind AliasKind) error {
		key, err := ClientKey(s, sent)
		if isRouteTooLong(err) { // it was refused then: nothing is recorded under it
			return nil
		}
		known := func(a Alias) bool { return a.Key == key }
		if err == nil && key != today && !slices.ContainsFunc(aliases, known) {
			aliases = append(aliases, Alias{Key: key, Kind: kind})
		}
		return err
	}
	for _, id := range predecessors {
		s := Scope{Version: today.version, Tenant: id.Tenant, Principal: id.Principal, Route: today.route}
		if err := add(s, AliasMerged); err != nil {
			return nil, err
		}
	}
	for i := range c.EarlierScopes {
		e := &c.EarlierScopes[i]
		if s, ok := e.scope(r, today); ok {
			if err := add(s, e.Kind); err != nil {
				return nil, err
			}
		}
	}
	if len(aliases) > MaxAliases {
		return nil, errTooManyNames
	}
	return aliases, nil
}

// isRouteTooLong reports whether a scope is unusable because the client asked for a path
// that is too long to be a route.
func isRouteTooLong(err error) bool {
	var scope *ScopeError
	return errors.As(err, &scope) && scope.Component == ComponentRoute && errors.Is(err, ErrScopeTooLong)
}

// validateEarlierScopes returns all faults of the earlier scopes.
func (c *Config) validateEarlierScopes() []error {
	var faults []error
	fault := func(i int, value, reason string) {
		field := "EarlierScopes"
		if i >= 0 {
			field += "[" + strconv.Itoa(i) + "]"
		}
		faults = append(faults, &ConfigError{Field: field, Value: value, Reason: reason})
	}
	if len(c.EarlierScopes) > MaxAliases {
		fault(-1, strconv.Itoa(len(c.EarlierScopes)), "are more than "+strconv.Itoa(MaxAliases))
	}
	for i := range c.EarlierScopes {
		e := &c.EarlierScopes[i]
		if !e.Kind.isKnown() {
			fault(i, "", "has no Kind: AliasRenamed or AliasMerged")
		}
		if !e.isOther() {
			fault(i, "", "is no other scope than today's")
		}
		if e.Version != "" {
			if err := checkComponent(e.Version, MaxVersionLen); err != nil {
				fault(i, e.Version, "has a Version that is no scope component: "+err.Error())
			}
		}
	}
	return faults
}
