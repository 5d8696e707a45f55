package idempotency_test

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"math"
	"net/http"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// configFaults returns the faults that New finds in a Config.
func configFaults(t *testing.T, store idempotency.Store, cfg idempotency.Config) []idempotency.ConfigError {
	t.Helper()
	m, err := idempotency.New(store, cfg)
	if err == nil {
		require.NotNil(t, m)
		return nil
	}
	require.Nil(t, m)
	joined, ok := err.(interface{ Unwrap() []error })
	require.True(t, ok, "%T", err)
	var faults []idempotency.ConfigError
	for _, err := range joined.Unwrap() {
		require.IsType(t, (*idempotency.ConfigError)(nil), err)
		var fault *idempotency.ConfigError
		require.ErrorAs(t, err, &fault)
		require.NotEmpty(t, fault.Reason)
		require.True(t, strings.HasPrefix(fault.Error(), "idempotency: config: "+fault.Field+": "), fault.Error())
		require.Contains(t, fault.Error(), fault.Reason)
		require.Contains(t, err.Error(), fault.Error())
		faults = append(faults, *fault)
	}
	require.NotEmpty(t, faults)
	return faults
}

// All faults of a Config come back at once, each with its field.
func TestConfigReportsAllFaults(t *testing.T) {
	faults := configFaults(t, nil, idempotency.Config{
		Version:           "v\x00",
		Methods:           []string{"POST", "patch", "", "PUT "},
		FingerprintSecret: []byte("secret"),
		TTL:               -1,
		Lease:             -2,
		StoreTimeout:      -3,
		MaxExecution:      -4,
		WaitInFlight:      -5,
		MaxRequestBytes:   -6,
		MaxResponseBytes:  -7,
		SpoolThreshold:    -8,
		DocumentationURL:  "docs",
	})
	var fields, values []string
	for _, fault := range faults {
		fields = append(fields, fault.Field)
		values = append(values, fault.Value)
	}
	require.Equal(t, []string{
		"store", "KeyScope", "Principal", "Version", "Methods", "Methods", "Methods", "FingerprintSecret", "TTL", "Lease",
		"StoreTimeout", "MaxExecution", "WaitInFlight", "MaxRequestBytes", "MaxResponseBytes", "SpoolThreshold", "DocumentationURL",
	}, fields)
	require.Equal(t, []string{
		"", "", "", "v\x00", "patch", "", "PUT ", "", "-1ns", "-2ns", "-3ns", "-4ns", "-5ns", "-6", "-7", "-8", "docs",
	}, values)

	_, err := idempotency.New(nil, idempotency.Config{})
	var fault *idempotency.ConfigError
	require.ErrorAs(t, err, &fault)
	require.Equal(t, "store", fault.Field)
}

