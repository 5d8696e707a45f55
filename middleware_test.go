package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// Tenant and caller of a test request, as an authentication in front would have
// established them.
const (
	headerTenant = "Test-Tenant"
	headerCaller = "Test-Caller"
)

func tenantOf(r *http.Request) string { return r.Header.Get(headerTenant) }
func callerOf(r *http.Request) string { return r.Header.Get(headerCaller) }

// identified returns cfg with the identity of test requests where it says nothing else.
func identified(cfg idempotency.Config) idempotency.Config {
	if cfg.KeyScope == nil {
		cfg.KeyScope = tenantOf
	}
	if cfg.Principal == nil {
		cfg.Principal = callerOf
	}
	return cfg
}

func newMiddleware(tb testing.TB, store idempotency.Store, cfg idempotency.Config) *idempotency.Middleware {
	tb.Helper()
	m, err := idempotency.New(store, identified(cfg))
	require.NoError(tb, err)
	return m
}

// A site is a real server with a captured error log, and a client for it.
type site struct {
	*httptest.Server
	proto  protocol
	errors *syncBuffer
	runs   atomic.Int64 // of the handler, where newGuardedSite made it
}

// A protocol is what a site speaks, and nothing else.
type protocol string

const (
	http1 protocol = "http1" // HTTP/1.1, without TLS
	http2 protocol = "http2" // HTTP/2 over TLS
	h2c   protocol = "h2c"   // HTTP/2 without TLS
)

// version is the major version of HTTP.
func (p protocol) version() int {
	if p == http1 {
		return 1
	}
	return 2
}

// newSite starts a server.
func newSite(tb testing.TB, proto protocol, handler http.Handler) *site {
	tb.Helper()
	s := &site{Server: httptest.NewUnstartedServer(handler), proto: proto, errors: &syncBuffer{}}
	s.Config.ErrorLog = log.New(s.errors, "", log.Lshortfile)
	leavesNothing(tb)
	switch proto {
	case http1:
		s.Start()
	case http2:
		s.EnableHTTP2 = true
		s.StartTLS()
	case h2c:
		only := new(http.Protocols)
		only.SetUnencryptedHTTP2(true)
		s.Config.Protocols = only
		s.Start()
		s.Client().Transport.(*http.Transport).Protocols = only
	}
	tb.Cleanup(s.Close)
	return s
}

type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// A call is a request to a site; zero fields have usable defaults.
type call struct {
	method, path, key, tenant, caller, body string
	noKey                                   bool
	header                                  http.Header
}

// A reply is all that a client sees of a response.
type reply struct {
	status  int
	header  http.Header // without Date and Content-Length
	body    string
	length  int64
	trailer http.Header
	informs []inform
	err     error // of sending, or of reading the body
}

// An inform is a 1xx response.
type inform struct {
	status int
	header http.Header
}

func (a reply) replayed() bool { return a.header.Get(idempotency.HeaderReplayed) == "true" }

func (a reply) code(t *testing.T) string {
	t.Helper()
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"), a.body)
	_, rest, ok := strings.Cut(a.body, `"code":"`)
	require.True(t, ok, a.body)
	code, _, _ := strings.Cut(rest, `"`)
	return code
}

func (s *site) request(ctx context.Context, c call) (*http.Request, error) {
	method, path, tenant, caller, key := c.method, c.path, c.tenant, c.caller, c.key
	if method == "" {
		method = http.MethodPost
	}
	if tenant == "" {
		tenant = "acme"
	}
	if caller == "" {
		caller = "alice"
	}
	if key == "" {
		key = `"8e03978e"`
	}
	r, err := http.NewRequestWithContext(ctx, method, s.URL+"/"+strings.TrimPrefix(path, "/"), strings.NewReader(c.body))
	if err != nil {
		return nil, err
	}
	maps.Copy(r.Header, c.header)
	r.Header.Set(headerTenant, tenant)
	r.Header.Set(headerCaller, caller)
	if !c.noKey {
		r.Header.Set(idempotency.HeaderKey, key)
	}
	return r, nil
}

func (s *site) do(ctx context.Context, c call) reply {
	var a reply
	var mu sync.Mutex
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			mu.Lock()
			defer mu.Unlock()
			a.informs = append(a.informs, inform{code, http.Header(maps.Clone(header))})
			return nil
		},
	})
	r, err := s.request(ctx, c)
	if err != nil {
		return reply{err: err}
	}
	resp, err := s.Client().Do(r)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	if resp.ProtoMajor != s.proto.version() {
		return reply{err: fmt.Errorf("answered in %s, not over %s", resp.Proto, s.proto)}
	}
	body, err := io.ReadAll(resp.Body)
	mu.Lock()
	defer mu.Unlock()
	a.status, a.header, a.body, a.length, a.trailer, a.err = resp.StatusCode, resp.Header, string(body), resp.ContentLength, resp.Trailer, err
	a.header.Del("Date")
	a.header.Del("Content-Length")
	return a
}

