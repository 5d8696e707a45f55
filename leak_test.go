package idempotency_test

import (
	"context"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/keytuple/idempotency"
)

// leavesNothing fails a test that leaves a goroutine, an open file of a request's
// body, or one on disk. Connections that are left keep a server or a pool from
// closing. It looks once for each test, after all cleanup that comes later.
func leavesNothing(tb testing.TB) {
	tb.Helper()
	if isParallel(tb.Name()) {
		return
	}
	if _, twice := looksForLeaks.LoadOrStore(tb, true); twice {
		return
	}
	before := goleak.IgnoreCurrent()
	tb.Cleanup(func() {
		looksForLeaks.Delete(tb)
		if err := leaks(before); err != nil {
			tb.Errorf("left behind: %v", err)
		}
		if files := spooledFiles(); len(files) > 0 {
			tb.Errorf("left behind: %v", files)
		}
	})
}

// parallel is t.Parallel for tests that use Postgres. What such a test leaves cannot
// be told from what its neighbours use: that is for the end of all tests.
func parallel(t *testing.T) {
	t.Helper()
	parallelTests.Store(t.Name(), true)
	t.Parallel()
}

// isParallel reports whether a test, or one that it is a part of, called parallel.
func isParallel(name string) bool {
	for {
		if _, ok := parallelTests.Load(name); ok {
			return true
		}
		end := strings.LastIndexByte(name, '/')
		if end < 0 {
			return false
		}
		name = name[:end]
	}
}

var (
	looksForLeaks sync.Map // the tests that leavesNothing was called for
	parallelTests sync.Map // names
)

// leaks returns an error if there are goroutines that do not end, other than those
// that wait for the test servers, which live as long as the process.
func leaks(before ...goleak.Option) error {
	before = append(before, goleak.IgnoreAnyFunction("github.com/keytuple/idempotency/internal/pgtest.(*Server).spawn.func1"))
	err := goleak.Find(before...)
	for end := time.Now().Add(3 * time.Second); err != nil && time.Now().Before(end); { // HTTP/2 takes its leave
		err = goleak.Find(before...)
	}
	return err
}

// spooledFiles returns the files that hold request bodies: those that this process
// has open, where the system lists them, and those that have a name.
func spooledFiles() []string {
	files, _ := filepath.Glob(filepath.Join(os.TempDir(), "idempotency-*"))
	open, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range open {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(target, "/idempotency-") {
			files = append(files, target)
		}
	}
	return files
}

// S27: once an operation is settled, nothing keeps it: no timer of its lease, no
// goroutine, no list.
func TestS27OperationIsLetGo(t *testing.T) {
	plain := func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }
	renewed := func(http.ResponseWriter, *http.Request) { <-time.After(2 * shortLease / 3) }
	for _, tc := range []struct {
		name    string
		edit    func(*idempotency.Config)
		handler http.HandlerFunc
	}{
		{"stored", nil, plain},
		{"released", nil, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }},
		{"renewed", func(c *idempotency.Config) { c.Lease = shortLease }, renewed},
		{"with a longest execution", func(c *idempotency.Config) { c.MaxExecution = time.Hour }, plain},
		{"longest execution is over", func(c *idempotency.Config) { c.MaxExecution = time.Millisecond }, func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}},
		{"panic", nil, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"Goexit", nil, func(http.ResponseWriter, *http.Request) { runtime.Goexit() }},
		{"held", func(c *idempotency.Config) { c.HoldAbandoned = true }, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"outlives its client", func(c *idempotency.Config) { c.HandlerOutlivesClient = true }, plain},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := idempotency.Config{Lease: time.Hour, TTL: 2 * time.Hour}
			if tc.edit != nil {
				tc.edit(&cfg)
			}
			var kept weak.Pointer[idempotency.Execution]
			m := newMiddleware(t, idempotency.NewMemoryStore(), cfg)
			handler := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				exec, _ := idempotency.FromContext(r.Context())
				kept = weak.Make(exec)
				tc.handler(w, r)
			}))
			s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				handler.ServeHTTP(w, r)
			}))
			s.do(t.Context(), call{body: "pay"})
			s.Close()
			require.NoError(t, m.Shutdown(t.Context()))
			require.Eventually(t, func() bool {
				runtime.GC()
				return kept.Value() == nil
			}, 5*time.Second, time.Millisecond)
		})
	}
}

// S30: neither does settling in the background keep an operation, once it is done
// or Shutdown has ended it.
func TestS30BackgroundIsLetGo(t *testing.T) {
	for _, tc := range []struct {
		name   string
		faults int64 // before the store is back
	}{
		{"settled", 3},
		{"given up", math.MaxInt64},
	} {
		t.Run(tc.name, func(t *testing.T) {
			store := &forgetfulStore{Store: idempotency.NewMemoryStore()}
			store.faults.Store(tc.faults)
			m := newMiddleware(t, store, idempotency.Config{StoreTimeout: time.Millisecond})
			var kept weak.Pointer[idempotency.Execution]
			handler := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				exec, _ := idempotency.FromContext(r.Context())
				kept = weak.Make(exec)
			}))
			s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				handler.ServeHTTP(w, r)
			}))
			require.Equal(t, http.StatusOK, s.do(t.Context(), call{}).status)
			s.Close()
			require.Equal(t, 1, idempotency.Unsettled(m))
			require.NotNil(t, kept.Value())

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if tc.faults == math.MaxInt64 {
				cancel()
			}
			require.Equal(t, ctx.Err() == nil, m.Shutdown(ctx) == nil)
			require.Eventually(t, func() bool {
				runtime.GC()
				return kept.Value() == nil
			}, 5*time.Second, time.Millisecond)
		})
	}
}

// A forgetfulStore fails to complete for a while, and keeps nothing of it.
type forgetfulStore struct {
	idempotency.Store
	faults atomic.Int64
}

func (s *forgetfulStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	if s.faults.Add(-1) >= 0 {
		return errExecStore
	}
	return s.Store.Complete(ctx, l, r)
}
