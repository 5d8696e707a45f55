package idempotency_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// loudCall is a request whose tenant, caller and key nobody can overlook in an
// answer.
func loudCall(c call) call {
	c.tenant, c.caller, c.key = "loud-tenant", "loud-caller", `"loud-key"`
	return c
}

// loudAnswer is a handler whose answer is for its own caller only.
func loudAnswer(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("X-Loud", "loud-header")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, "loud-answer")
}

// A problemCase is one way to be refused.
type problemCase struct {
	name       string
	code       idempotency.Code
	status     int
	title      string
	retryAfter string // "" for none
	original   int
	provoke    func(t *testing.T, cfg idempotency.Config) reply
}

// provokeBy sends calls to a handler, and returns the answer to the last one.
func provokeBy(t *testing.T, store idempotency.Store, cfg idempotency.Config, h http.HandlerFunc, calls ...call) reply {
	t.Helper()
	s := newGuardedSite(t, store, cfg, h)
	var a reply
	for _, c := range calls {
		a = s.do(t.Context(), loudCall(c))
		require.NoError(t, a.err)
	}
	return a
}

func problemCases() []problemCase {
	return []problemCase{
		{
			name: "missing key", code: idempotency.CodeMissingKey, status: 400, title: "Idempotency-Key is missing",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				return provokeBy(t, noStore{}, cfg, loudAnswer, call{noKey: true})
			},
		},
		{
			name: "invalid key", code: idempotency.CodeInvalidKey, status: 400, title: "Idempotency-Key is invalid",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				s := newGuardedSite(t, noStore{}, cfg, loudAnswer)
				return s.do(t.Context(), call{tenant: "loud-tenant", caller: "loud-caller", key: "loud key"})
			},
		},
		{
			name: "broken body", code: idempotency.CodeBrokenBody, status: 400, title: "Request body is broken",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.Fingerprint = func(*http.Request, io.Reader) ([]byte, error) { return nil, errDown }
				return provokeBy(t, noStore{}, cfg, loudAnswer, call{body: "loud body"})
			},
		},
		{
			name: "no identity", code: idempotency.CodeNoIdentity, status: 403, title: "Caller is not identified",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				s := newGuardedSite(t, noStore{}, cfg, loudAnswer)
				return exchangeRaw(t, s, "POST", "POST / HTTP/1.1\r\nHost: api.test\r\n"+headerCaller+": loud-caller\r\n"+
					"Idempotency-Key: \"loud-key\"\r\nContent-Length: 0\r\n\r\n")
			},
		},
		{
			name: "replay refused", code: idempotency.CodeReplayRefused, status: 403, title: "Replay is refused",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.CheckReplay = func(*http.Request) error { return errDown }
				return provokeBy(t, idempotency.NewMemoryStore(), cfg, loudAnswer, call{}, call{})
			},
		},
		{
			name: "in flight", code: idempotency.CodeInFlight, status: 409, title: "Request is in progress", retryAfter: "1",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				started, end := make(chan struct{}), make(chan struct{})
				s := newGuardedSite(t, idempotency.NewMemoryStore(), cfg, func(w http.ResponseWriter, r *http.Request) {
					close(started)
					<-end
					loudAnswer(w, r)
				})
				release := sync.OnceFunc(func() { close(end) })
				t.Cleanup(release)
				first := make(chan reply, 1)
				go func() { first <- s.do(t.Context(), loudCall(call{})) }()
				<-started
				a := s.do(t.Context(), loudCall(call{}))
				release()
				require.Equal(t, "loud-answer", (<-first).body)
				return a
			},
		},
		{
			name: "outcome unknown", code: idempotency.CodeOutcomeUnknown, status: 409, title: "Outcome is unknown",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.HoldAbandoned = true
				return provokeBy(t, idempotency.NewMemoryStore(), cfg, func(w http.ResponseWriter, _ *http.Request) {
					http.Error(w, "loud-answer", http.StatusInternalServerError)
				}, call{}, call{})
			},
		},
		{
			name: "not replayable", code: idempotency.CodeNotReplayable, status: 409, title: "Outcome cannot be replayed", original: 201,
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.MaxResponseBytes = 5
				return provokeBy(t, idempotency.NewMemoryStore(), cfg, loudAnswer, call{}, call{})
			},
		},
		{
			name: "request too large", code: idempotency.CodeRequestTooLarge, status: 413, title: "Request body is too large",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.MaxRequestBytes = 5
				return provokeBy(t, noStore{}, cfg, loudAnswer, call{body: "loud body"})
			},
		},
		{
			name: "key reused", code: idempotency.CodeKeyReused, status: 422, title: "Idempotency-Key is already used",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				return provokeBy(t, idempotency.NewMemoryStore(), cfg, loudAnswer, call{body: "loud body"}, call{body: "other"})
			},
		},
		{
			name: "bad identity", code: idempotency.CodeBadIdentity, status: 500, title: "Caller cannot be scoped",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				s := newGuardedSite(t, noStore{}, cfg, loudAnswer)
				return s.do(t.Context(), call{tenant: strings.Repeat("loud", 64), caller: "loud-caller", key: `"loud-key"`})
			},
		},
		{
			name: "store unavailable", code: idempotency.CodeStoreUnavailable, status: 503, title: "Idempotency store is unavailable", retryAfter: "2",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				cfg.Lease = 100 * time.Millisecond
				return provokeBy(t, downStore{}, cfg, loudAnswer, call{})
			},
		},
		{
			name: "retry", code: idempotency.CodeRetry, status: 503, title: "Request was not carried through", retryAfter: "1",
			provoke: func(t *testing.T, cfg idempotency.Config) reply {
				t.Helper()
				dir := newSpoolDir(t)
				dir.set(t, filepath.Join(string(dir), "loud-directory"))
				cfg.SpoolThreshold = 1
				return provokeBy(t, noStore{}, cfg, loudAnswer, call{body: "loud body"})
			},
		},
	}
}

