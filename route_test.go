package idempotency_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A rawConn is a connection to a site on which a test writes what it likes.
type rawConn struct {
	*net.TCPConn
	reader *bufio.Reader
}

func dialRaw(t *testing.T, s *site) *rawConn {
	t.Helper()
	dialer := net.Dialer{Timeout: 10 * time.Second}
	conn, err := dialer.DialContext(t.Context(), "tcp", s.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	return &rawConn{TCPConn: conn.(*net.TCPConn), reader: bufio.NewReader(conn)}
}

func (c *rawConn) write(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(c.TCPConn, text)
	require.NoError(t, err)
}

// read returns the next response, be it an informational one.
func (c *rawConn) read(t *testing.T, method string) reply {
	t.Helper()
	resp, err := http.ReadResponse(c.reader, &http.Request{Method: method})
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	a := reply{status: resp.StatusCode, header: resp.Header, body: string(body), length: resp.ContentLength}
	a.header.Del("Date")
	a.header.Del("Content-Length")
	return a
}

// rawHead returns a request up to its last field line.
func rawHead(method, target, key string, fields ...string) string {
	lines := []string{method + " " + target + " HTTP/1.1", headerTenant + ": acme", headerCaller + ": alice"}
	if key != "" {
		lines = append(lines, idempotency.HeaderKey+": "+key)
	}
	return strings.Join(append(lines, fields...), "\r\n") + "\r\n"
}

func exchangeRaw(t *testing.T, s *site, method, text string) reply {
	t.Helper()
	conn := dialRaw(t, s)
	defer conn.Close()
	conn.write(t, text)
	return conn.read(t, method)
}

// A routeRun is what a handler saw of one run.
type routeRun struct{ handler, route string }

// A routeSpy makes handlers that say under which route they run.
type routeSpy struct {
	mu   sync.Mutex
	runs []routeRun
}

func (s *routeSpy) handler(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		run := routeRun{handler: name, route: "(unguarded)"}
		if exec, ok := idempotency.FromContext(r.Context()); ok {
			run.route = exec.Key().Route()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.runs = append(s.runs, run)
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprintf(w, "%s ran as number %d", name, len(s.runs))
	})
}

func (s *routeSpy) take() []routeRun {
	s.mu.Lock()
	defer s.mu.Unlock()
	runs := s.runs
	s.runs = nil
	return runs
}

// A leftPath is the part of the path that a pathRouter has still to route.
type leftPath struct{}

// A pathRouter routes as chi does: on a path that it keeps in the request's
// context, with patterns that are relative to its mount.
type pathRouter struct{ routes []pathRoute }

type pathRoute struct {
	pattern string
	handler http.Handler
	mounted bool
}

func (p *pathRouter) handle(pattern string, h http.Handler) {
	p.routes = append(p.routes, pathRoute{pattern: pattern, handler: h})
}

func (p *pathRouter) mount(prefix string, h http.Handler) {
	p.routes = append(p.routes, pathRoute{pattern: prefix + "/*", handler: h, mounted: true})
}

func (p *pathRouter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := r.Context().Value(leftPath{}).(string)
	if !ok {
		path = r.URL.EscapedPath()
	}
	for _, route := range p.routes {
		left, ok := routeLeft(route.pattern, path)
		if !ok {
			continue
		}
		if route.mounted {
			r = r.WithContext(context.WithValue(r.Context(), leftPath{}, left))
		}
		r.Pattern = route.pattern
		route.handler.ServeHTTP(w, r)
		return
	}
	http.NotFound(w, r)
}

// routeLeft matches path against a pattern with {wildcard} segments and an
// optional * at its end, and returns what stands in the place of that.
func routeLeft(pattern, path string) (left string, ok bool) {
	for {
		want, morePattern, patternGoesOn := strings.Cut(pattern, "/")
		if want == "*" {
			return "/" + path, true
		}
		have, morePath, pathGoesOn := strings.Cut(path, "/")
		wildcard := strings.HasPrefix(want, "{") && have != ""
		if want != have && !wildcard || patternGoesOn != pathGoesOn {
			return "", false
		}
		if !patternGoesOn {
			return "", true
		}
		pattern, path = morePattern, morePath
	}
}

// shorten is http.StripPrefix as routers do it that keep r.URL.RawPath as it is,
// and cut where they like.
func shorten(prefix string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := *r.URL
		u.Path = "/" + strings.TrimPrefix(strings.TrimPrefix(u.Path, prefix), "/")
		r = r.WithContext(r.Context())
		r.URL = &u
		h.ServeHTTP(w, r)
	})
}

// A routedOp is one operation of a placement: how it is asked for, the handler
// that must run, and its default route.
type routedOp struct {
	method, target, host string // default: POST, host "api.test"
	handler, route       string
}

// muxOf returns a ServeMux with alternating patterns and handlers.
func muxOf(patternsAndHandlers ...any) *http.ServeMux {
	mux := http.NewServeMux()
	for i := 0; i < len(patternsAndHandlers); i += 2 {
		mux.Handle(patternsAndHandlers[i].(string), patternsAndHandlers[i+1].(http.Handler))
	}
	return mux
}