// What a Config accepts, on both sides of each bound.
func TestConfigBounds(t *testing.T) {
	const hour = time.Hour
	for _, tc := range []struct {
		name  string
		edit  func(*idempotency.Config)
		fault string // the one field that is at fault; "" for none
	}{
		{"nothing but what is required", func(*idempotency.Config) {}, ""},
		{"no tenant", func(c *idempotency.Config) { c.KeyScope = nil }, "KeyScope"},
		{"no principal", func(c *idempotency.Config) { c.Principal = nil }, "Principal"},
		{"longest version", func(c *idempotency.Config) { c.Version = strings.Repeat("v", idempotency.MaxVersionLen) }, ""},
		{"version too long", func(c *idempotency.Config) { c.Version = strings.Repeat("v", idempotency.MaxVersionLen+1) }, "Version"},
		{"version in bad UTF-8", func(c *idempotency.Config) { c.Version = "\xff" }, "Version"},
		{"methods", func(c *idempotency.Config) { c.Methods = []string{"PUT", "DELETE", "M-SEARCH"} }, ""},
		{"no methods", func(c *idempotency.Config) { c.Methods = []string{} }, "Methods"},
		{"method in small letters", func(c *idempotency.Config) { c.Methods = []string{"Post"} }, "Methods"},
		{"two methods in one", func(c *idempotency.Config) { c.Methods = []string{"POST,PUT"} }, "Methods"},
		{"all methods", func(c *idempotency.Config) { c.Methods = []string{"*"} }, "Methods"},
		{"secret", func(c *idempotency.Config) { c.FingerprintSecret = make([]byte, 16) }, ""},
		{"short secret", func(c *idempotency.Config) { c.FingerprintSecret = make([]byte, 15) }, "FingerprintSecret"},
		{"empty secret", func(c *idempotency.Config) { c.FingerprintSecret = []byte{} }, "FingerprintSecret"},
		{"TTL as long as the lease", func(c *idempotency.Config) { c.TTL, c.Lease = hour, hour }, ""},
		{"TTL shorter than the lease", func(c *idempotency.Config) { c.TTL, c.Lease = hour-1, hour }, "TTL"},
		{"TTL shorter than the default lease", func(c *idempotency.Config) { c.TTL = 30*time.Second - 1 }, "TTL"},
		{"lease longer than the default TTL", func(c *idempotency.Config) { c.Lease = 24*time.Hour + 1 }, "TTL"},
		{"negative TTL", func(c *idempotency.Config) { c.TTL = -1 }, "TTL"},
		{"negative lease", func(c *idempotency.Config) { c.Lease = -1 }, "Lease"},
		{"short lease", func(c *idempotency.Config) { c.Lease = 2 }, ""},
		{"timeout shorter than the lease", func(c *idempotency.Config) { c.StoreTimeout, c.Lease = hour-1, hour }, ""},
		{"timeout as long as the lease", func(c *idempotency.Config) { c.StoreTimeout, c.Lease = hour, hour }, "StoreTimeout"},
		{"timeout as long as the default lease", func(c *idempotency.Config) { c.StoreTimeout = 30 * time.Second }, "StoreTimeout"},
		{"negative timeout", func(c *idempotency.Config) { c.StoreTimeout = -1 }, "StoreTimeout"},
		{"longest execution", func(c *idempotency.Config) { c.MaxExecution = 1 }, ""},
		{"negative longest execution", func(c *idempotency.Config) { c.MaxExecution = -1 }, "MaxExecution"},
		{"wait", func(c *idempotency.Config) { c.WaitInFlight = 1 }, ""},
		{"negative wait", func(c *idempotency.Config) { c.WaitInFlight = -1 }, "WaitInFlight"},
		{"small sizes", func(c *idempotency.Config) { c.MaxRequestBytes, c.MaxResponseBytes, c.SpoolThreshold = 1, 1, 1 }, ""},
		{"large sizes", func(c *idempotency.Config) {
			c.MaxRequestBytes, c.MaxResponseBytes, c.SpoolThreshold = math.MaxInt64, idempotency.MaxResponseBody, math.MaxInt64
		}, ""},
		{"request size", func(c *idempotency.Config) { c.MaxRequestBytes = -1 }, "MaxRequestBytes"},
		{"response size", func(c *idempotency.Config) { c.MaxResponseBytes = -1 }, "MaxResponseBytes"},
		{"response that cannot be stored", func(c *idempotency.Config) { c.MaxResponseBytes = idempotency.MaxResponseBody + 1 }, "MaxResponseBytes"},
		{"threshold", func(c *idempotency.Config) { c.SpoolThreshold = -1 }, "SpoolThreshold"},
		{"https", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/errors?lang=en&v=2" }, ""},
		{"http", func(c *idempotency.Config) { c.DocumentationURL = "http://docs.test" }, ""},
		{"other scheme", func(c *idempotency.Config) { c.DocumentationURL = "ftp://docs.test" }, "DocumentationURL"},
		{"no scheme", func(c *idempotency.Config) { c.DocumentationURL = "//docs.test" }, "DocumentationURL"},
		{"no host", func(c *idempotency.Config) { c.DocumentationURL = "https:///errors" }, "DocumentationURL"},
		{"relative", func(c *idempotency.Config) { c.DocumentationURL = "/errors" }, "DocumentationURL"},
		{"fragment", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/#errors" }, "DocumentationURL"},
		{"empty fragment", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/#" }, "DocumentationURL"},
		{"bracket", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/>;x" }, "DocumentationURL"},
		{"opening bracket", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/<" }, "DocumentationURL"},
		{"quote", func(c *idempotency.Config) { c.DocumentationURL = `https://docs.test/"` }, "DocumentationURL"},
		{"space", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/a b" }, "DocumentationURL"},
		{"line break", func(c *idempotency.Config) { c.DocumentationURL = "https://docs.test/\r\nX: y" }, "DocumentationURL"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := identified(idempotency.Config{})
			tc.edit(&cfg)
			faults := configFaults(t, idempotency.NewMemoryStore(), cfg)
			if tc.fault == "" {
				require.Empty(t, faults)
				return
			}
			require.Len(t, faults, 1)
			require.Equal(t, tc.fault, faults[0].Field)
		})
	}
}

// A secret appears in no form of an error, and in none of the Config's own faults.
func TestConfigErrorsShowNoSecret(t *testing.T) {
	_, err := idempotency.New(nil, idempotency.Config{FingerprintSecret: []byte("loud secret")})
	require.Error(t, err)
	var fault *idempotency.ConfigError
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		require.ErrorAs(t, e, &fault)
		require.NotContains(t, fmt.Sprintf("%v %+v %#v %q", e, *fault, *fault, e), "loud")
	}
	require.NotContains(t, fmt.Sprintf("%v %+v %q", err, err, err), "loud")
	require.NotContains(t, fmt.Sprintf("%v %#v", err, err), fmt.Sprintf("%v", []byte("loud secret")))

	secret := []byte("a loud secret, of full length")
	m := newMiddleware(t, noStore{}, idempotency.Config{FingerprintSecret: secret})
	printed := fmt.Sprintf("%v %+v %#v", m, *m, *m)
	for _, form := range []string{string(secret), fmt.Sprintf("%d", secret), fmt.Sprintf("%#v", secret)} {
		require.NotContains(t, printed, strings.Trim(form, "[]"))
	}
}

// configDefaults are the defaults that the comments of Config's fields promise.
// TestConfigDefaults holds the code to them.
var configDefaults = map[string]string{
	"Version":           `"v1".`,
	"Methods":           "POST and PATCH.",
	"TTL":               "24 hours.",
	"Lease":             "30 seconds.",
	"StoreTimeout":      "5 seconds, at most half a Lease.",
	"MaxExecution":      "no limit.",
	"WaitInFlight":      "0, no waiting.",
	"MaxRequestBytes":   "10 MiB.",
	"SpoolThreshold":    "64 KiB.",
	"MaxResponseBytes":  "1 MiB.",
	"FingerprintSecret": "none.",
	"CheckReplay":       "no check.",
	"Predecessors":      "none.",
	"Logger":            "no logging.",
	"OnEvent":           "none.",
	"DocumentationURL":  "[DefaultDocumentationURL].",
	"RenderProblem":     "[RenderProblem].",
	"Keep":              "[DefaultKeep].",
	"Route": "the method and the http.ServeMux pattern, if the middleware wraps one route whose pattern names one operation, " +
		`that is, does not end in "/", "*" or "{x...}"; else the method and the escaped path as received, as always where the ` +
		"middleware wraps a whole mux. The host is part of it only where the pattern names one. Give operations a fixed name in " +
		"production, by [RouteName] or [Middleware.Named].",
}

// The comments of Config's fields promise what is tested here, and nothing else.
func TestConfigDocumentsItsDefaults(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "idempotency.go", nil, parser.ParseComments)
	require.NoError(t, err)
	documented := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Config" {
			return true
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			_, after, ok := strings.Cut(strings.Join(strings.Fields(field.Doc.Text()), " "), "Default: ")
			if ok {
				documented[field.Names[0].Name] = after
			}
		}
		return false
	})
	require.Equal(t, configDefaults, documented)
}