// header is the whole header of a problem, but for what belongs to the connection.
func (c problemCase) header(docs string) http.Header {
	h := http.Header{
		"Content-Type":     {"application/problem+json"},
		"Content-Language": {"en"},
		"Cache-Control":    {"no-store"},
		"Link":             {"<" + docs + `>; rel="describedby"; type="text/html"`},
	}
	if c.retryAfter != "" {
		h.Set("Retry-After", c.retryAfter)
	}
	return h
}

// S32, S33: every refusal is a problem with all that a client needs to tell what to
// do, and nothing that is not the client's.
func TestS32Problems(t *testing.T) {
	for _, tc := range problemCases() {
		for _, docs := range []string{"", "https://docs.test/errors?lang=en"} {
			t.Run(tc.name+", documented at "+docs, func(t *testing.T) {
				a := tc.provoke(t, idempotency.Config{DocumentationURL: docs})
				if docs == "" {
					docs = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
				}
				require.Equal(t, tc.status, a.status)
				a.header.Del("Connection")
				require.Equal(t, tc.header(docs), a.header)
				require.EqualValues(t, len(a.body), a.length)

				var got map[string]any
				require.NoError(t, json.Unmarshal([]byte(a.body), &got))
				require.Regexp(t, `^[A-Z].*\.$`, got["detail"])
				want := map[string]any{
					"type": docs + "#" + string(tc.code), "title": tc.title, "status": float64(tc.status), "detail": got["detail"],
					"code": string(tc.code),
				}
				if tc.original != 0 {
					want["original_status"] = float64(tc.original)
				}
				require.Equal(t, want, got)
				require.NotContains(t, fmt.Sprint(a.header, a.body), "loud")
			})
		}
	}
}

// S32: the codes, which can never change.
func TestS32CodesAreStable(t *testing.T) {
	var got []string
	for _, tc := range problemCases() {
		got = append(got, fmt.Sprint(tc.status, " ", tc.code))
	}
	require.Equal(t, []string{
		"400 missing-key", "400 invalid-key", "400 broken-body", "403 no-identity", "403 replay-refused", "409 in-flight",
		"409 outcome-unknown", "409 not-replayable", "413 request-too-large", "422 key-reused", "500 bad-identity",
		"503 store-unavailable", "503 retry",
	}, got)
}

// S32: what was wrong with the header is said, but not what it held.
func TestS32InvalidKeyDetails(t *testing.T) {
	s := newGuardedSite(t, noStore{}, idempotency.Config{}, echo)
	for _, tc := range []struct{ name, fields, detail string }{
		{"not a String", "Idempotency-Key: loud\r\n", "Idempotency-Key: the value is not a structured field String (RFC 9651), " +
			`such as "8e03978e-40d5-43e8-bc93-6894a57f9324" with its quotes.`},
		{"empty", "Idempotency-Key: \"\"\r\n", "Idempotency-Key: the key is empty."},
		{"too long", `Idempotency-Key: "` + strings.Repeat("loud", 64) + "\"\r\n", "Idempotency-Key: the key is longer than 255 bytes."},
		{
			"two lines", "Idempotency-Key: \"loud\"\r\nIdempotency-Key: \"loud\"\r\n",
			"Idempotency-Key: the request has more than one Idempotency-Key field line.",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := exchangeRaw(t, s, "POST", rawHead("POST", "/", "", "Host: api.test", "Content-Length: 0")+tc.fields+"\r\n")
			require.Equal(t, "invalid-key", a.code(t))
			var problem idempotency.Problem
			require.NoError(t, json.Unmarshal([]byte(a.body), &problem))
			require.Equal(t, tc.detail, problem.Detail)
			require.NotContains(t, a.body, "loud")
		})
	}
}

// S34: an application renders problems in its own shape. It gets all that the
// default one writes, and the headers that go with it.
func TestS34CustomRenderer(t *testing.T) {
	const docs = "https://docs.test/errors"
	for _, tc := range problemCases() {
		t.Run(tc.name, func(t *testing.T) {
			var mu sync.Mutex
			var problems []idempotency.Problem
			var headers []http.Header
			a := tc.provoke(t, idempotency.Config{
				DocumentationURL: docs,
				RenderProblem: func(w http.ResponseWriter, r *http.Request, p idempotency.Problem) {
					mu.Lock()
					defer mu.Unlock()
					problems = append(problems, p)
					headers = append(headers, w.Header().Clone())
					w.Header().Set("Content-Type", "text/x-own")
					w.Header().Set("Cache-Control", "private")
					w.Header().Del("Link")
					w.Header().Set("X-Path", r.URL.Path)
					w.WriteHeader(http.StatusTeapot)
					_, _ = io.WriteString(w, "own: "+string(p.Code))
				},
			})
			require.Len(t, problems, 1)
			p := problems[0]
			require.NotEmpty(t, p.Detail)
			wait, _ := time.ParseDuration(tc.retryAfter + "s")
			require.Equal(t, idempotency.Problem{
				Type: docs + "#" + string(tc.code), Title: tc.title, Status: tc.status, Detail: p.Detail, Code: tc.code,
				OriginalStatus: tc.original, RetryAfter: wait,
			}, p)
			want := tc.header(docs)
			want.Del("Content-Type") // the renderer's own
			headers[0].Del("Connection")
			require.Equal(t, want, headers[0])

			want.Set("Content-Type", "text/x-own")
			want.Set("Cache-Control", "private")
			want.Del("Link")
			want.Set("X-Path", "/")
			a.header.Del("Connection")
			require.Equal(t, want, a.header)
			require.Equal(t, http.StatusTeapot, a.status)
			require.Equal(t, "own: "+string(tc.code), a.body)
		})
	}

	t.Run("on top of the default", func(t *testing.T) {
		a := problemCases()[0].provoke(t, idempotency.Config{
			RenderProblem: func(w http.ResponseWriter, r *http.Request, p idempotency.Problem) {
				p.Title = "Schlüssel fehlt"
				w.Header().Set("Content-Language", "de")
				idempotency.RenderProblem(w, r, p)
			},
		})
		require.Equal(t, http.StatusBadRequest, a.status)
		require.Equal(t, "missing-key", a.code(t))
		require.Contains(t, a.body, `"title":"Schlüssel fehlt"`)
		require.Equal(t, "de", a.header.Get("Content-Language"))
	})
}

// S32: a problem leaves alone what outer middlewares have put on the response.
func TestS32OuterHeaders(t *testing.T) {
	guarded := newMiddleware(t, noStore{}, idempotency.Config{}).Handler(http.HandlerFunc(echo))
	s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "7")
		w.Header().Set("Link", "</terms>; rel=terms-of-service")
		w.Header().Set("Cache-Control", "max-age=60")
		w.Header().Set("Content-Type", "text/html")
		guarded.ServeHTTP(w, r)
	}))
	a := s.do(t.Context(), call{noKey: true})
	require.Equal(t, "missing-key", a.code(t))
	require.Equal(t, "7", a.header.Get("X-Request-Id"))
	require.Equal(t, []string{
		"</terms>; rel=terms-of-service",
		"<" + idempotency.DefaultDocumentationURL + `>; rel="describedby"; type="text/html"`,
	}, a.header.Values("Link"))
	require.Equal(t, []string{"no-store"}, a.header.Values("Cache-Control"))
}