// S08: wherever the middleware stands, no two operations share a record, and a
// retry finds its own.
func TestS08DefaultRoute(t *testing.T) {
	type guard = func(http.Handler) http.Handler
	for _, tc := range []struct {
		name  string
		build func(guard guard, op func(name string) http.Handler) http.Handler
		ops   []routedOp
	}{
		{
			name: "around a mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return guard(muxOf("POST /v1/charges", op("charge"), "POST /v1/refunds", op("refund"),
					"POST /v1/orders/{id}/pay", op("pay"), "/v1/any", op("any"), "POST /v1/files/{path...}", op("file")))
			},
			ops: []routedOp{
				{target: "/v1/charges", handler: "charge", route: "POST /v1/charges"},
				{target: "/v1/refunds", handler: "refund", route: "POST /v1/refunds"},
				{target: "/v1/orders/1/pay", handler: "pay", route: "POST /v1/orders/1/pay"},
				{target: "/v1/orders/2/pay", handler: "pay", route: "POST /v1/orders/2/pay"},
				{target: "/v1/any", handler: "any", route: "POST /v1/any"},
				{method: "PATCH", target: "/v1/any", handler: "any", route: "PATCH /v1/any"},
				{target: "/v1/files/a/b", handler: "file", route: "POST /v1/files/a/b"},
			},
		},
		{
			name: "around routes of a mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /v1/charges", guard(op("charge")), "POST /v1/refunds", guard(op("refund")),
					"POST /v1/orders/{id}/pay", guard(op("pay")), "POST /v1/orders/{id}/cancel", guard(op("cancel")))
			},
			ops: []routedOp{
				{target: "/v1/charges?expand=all", handler: "charge", route: "POST /v1/charges"},
				{target: "/v1/refunds", handler: "refund", route: "POST /v1/refunds"},
				{target: "/v1/orders/1/pay", handler: "pay", route: "POST /v1/orders/{id}/pay"},
				{target: "/v1/orders/1/cancel", handler: "cancel", route: "POST /v1/orders/{id}/cancel"},
			},
		},
		{
			name: "patterns without a method",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("/charges", guard(op("charge")), "/orders/{id}", guard(op("order")))
			},
			ops: []routedOp{
				{target: "/charges", handler: "charge", route: "POST /charges"},
				{method: "PATCH", target: "/charges", handler: "charge", route: "PATCH /charges"},
				{target: "/orders/1", handler: "order", route: "POST /orders/{id}"},
				{method: "PATCH", target: "/orders/1", handler: "order", route: "PATCH /orders/{id}"},
			},
		},
		{
			name: "a GET pattern, which serves HEAD too",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("GET /reports/{id}", guard(op("get")), "POST /reports/{id}", guard(op("post")))
			},
			ops: []routedOp{
				{method: "GET", target: "/reports/1", handler: "get", route: "GET /reports/{id}"},
				{method: "HEAD", target: "/reports/1", handler: "get", route: "HEAD /reports/{id}"},
				{target: "/reports/1", handler: "post", route: "POST /reports/{id}"},
			},
		},
		{
			name: "a tab between method and path",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST\t/charges/{id}", guard(op("charge")), "POST \t /refunds/{id}", guard(op("refund")))
			},
			ops: []routedOp{
				{target: "/charges/1", handler: "charge", route: "POST /charges/{id}"},
				{target: "/refunds/1", handler: "refund", route: "POST /refunds/{id}"},
			},
		},
		{
			name: "patterns for many paths",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /", guard(op("root")), "POST /tree/", guard(op("tree")),
					"POST /rest/{path...}", guard(op("rest")), "POST /star/*", guard(op("star")))
			},
			ops: []routedOp{
				{target: "/", handler: "root", route: "POST /"},
				{target: "/x", handler: "root", route: "POST /x"},
				{target: "/tree/", handler: "tree", route: "POST /tree/"},
				{target: "/tree/x", handler: "tree", route: "POST /tree/x"},
				{target: "/tree/x/", handler: "tree", route: "POST /tree/x/"},
				{target: "/rest/", handler: "rest", route: "POST /rest/"},
				{target: "/rest/x", handler: "rest", route: "POST /rest/x"},
				{target: "/rest/x/y", handler: "rest", route: "POST /rest/x/y"},
				{target: "/star/*", handler: "star", route: "POST /star/*"},
			},
		},
		{
			name: "patterns for many paths, with a wildcard",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /{account}/tree/", guard(op("tree")), "POST /{account}/rest/{path...}", guard(op("rest")))
			},
			ops: []routedOp{
				{target: "/1/tree/", handler: "tree", route: "POST /1/tree/"},
				{target: "/2/tree/", handler: "tree", route: "POST /2/tree/"},
				{target: "/1/rest/x", handler: "rest", route: "POST /1/rest/x"},
				{target: "/2/rest/x", handler: "rest", route: "POST /2/rest/x"},
			},
		},
		{
			name: "the end of a path",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /{$}", guard(op("root")), "POST /orders", guard(op("none")),
					"POST /orders/{$}", guard(op("slash")), "POST /orders/{id}", guard(op("one")))
			},
			ops: []routedOp{
				{target: "/", handler: "root", route: "POST /{$}"},
				{target: "/orders", handler: "none", route: "POST /orders"},
				{target: "/orders/", handler: "slash", route: "POST /orders/{$}"},
				{target: "/orders/1", handler: "one", route: "POST /orders/{id}"},
			},
		},
		{
			name: "behind StripPrefix, around the route",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf(
					"/a/", http.StripPrefix("/a", muxOf("POST /charges", guard(op("a")), "POST /{id}/pay", guard(op("a pay")))),
					"/b/", http.StripPrefix("/b", muxOf("POST /charges", guard(op("b")), "POST /{id}/pay", guard(op("b pay")))),
					"/charges", guard(op("top")))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
				{target: "/a/1/pay", handler: "a pay", route: "POST /a/1/pay"},
				{target: "/b/1/pay", handler: "b pay", route: "POST /b/1/pay"},
				{target: "/charges", handler: "top", route: "POST /charges"},
			},
		},
		{
			name: "behind StripPrefix, around the sub-mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf(
					"/a/", http.StripPrefix("/a", guard(muxOf("POST /charges", op("a"), "POST /refunds", op("a refund")))),
					"/b/{rest...}", http.StripPrefix("/b", guard(muxOf("POST /charges", op("b")))))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/a/refunds", handler: "a refund", route: "POST /a/refunds"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
			},
		},
		{
			name: "in front of StripPrefix",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf(
					"/a/", guard(http.StripPrefix("/a", muxOf("POST /charges", op("a"), "POST /refunds", op("a refund")))),
					"/b/", guard(http.StripPrefix("/b", muxOf("POST /charges", op("b")))))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/a/refunds", handler: "a refund", route: "POST /a/refunds"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
			},
		},
		{
			name: "behind StripPrefix that cuts a segment in two",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /v1-x", http.StripPrefix("/v1", guard(op("v1"))), "POST /v2-x", http.StripPrefix("/v2", guard(op("v2"))),
					"POST /{op}", guard(op("top")))
			},
			ops: []routedOp{
				{target: "/v1-x", handler: "v1", route: "POST /v1-x"},
				{target: "/v2-x", handler: "v2", route: "POST /v2-x"},
				{target: "/-x", handler: "top", route: "POST /{op}"},
			},
		},
		{
			name: "two StripPrefix deep",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				inner := func(name string) http.Handler {
					return http.StripPrefix("/v1", muxOf("POST /{object}", guard(op(name))))
				}
				return muxOf("/a/", http.StripPrefix("/a", muxOf("/v1/", inner("a"))),
					"/b/", http.StripPrefix("/b", muxOf("/v1/", inner("b"))))
			},
			ops: []routedOp{
				{target: "/a/v1/charges", handler: "a", route: "POST /a/v1/charges"},
				{target: "/b/v1/charges", handler: "b", route: "POST /b/v1/charges"},
			},
		},
		{
			name: "escapes behind StripPrefix",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("/a/", http.StripPrefix("/a", muxOf("POST /{name}", guard(op("a")))),
					"/b/", http.StripPrefix("/b", muxOf("POST /{name}", guard(op("b")))))
			},
			ops: []routedOp{
				{target: "/a/x%2Fy", handler: "a", route: "POST /a/x%2Fy"},
				{target: "/b/x%2Fy", handler: "b", route: "POST /b/x%2Fy"},
				{target: "/a/x", handler: "a", route: "POST /a/x"},
			},
		},
		{
			name: "nested mux, around its routes",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf(
					"/v1/", muxOf("POST /v1/charges", guard(op("v1")), "POST /v1/orders/{id}", guard(op("v1 order"))),
					"/v2/", muxOf("POST /v2/charges", guard(op("v2")), "POST /v2/", guard(op("v2 other"))))
			},
			ops: []routedOp{
				{target: "/v1/charges", handler: "v1", route: "POST /v1/charges"},
				{target: "/v1/orders/1", handler: "v1 order", route: "POST /v1/orders/{id}"},
				{target: "/v2/charges", handler: "v2", route: "POST /v2/charges"},
				{target: "/v2/refunds", handler: "v2 other", route: "POST /v2/refunds"},
			},
		},
		{
			name: "nested mux, around the mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf(
					"/v1/", guard(muxOf("POST /v1/charges", op("v1"), "POST /v1/refunds", op("v1 refund"))),
					"/v2/", guard(muxOf("POST /v2/charges", op("v2"))))
			},
			ops: []routedOp{
				{target: "/v1/charges", handler: "v1", route: "POST /v1/charges"},
				{target: "/v1/refunds", handler: "v1 refund", route: "POST /v1/refunds"},
				{target: "/v2/charges", handler: "v2", route: "POST /v2/charges"},
			},
		},
		{
			name: "sub-router, around its routes",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				var top, a, b pathRouter
				a.handle("/charges", guard(op("a")))
				a.handle("/{id}/pay", guard(op("a pay")))
				a.handle("/files/*", guard(op("a files")))
				a.handle("/", guard(op("a root")))
				b.handle("/charges", guard(op("b")))
				b.handle("/{id}/pay", guard(op("b pay")))
				top.mount("/a", &a)
				top.mount("/b/{account}", &b)
				top.handle("/charges", guard(op("top")))
				top.handle("/{id}/pay", guard(op("top pay")))
				top.handle("/{id}/files/*", guard(op("top files")))
				return &top
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/a/1/pay", handler: "a pay", route: "POST /a/1/pay"},
				{target: "/a/files/x/y", handler: "a files", route: "POST /a/files/x/y"},
				{target: "/a/files/", handler: "a files", route: "POST /a/files/"},
				{target: "/a/", handler: "a root", route: "POST /a/"},
				{target: "/b/7/charges", handler: "b", route: "POST /b/7/charges"},
				{target: "/b/8/charges", handler: "b", route: "POST /b/8/charges"},
				{target: "/b/7/1/pay", handler: "b pay", route: "POST /b/7/1/pay"},
				{target: "/charges", handler: "top", route: "POST /charges"},
				{target: "/1/pay", handler: "top pay", route: "POST /{id}/pay"},
				{target: "/1/files/*", handler: "top files", route: "POST /1/files/*"},
				{target: "/2/files/*", handler: "top files", route: "POST /2/files/*"},
			},
		},
		{
			name: "sub-router, around the sub-router",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				var top, a, b pathRouter
				a.handle("/charges", op("a"))
				a.handle("/refunds", op("a refund"))
				b.handle("/charges", op("b"))
				top.mount("/a", guard(&a))
				top.mount("/b", guard(&b))
				return &top
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/a/refunds", handler: "a refund", route: "POST /a/refunds"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
			},
		},
		{
			name: "sub-router in a mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				var a, b pathRouter
				a.handle("/{object}", guard(op("a")))
				b.handle("/{object}", guard(op("b")))
				return muxOf("/a/", http.StripPrefix("/a", &a), "/b/", http.StripPrefix("/b", &b))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
			},
		},
		{
			name: "router that shortens the path alone",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				var a, b pathRouter
				a.handle("/{object}", guard(op("a")))
				b.handle("/{object}", guard(op("b")))
				return muxOf("/a/", shorten("/a", &a), "/b/", shorten("/b", &b), "/a-x", shorten("/a-", &a), "/b-x", shorten("/b-", &b))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
				{target: "/a-x", handler: "a", route: "POST /a-x"},
				{target: "/b-x", handler: "b", route: "POST /b-x"},
				{target: "/a/x%2Ay", handler: "a", route: "POST /a/x%2Ay"}, // an escape that r.URL.RawPath is for
				{target: "/b/x%2Ay", handler: "b", route: "POST /b/x%2Ay"},
			},
		},
		{
			name: "patterns without a leading slash",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				pattern := func(pattern string, h http.Handler) http.Handler {
					return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						r.Pattern = pattern
						h.ServeHTTP(w, r)
					})
				}
				return muxOf("/a/", pattern("charges", guard(op("a"))), "/b/", pattern("charges", guard(op("b"))),
					"/c/", pattern("x/{id}", guard(op("c"))), "/d/", pattern("{x}/{id}", guard(op("d"))))
			},
			ops: []routedOp{
				{target: "/a/charges", handler: "a", route: "POST /a/charges"},
				{target: "/b/charges", handler: "b", route: "POST /b/charges"},
				{target: "/c/x/1", handler: "c", route: "POST /c/x/1"},
				{target: "/d/x/1", handler: "d", route: "POST /d/x/1"},
			},
		},
		{
			name: "host patterns",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST a.test/charges", guard(op("a")), "POST b.test/charges", guard(op("b")),
					"c.test/", guard(op("c")), "POST d.test/{path...}", guard(op("d")), "POST /charges", guard(op("all")))
			},
			ops: []routedOp{
				{host: "a.test", target: "/charges", handler: "a", route: "POST a.test/charges"},
				{host: "b.test:8080", target: "/charges", handler: "b", route: "POST b.test/charges"},
				{host: "c.test", target: "/charges", handler: "c", route: "POST c.test/charges"},
				{host: "c.test:8080", target: "/refunds", handler: "c", route: "POST c.test/refunds"},
				{host: "d.test", target: "/charges", handler: "d", route: "POST d.test/charges"},
				{host: "e.test", target: "/charges", handler: "all", route: "POST /charges"},
			},
		},
		{
			name: "escaped slashes, around routes",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /files/{name}", guard(op("one")), "POST /files/{dir}/{name}", guard(op("two")),
					"POST /lit/a%2Fb", guard(op("literal one")), "POST /lit/a/b", guard(op("literal two")))
			},
			ops: []routedOp{
				{target: "/files/a%2Fb", handler: "one", route: "POST /files/{name}"},
				{target: "/files/a/b", handler: "two", route: "POST /files/{dir}/{name}"},
				{target: "/lit/a%2Fb", handler: "literal one", route: "POST /lit/a%2Fb"},
				{target: "/lit/a/b", handler: "literal two", route: "POST /lit/a/b"},
			},
		},
		{
			name: "escapes, around a mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return guard(muxOf("POST /files/{name}", op("one"), "POST /files/{dir}/{name}", op("two")))
			},
			ops: []routedOp{
				{target: "/files/a%2Fb", handler: "one", route: "POST /files/a%2Fb"},
				{target: "/files/a/b", handler: "two", route: "POST /files/a/b"},
				{target: "/files/a%252Fb", handler: "one", route: "POST /files/a%252Fb"},
				{target: "/files/a%3Fb", handler: "one", route: "POST /files/a%3Fb"},
				{target: "/files/a%20b", handler: "one", route: "POST /files/a%20b"},
				{target: "/files/caf%C3%A9", handler: "one", route: "POST /files/caf%C3%A9"},
				{target: "/files/%00", handler: "one", route: "POST /files/%00"},
				{target: "/files/%FF", handler: "one", route: "POST /files/%FF"},
			},
		},
		{
			name: "escapes that patterns spell in another way",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /a b", guard(op("space")), "POST /caf\u00e9", guard(op("accent")), "POST /%41%2f", guard(op("capital")))
			},
			ops: []routedOp{
				{target: "/a%20b", handler: "space", route: "POST /a b"},
				{target: "/caf%C3%A9", handler: "accent", route: "POST /caf\u00e9"},
				{target: "/A%2F", handler: "capital", route: "POST /%41%2f"},
			},
		},
		{
			name: "bytes that a client should have escaped",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return guard(muxOf("POST /files/{name}", op("file")))
			},
			ops: []routedOp{
				{target: "/files/caf\u00e9", handler: "file", route: "POST /files/caf%C3%A9"},
				{target: "/files/\xff", handler: "file", route: "POST /files/%FF"},
				{target: "/files/{name}", handler: "file", route: "POST /files/%7Bname%7D"},
			},
		},
		{
			name: "a path that looks like a pattern",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /orders/{id}/pay", guard(op("pay")),
					"POST /orders/%7Bid%7D/pay", guard(op("braces")))
			},
			ops: []routedOp{
				{target: "/orders/1/pay", handler: "pay", route: "POST /orders/{id}/pay"},
				{target: "/orders/{id}/pay", handler: "braces", route: "POST /orders/%7Bid%7D/pay"},
			},
		},
		{
			name: "absolute-form targets, around a mux",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return guard(muxOf("POST /charges", op("charge"), "POST /refunds", op("refund"), "POST /files/{name}", op("file"),
					"POST /{other}", op("other")))
			},
			ops: []routedOp{
				{target: "http://api.test/charges?q", handler: "charge", route: "POST /charges"},
				{target: "http://api.test/refunds", handler: "refund", route: "POST /refunds"},
				{target: "HTTPS://user@api.test:443/files/a%2Fb?http://x/y", handler: "file", route: "POST /files/a%2Fb"},
				{target: "http://api.test/charges#x", handler: "other", route: "POST /charges%23x"},
			},
		},
		{
			name: "absolute-form targets, around routes",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return muxOf("POST /charges", guard(op("charge")), "POST /orders/{id}", guard(op("order")),
					"/a/", http.StripPrefix("/a", muxOf("POST /charges", guard(op("a")))))
			},
			ops: []routedOp{
				{target: "http://api.test/charges", handler: "charge", route: "POST /charges"},
				{target: "http://api.test/orders/1", handler: "order", route: "POST /orders/{id}"},
				{target: "http://api.test/a/charges", handler: "a", route: "POST /a/charges"},
			},
		},
		{
			name: "paths that no mux would let through",
			build: func(guard guard, op func(string) http.Handler) http.Handler {
				return guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					op("path "+r.URL.EscapedPath()).ServeHTTP(w, r)
				}))
			},
			ops: []routedOp{
				{target: "/charges", handler: "path /charges", route: "POST /charges"},
				{target: "//charges", handler: "path //charges", route: "POST //charges"},
				{target: "///charges", handler: "path ///charges", route: "POST ///charges"},
				{target: "/./charges", handler: "path /./charges", route: "POST /./charges"},
				{target: "/x/../charges", handler: "path /x/../charges", route: "POST /x/../charges"},
				{target: "/charges/", handler: "path /charges/", route: "POST /charges/"},
				{target: "/Charges", handler: "path /Charges", route: "POST /Charges"},
				{target: "http://api.test//charges/", handler: "path //charges/", route: "POST //charges/"},
				{target: "*", handler: "path *", route: "POST *"},
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := idempotency.Config{Methods: []string{"GET", "HEAD", "POST", "PATCH"}}
			m := newMiddleware(t, idempotency.NewMemoryStore(), cfg)
			var spy routeSpy
			s := newSite(t, http1, tc.build(m.Handler, spy.handler))
			ran := map[string]routedOp{}
			for _, op := range tc.ops {
				if op.method == "" {
					op.method = http.MethodPost
				}
				if op.host == "" {
					op.host = "api.test"
				}
				// One key for all of them, and a payload that differs in nothing else.
				text := rawHead(op.method, op.target, `"one key"`, "Host: "+op.host, "Content-Length: 2") + "\r\n{}"
				first := exchangeRaw(t, s, op.method, text)
				require.Equal(t, http.StatusCreated, first.status, "%s: %s", op.target, first.body)
				require.Equal(t, []routeRun{{op.handler, op.route}}, spy.take(), op.target)
				require.NotContains(t, ran, op.route, "%s and %s share a record", op.target, ran[op.route].target)
				ran[op.route] = op

				retry := exchangeRaw(t, s, op.method, text)
				require.Empty(t, spy.take(), "%s ran again", op.target)
				require.True(t, retry.replayed(), op.target)
				require.Equal(t, first.body, retry.body, op.target)
			}
		})
	}
}