// newGuardedSite starts an HTTP/1.1 server whose handler is guarded and counted.
func newGuardedSite(tb testing.TB, store idempotency.Store, cfg idempotency.Config, h http.HandlerFunc) *site {
	tb.Helper()
	return newGuardedSiteOver(tb, http1, store, cfg, h)
}

func newGuardedSiteOver(tb testing.TB, proto protocol, store idempotency.Store, cfg idempotency.Config, h http.HandlerFunc) *site {
	tb.Helper()
	var s *site
	m := newMiddleware(tb, store, cfg)
	s = newSite(tb, proto, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.runs.Add(1)
		h(w, r)
	})))
	return s
}

// echo answers 201 with the attempt and the request's body.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body)
}

// S19, S20: a first request runs, and its retries get its outcome.
func TestS20Replay(t *testing.T) {
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, echo)

	first := s.do(t.Context(), call{body: "ten euro"})
	require.Equal(t, http.StatusCreated, first.status)
	require.Equal(t, "ten euro", first.body)
	require.False(t, first.replayed())

	for range 3 {
		retry := s.do(t.Context(), call{body: "ten euro"})
		require.True(t, retry.replayed())
		retry.header.Del(idempotency.HeaderReplayed)
		require.Equal(t, first, retry)
	}
	require.EqualValues(t, 1, s.runs.Load())
}

// The accidents of libraries that store the header's value as the key: each part
// of the tuple keeps apart what only it can (S05, S08, S01).
func TestS01EachComponentSeparates(t *testing.T) {
	for _, tc := range []struct {
		name  string
		other call
	}{
		{"tenant", call{tenant: "other"}},
		{"principal", call{caller: "other"}},
		{"route", call{path: "/refunds"}},
		{"key", call{key: `"other"`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
				exec, _ := idempotency.FromContext(r.Context())
				_, _ = io.WriteString(w, exec.Key().Flat())
			})
			first, other := s.do(t.Context(), call{}), s.do(t.Context(), tc.other)
			require.False(t, other.replayed())
			require.NotEqual(t, first.body, other.body)
			require.EqualValues(t, 2, s.runs.Load())
			require.True(t, s.do(t.Context(), call{}).replayed())
			require.True(t, s.do(t.Context(), tc.other).replayed())
		})
	}
}

// S05, S06: what the client sends is stored in the client's namespace, under the
// first version.
func TestS05TheHeaderReachesTheClientNamespaceOnly(t *testing.T) {
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
		exec, _ := idempotency.FromContext(r.Context())
		_, _ = io.WriteString(w, exec.Key().Version()+" "+exec.Key().Namespace()+" "+exec.Key().Key())
	})
	for _, key := range []string{"replay:evt_x:", "s:replay:evt_x:", "v1 s:", "s:"} {
		require.Equal(t, "v1 u: "+key, s.do(t.Context(), call{key: `"` + key + `"`}).body)
	}
}

// S22: the answer leaves only after its outcome is stored, and the request's own
// records show it.
func TestS22AnswerAfterTheOutcomeIsStored(t *testing.T) {
	store := &blockingStore{Store: idempotency.NewMemoryStore(), completing: make(chan struct{}), proceed: make(chan struct{})}
	s := newGuardedSite(t, store, idempotency.Config{}, echo)
	answered := make(chan reply, 1)
	go func() { answered <- s.do(t.Context(), call{}) }()
	<-store.completing
	select {
	case a := <-answered:
		t.Fatalf("answered %d before the outcome was stored", a.status)
	default:
	}
	require.Equal(t, "in-flight", s.do(t.Context(), call{}).code(t))
	close(store.proceed)
	require.Equal(t, http.StatusCreated, (<-answered).status)
}

type blockingStore struct {
	idempotency.Store
	completing, proceed chan struct{}
}

func (b *blockingStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	close(b.completing)
	<-b.proceed
	return b.Store.Complete(ctx, l, r)
}

// S20: what belongs to outer middlewares is neither stored nor replayed: each
// retry keeps its own.
func TestS20OuterHeadersAreTheRetrysOwn(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
		guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			require.Equal(t, "Origin", w.Header().Get("Vary"), "the handler sees the outer header")
			w.Header().Add("Vary", "Accept, Accept-Language")
			w.Header().Add("Vary", "Accept-Encoding")
			w.Header().Set("X-Set", "by the handler")
			w.Header().Del("X-Deleted")
			w.Header()["X-Lines"] = []string{"a, b", "c"}
			w.WriteHeader(http.StatusAccepted)
		}))
		requests := 0
		s := newSite(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests++
			w.Header().Set("X-Request-Id", strings.Repeat("i", requests))
			w.Header().Set("Access-Control-Allow-Origin", "*")
			w.Header().Add("Vary", "Origin")
			w.Header().Set("X-Set", "by the outer one")
			w.Header().Set("X-Deleted", "by the handler")
			guarded.ServeHTTP(w, r)
		}))
		first, retry := s.do(t.Context(), call{}), s.do(t.Context(), call{})
		require.True(t, retry.replayed())
		for i, a := range []reply{first, retry} {
			require.Equal(t, strings.Repeat("i", i+1), a.header.Get("X-Request-Id"))
			require.Equal(t, []string{"*"}, a.header.Values("Access-Control-Allow-Origin"))
			require.Equal(t, []string{"Origin", "Accept, Accept-Language", "Accept-Encoding"}, a.header.Values("Vary"))
			require.Equal(t, []string{"by the handler"}, a.header.Values("X-Set"))
			require.Equal(t, []string{"a, b", "c"}, a.header.Values("X-Lines"))
			require.NotContains(t, a.header, "X-Deleted")
		}
	})
}