// The caller's rights may have been revoked since: a refused replay is refused for
// now, and changes nothing.
func TestS32ReplayRefused(t *testing.T) {
	var mu sync.Mutex
	revoked := true
	var asked []string
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{
		MaxResponseBytes: 20,
		CheckReplay: func(r *http.Request) error {
			body, err := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, r.URL.Path+" "+string(body))
			if revoked {
				return errDown
			}
			return err
		},
	}, echo)
	large := strings.Repeat("large", 5)
	first := s.do(t.Context(), call{body: "amount=1"})
	require.Equal(t, http.StatusCreated, first.status)
	require.Equal(t, large, s.do(t.Context(), call{path: "/large", body: large}).body)
	require.Empty(t, asked) // those were no replays
	for range 3 {
		a := s.do(t.Context(), call{body: "amount=1"})
		require.Equal(t, http.StatusForbidden, a.status)
		require.Equal(t, "replay-refused", a.code(t))
		a = s.do(t.Context(), call{path: "/large", body: large})
		require.Equal(t, "replay-refused", a.code(t)) // not even that it is done, and how
		require.NotContains(t, a.body, "original_status")
		require.Equal(t, "key-reused", s.do(t.Context(), call{body: "amount=2"}).code(t))
	}
	require.Equal(t, []string{"/ amount=1", "/large " + large}, asked[:2])
	require.Len(t, asked, 6)

	mu.Lock()
	revoked = false
	mu.Unlock()
	a := s.do(t.Context(), call{body: "amount=1"})
	require.True(t, a.replayed())
	require.Equal(t, first.body, a.body)
	require.Equal(t, "not-replayable", s.do(t.Context(), call{path: "/large", body: large}).code(t))
	require.EqualValues(t, 2, s.runs.Load())
}

// S23: a response over the limit is not truncated for its first caller. A retry
// learns that the operation is done, and how, but not more.
func TestS23NotReplayable(t *testing.T) {
	for _, status := range []int{http.StatusOK, http.StatusCreated, http.StatusFound, http.StatusNotFound, http.StatusUnprocessableEntity} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{MaxResponseBytes: 10},
				func(w http.ResponseWriter, _ *http.Request) {
					w.WriteHeader(status)
					_, _ = io.WriteString(w, "eleven, or ")
					_, _ = io.WriteString(w, "more")
				})
			first := s.do(t.Context(), call{body: "amount=1"})
			require.Equal(t, status, first.status)
			require.Equal(t, "eleven, or more", first.body)
			for range 2 {
				a := s.do(t.Context(), call{body: "amount=1"})
				require.Equal(t, http.StatusConflict, a.status)
				require.Equal(t, "not-replayable", a.code(t))
				require.Contains(t, a.body, fmt.Sprint(`"original_status":`, status))
				require.Empty(t, a.header.Get("Retry-After"))
				require.False(t, a.replayed())
			}
			require.Equal(t, "key-reused", s.do(t.Context(), call{body: "amount=2"}).code(t))
			require.EqualValues(t, 1, s.runs.Load())
		})
	}
}

// A slowRun is a handler that returns when it is told to.
type slowRun struct {
	started, ended chan struct{}
	end            func()
}

// A tenantSite answers by what it is asked, and not by what happened before.
type tenantSite struct {
	*site

	mu   sync.Mutex
	runs map[string]*slowRun // by tenant
}

