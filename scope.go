package idempotency

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"unicode/utf8"
)

// DefaultVersion is the scope version of a [Config] that names none. The
// version is part of every stored key, so that a later change of what tenant,
// principal or route mean can live beside the records made before it (S06).
const DefaultVersion = "v1"

// Namespaces keep the keys that clients send apart from the keys that the
// server mints itself: no header value can reach the server's (S05).
const (
	// NamespaceClient is the namespace of keys a client sent. They are never trusted.
	NamespaceClient = "u:"
	// NamespaceServer is the namespace of keys the server minted.
	NamespaceServer = "s:"
)

// Limits of the scope's components in bytes (S03).
const (
	MaxVersionLen   = 32
	MaxTenantLen    = 255
	MaxPrincipalLen = 255
	MaxRouteLen     = 512
	MaxKeyLen       = 255
)

// What can be wrong with a component of a scope. Constructors return them
// inside a [*ScopeError], which names the component.
var (
	// ErrMissingScope reports an empty component (S02).
	ErrMissingScope = errors.New("idempotency: missing scope component")
	// ErrBadScope reports a component that contains U+0000, the separator of the flat form (S03).
	ErrBadScope = errors.New("idempotency: scope component contains separator")
	// ErrScopeEncoding reports a component that is not valid UTF-8 (S03).
	ErrScopeEncoding = errors.New("idempotency: scope component is not valid UTF-8")
	// ErrScopeTooLong reports a component over its limit in bytes (S03).
	ErrScopeTooLong = errors.New("idempotency: scope component is too long")
)

// A Component names one part of the tuple that a key is stored under.
type Component string

// The components of the tuple, in its order.
const (
	ComponentVersion   Component = "version"
	ComponentTenant    Component = "tenant"
	ComponentPrincipal Component = "principal"
	ComponentRoute     Component = "route"
	ComponentNamespace Component = "namespace"
	ComponentKey       Component = "key"
)

// A ScopeError says which component of a scope is unusable and why. It never
// holds the component's value. Match the reason with [errors.Is]:
// [ErrMissingScope], [ErrBadScope], [ErrScopeEncoding] or [ErrScopeTooLong].
type ScopeError struct {
	Component Component
	Err       error
}

// Error names the reason and the component.
func (e *ScopeError) Error() string { return e.Err.Error() + ": " + string(e.Component) }

// Unwrap returns the reason.
func (e *ScopeError) Unwrap() error { return e.Err }

// A Scope says whose key it is and for which operation. All four parts are
// required; nothing in them is trimmed, folded or normalised (S03).
type Scope struct {
	// Version of the scope's meaning, usually [DefaultVersion].
	Version string
	// Tenant is the customer account that the operation belongs to.
	Tenant string
	// Principal is the caller within the tenant.
	Principal string
	// Route names the operation, such as "charge".
	Route string
}

// A ScopedKey is the tuple (version, tenant, principal, route, namespace, key)
// that an operation is stored under (S01). It is comparable: two keys are equal
// if and only if all their components are.
//
// It can be made only by [ClientKey] and [ServerKey], which validate it. The
// zero value is no key, and every [Store] refuses it. Formatting and logging
// show a digest, never the parts; but package fmt cannot call the methods of an
// unexported field, so do not print structs that hold a key in one.
type ScopedKey struct {
	version, tenant, principal, route, namespace, key string
}

// ClientKey returns the stored key for a key that a client sent. The error is a
// [*ScopeError].
func ClientKey(s Scope, key string) (ScopedKey, error) {
	return scoped(s, NamespaceClient, key)
}

// ServerKey returns the stored key for a key that the server minted itself. The
// error is a [*ScopeError].
func ServerKey(s Scope, key string) (ScopedKey, error) {
	return scoped(s, NamespaceServer, key)
}

// scoped is the only place where a ScopedKey is made (S01).
func scoped(s Scope, namespace, key string) (ScopedKey, error) {
	for _, c := range [...]struct {
		name  Component
		value string
		limit int
	}{
		{ComponentVersion, s.Version, MaxVersionLen},
		{ComponentTenant, s.Tenant, MaxTenantLen},
		{ComponentPrincipal, s.Principal, MaxPrincipalLen},
		{ComponentRoute, s.Route, MaxRouteLen},
		{ComponentKey, key, MaxKeyLen},
	} {
		if err := checkComponent(c.value, c.limit); err != nil {
			return ScopedKey{}, &ScopeError{Component: c.name, Err: err}
		}
	}
	return ScopedKey{
		version: s.Version, tenant: s.Tenant, principal: s.Principal, route: s.Route,
		namespace: namespace, key: key,
	}, nil
}

func checkComponent(value string, limit int) error {
	switch {
	case value == "":
		return ErrMissingScope
	case len(value) > limit:
		return ErrScopeTooLong
	case strings.IndexByte(value, 0) >= 0:
		return ErrBadScope
	case !utf8.ValidString(value):
		return ErrScopeEncoding
	}
	return nil
}

// Version returns the scope's version.
func (k ScopedKey) Version() string { return k.version }

// Tenant returns the customer account that the operation belongs to.
func (k ScopedKey) Tenant() string { return k.tenant }

// Principal returns the caller within the tenant.
func (k ScopedKey) Principal() string { return k.principal }

// Route returns the operation's name.
func (k ScopedKey) Route() string { return k.route }

// Namespace returns [NamespaceClient] or [NamespaceServer].
func (k ScopedKey) Namespace() string { return k.namespace }

// Key returns the idempotency key as the client sent or the server minted it.
func (k ScopedKey) Key() string { return k.key }

// IsZero reports whether k is the zero value, which is no key.
func (k ScopedKey) IsZero() bool { return k == ScopedKey{} }

// Flat returns the key as one string, its components joined by U+0000, for
// key-value stores. It is injective: two keys have the same flat form only if
// they are equal (S04). It holds tenant, principal and key in clear text.
func (k ScopedKey) Flat() string {
	return strings.Join([]string{k.version, k.tenant, k.principal, k.route, k.namespace, k.key}, "\x00")
}

// A KeyDigest stands for a [ScopedKey] where its parts are not needed: SHA-256 of its
// flat form. The zero value is no key's.
type KeyDigest [sha256.Size]byte

// Digest returns the key's digest.
func (k ScopedKey) Digest() KeyDigest { return sha256.Sum256([]byte(k.Flat())) }

// compare orders keys by their components, each byte by byte.
func (k ScopedKey) compare(other ScopedKey) int {
	return cmp.Or(
		strings.Compare(k.version, other.version),
		strings.Compare(k.tenant, other.tenant),
		strings.Compare(k.principal, other.principal),
		strings.Compare(k.route, other.route),
		strings.Compare(k.namespace, other.namespace),
		strings.Compare(k.key, other.key),
	)
}

// String returns a short digest of the key: enough to find the lines of one
// operation in a log, nothing of its parts (S01, S46).
func (k ScopedKey) String() string {
	if k.IsZero() {
		return "idempotency-key:none"
	}
	digest := k.Digest()
	return "idempotency-key:" + hex.EncodeToString(digest[:8])
}

// Format writes [ScopedKey.String] for every verb, so that none shows the parts.
func (k ScopedKey) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// LogValue returns [ScopedKey.String] for package slog.
func (k ScopedKey) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalText returns [ScopedKey.String]: what encoders print is the digest, too.
func (k ScopedKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }
