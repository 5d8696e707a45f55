package integration_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A protocol is what a site speaks, and nothing else.
type protocol string

const (
	http1 protocol = "http1" // HTTP/1.1, without TLS
	http2 protocol = "http2" // HTTP/2 over TLS
	h2c   protocol = "h2c"   // HTTP/2 without TLS
)

func forEachProtocol(t *testing.T, f func(t *testing.T, proto protocol)) {
	t.Helper()
	for _, proto := range []protocol{http1, http2, h2c} {
		t.Run(string(proto), func(t *testing.T) { f(t, proto) })
	}
}

// A site is a real server with a captured error log, and a client for it that
// decodes nothing by itself.
type site struct {
	*httptest.Server
	errors *syncBuffer
}

func newSite(t *testing.T, proto protocol, handler http.Handler) *site {
	t.Helper()
	s := &site{Server: httptest.NewUnstartedServer(handler), errors: &syncBuffer{}}
	s.Config.ErrorLog = log.New(s.errors, "", 0)
	protocols := new(http.Protocols)
	switch proto {
	case http1:
		s.Start()
		protocols.SetHTTP1(true)
	case http2:
		s.EnableHTTP2 = true
		s.StartTLS()
		protocols.SetHTTP2(true)
	case h2c:
		protocols.SetUnencryptedHTTP2(true)
		s.Config.Protocols = protocols
		s.Start()
	}
	transport := s.Client().Transport.(*http.Transport)
	transport.Protocols, transport.DisableCompression = protocols, true
	t.Cleanup(s.Close)
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

// A call is a POST to a site; zero fields have usable defaults.
type call struct {
	path string
	key  string
	// plain asks for no content coding.
	plain bool
}

// A reply is all that a client sees of a response.
type reply struct {
	status  int
	header  http.Header // without Date
	raw     string
	decoded string
	trailer http.Header
}

func (a reply) replayed() bool { return a.header.Get(idempotency.HeaderReplayed) == "true" }

func (s *site) open(ctx context.Context, t *testing.T, c call) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/"+strings.TrimPrefix(c.path, "/"), strings.NewReader("amount=1"))
	require.NoError(t, err)
	if c.key == "" {
		c.key = "8e03978e"
	}
	r.Header.Set(idempotency.HeaderKey, `"`+c.key+`"`)
	if !c.plain {
		r.Header.Set("Accept-Encoding", "gzip")
	}
	resp, err := s.Client().Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func (s *site) do(t *testing.T, c call) reply {
	t.Helper()
	resp := s.open(t.Context(), t, c)
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	a := reply{status: resp.StatusCode, header: resp.Header, raw: string(raw), decoded: string(raw), trailer: resp.Trailer}
	if resp.ContentLength >= 0 {
		require.EqualValues(t, len(raw), resp.ContentLength)
	}
	if resp.Header.Get("Content-Encoding") == "gzip" {
		a.decoded = gunzip(t, bytes.NewReader(raw))
	}
	a.header.Del("Date")
	return a
}

func gunzip(t *testing.T, compressed io.Reader) string {
	t.Helper()
	decoder, err := gzip.NewReader(compressed)
	require.NoError(t, err)
	text, err := io.ReadAll(decoder)
	require.NoError(t, err)
	return string(text)
}

// A recordingStore remembers the last outcome that it was given.
type recordingStore struct {
	idempotency.Store
	stored idempotency.Response
}

func (s *recordingStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	s.stored = r
	return s.Store.Complete(ctx, l, r)
}

func newGuard(t *testing.T, store idempotency.Store, cfg idempotency.Config) *idempotency.Middleware {
	t.Helper()
	cfg.KeyScope = func(*http.Request) string { return "acme" }
	cfg.Principal = func(*http.Request) string { return "alice" }
	m, err := idempotency.New(store, cfg)
	require.NoError(t, err)
	return m
}