// Each default is what the comment of its field says.
func TestConfigDefaults(t *testing.T) {
	t.Run("Version, TTL, Lease, StoreTimeout, HoldAbandoned", func(t *testing.T) {
		for _, tc := range []struct {
			name    string
			cfg     idempotency.Config
			lease   time.Duration
			timeout time.Duration
		}{
			{"nothing set", idempotency.Config{}, 30 * time.Second, 5 * time.Second},
			{"long lease", idempotency.Config{Lease: time.Hour}, time.Hour, 5 * time.Second},
			{"lease that still leaves all of it", idempotency.Config{Lease: 10 * time.Second}, 10 * time.Second, 5 * time.Second},
			{"short lease", idempotency.Config{Lease: 4 * time.Second}, 4 * time.Second, 2 * time.Second},
			{"timeout set", idempotency.Config{Lease: 4 * time.Second, StoreTimeout: 3 * time.Second}, 4 * time.Second, 3 * time.Second},
		} {
			t.Run(tc.name, func(t *testing.T) {
				store := newPrintStore()
				s := newGuardedSite(t, store, tc.cfg, echo)
				require.Equal(t, http.StatusCreated, s.do(t.Context(), call{}).status)
				claim, budget := store.last()
				require.Equal(t, "v1", claim.Key.Version())
				require.Equal(t, 24*time.Hour, claim.TTL)
				require.Equal(t, tc.lease, claim.Lease)
				require.False(t, claim.Hold)
				require.InDelta(t, tc.timeout, budget, float64(900*time.Millisecond))
				require.LessOrEqual(t, budget, tc.timeout)
			})
		}
	})

	t.Run("MaxRequestBytes", func(t *testing.T) {
		s, runs := spoolSite(t, newSpoolDir(t), idempotency.NewMemoryStore(), idempotency.Config{})
		body := string(bytes.Repeat([]byte("0123456789abcdef"), 10<<20/16))
		require.Equal(t, http.StatusCreated, s.do(t.Context(), call{body: body}).status)
		require.Len(t, runs()[0].body, 10<<20)
		head := rawHead("POST", "/", `"k"`, "Host: api.test", "Expect: 100-continue", fmt.Sprint("Content-Length: ", 10<<20+1))
		require.Equal(t, "request-too-large", exchangeRaw(t, s, "POST", head+"\r\n").code(t))
	})

	t.Run("SpoolThreshold", func(t *testing.T) {
		s, runs := spoolSite(t, newSpoolDir(t), idempotency.NewMemoryStore(), idempotency.Config{})
		for i, size := range []int{64 << 10, 64<<10 + 1} {
			a := s.do(t.Context(), call{key: fmt.Sprintf(`"%d"`, i), body: strings.Repeat("b", size)})
			require.Equal(t, http.StatusCreated, a.status)
			if len(runs()[i].open) != i {
				require.Empty(t, runs()[i].open, "a body of 64 KiB is kept in a file")
				require.NotEqual(t, "linux", runtime.GOOS, "a larger body is kept in memory")
			}
		}
	})

	t.Run("MaxResponseBytes", func(t *testing.T) {
		for _, size := range []int{1 << 20, 1<<20 + 1} {
			s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, strings.Repeat("b", size))
			})
			require.Len(t, s.do(t.Context(), call{}).body, size)
			a := s.do(t.Context(), call{})
			require.EqualValues(t, 1, s.runs.Load())
			if size == 1<<20 {
				require.True(t, a.replayed())
				require.Len(t, a.body, size)
			} else {
				require.Equal(t, "not-replayable", a.code(t))
			}
		}
	})

	t.Run("DocumentationURL, RenderProblem", func(t *testing.T) {
		s := newGuardedSite(t, noStore{}, idempotency.Config{}, echo)
		a := s.do(t.Context(), call{noKey: true})
		require.Contains(t, a.body, `"type":"https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/#missing-key"`)
	})

	t.Run("Keep", func(t *testing.T) {
		for status := 200; status <= 599; status++ { // S24
			invitesRetry := slices.Contains([]int{401, 403, 408, 409, 423, 425, 429}, status) || status >= 500
			require.Equal(t, !invitesRetry, idempotency.DefaultKeep(status), status)
		}
		for status, runs := range map[int]int64{201: 1, 404: 1, 429: 2, 500: 2} {
			s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(status)
			})
			for range 2 {
				require.Equal(t, status, s.do(t.Context(), call{}).status)
			}
			require.Equal(t, runs, s.runs.Load(), status)
		}
	})
}