// S08, S16: one pattern is one route. The path is in the fingerprint, so the
// second path under one key gets 422 and never the first one's answer.
func TestS08OnePatternIsOneRoute(t *testing.T) {
	m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
	var spy routeSpy
	s := newSite(t, http1, muxOf("POST /orders/{id}/pay", m.Handler(spy.handler("pay"))))
	first := s.do(t.Context(), call{path: "/orders/1/pay"})
	require.Equal(t, http.StatusCreated, first.status)
	require.Equal(t, []routeRun{{"pay", "POST /orders/{id}/pay"}}, spy.take())

	for range 2 {
		other := s.do(t.Context(), call{path: "/orders/2/pay"})
		require.Equal(t, http.StatusUnprocessableEntity, other.status)
		require.Equal(t, "key-reused", other.code(t))
		require.NotContains(t, other.body, first.body)
	}
	require.Equal(t, first.body, s.do(t.Context(), call{path: "/orders/1/pay"}).body)
	require.Empty(t, spy.take())
}

// S08: the host is no part of a route whose pattern names none, so a retry that
// goes to another name of the service finds its record.
func TestS08RetryToAnotherHost(t *testing.T) {
	for _, tc := range []struct {
		name  string
		build func(m *idempotency.Middleware, h http.Handler) http.Handler
	}{
		{"around a route", func(m *idempotency.Middleware, h http.Handler) http.Handler {
			return muxOf("POST /charges", m.Handler(h))
		}},
		{"around a mux", func(m *idempotency.Middleware, h http.Handler) http.Handler {
			return m.Handler(muxOf("POST /charges", h))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var spy routeSpy
			s := newSite(t, http1, tc.build(newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}), spy.handler("charge")))
			for i, host := range []string{"one.test", "two.test", "two.test:8443", "[::1]:80", "::1"} {
				a := exchangeRaw(t, s, "POST", rawHead("POST", "/charges", `"k"`, "Host: "+host, "Content-Length: 0")+"\r\n")
				require.Equal(t, http.StatusCreated, a.status, host)
				require.Equal(t, i > 0, a.replayed(), host)
			}
			require.Equal(t, []routeRun{{"charge", "POST /charges"}}, spy.take())
		})
	}
}

// S08: a fixed name is the route wherever the middleware stands, so a retry finds
// its record after the middleware was moved.
func TestS08FixedName(t *testing.T) {
	type guard = func(http.Handler) http.Handler
	placements := []struct {
		name  string
		build func(guard, http.Handler) http.Handler
	}{
		{"around a mux", func(g guard, h http.Handler) http.Handler { return g(muxOf("POST /v1/charges", h)) }},
		{"around a route", func(g guard, h http.Handler) http.Handler { return muxOf("POST /v1/charges", g(h)) }},
		{"around another pattern", func(g guard, h http.Handler) http.Handler { return muxOf("POST /{version}/{object}", g(h)) }},
		{"behind StripPrefix", func(g guard, h http.Handler) http.Handler {
			return muxOf("/v1/", http.StripPrefix("/v1", muxOf("POST /charges", g(h))))
		}},
		{"in a sub-router", func(g guard, h http.Handler) http.Handler {
			var top, sub pathRouter
			sub.handle("/charges", g(h))
			top.mount("/v1", &sub)
			return &top
		}},
	}
	for _, tc := range []struct {
		name string
		make func(t *testing.T, store idempotency.Store) guard
	}{
		{"RouteName", func(t *testing.T, store idempotency.Store) guard {
			t.Helper()
			return newMiddleware(t, store, idempotency.Config{Route: idempotency.RouteName("charge")}).Handler
		}},
		{"Named", func(t *testing.T, store idempotency.Store) guard {
			t.Helper()
			return newMiddleware(t, store, idempotency.Config{}).Named("charge").Handler
		}},
		{"Named over RouteName", func(t *testing.T, store idempotency.Store) guard {
			t.Helper()
			return newMiddleware(t, store, idempotency.Config{Route: idempotency.RouteName("other")}).Named("charge").Handler
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := idempotency.NewMemoryStore()
			var spy routeSpy
			for i, placement := range placements {
				s := newSite(t, http1, placement.build(tc.make(t, store), spy.handler("charge")))
				a := s.do(t.Context(), call{path: "/v1/charges"})
				require.Equal(t, http.StatusCreated, a.status, "%s: %s", placement.name, a.body)
				require.Equal(t, i > 0, a.replayed(), placement.name)
			}
			require.Equal(t, []routeRun{{"charge", "charge"}}, spy.take())
			require.Equal(t, 1, store.Len())
		})
	}

	t.Run("two names on one middleware", func(t *testing.T) {
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
		var spy routeSpy
		s := newSite(t, http1, muxOf("POST /a", m.Named("a").Handler(spy.handler("a")), "POST /b", m.Named("b").Handler(spy.handler("b")),
			"POST /c", m.Handler(spy.handler("c"))))
		for _, path := range []string{"/a", "/b", "/c"} {
			require.Equal(t, http.StatusCreated, s.do(t.Context(), call{path: path}).status)
		}
		require.Equal(t, []routeRun{{"a", "a"}, {"b", "b"}, {"c", "POST /c"}}, spy.take())
	})
}

// S08, S03: a route that is over its limit is refused, not cut: two long paths
// would otherwise share a record.
func TestS08LongPath(t *testing.T) {
	var spy routeSpy
	store := idempotency.NewMemoryStore()
	s := newSite(t, http1, newMiddleware(t, store, idempotency.Config{}).Handler(spy.handler("any")))
	path := func(routeLen int, last string) string { // of a route with that length
		return "/" + strings.Repeat("p", routeLen-len("POST /")-len(last)) + last
	}
	longest := s.do(t.Context(), call{path: path(idempotency.MaxRouteLen, "a")})
	require.Equal(t, http.StatusCreated, longest.status)
	require.Equal(t, []routeRun{{"any", "POST " + path(idempotency.MaxRouteLen, "a")}}, spy.take())
	require.Equal(t, 1, store.Len())
	for _, last := range []string{"a", "b"} {
		a := s.do(t.Context(), call{path: path(idempotency.MaxRouteLen+1, last)})
		require.Equal(t, http.StatusInternalServerError, a.status)
		require.Equal(t, "bad-identity", a.code(t))
	}
	require.Empty(t, spy.take())
	require.Equal(t, 1, store.Len())
}

// An identityGuard says who everyone is, and collects the log.
type identityGuard struct {
	tenant, principal, route string
	unguarded                bool
	logs                     syncBuffer
}

