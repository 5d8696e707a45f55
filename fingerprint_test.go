package idempotency_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

const (
	printSecret      = "0123456789abcdef"
	printOtherSecret = "fedcba9876543210"
)

// A printStore remembers the last claim.
type printStore struct {
	idempotency.Store

	mu     sync.Mutex
	claim  idempotency.Claim
	budget time.Duration // how long the call might have taken
}

func newPrintStore() *printStore { return &printStore{Store: idempotency.NewMemoryStore()} }

func (s *printStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	deadline, _ := ctx.Deadline()
	s.mu.Lock()
	s.claim, s.budget = c, time.Until(deadline)
	s.mu.Unlock()
	return s.Store.Claim(ctx, c)
}

func (s *printStore) last() (idempotency.Claim, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claim, s.budget
}

func (s *printStore) print() idempotency.Fingerprint {
	c, _ := s.last()
	return c.Fingerprint
}

// requestText is a whole request with a body of known length.
func requestText(method, target, body string, fields ...string) string {
	fields = append([]string{"Host: api.test"}, fields...)
	return rawHead(method, target, `"k"`, append(fields, fmt.Sprint("Content-Length: ", len(body)))...) + "\r\n" + body
}

// S16: a retry must be byte-identical in method, target, content type, content
// encoding and body, and in nothing else.
func TestS16WhatARetryMustRepeat(t *testing.T) {
	const (
		target = "/charges?a=1&b=2"
		body   = `{"amount":1,"currency":"EUR"}`
		json   = "Content-Type: application/json"
		gzip   = "Content-Encoding: gzip"
	)
	first := requestText("POST", target, body, json, gzip)
	for _, tc := range []struct {
		name, method, retry string
		replayed            bool
	}{
		{"the same", "POST", first, true},
		{"other method", "PUT", requestText("PUT", target, body, json, gzip), false},
		{"other path", "POST", requestText("POST", "/refunds?a=1&b=2", body, json, gzip), false},
		{"path escaped in another way", "POST", requestText("POST", "/charge%73?a=1&b=2", body, json, gzip), false},
		{"path with a slash more", "POST", requestText("POST", "/charges/?a=1&b=2", body, json, gzip), false},
		{"query in another order", "POST", requestText("POST", "/charges?b=2&a=1", body, json, gzip), false},
		{"query escaped in another way", "POST", requestText("POST", "/charges?a=%31&b=2", body, json, gzip), false},
		{"no query", "POST", requestText("POST", "/charges", body, json, gzip), false},
		{"no content type", "POST", requestText("POST", target, body, gzip), false},
		{"other content type", "POST", requestText("POST", target, body, json+"; charset=utf-8", gzip), false},
		{"two content types", "POST", requestText("POST", target, body, json, json, gzip), false},
		{"no content encoding", "POST", requestText("POST", target, body, json), false},
		{"other content encoding", "POST", requestText("POST", target, body, json, "Content-Encoding: br"), false},
		{"other body", "POST", requestText("POST", target, `{"amount":2,"currency":"EUR"}`, json, gzip), false},
		{"JSON with other whitespace", "POST", requestText("POST", target, `{"amount": 1,"currency":"EUR"}`, json, gzip), false},
		{"JSON in another order", "POST", requestText("POST", target, `{"currency":"EUR","amount":1}`, json, gzip), false},
		{"body with a byte more", "POST", requestText("POST", target, body+"\n", json, gzip), false},
		{"no body", "POST", requestText("POST", target, "", json, gzip), false},
		{"fields in another order", "POST", requestText("POST", target, body, gzip, json), true},
		{"chunked", "POST", rawHead("POST", target, `"k"`, "Host: api.test", json, gzip, "Transfer-Encoding: chunked") +
			"\r\n5\r\n" + body[:5] + "\r\n18\r\n" + body[5:] + "\r\n0\r\n\r\n", true},
		{"other fields", "POST", requestText("POST", target, body, json, gzip, "User-Agent: v2", "Accept: text/plain",
			"Accept-Encoding: br", "X-Request-Id: 2", "Cookie: a=b", "Authorization: Bearer new", "Content-Language: fr", "Traceparent: 00-1-2-01"), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{Methods: []string{"POST", "PUT"}})
			var spy routeSpy
			s := newSite(t, http1, m.Named("charge").Handler(spy.handler("charge")))
			ran := exchangeRaw(t, s, "POST", first)
			require.Equal(t, http.StatusCreated, ran.status, ran.body)
			a := exchangeRaw(t, s, tc.method, tc.retry)
			if tc.replayed {
				require.True(t, a.replayed(), a.body)
				require.Equal(t, ran.body, a.body)
			} else {
				require.Equal(t, http.StatusUnprocessableEntity, a.status)
				require.Equal(t, "key-reused", a.code(t))
			}
			require.Len(t, spy.take(), 1)
			require.True(t, exchangeRaw(t, s, "POST", first).replayed())
		})
	}
}

// S16: the schemes are part of what is stored, and can never change. What is
// hashed is written down here a second time.
func TestS16Schemes(t *testing.T) {
	const body = `{"amount":1}`
	parts := func(scheme byte) []byte {
		b := []byte{scheme}
		number := func(n int) { b = binary.BigEndian.AppendUint64(b, uint64(n)) }
		text := func(s string) { number(len(s)); b = append(b, s...) }
		text("POST")
		text("/ch%61rges?b=2&a=1")
		number(2)
		text("application/json")
		text("text/json")
		number(1)
		text("gzip")
		text(body)
		return b
	}
	digest := func(b []byte) []byte { sum := sha256.Sum256(b); return sum[:] }
	digestHMAC := func(b []byte) []byte {
		h := hmac.New(sha256.New, []byte(printSecret))
		h.Write(b)
		return h.Sum(nil)
	}
	custom := func(*http.Request, io.Reader) ([]byte, error) { return []byte("selected"), nil }
	for _, tc := range []struct {
		name string
		cfg  idempotency.Config
		want []byte
	}{
		{"request", idempotency.Config{}, append([]byte{1}, digest(parts(1))...)},
		{
			"request, secret",
			idempotency.Config{FingerprintSecret: []byte(printSecret)},
			append([]byte{2}, digestHMAC(parts(2))...),
		},
		{
			"custom",
			idempotency.Config{Fingerprint: custom},
			append([]byte{3}, digest([]byte("\x03selected"))...),
		},
		{
			"custom, secret",
			idempotency.Config{Fingerprint: custom, FingerprintSecret: []byte(printSecret)},
			append([]byte{4}, digestHMAC([]byte("\x04selected"))...),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := newPrintStore()
			var spy routeSpy
			s := newSite(t, http1, newMiddleware(t, store, tc.cfg).Handler(spy.handler("charge")))
			text := requestText("POST", "/ch%61rges?b=2&a=1", body,
				"Content-Type: application/json", "Content-Encoding: gzip", "Content-Type: text/json")
			require.Equal(t, http.StatusCreated, exchangeRaw(t, s, "POST", text).status)
			fp := store.print()
			require.Equal(t, tc.want, fp[:])
		})
	}
}

// A voidWriter is a ResponseWriter without a connection.
type voidWriter http.Header

func (w voidWriter) Header() http.Header       { return http.Header(w) }
func (voidWriter) Write(p []byte) (int, error) { return len(p), nil }
func (voidWriter) WriteHeader(int)             {}

// A printInput is all that a fingerprint is made of.
type printInput struct {
	method, target string
	types, codings []string
	body           string
}

func (in printInput) id() string {
	return fmt.Sprintf("%q %q %q %q %q", in.method, in.target, in.types, in.codings, in.body)
}

// S16: each part is behind its length. Whatever moves from one part to its
// neighbour, two requests have one fingerprint only if they are the same.
func TestS16PartsDoNotRunTogether(t *testing.T) {
	store := newPrintStore()
	m := newMiddleware(t, store, idempotency.Config{Methods: []string{"P", "PO", "POS"}})
	h := m.Named("op").Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	sum := func(in printInput) idempotency.Fingerprint {
		r := &http.Request{
			Method: in.method, RequestURI: in.target, URL: &url.URL{Path: "/"}, ContentLength: int64(len(in.body)),
			Header: http.Header{
				headerTenant: {"acme"}, headerCaller: {"alice"}, idempotency.HeaderKey: {`"k"`},
				"Content-Type": in.types, "Content-Encoding": in.codings,
			},
			Body: io.NopCloser(strings.NewReader(in.body)),
		}
		h.ServeHTTP(voidWriter{}, r.WithContext(t.Context()))
		return store.print()
	}
	// The bytes of a length are among what can be moved.
	const length = "\x00\x00\x00\x00\x00\x00\x00\x01"
	texts := []string{"", "S", "SS", length, length + "S", "S" + length}
	lists := [][]string{nil, {""}, {"S"}, {"", ""}, {"S", ""}, {"", "S"}, {"SS"}, {length}, {"S", "S"}}
	seen := map[idempotency.Fingerprint]string{}
	n := 0
	for _, method := range []string{"P", "PO", "POS"} {
		for _, target := range []string{"S/", "OS/", "/", "/S", "/" + length} {
			for _, types := range lists {
				for _, codings := range lists {
					for _, body := range texts {
						in := printInput{method, target, types, codings, body}
						fp := sum(in)
						if other, taken := seen[fp]; taken {
							require.Fail(t, "one fingerprint for two requests", "%s and %s", in.id(), other)
						}
						seen[fp] = in.id()
						n++
					}
				}
			}
		}
	}
	require.Len(t, seen, n)
	again := printInput{"POS", "/S", []string{"S"}, nil, "S"}
	require.Equal(t, again.id(), seen[sum(again)])
}

// S16: with a secret, who can read the store cannot guess small payloads by the
// plain digest. Instances with the same secret know each other's records.
func TestS16Secret(t *testing.T) {
	sum := func(secret string) idempotency.Fingerprint {
		store := newPrintStore()
		var cfg idempotency.Config
		if secret != "" {
			cfg.FingerprintSecret = []byte(secret)
		}
		s := newGuardedSite(t, store, cfg, echo)
		require.Equal(t, http.StatusCreated, s.do(t.Context(), call{body: "amount=1"}).status)
		return store.print()
	}
	plain, one, again, other := sum(""), sum(printSecret), sum(printSecret), sum(printOtherSecret)
	require.Equal(t, one, again)
	require.NotEqual(t, plain[1:], one[1:])
	require.NotEqual(t, other[1:], one[1:])
	require.NotEqual(t, other[1:], plain[1:])
}

// A printClock is the clock of a store.
type printClock struct{ offset atomic.Int64 }

func (c *printClock) advance(d time.Duration) { c.offset.Add(int64(d)) }

func (c *printClock) now() time.Time {
	return time.Unix(1_700_000_000, 0).Add(time.Duration(c.offset.Load()))
}

// An oldRecord is a record that a request with the payload "first" left behind,
// and how it stands.
type oldRecord struct {
	store *idempotency.MemoryStore
	clock *printClock
	end   func() reply // lets a handler that is still running return
}

// leaveRecord makes a record by a middleware with this configuration.
func leaveRecord(t *testing.T, state string, cfg idempotency.Config) oldRecord {
	t.Helper()
	old := oldRecord{clock: &printClock{}}
	old.store = idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{Now: old.clock.now})
	started, end, answered := make(chan struct{}), make(chan struct{}), make(chan reply, 1)
	cfg.HoldAbandoned = state == "held"
	s := newGuardedSite(t, old.store, cfg, func(w http.ResponseWriter, _ *http.Request) {
		switch state {
		case "released", "held":
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		case "in progress", "abandoned":
			close(started)
			<-end
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "first answer")
	})
	go func() { answered <- s.do(t.Context(), call{body: "first"}) }()
	old.end = sync.OnceValue(func() reply {
		close(end)
		return <-answered
	})
	t.Cleanup(func() { old.end() })
	switch state {
	case "in progress", "abandoned":
		<-started
	default:
		old.end()
	}
	if state == "abandoned" {
		old.clock.advance(time.Minute) // longer than a lease
	}
	return old
}

// attemptSite answers with the attempt.
func attemptSite(t *testing.T, store idempotency.Store, cfg idempotency.Config) *site {
	t.Helper()
	return newGuardedSite(t, store, cfg, func(w http.ResponseWriter, r *http.Request) {
		exec, ok := idempotency.FromContext(r.Context())
		if !ok {
			panic("unguarded")
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprint(w, "attempt ", exec.Attempt())
	})
}

// wholeBody is a FingerprintFunc that selects the body.
func wholeBody(_ *http.Request, body io.Reader) ([]byte, error) { return io.ReadAll(body) }

// S16: a record is compared by the scheme that it names, so a secret or a
// function can be configured while records made without it live.
func TestS16RecordsOfAnEarlierConfiguration(t *testing.T) {
	plain := idempotency.Config{}
	secret := idempotency.Config{FingerprintSecret: []byte(printSecret)}
	otherSecret := idempotency.Config{FingerprintSecret: []byte(printOtherSecret)}
	custom := idempotency.Config{Fingerprint: wholeBody}
	customSecret := idempotency.Config{Fingerprint: wholeBody, FingerprintSecret: []byte(printSecret)}
	for _, tc := range []struct {
		name     string
		old, now idempotency.Config
		known    bool
	}{
		{"nothing changed", plain, plain, true},
		{"secret added", plain, secret, true},
		{"same secret", secret, secret, true},
		{"secret changed", secret, otherSecret, false},
		{"secret removed", secret, plain, false},
		{"function added", plain, custom, true},
		{"function and secret added", plain, customSecret, true},
		{"function added to a secret", secret, customSecret, true},
		{"secret added to a function", custom, customSecret, true},
		{"function removed", custom, plain, false},
		{"function removed from a secret", customSecret, secret, false},
		{"secret removed from a function", customSecret, custom, false},
	} {
		for _, state := range []string{"completed", "released", "abandoned", "in progress", "held"} {
			t.Run(tc.name+", "+state, func(t *testing.T) {
				old := leaveRecord(t, state, tc.old)
				s := attemptSite(t, old.store, tc.now)
				require.Equal(t, "key-reused", s.do(t.Context(), call{body: "other"}).code(t))
				a := s.do(t.Context(), call{body: "first"})
				switch {
				case !tc.known:
					require.Equal(t, "key-reused", a.code(t))
					require.Zero(t, s.runs.Load())
				case state == "completed":
					require.True(t, a.replayed(), a.body)
					require.Equal(t, "first answer", a.body)
				case state == "in progress":
					require.Equal(t, "in-flight", a.code(t))
				case state == "held":
					require.Equal(t, "outcome-unknown", a.code(t))
				default: // taken over, still bound to its payload, and known to both configurations
					require.Equal(t, "attempt 2", a.body)
					for _, cfg := range []idempotency.Config{tc.now, tc.old} {
						s := attemptSite(t, old.store, cfg)
						require.True(t, s.do(t.Context(), call{body: "first"}).replayed())
						require.Equal(t, "key-reused", s.do(t.Context(), call{body: "other"}).code(t))
						require.Zero(t, s.runs.Load())
					}
				}
			})
		}
	}
}

// S18: a key is bound to its first payload, however often it is sent with another,
// and whatever state its record is in. A mismatch changes nothing in the record.
func TestS18MismatchChangesNothing(t *testing.T) {
	for _, tc := range []struct {
		state string
		then  func(t *testing.T, old oldRecord, a reply)
	}{
		{"completed", func(t *testing.T, _ oldRecord, a reply) {
			t.Helper()
			require.True(t, a.replayed())
			require.Equal(t, "first answer", a.body)
		}},
		{"released", func(t *testing.T, _ oldRecord, a reply) {
			t.Helper()
			require.Equal(t, "attempt 2", a.body)
		}},
		{"abandoned", func(t *testing.T, old oldRecord, a reply) {
			t.Helper()
			require.Equal(t, "attempt 2", a.body)
			require.Equal(t, http.StatusConflict, old.end().status) // its late outcome counts for nothing
		}},
		{"in progress", func(t *testing.T, old oldRecord, a reply) {
			t.Helper()
			require.Equal(t, "in-flight", a.code(t))
			require.Equal(t, "first answer", old.end().body)
		}},
		{"held", func(t *testing.T, _ oldRecord, a reply) {
			t.Helper()
			require.Equal(t, "outcome-unknown", a.code(t))
		}},
	} {
		t.Run(tc.state, func(t *testing.T) {
			old := leaveRecord(t, tc.state, idempotency.Config{})
			s := attemptSite(t, old.store, idempotency.Config{HoldAbandoned: tc.state == "held"})
			for i := range 20 {
				a := s.do(t.Context(), call{body: fmt.Sprint("other ", i)})
				require.Equal(t, http.StatusUnprocessableEntity, a.status)
				require.Equal(t, "key-reused", a.code(t))
			}
			require.Zero(t, s.runs.Load())
			tc.then(t, old, s.do(t.Context(), call{body: "first"}))
		})
	}

	t.Run("expiry", func(t *testing.T) {
		old := leaveRecord(t, "completed", idempotency.Config{TTL: time.Hour})
		s := attemptSite(t, old.store, idempotency.Config{TTL: time.Hour})
		old.clock.advance(time.Hour - 1)
		require.Equal(t, "key-reused", s.do(t.Context(), call{body: "other"}).code(t))
		old.clock.advance(1) // S29: from now on the key is free for any payload
		require.Equal(t, "attempt 1", s.do(t.Context(), call{body: "other"}).body)
		require.Equal(t, "key-reused", s.do(t.Context(), call{body: "first"}).code(t))
	})
}

// S07: the payload is no part of the key.
func TestS07EqualPayloadsWithOtherKeysRun(t *testing.T) {
	for _, cfg := range []idempotency.Config{{}, {FingerprintSecret: []byte(printSecret)}, {Fingerprint: wholeBody}} {
		s := attemptSite(t, idempotency.NewMemoryStore(), cfg)
		for _, key := range []string{`"one"`, `"two"`, `"One"`, `"one "`} {
			a := s.do(t.Context(), call{key: key, body: "amount=1"})
			require.Equal(t, http.StatusCreated, a.status, key)
			require.False(t, a.replayed(), key)
		}
		require.EqualValues(t, 4, s.runs.Load())
	}
}

// S14: the quoted and the bare form of a key are one key, where bare keys are
// accepted at all.
func TestS14BothFormsShareARecord(t *testing.T) {
	const bare = "8e03978e-40d5-43e8-bc93-6894a57f9324"
	forms := []string{bare, `"` + bare + `"`, `"` + bare + `";parameter=1`}
	for _, first := range forms {
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{AcceptBareKeys: true}, echo)
		require.Equal(t, http.StatusCreated, s.do(t.Context(), call{key: first, body: "amount=1"}).status)
		for _, retry := range forms {
			a := s.do(t.Context(), call{key: retry, body: "amount=1"})
			require.True(t, a.replayed(), "%s after %s", retry, first)
			require.Equal(t, "key-reused", s.do(t.Context(), call{key: retry, body: "amount=2"}).code(t))
		}
		require.EqualValues(t, 1, s.runs.Load())
	}
	s := newGuardedSite(t, noStore{}, idempotency.Config{}, echo)
	require.Equal(t, "invalid-key", s.do(t.Context(), call{key: bare}).code(t))
}