// S15: POST and PATCH are guarded, or the methods that are configured. All others
// pass through: same writer, same request, and a body that nobody has read.
func TestS15Methods(t *testing.T) {
	all := []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"}
	for _, tc := range []struct {
		name    string
		methods []string
		guarded []string
	}{
		{"default", nil, []string{"POST", "PATCH"}},
		{"configured", []string{"PUT", "PURGE"}, []string{"PUT", "PURGE"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMiddleware(t, noStore{}, idempotency.Config{Methods: tc.methods})
			for _, method := range all {
				var got *http.Request
				var unread int
				h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					got = r
					require.IsType(t, plainWriter{}, w)
					unread = r.Body.(*countingBody).Len()
				}))
				var sent *http.Request
				s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					r.Body = &countingBody{strings.NewReader("amount=1")}
					sent = r
					h.ServeHTTP(plainWriter{w}, r)
				}))
				// With a key that would be refused: nobody looks at it.
				text := rawHead(method, "/", "no key at all", "Host: api.test", "Content-Length: 0") + "\r\n"
				a := exchangeRaw(t, s, method, text)
				if slices.Contains(tc.guarded, method) {
					require.Equal(t, http.StatusBadRequest, a.status, method)
					require.Nil(t, got, method)
					continue
				}
				require.Equal(t, http.StatusOK, a.status, method)
				require.Same(t, sent, got, method)
				require.Equal(t, len("amount=1"), unread, method)
				require.Empty(t, a.header.Values(idempotency.HeaderDeduplicated))
			}
		})
	}

	t.Run("no allocations", func(t *testing.T) {
		runs := 0
		h := newMiddleware(t, noStore{}, idempotency.Config{}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ }))
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "/", http.NoBody)
		require.NoError(t, err)
		w := voidWriter{}
		require.Zero(t, testing.AllocsPerRun(100, func() { h.ServeHTTP(w, r) }))
		require.Equal(t, 101, runs)
	})
}