func newTenantSite(t *testing.T) *tenantSite {
	t.Helper()
	s := &tenantSite{runs: map[string]*slowRun{}}
	cfg := idempotency.Config{
		MaxRequestBytes: 1000, MaxResponseBytes: 1000,
		CheckReplay: func(r *http.Request) error {
			if r.URL.Path == "/revoked" {
				return errDown
			}
			return nil
		},
	}
	s.site = newGuardedSite(t, idempotency.NewMemoryStore(), cfg, func(w http.ResponseWriter, r *http.Request) {
		tenant := r.Header.Get(headerTenant)
		body, _ := io.ReadAll(r.Body)
		switch r.URL.Path {
		case "/slow":
			run := s.slow(t, tenant)
			close(run.started)
			<-run.ended
		case "/large":
			body = []byte(strings.Repeat("large", 500))
		case "/unavailable":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/panic":
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Location", "/of/"+tenant)
		_, _ = fmt.Fprintf(w, "%s for %s: %s", r.URL.Path, tenant, body)
	})
	return s
}

// slow returns a tenant's only slow run, which has started or will. It ends with
// the test at the latest.
func (s *tenantSite) slow(t *testing.T, tenant string) *slowRun {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	run := s.runs[tenant]
	if run == nil {
		run = &slowRun{started: make(chan struct{}), ended: make(chan struct{})}
		run.end = sync.OnceFunc(func() { close(run.ended) })
		t.Cleanup(run.end)
		s.runs[tenant] = run
	}
	return run
}

var dateLine = regexp.MustCompile(`Date: [^\r]*\r\n`)

// bytes returns the whole answer to a request, byte for byte, but for its Date.
func (s *tenantSite) bytes(t *testing.T, conn *rawConn) string {
	t.Helper()
	answer, err := io.ReadAll(conn.reader)
	require.NoError(t, err)
	return dateLine.ReplaceAllString(string(answer), "")
}

func (s *tenantSite) send(t *testing.T, tenant, text string) *rawConn {
	t.Helper()
	conn := dialRaw(t, s.site)
	conn.write(t, strings.Replace(text, headerTenant+": acme", "Connection: close\r\n"+headerTenant+": "+tenant, 1))
	return conn
}

// story sends all kinds of requests for a tenant, all with one key, and returns
// what came back.
func (s *tenantSite) story(t *testing.T, tenant, body string) map[string]string {
	t.Helper()
	answers := map[string]string{}
	ask := func(name, text string) { answers[name] = s.bytes(t, s.send(t, tenant, text)) }
	post := func(path string) string { return requestText("POST", path, body) }
	other := func(path string) string { return requestText("POST", path, body+" and more") }
	for _, path := range []string{"/done", "/large", "/revoked", "/unavailable", "/panic"} {
		ask("first "+path, post(path))
		ask("retry "+path, post(path))
		ask("other payload "+path, other(path))
	}
	run := s.slow(t, tenant)
	first := s.send(t, tenant, post("/slow"))
	<-run.started
	ask("in flight", post("/slow"))
	ask("in flight, other payload", other("/slow"))
	run.end()
	answers["first slow"] = s.bytes(t, first)
	ask("retry slow", post("/slow"))
	ask("invalid key", strings.Replace(post("/done"), `"k"`, "k", 1))
	head, _, _ := strings.Cut(requestText("POST", "/done", strings.Repeat(body, 1000)), "\r\n\r\n")
	ask("too large", head+"\r\nExpect: 100-continue\r\n\r\n")
	return answers
}

// S33: an answer to one tenant is the same, byte for byte, whether or not another
// tenant used that key, and whatever came of it.
func TestS33OtherTenantsDoNotShow(t *testing.T) {
	alone := newTenantSite(t).story(t, "one", "amount=1")
	require.Len(t, alone, 21)
	for name, status := range map[string]string{
		"first /done": "200", "retry /done": "200", "other payload /done": "422", "retry /large": "409", "retry /revoked": "403",
		"retry /unavailable": "503", "in flight": "409", "in flight, other payload": "422", "invalid key": "400", "too large": "413",
	} {
		require.True(t, strings.HasPrefix(alone[name], "HTTP/1.1 "+status+" "), "%s: %s", name, alone[name])
	}
	require.Contains(t, alone["retry /done"], "Idempotency-Replayed: true")

	for _, tc := range []struct{ name, body string }{
		{"the same payloads", "amount=1"},
		{"other payloads", "amount=2"},
	} {
		t.Run(tc.name+" before", func(t *testing.T) {
			s := newTenantSite(t)
			s.story(t, "two", tc.body)
			require.Equal(t, alone, s.story(t, "one", "amount=1"))
		})
		t.Run(tc.name+" in flight", func(t *testing.T) {
			s := newTenantSite(t)
			run := s.slow(t, "two")
			conn := s.send(t, "two", requestText("POST", "/slow", tc.body))
			<-run.started
			require.Equal(t, alone, s.story(t, "one", "amount=1"))
			run.end()
			require.Contains(t, s.bytes(t, conn), "/slow for two: "+tc.body)
		})
	}
}

// S32: inside of an encoder a problem does not send the length of its plain text.
func TestS32ProblemInsideOfAnEncoder(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		s := newSite(t, proto, gzipped(newMiddleware(t, noStore{}, idempotency.Config{}).Handler(http.HandlerFunc(echo))))
		a := s.do(t.Context(), call{noKey: true})
		require.NoError(t, a.err)
		require.Equal(t, http.StatusBadRequest, a.status)
		require.Equal(t, "missing-key", a.code(t))
	})
}
