package idempotency

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A ConfigError is one fault of a [Config] or of another argument of a
// constructor, which reports all of them at once, joined by [errors.Join].
type ConfigError struct {
	// Field is the name of the field, or of the argument.
	Field string
	// Value is what it holds, as text; empty for secrets.
	Value string
	// Reason says what is wrong with it.
	Reason string
}

// Error names field, value and reason.
func (e *ConfigError) Error() string {
	if e.Value == "" {
		return "idempotency: config: " + e.Field + ": " + e.Reason
	}
	return fmt.Sprintf("idempotency: config: %s: %q %s", e.Field, e.Value, e.Reason)
}

// Defaults of a Config.
const (
	defaultTTL              = 24 * time.Hour
	defaultLease            = 30 * time.Second
	defaultStoreTimeout     = 5 * time.Second
	defaultMaxRequestBytes  = 10 << 20
	defaultMaxResponseBytes = 1 << 20
	defaultSpoolThreshold   = 64 << 10
	minSecretLen            = 16
)

// withDefaults returns a copy of c that shares nothing with it and holds no zero
// value that stands for a default.
func (c Config) withDefaults() Config {
	c.Version = orDefault(c.Version, DefaultVersion)
	c.TTL = orDefault(c.TTL, defaultTTL)
	c.Lease = orDefault(c.Lease, defaultLease)
	c.StoreTimeout = orDefault(c.StoreTimeout, defaultStoreTimeoutFor(c.Lease))
	c.MaxRequestBytes = orDefault(c.MaxRequestBytes, defaultMaxRequestBytes)
	c.MaxResponseBytes = orDefault(c.MaxResponseBytes, defaultMaxResponseBytes)
	c.SpoolThreshold = orDefault(c.SpoolThreshold, defaultSpoolThreshold)
	c.DocumentationURL = orDefault(c.DocumentationURL, DefaultDocumentationURL)
	if c.Methods == nil {
		c.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	c.Methods = slices.Clone(c.Methods)
	c.EarlierScopes = slices.Clone(c.EarlierScopes)
	c.FingerprintSecret = slices.Clone(c.FingerprintSecret)
	if c.Route == nil {
		c.Route = DefaultRoute
	}
	if c.Keep == nil {
		c.Keep = DefaultKeep
	}
	if c.RenderProblem == nil {
		c.RenderProblem = RenderProblem
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// defaultStoreTimeoutFor is half the lease where that is short: what is late must
// still find it live. A lease that is a fault itself makes no second one.
func defaultStoreTimeoutFor(lease time.Duration) time.Duration {
	if lease > 0 {
		return min(defaultStoreTimeout, lease/2)
	}
	return defaultStoreTimeout
}

func orDefault[T comparable](value, byDefault T) T {
	var zero T
	if value == zero {
		return byDefault
	}
	return value
}

// validate returns all faults of a config that has its defaults.
func (c Config) validate() []error {
	var faults []error
	fault := func(field, value, reason string) {
		faults = append(faults, &ConfigError{Field: field, Value: value, Reason: reason})
	}
	if c.KeyScope == nil {
		fault("KeyScope", "", "is required: without a tenant, one customer's key is another's")
	}
	if c.Principal == nil {
		fault("Principal", "", "is required: without a caller, one user's key is another's")
	}
	if err := checkComponent(c.Version, MaxVersionLen); err != nil {
		fault("Version", c.Version, "is no scope component: "+err.Error())
	}
	if len(c.Methods) == 0 {
		fault("Methods", "", "guard nothing: leave them nil for POST and PATCH")
	}
	for _, method := range c.Methods {
		if !isMethod(method) {
			fault("Methods", method, "is not an HTTP method in capital letters")
		}
	}
	if c.FingerprintSecret != nil && len(c.FingerprintSecret) < minSecretLen {
		fault("FingerprintSecret", "", fmt.Sprintf("is shorter than %d bytes", minSecretLen))
	}
	for _, d := range []struct {
		field  string
		value  time.Duration
		least  time.Duration
		reason string
	}{
		{"TTL", c.TTL, 1, "is not positive"},
		{"Lease", c.Lease, 1, "is not positive"},
		{"StoreTimeout", c.StoreTimeout, 1, "is not positive"},
		{"MaxExecution", c.MaxExecution, 0, "is negative"},
		{"WaitInFlight", c.WaitInFlight, 0, "is negative"},
	} {
		if d.value < d.least {
			fault(d.field, d.value.String(), d.reason)
		}
	}
	if c.Lease > 0 && c.StoreTimeout >= c.Lease {
		fault("StoreTimeout", c.StoreTimeout.String(), "is not shorter than the Lease of "+c.Lease.String())
	}
	if c.Lease > 0 && c.TTL > 0 && c.TTL < c.Lease {
		fault("TTL", c.TTL.String(), "is shorter than the Lease of "+c.Lease.String())
	}
	for _, n := range []struct {
		field string
		value int64
	}{
		{"MaxRequestBytes", c.MaxRequestBytes},
		{"MaxResponseBytes", c.MaxResponseBytes},
		{"SpoolThreshold", c.SpoolThreshold},
	} {
		if n.value < 0 {
			fault(n.field, strconv.FormatInt(n.value, 10), "is negative")
		}
	}
	if c.MaxResponseBytes > maxResponseBody {
		fault("MaxResponseBytes", strconv.FormatInt(c.MaxResponseBytes, 10), fmt.Sprintf("is more than the storable %d", maxResponseBody))
	}
	if c.Transactional {
		for _, excluded := range []struct {
			field  string
			set    bool
			reason string
		}{
			{"OptionalKeys", c.OptionalKeys, "cannot be with Transactional: a handler would find no transaction"},
			{"UnguardedWithoutIdentity", c.UnguardedWithoutIdentity, "cannot be with Transactional: a handler would find no transaction"},
			{"UnguardedWhenStoreDown", c.UnguardedWhenStoreDown, "cannot be with Transactional: a handler would find no transaction"},
			{"HoldAbandoned", c.HoldAbandoned, "cannot be with Transactional: an execution that breaks off leaves nothing behind"},
		} {
			if excluded.set {
				fault(excluded.field, "true", excluded.reason)
			}
		}
	}
	faults = append(faults, c.validateEarlierScopes()...)
	if reason := checkDocumentationURL(c.DocumentationURL); reason != "" {
		fault("DocumentationURL", c.DocumentationURL, reason)
	}
	return faults
}

func isMethod(s string) bool {
	return s != "" && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") == ""
}

// checkDocumentationURL makes sure that a URL can take a fragment and stand
// between the angle brackets of a Link header.
func checkDocumentationURL(s string) string {
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http"):
		return "is not an absolute http or https URL"
	case strings.Contains(s, "#"):
		return "has a fragment: the problem's code becomes that"
	case strings.ContainsAny(s, " <>\""):
		return "contains a character that a Link header cannot hold"
	}
	return ""
}