// formPrint is a FingerprintFunc for multipart forms: their fields, whatever the
// boundary.
func formPrint(r *http.Request, body io.Reader) ([]byte, error) {
	_, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, err
	}
	parts := multipart.NewReader(body, params["boundary"])
	var b []byte
	for {
		part, err := parts.NextPart()
		if errors.Is(err, io.EOF) {
			return b, nil
		}
		if err != nil {
			return nil, err
		}
		value, err := io.ReadAll(part)
		if err != nil {
			return nil, err
		}
		b = fmt.Appendf(b, "%q %q,", part.FormName(), value)
	}
}

// formCall is a multipart request.
func formCall(t *testing.T, boundary string, fields ...string) call {
	t.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	require.NoError(t, w.SetBoundary(boundary))
	for i := 0; i < len(fields); i += 2 {
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	require.NoError(t, w.Close())
	return call{body: body.String(), header: http.Header{"Content-Type": {w.FormDataContentType()}}}
}

// S16: a custom function says what a retry must repeat. The handler reads the
// whole body all the same (S17).
func TestS16CustomFingerprint(t *testing.T) {
	t.Run("multipart", func(t *testing.T) {
		for _, threshold := range []int64{1 << 20, 1} { // in memory, and in a file
			cfg := idempotency.Config{Fingerprint: formPrint, SpoolThreshold: threshold}
			s := newGuardedSite(t, idempotency.NewMemoryStore(), cfg, echo)
			first := formCall(t, "boundary-1", "amount", "1", "note", "a\x00b")
			ran := s.do(t.Context(), first)
			require.Equal(t, http.StatusCreated, ran.status)
			require.Equal(t, first.body, ran.body)
			retry := s.do(t.Context(), formCall(t, "boundary-2", "amount", "1", "note", "a\x00b"))
			require.True(t, retry.replayed())
			require.Equal(t, first.body, retry.body)
			for _, other := range []call{
				formCall(t, "boundary-1", "amount", "2", "note", "a\x00b"),
				formCall(t, "boundary-1", "amount", "1"),
				formCall(t, "boundary-1", "note", "a\x00b", "amount", "1"),
			} {
				require.Equal(t, "key-reused", s.do(t.Context(), other).code(t))
			}
			require.EqualValues(t, 1, s.runs.Load())
		}
	})

	t.Run("selected fields", func(t *testing.T) {
		selected := func(_ *http.Request, body io.Reader) ([]byte, error) {
			var charge struct{ Amount json.Number }
			err := json.NewDecoder(body).Decode(&charge)
			return []byte(charge.Amount), err
		}
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{Fingerprint: selected})
		s := newSite(t, http1, m.Named("charge").Handler(http.HandlerFunc(echo)))
		require.Equal(t, `{"amount":1,"sent":"10:00"} `, s.do(t.Context(), call{body: `{"amount":1,"sent":"10:00"} `}).body)
		for _, retry := range []call{
			{body: `{"sent":"10:05", "amount":1}`},
			{body: `{"amount":1}`, path: "/other?q=1", header: http.Header{"Content-Type": {"text/json"}}},
		} {
			a := s.do(t.Context(), retry)
			require.True(t, a.replayed(), retry.body)
			require.Equal(t, `{"amount":1,"sent":"10:00"} `, a.body)
		}
		require.Equal(t, "key-reused", s.do(t.Context(), call{body: `{"amount":2,"sent":"10:00"}`}).code(t))
	})

	t.Run("the whole request is there", func(t *testing.T) {
		var got []string
		see := func(r *http.Request, body io.Reader) ([]byte, error) {
			b, err := io.ReadAll(body)
			got = append(got, r.Method, r.RequestURI, r.Header.Get("Content-Type"), string(b))
			return slices.Concat(b), err
		}
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{Fingerprint: see}, echo)
		s.do(t.Context(), call{path: "/charges?q", body: "amount=1", header: http.Header{"Content-Type": {"text/plain"}}})
		require.Equal(t, []string{"POST", "/charges?q", "text/plain", "amount=1"}, got)
	})

	t.Run("nothing selected", func(t *testing.T) {
		nothing := func(*http.Request, io.Reader) ([]byte, error) { return nil, nil }
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{Fingerprint: nothing})
		s := newSite(t, http1, m.Named("charge").Handler(http.HandlerFunc(echo)))
		require.Equal(t, "amount=1", s.do(t.Context(), call{body: "amount=1"}).body)
		require.Equal(t, "amount=1", s.do(t.Context(), call{body: "amount=2"}).body) // it said that they are the same
	})
}