func (g *identityGuard) middleware(t *testing.T, store idempotency.Store) *idempotency.Middleware {
	t.Helper()
	m, err := idempotency.New(store, idempotency.Config{
		KeyScope:                 func(*http.Request) string { return g.tenant },
		Principal:                func(*http.Request) string { return g.principal },
		Route:                    idempotency.RouteName(g.route),
		UnguardedWithoutIdentity: g.unguarded,
		Logger:                   slog.New(slog.NewTextHandler(&g.logs, nil)),
	})
	require.NoError(t, err)
	return m
}

// A noStore fails the request that calls it.
type noStore struct{ idempotency.Store }

// requireRefusedUnread sends a request whose body the server has to ask for, and
// makes sure that it refuses without doing so.
func requireRefusedUnread(t *testing.T, s *site, key string, status int, code string) {
	t.Helper()
	a := exchangeRaw(t, s, "POST", rawHead("POST", "/charges", key, "Host: api.test", "Content-Length: 2", "Expect: 100-continue")+"\r\n")
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, code, a.code(t))
	require.Empty(t, a.header.Values(idempotency.HeaderDeduplicated))
}

// S09: no tenant or no principal is refused, and never a namespace that all such
// callers share.
func TestS09NoIdentityIsRefused(t *testing.T) {
	for _, tc := range []struct{ name, tenant, principal string }{
		{"no tenant", "", "alice"},
		{"no principal", "acme", ""},
		{"neither", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := identityGuard{tenant: tc.tenant, principal: tc.principal, route: "charge"}
			var spy routeSpy
			s := newSite(t, http1, g.middleware(t, noStore{}).Handler(spy.handler("charge")))
			requireRefusedUnread(t, s, `"k"`, http.StatusForbidden, "no-identity")
			require.Empty(t, spy.take())
		})
	}
}