// A countingBody is a request body that tells how much of it is left.
type countingBody struct{ *strings.Reader }

func (*countingBody) Close() error { return nil }

// S13: without a key the handler does not run, unless keys are optional; then it
// runs as if there were no guard, and nothing says otherwise.
func TestS13MissingKey(t *testing.T) {
	t.Run("required", func(t *testing.T) {
		for _, method := range []string{"POST", "PATCH"} {
			s := newGuardedSite(t, noStore{}, idempotency.Config{}, echo)
			a := s.do(t.Context(), call{method: method, noKey: true, body: "amount=1"})
			require.Equal(t, http.StatusBadRequest, a.status)
			require.Equal(t, "missing-key", a.code(t))
			require.Contains(t, a.header.Get("Link"), idempotency.DefaultDocumentationURL)
			require.Zero(t, s.runs.Load())
		}
	})

	t.Run("optional", func(t *testing.T) {
		s, runs := servePlain(t, newMiddleware(t, noStore{}, idempotency.Config{OptionalKeys: true}))
		for i := range 2 {
			a := s.do(t.Context(), call{noKey: true, body: "amount=1"})
			require.Equal(t, http.StatusOK, a.status)
			require.Equal(t, fmt.Sprint("run ", i+1), a.body)
			require.Equal(t, http.Header{"Content-Type": {"text/plain; charset=utf-8"}}, a.header)
			requirePlain(t, runs()[i], "amount=1")
		}
		// Nobody is asked for an identity either.
		a := exchangeRaw(t, s, "POST", "POST / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
		require.Equal(t, "run 3", a.body)
	})

	t.Run("optional, but there", func(t *testing.T) {
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{OptionalKeys: true}, echo)
		require.False(t, s.do(t.Context(), call{}).replayed())
		require.True(t, s.do(t.Context(), call{}).replayed())
		empty := exchangeRaw(t, s, "POST", rawHead("POST", "/", "", "Host: api.test", "Idempotency-Key:", "Content-Length: 0")+"\r\n")
		require.Equal(t, "invalid-key", empty.code(t)) // S11: present and invalid, not missing
		require.Equal(t, "invalid-key", s.do(t.Context(), call{key: "bare"}).code(t))
		require.EqualValues(t, 1, s.runs.Load())
	})
}

// What the slices of a Config hold after New is nobody's business.
func TestConfigIsCopied(t *testing.T) {
	store := idempotency.NewMemoryStore()
	cfg := idempotency.Config{Methods: []string{"POST", "PUT"}, FingerprintSecret: []byte(printSecret)}
	s := newGuardedSite(t, store, cfg, echo)
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{body: "amount=1"}).status)
	cfg.Methods[0], cfg.Methods[1] = "GET", "HEAD"
	copy(cfg.FingerprintSecret, printOtherSecret)

	require.True(t, s.do(t.Context(), call{body: "amount=1"}).replayed())
	require.Equal(t, "missing-key", s.do(t.Context(), call{method: "PUT", noKey: true}).code(t))
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{method: "GET", noKey: true}).status)
	again := newGuardedSite(t, store, idempotency.Config{FingerprintSecret: []byte(printSecret)}, echo)
	require.True(t, again.do(t.Context(), call{body: "amount=1"}).replayed())
}

// A ConfigError is found in whatever it was wrapped by, and reads as one line.
func TestConfigErrorText(t *testing.T) {
	require.EqualError(t, &idempotency.ConfigError{Field: "Lease", Value: "-1s", Reason: "is not positive"},
		`idempotency: config: Lease: "-1s" is not positive`)
	require.EqualError(t, &idempotency.ConfigError{Field: "KeyScope", Reason: "is required"}, "idempotency: config: KeyScope: is required")
	faults := configFaults(t, idempotency.NewMemoryStore(), idempotency.Config{Methods: []string{"a\r\nb"}})
	line := regexp.MustCompile(`^[ -~]+$`)
	for i := range faults {
		require.Regexp(t, line, faults[i].Error())
	}
	var fault *idempotency.ConfigError
	require.True(t, errors.As(fmt.Errorf("start: %w", errors.Join(errDown, &faults[0])), &fault))
}