// S20: what is for one exchange, one connection or one client only is not stored.
func TestS20WhatIsNotStored(t *testing.T) {
	handler := func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range []string{
			"Date", "WWW-Authenticate", "Proxy-Authenticate", "Set-Cookie", "Keep-Alive", "Proxy-Connection",
			"TE", "Upgrade", "X-Hop", "X-Kept",
		} {
			w.Header().Set(name, "Mon, 01 Jan 2001 00:00:00 GMT")
		}
		w.Header().Set("Connection", "X-Hop")
	}
	for _, tc := range []struct {
		name    string
		cfg     idempotency.Config
		replays []string
	}{
		{"default", idempotency.Config{}, []string{"X-Kept"}},
		{"cookies too", idempotency.Config{StoreCookies: true}, []string{"Set-Cookie", "X-Kept"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := &recordingStore{Store: idempotency.NewMemoryStore()}
			s := newGuardedSite(t, store, tc.cfg, handler)
			first := s.do(t.Context(), call{})
			require.NotEmpty(t, first.header.Get("Set-Cookie"), "the first caller gets all")
			require.NotEmpty(t, first.header.Get("WWW-Authenticate"))
			retry := s.do(t.Context(), call{})
			require.True(t, retry.replayed())
			for _, name := range tc.replays {
				require.NotEmpty(t, retry.header.Get(name), name)
				require.Contains(t, store.stored.Header, name)
			}
			require.Len(t, store.stored.Header, len(tc.replays), "%v", store.stored.Header)
			require.Len(t, retry.header, len(tc.replays)+1, "%v", retry.header) // and Idempotency-Replayed
		})
	}
}

// A recordingStore remembers the last outcome it was given.
type recordingStore struct {
	idempotency.Store
	stored    idempotency.Response
	completed int
}

func (s *recordingStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	s.stored, s.completed = r, s.completed+1
	return s.Store.Complete(ctx, l, r)
}

// S20: an outer middleware that edits headers in place does not edit the record.
func TestS20OuterEditsDoNotReachTheRecord(t *testing.T) {
	m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{StoreCookies: true})
	guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Set-Cookie", "id=1")
	}))
	s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guarded.ServeHTTP(securing{w}, r)
	}))
	for range 3 {
		require.Equal(t, "id=1; Secure", s.do(t.Context(), call{}).header.Get("Set-Cookie"))
	}
}

type securing struct{ http.ResponseWriter }

func (s securing) WriteHeader(status int) {
	for i := range s.Header()["Set-Cookie"] {
		s.Header()["Set-Cookie"][i] += "; Secure"
	}
	s.ResponseWriter.WriteHeader(status)
}

// S20: CheckReplay comes with the retry's own request, body included.
func TestCheckReplaySeesTheRetry(t *testing.T) {
	allowed := true
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{
		CheckReplay: func(r *http.Request) error {
			body, err := io.ReadAll(r.Body)
			require.NoError(t, err)
			require.Equal(t, "the body", string(body))
			if !allowed {
				return errors.New("revoked")
			}
			return nil
		},
	}, echo)
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{body: "the body"}).status)
	require.True(t, s.do(t.Context(), call{body: "the body"}).replayed())
	allowed = false
	require.Equal(t, "replay-refused", s.do(t.Context(), call{body: "the body"}).code(t))
}

// S46: what holds secrets and keys does not print them.
func TestS46PrintingShowsNoSecrets(t *testing.T) {
	store := idempotency.NewMemoryStore()
	m := newMiddleware(t, store, idempotency.Config{FingerprintSecret: []byte("open sesame, open sesame")})
	s := newSite(t, http1, m.Handler(http.HandlerFunc(echo)))
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{tenant: "unmistakable"}).status)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%d", "%x"} {
		printed := fmt.Sprintf(verb+verb, store, m)
		for _, secret := range []string{"sesame", "115 101 115 97 109 101", "0x73, 0x65, 0x73, 0x61", "736573616d65", "unmistakable"} {
			require.NotContains(t, printed, secret, verb)
		}
	}
}