// A plainWriter is a ResponseWriter that a handler can tell from others.
type plainWriter struct{ http.ResponseWriter }

// A plainRun is what a handler saw that ran without a guard.
type plainRun struct {
	writer   http.ResponseWriter
	request  *http.Request
	body     string
	executed bool // there is an Execution
}

// servePlain serves guarded behind a middleware that hands in a plainWriter, and
// returns the site and what the handler saw.
func servePlain(t *testing.T, m *idempotency.Middleware) (*site, func() []plainRun) {
	t.Helper()
	var mu sync.Mutex
	var runs []plainRun
	guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, executed := idempotency.FromContext(r.Context())
		mu.Lock()
		defer mu.Unlock()
		runs = append(runs, plainRun{writer: w, request: r, body: string(body), executed: executed})
		_, _ = fmt.Fprintf(w, "run %d", len(runs))
	}))
	s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guarded.ServeHTTP(plainWriter{w}, r)
	}))
	return s, func() []plainRun {
		mu.Lock()
		defer mu.Unlock()
		return runs
	}
}

func requirePlain(t *testing.T, run plainRun, body string) {
	t.Helper()
	require.IsType(t, plainWriter{}, run.writer)
	require.Equal(t, body, run.body)
	require.False(t, run.executed)
}

// S09: where the configuration says so, the handler runs without deduplication
// each time, and log and response say so.
func TestS09NoIdentityRunsUnguarded(t *testing.T) {
	for _, tc := range []struct{ name, tenant, principal, component string }{
		{"no tenant", "", "alice-secret", "tenant"},
		{"no principal", "acme-secret", "", "principal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := identityGuard{tenant: tc.tenant, principal: tc.principal, route: "charge", unguarded: true}
			s, runs := servePlain(t, g.middleware(t, noStore{}))
			for i := range 2 {
				a := s.do(t.Context(), call{key: `"key-secret"`, body: "amount=1"})
				require.Equal(t, http.StatusOK, a.status)
				require.Equal(t, "run "+strconv.Itoa(i+1), a.body)
				require.Equal(t, []string{"false"}, a.header.Values(idempotency.HeaderDeduplicated))
				require.False(t, a.replayed())
				require.Len(t, runs(), i+1)
				requirePlain(t, runs()[i], "amount=1")
			}
			logged := g.logs.String()
			require.Equal(t, 2, strings.Count(logged, "level=WARN"), logged)
			require.Contains(t, logged, tc.component)
			require.NotContains(t, logged, "secret")
		})
	}
}