// S16, S17: a custom function may parse the form of its request: its
// body is there to be read, and the handler's is left whole.
func TestS16CustomFingerprintParsesTheForm(t *testing.T) {
	amount := func(r *http.Request, body io.Reader) ([]byte, error) {
		value := r.FormValue("amount")
		rest, err := io.ReadAll(body)
		if err == nil && len(rest) == 0 {
			err = errors.New("parsing the form took the body away")
		}
		return []byte(value), err
	}
	urlencoded := func(amount string) call {
		return call{body: "amount=" + amount, header: http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}}
	}
	upload := func(amount string) call {
		return formCall(t, "boundary", "amount", amount, "note", "any")
	}
	for _, tc := range []struct {
		name string
		call func(amount string) call
	}{{"urlencoded", urlencoded}, {"multipart", upload}} {
		for _, threshold := range []int64{1 << 20, 1} {
			t.Run(fmt.Sprintf("%s, threshold %d", tc.name, threshold), func(t *testing.T) {
				dir := newSpoolDir(t)
				s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{
					Fingerprint: amount, SpoolThreshold: threshold,
				}, func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.WriteString(w, "charged "+r.FormValue("amount"))
				})
				require.Equal(t, "charged 1", s.do(t.Context(), tc.call("1")).body)
				retry := s.do(t.Context(), tc.call("1"))
				require.True(t, retry.replayed())
				require.Equal(t, "charged 1", retry.body)
				require.Equal(t, "key-reused", s.do(t.Context(), tc.call("1000")).code(t))
				dir.requireEmpty(t)
			})
		}
	}
}

// S16, S17: an error of the function refuses the request before the store is asked
// for anything. Its text is not for the client (S33).
func TestS16CustomFingerprintFails(t *testing.T) {
	for _, threshold := range []int64{1 << 20, 1} {
		fails := func(*http.Request, io.Reader) ([]byte, error) { return nil, errors.New("loud internal text") }
		s := newGuardedSite(t, noStore{}, idempotency.Config{Fingerprint: fails, SpoolThreshold: threshold}, echo)
		a := s.do(t.Context(), call{body: "amount=1"})
		require.Equal(t, http.StatusBadRequest, a.status)
		require.Equal(t, "broken-body", a.code(t))
		require.NotContains(t, a.body, "loud")
		require.Zero(t, s.runs.Load())
	}
}
