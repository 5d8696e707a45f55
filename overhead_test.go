package idempotency_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A nullWriter is the cheapest http.ResponseWriter there is, so that what is
// counted is the middleware's.
type nullWriter struct{ header http.Header }

func (w *nullWriter) Header() http.Header         { return w.header }
func (w *nullWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *nullWriter) WriteHeader(int)             {}

// An overhead serves one kind of request again and again, to a handler bare or
// guarded.
type overhead struct {
	handler http.Handler
	writer  nullWriter
	request *http.Request
	body    *strings.Reader
}

const chargeBody = `{"amount":1999,"currency":"EUR","source":"card_1","description":"order 42, two items"}`

func createCharge(w http.ResponseWriter, r *http.Request) {
	var buf [len(chargeBody)]byte
	_, _ = io.ReadFull(r.Body, buf[:])
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Location", "/v1/charges/ch_1")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, `{"id":"ch_1","amount":1999,"currency":"EUR"}`)
}

func newOverhead(tb testing.TB, method string, guard guarding) *overhead {
	tb.Helper()
	o := &overhead{handler: http.HandlerFunc(createCharge), body: strings.NewReader(chargeBody)}
	if guard != nil {
		m, err := idempotency.New(steadyStore(), guard())
		require.NoError(tb, err)
		o.handler = m.Named("charge").Handler(o.handler)
	}
	r, err := http.NewRequestWithContext(tb.Context(), method, "/v1/charges", nil)
	require.NoError(tb, err)
	r.RequestURI = "/v1/charges"
	r.Header.Set("Content-Type", "application/json")
	r.ContentLength = int64(len(chargeBody))
	r.Body = io.NopCloser(o.body)
	o.request = r
	return o
}

// A guarding is the configuration of a guard; nil is none.
type guarding func() idempotency.Config

func byDefault() idempotency.Config {
	return idempotency.Config{
		KeyScope:  func(*http.Request) string { return "tenant" },
		Principal: func(*http.Request) string { return "principal" },
	}
}

// everythingOn is a guard with all that can be switched on beside each other.
func everythingOn() idempotency.Config {
	cfg := byDefault()
	cfg.AcceptBareKeys = true
	cfg.FingerprintSecret = make([]byte, 32)
	cfg.Keep = idempotency.DefaultKeep
	cfg.StoreCookies = true
	cfg.CheckReplay = func(*http.Request) error { return nil }
	cfg.HoldAbandoned = true
	cfg.MaxExecution = time.Minute
	cfg.HandlerOutlivesClient = true
	cfg.WaitInFlight = time.Second
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.OnEvent = func(context.Context, idempotency.Event) {}
	return cfg
}

// steadyStore returns a store that is not growing: as many records expire as
// come. Its clock goes ten seconds with each look at it.
func steadyStore() *idempotency.MemoryStore {
	clock := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{Now: func() time.Time {
		clock = clock.Add(10 * time.Second)
		return clock
	}})
}

func (o *overhead) serve(key string) {
	o.writer.header = make(http.Header)
	o.body.Reset(chargeBody)
	o.request.Header["Idempotency-Key"] = []string{key}
	o.handler.ServeHTTP(&o.writer, o.request)
}

// numberedKeys returns a function whose every call makes another key.
func numberedKeys() func() string {
	n := 0
	return func() string {
		n++
		return `"8e03978e-40d5-43e8-bc93-` + strconv.Itoa(1000000+n) + `"`
	}
}

func oneKey() string { return `"8e03978e-40d5-43e8-bc93-6894a57f9324"` }

// The allocations that the middleware adds to those of the bare handler.
func TestAllocationBudget(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		keys   func() string
		budget float64
	}{
		{"first request", http.MethodPost, numberedKeys(), 30},
		{"replay", http.MethodPost, oneKey, 20},
		{"unguarded method", http.MethodPut, oneKey, 0},
	} {
		for name, guard := range map[string]guarding{"by default": byDefault, "everything on": everythingOn} {
			t.Run(tc.name+", "+name, func(t *testing.T) {
				bare, guarded := newOverhead(t, tc.method, nil), newOverhead(t, tc.method, guard)
				keys := make([]string, 2000)
				for i := range keys {
					keys[i] = tc.keys()
				}
				next := 0
				key := func() string { next++; return keys[next%len(keys)] }
				base := fewestAllocs(func() { bare.serve(key()) })
				with := fewestAllocs(func() { guarded.serve(key()) })
				t.Logf("%v allocations, of them %v the bare handler's", with, base)
				require.LessOrEqual(t, with-base, tc.budget)
			})
		}
	}
}

// fewestAllocs returns what f allocates on average when it is least disturbed: what
// else the process does is counted too, and a garbage collection empties the pools.
func fewestAllocs(f func()) float64 {
	fewest := testing.AllocsPerRun(500, f)
	for range 4 {
		fewest = min(fewest, testing.AllocsPerRun(500, f))
	}
	return fewest
}

func BenchmarkBare(b *testing.B) {
	benchmarkOverhead(b, newOverhead(b, http.MethodPost, nil), numberedKeys())
}

func BenchmarkFirst(b *testing.B) {
	benchmarkOverhead(b, newOverhead(b, http.MethodPost, byDefault), numberedKeys())
}

func BenchmarkFirstEverythingOn(b *testing.B) {
	benchmarkOverhead(b, newOverhead(b, http.MethodPost, everythingOn), numberedKeys())
}

func BenchmarkReplay(b *testing.B) {
	benchmarkOverhead(b, newOverhead(b, http.MethodPost, byDefault), oneKey)
}

func BenchmarkUnguardedMethod(b *testing.B) {
	benchmarkOverhead(b, newOverhead(b, http.MethodPut, byDefault), oneKey)
}

func benchmarkOverhead(b *testing.B, o *overhead, key func() string) {
	b.Helper()
	b.ReportAllocs()
	for b.Loop() {
		o.serve(key())
	}
}