// S10: an identity or a route that cannot be used is the deployment's fault: 500,
// logged with the component's name and never its value. That requests without an
// identity may run unguarded is no way around it (S09: there is no third).
func TestS10UnusableIdentity(t *testing.T) {
	usable := identityGuard{tenant: "acme", principal: "alice", route: "charge"}
	type edit func(g *identityGuard, value string)
	tenant := func(g *identityGuard, value string) { g.tenant = value }
	principal := func(g *identityGuard, value string) { g.principal = value }
	route := func(g *identityGuard, value string) { g.route = value }
	for _, tc := range []struct {
		name, component, value string
		edit                   edit
	}{
		{"tenant with NUL", "tenant", "loud\x00loud", tenant},
		{"tenant in bad UTF-8", "tenant", "loud\xff", tenant},
		{"tenant too long", "tenant", strings.Repeat("loud", 64), tenant},
		{"principal with NUL", "principal", "loud\x00", principal},
		{"principal in bad UTF-8", "principal", "\xc3loud", principal},
		{"principal too long", "principal", strings.Repeat("loud", 64), principal},
		{"route with NUL", "route", "\x00loud", route},
		{"route in bad UTF-8", "route", "loud\xed\xa0\x80", route},
		{"route too long", "route", strings.Repeat("loud", 129), route},
		{"route empty", "route", "", route},
	} {
		for _, unguarded := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, unguarded without identity: %t", tc.name, unguarded), func(t *testing.T) {
				g := identityGuard{tenant: usable.tenant, principal: usable.principal, route: usable.route, unguarded: unguarded}
				tc.edit(&g, tc.value)
				var spy routeSpy
				s := newSite(t, http1, g.middleware(t, noStore{}).Handler(spy.handler("charge")))
				requireRefusedUnread(t, s, `"k"`, http.StatusInternalServerError, "bad-identity")
				require.Empty(t, spy.take())
				logged := g.logs.String()
				require.Contains(t, logged, "level=ERROR")
				require.Contains(t, logged, tc.component)
				require.NotContains(t, logged, "loud")
				require.NotContains(t, logged, "acme")
				require.NotContains(t, logged, "alice")
			})
		}
	}
}

// S08, S10: a name that cannot be a route fails closed.
func TestS10UnusableName(t *testing.T) {
	for _, tc := range []struct{ name, route string }{
		{"empty", ""},
		{"with NUL", "charge\x00"},
		{"in bad UTF-8", "charge\xff"},
		{"too long", strings.Repeat("n", idempotency.MaxRouteLen+1)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMiddleware(t, noStore{}, idempotency.Config{})
			var spy routeSpy
			s := newSite(t, http1, m.Named(tc.route).Handler(spy.handler("charge")))
			requireRefusedUnread(t, s, `"k"`, http.StatusInternalServerError, "bad-identity")
			require.Empty(t, spy.take())
		})
	}
	longest := strings.Repeat("n", idempotency.MaxRouteLen)
	var spy routeSpy
	s := newSite(t, http1, newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}).Named(longest).Handler(spy.handler("charge")))
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{}).status)
	require.Equal(t, []routeRun{{"charge", longest}}, spy.take())
}
