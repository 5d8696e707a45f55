package idempotency

import (
	"net"
	"net/http"
	"net/url"
	"strings"
)

// A KeyScopeFunc returns the tenant of a request: the customer account that the
// operation belongs to, as the authentication in front of this middleware
// established it, never as the client claims it. "" means that there is none.
type KeyScopeFunc func(*http.Request) string

// A PrincipalFunc returns the caller within the tenant, such as a user or API
// key id. "" means that there is none.
type PrincipalFunc func(*http.Request) string

// A RouteFunc names the operation that a request asks for, so that one key sent
// to two operations is two records (S08). "" fails closed: the request is refused.
type RouteFunc func(*http.Request) string

// RouteName returns a [RouteFunc] that gives every request the same name, such
// as "charge". Production code should use it, or [Middleware.Named]: editing a
// pattern or moving the middleware silently changes a default route, and a retry
// across that deploy would run again.
func RouteName(name string) RouteFunc {
	return func(*http.Request) string { return name }
}

// DefaultRoute is the default of [Config].Route: the method and the ServeMux pattern
// where that names one operation, else the method and the escaped path as received
// (S08), behind the host if the pattern names it. Where operations are given fixed
// names, it is what their [EarlierScope] had.
func DefaultRoute(r *http.Request) string {
	path := receivedPath(r)
	host, pattern := splitPattern(r.Pattern)
	if host != "" && host != hostWithoutPort(r) {
		return r.Method + " " + path // no pattern that ServeMux matched
	}
	if namesOneOperation(pattern, path, r) {
		path = pattern
	}
	return r.Method + " " + host + path
}

// splitPattern returns host and path of a ServeMux pattern, "[METHOD ][HOST]/[PATH]".
func splitPattern(pattern string) (host, path string) {
	if i := strings.IndexAny(pattern, " \t"); i >= 0 {
		pattern = strings.TrimLeft(pattern[i:], " \t")
	}
	if i := strings.IndexByte(pattern, '/'); i >= 0 {
		return pattern[:i], pattern[i:]
	}
	return pattern, ""
}

// hostWithoutPort is what ServeMux compares with the host of a pattern.
func hostWithoutPort(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.Host); err == nil {
		return host
	}
	return r.Host
}

// namesOneOperation reports whether the path of a pattern stands for one
// operation, and for the whole path as received. Behind http.StripPrefix or a
// sub-router it is relative to a part of the path, and would look the same for two
// operations.
func namesOneOperation(pattern, path string, r *http.Request) bool {
	if strings.HasSuffix(pattern, "/") || strings.HasSuffix(pattern, "*") || strings.HasSuffix(pattern, "...}") {
		return false
	}
	return pattern != "" && r.URL.EscapedPath() == path && matches(pattern, path)
}

// matches reports whether each segment of path is the one that pattern has in
// its place, or meets a wildcard there.
func matches(pattern, path string) bool {
	for {
		patternSegment, patternRest, patternMore := strings.Cut(pattern, "/")
		pathSegment, pathRest, pathMore := strings.Cut(path, "/")
		if patternMore != pathMore || !segmentMatches(patternSegment, pathSegment) {
			return false
		}
		if !patternMore {
			return true
		}
		pattern, path = patternRest, pathRest
	}
}

func segmentMatches(pattern, segment string) bool {
	switch {
	case pattern == "{$}":
		return segment == ""
	case strings.HasPrefix(pattern, "{") && strings.HasSuffix(pattern, "}"):
		return segment != ""
	case pattern == segment:
		return true
	}
	// ServeMux compares unescaped segments.
	p, errP := url.PathUnescape(pattern)
	s, errS := url.PathUnescape(segment)
	return errP == nil && errS == nil && p == s
}

// receivedPath is the escaped path of the request as it came in, which no
// handler in front has changed.
func receivedPath(r *http.Request) string {
	path, _, _ := strings.Cut(requestTarget(r), "?")
	if strings.HasPrefix(path, "/") {
		return escapePath(path)
	}
	if _, rest, ok := strings.Cut(path, "://"); ok { // absolute form, as a proxy may send it
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			return escapePath(rest[i:])
		}
		return ""
	}
	return escapePath(path)
}

// escapePath escapes what a client should have escaped, so that its path can be
// taken neither for a pattern nor for bad text. What it did escape stays as it is.
func escapePath(path string) string {
	if strings.IndexFunc(path, mustEscape) < 0 {
		return path
	}
	const digits = "0123456789ABCDEF"
	escaped := make([]byte, 0, len(path)+16)
	for i := range len(path) {
		if c := path[i]; mustEscape(rune(c)) {
			escaped = append(escaped, '%', digits[c>>4], digits[c&15])
		} else {
			escaped = append(escaped, c)
		}
	}
	return string(escaped)
}

// mustEscape reports whether c has no place in a path (RFC 3986, section 3.3).
// Brackets have none either, but package net/url leaves them alone.
func mustEscape(c rune) bool {
	return c <= ' ' || c > '~' || strings.ContainsRune("\"#<>?\\^`{|}", c)
}
