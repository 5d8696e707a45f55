package idempotency_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A spoolDir is the directory for temporary files during a test.
type spoolDir string

func newSpoolDir(t *testing.T) spoolDir {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	spoolDir(dir).use(t)
	return spoolDir(dir)
}

func (spoolDir) set(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"TMPDIR", "TMP", "TEMP"} {
		t.Setenv(name, dir)
	}
}

func (d spoolDir) use(t *testing.T) {
	t.Helper()
	d.set(t, string(d))
}

// named returns the names of the files in the directory.
func (d spoolDir) named() []string {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return []string{err.Error()}
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// open returns the files of the directory that this process has open, be their
// names gone or not. It can tell on Linux only.
func (d spoolDir) open() []string {
	if runtime.GOOS != "linux" {
		return nil
	}
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return []string{err.Error()}
	}
	var files []string
	for _, link := range links {
		if file, err := os.Readlink(link); err == nil && strings.HasPrefix(file, string(d)) {
			files = append(files, file)
		}
	}
	return files
}

func (d spoolDir) requireEmpty(t *testing.T) {
	t.Helper()
	require.Empty(t, d.named())
	require.Empty(t, d.open())
}

// testBytes are n bytes of which no part is like another.
func testBytes(n int) string {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		_, _ = fmt.Fprintf(&b, "%d\x00\xff\r\n", i)
	}
	return b.String()[:n]
}

// chunkedText is a whole request whose body has no announced length.
func chunkedText(method, target, body string, fields ...string) string {
	var b strings.Builder
	b.WriteString(rawHead(method, target, `"k"`, append([]string{"Host: api.test", "Transfer-Encoding: chunked"}, fields...)...))
	b.WriteString("\r\n")
	for rest := body; rest != ""; {
		chunk := rest[:min(len(rest), 10_000)]
		_, _ = fmt.Fprintf(&b, "%x\r\n%s\r\n", len(chunk), chunk)
		rest = rest[len(chunk):]
	}
	b.WriteString("0\r\n\r\n")
	return b.String()
}

// spoolForms are the forms of a request with a body.
var spoolForms = []struct {
	name string
	text func(method, target, body string, fields ...string) string
}{{"with its length", requestText}, {"chunked", chunkedText}}

// A spoolRun is what a handler saw of a body.
type spoolRun struct {
	body        string
	err         error
	length      int64
	named, open []string // files, while it ran
}

// spoolSite reads bodies behind a guard.
func spoolSite(t *testing.T, dir spoolDir, store idempotency.Store, cfg idempotency.Config) (*site, func() []spoolRun) {
	t.Helper()
	var mu sync.Mutex
	var runs []spoolRun
	s := newGuardedSite(t, store, cfg, func(w http.ResponseWriter, r *http.Request) {
		run := spoolRun{length: r.ContentLength, named: dir.named(), open: dir.open()}
		body, err := io.ReadAll(r.Body)
		run.body, run.err = string(body), err
		mu.Lock()
		defer mu.Unlock()
		runs = append(runs, run)
		w.WriteHeader(http.StatusCreated)
	})
	return s, func() []spoolRun {
		mu.Lock()
		defer mu.Unlock()
		return runs
	}
}

// S17: the handler reads the very bytes that were sent. Above the threshold they
// are kept in a file, which is gone afterwards; where the system allows it, its
// name is gone at once.
func TestS17HandlerReadsWhatWasSent(t *testing.T) {
	const threshold = 1000
	for _, form := range spoolForms {
		for _, size := range []int{0, 1, 511, 512, 513, threshold - 1, threshold, threshold + 1, 10 * threshold, 300_000} {
			t.Run(fmt.Sprintf("%s, %d bytes", form.name, size), func(t *testing.T) {
				dir := newSpoolDir(t)
				s, runs := spoolSite(t, dir, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: threshold})
				body := testBytes(size)
				require.Equal(t, http.StatusCreated, exchangeRaw(t, s, "POST", form.text("POST", "/", body)).status)
				dir.requireEmpty(t)
				require.Len(t, runs(), 1)
				run := runs()[0]
				require.NoError(t, run.err)
				require.True(t, body == run.body, "%d bytes of %d, or other ones", len(run.body), size)
				if form.name == "chunked" {
					require.EqualValues(t, -1, run.length)
				} else {
					require.EqualValues(t, size, run.length)
				}
				if runtime.GOOS == "linux" {
					require.Empty(t, run.named)
					require.Equal(t, size > threshold, len(run.open) == 1, run.open)
				}

				require.True(t, exchangeRaw(t, s, "POST", form.text("POST", "/", body)).replayed())
				other := body + "x"
				require.Equal(t, "key-reused", exchangeRaw(t, s, "POST", form.text("POST", "/", other)).code(t))
				if size > 0 {
					other = body[:size-1] + "x"
					require.Equal(t, "key-reused", exchangeRaw(t, s, "POST", form.text("POST", "/", other)).code(t))
				}
				dir.requireEmpty(t)
				require.Len(t, runs(), 1)
			})
		}
	}
}

// S17: neither bytes nor threshold depend on how a body comes in: byte by byte, and
// with its end for itself.
func TestS17BodyInPieces(t *testing.T) {
	const threshold = 1000
	for _, size := range []int{1, threshold - 1, threshold, threshold + 1, 3 * threshold} {
		for _, form := range spoolForms {
			dir := newSpoolDir(t)
			var spooled, same bool
			body := testBytes(size)
			m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: threshold})
			guarded := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				spooled = len(dir.open()) > 0
				b, err := io.ReadAll(r.Body)
				same = err == nil && string(b) == body
			}))
			s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r.Body = io.NopCloser(iotest.OneByteReader(bufio.NewReader(r.Body)))
				guarded.ServeHTTP(w, r)
			}))
			require.Equal(t, http.StatusOK, exchangeRaw(t, s, "POST", form.text("POST", "/", body)).status)
			require.True(t, same, size)
			if runtime.GOOS == "linux" {
				require.Equal(t, size > threshold, spooled, size)
			}
			require.True(t, exchangeRaw(t, s, "POST", form.text("POST", "/", body)).replayed())
		}
	}
}

// S17: an empty body is the one that net/http has for it.
func TestS17NoBody(t *testing.T) {
	var bodies []io.ReadCloser
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(_ http.ResponseWriter, r *http.Request) {
		bodies = append(bodies, r.Body)
	})
	require.Equal(t, http.StatusOK, exchangeRaw(t, s, "POST", rawHead("POST", "/1", `"k"`, "Host: api.test")+"\r\n").status)
	require.Equal(t, http.StatusOK, exchangeRaw(t, s, "POST", requestText("POST", "/2", "")).status)
	require.Equal(t, http.StatusOK, exchangeRaw(t, s, "POST", chunkedText("POST", "/3", "")).status)
	require.Equal(t, []io.ReadCloser{http.NoBody, http.NoBody, http.NoBody}, bodies)
}

// S17: a handler can close its body like the one of net/http.
func TestS17CloseThenRead(t *testing.T) {
	for _, threshold := range []int64{1, 1000} {
		var read, readAgain error
		var first [3]byte
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: threshold},
			func(_ http.ResponseWriter, r *http.Request) {
				_, read = io.ReadFull(r.Body, first[:])
				_ = r.Body.Close()
				_ = r.Body.Close()
				_, readAgain = r.Body.Read(make([]byte, 1))
			})
		require.Equal(t, http.StatusOK, s.do(t.Context(), call{body: "amount=1"}).status)
		require.NoError(t, read)
		require.Equal(t, "amo", string(first[:]))
		require.ErrorIs(t, readAgain, http.ErrBodyReadAfterClose)
	}
}

// S17: a body over the limit is refused, and claims nothing. With an announced
// length it is not even asked for. Exactly the limit passes.
func TestS17Limit(t *testing.T) {
	for _, tc := range []struct {
		name             string
		limit, threshold int64
	}{
		{"limit over the threshold", 2000, 1000},
		{"limit a byte over the threshold", 1001, 1000},
		{"limit at the threshold", 1000, 1000},
		{"limit under the threshold", 500, 1000},
	} {
		for _, form := range spoolForms {
			t.Run(tc.name+", "+form.name, func(t *testing.T) {
				dir := newSpoolDir(t)
				store := idempotency.NewMemoryStore()
				s, runs := spoolSite(t, dir, store, idempotency.Config{MaxRequestBytes: tc.limit, SpoolThreshold: tc.threshold})
				for _, over := range []int{1, 2, 5000} {
					a := exchangeRaw(t, s, "POST", form.text("POST", "/", testBytes(int(tc.limit)+over)))
					require.Equal(t, http.StatusRequestEntityTooLarge, a.status)
					require.Equal(t, "request-too-large", a.code(t))
					dir.requireEmpty(t)
				}
				require.Empty(t, runs())
				require.Zero(t, store.Len())
				a := exchangeRaw(t, s, "POST", form.text("POST", "/", testBytes(int(tc.limit))))
				require.Equal(t, http.StatusCreated, a.status)
				require.Len(t, runs(), 1)
				require.Len(t, runs()[0].body, int(tc.limit))
			})
		}
	}

	t.Run("not asked for", func(t *testing.T) {
		s := newGuardedSite(t, noStore{}, idempotency.Config{MaxRequestBytes: 1}, echo)
		requireRefusedUnread(t, s, `"k"`, http.StatusRequestEntityTooLarge, "request-too-large")
	})

	t.Run("no limits", func(t *testing.T) {
		dir := newSpoolDir(t)
		store := idempotency.NewMemoryStore()
		s, runs := spoolSite(t, dir, store, idempotency.Config{MaxRequestBytes: math.MaxInt64, SpoolThreshold: math.MaxInt64})
		// What a client announces is not what it gets memory for.
		conn := dialRaw(t, s)
		conn.write(t, rawHead("POST", "/", `"k"`, "Host: api.test", fmt.Sprint("Content-Length: ", int64(math.MaxInt64)))+"\r\nab")
		require.NoError(t, conn.CloseWrite())
		require.Equal(t, "broken-body", conn.read(t, "POST").code(t))
		require.Zero(t, store.Len())
		for i, form := range spoolForms {
			body := testBytes(200_000)
			require.Equal(t, http.StatusCreated, exchangeRaw(t, s, "POST", form.text("POST", "/"+form.name[:1], body)).status)
			require.True(t, body == runs()[i].body)
			require.Empty(t, runs()[i].open)
		}
	})
}

// S17: the limit of a middleware in front counts as well.
func TestS17OuterLimit(t *testing.T) {
	for _, form := range spoolForms {
		for _, threshold := range []int64{1, 1000} {
			dir := newSpoolDir(t)
			m := newMiddleware(t, noStore{}, idempotency.Config{SpoolThreshold: threshold})
			guarded := m.Handler(http.HandlerFunc(echo))
			s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r.Body = http.MaxBytesReader(w, r.Body, 10)
				guarded.ServeHTTP(w, r)
			}))
			a := exchangeRaw(t, s, "POST", form.text("POST", "/", testBytes(11)))
			require.Equal(t, http.StatusRequestEntityTooLarge, a.status)
			require.Equal(t, "request-too-large", a.code(t))
			dir.requireEmpty(t)
		}
	}
}

// S17: a body that breaks off is no request. Nothing is claimed, and the next one
// is the first.
func TestS17BrokenBody(t *testing.T) {
	head := func(field string) string { return rawHead("POST", "/", `"k"`, "Host: api.test", field) + "\r\n" }
	for _, tc := range []struct{ name, text string }{
		{"ends early", head("Content-Length: 1000") + testBytes(500)},
		{"ends before it begins", head("Content-Length: 1000")},
		{"ends early, chunked", head("Transfer-Encoding: chunked") + "190\r\n" + testBytes(400) + "\r\n"},
		{"ends within a chunk", head("Transfer-Encoding: chunked") + "190\r\n" + testBytes(300)},
		{"ends before its first chunk", head("Transfer-Encoding: chunked")},
		{"bad chunk", head("Transfer-Encoding: chunked") + "190\r\n" + testBytes(400) + "\r\nno number\r\n"},
		{"bad end of a chunk", head("Transfer-Encoding: chunked") + "2\r\nabc\r\n0\r\n\r\n"},
	} {
		for _, threshold := range []int64{10, 10_000} {
			for _, gone := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, threshold %d, client gone: %t", tc.name, threshold, gone), func(t *testing.T) {
					dir := newSpoolDir(t)
					store := idempotency.NewMemoryStore()
					var spy routeSpy
					guarded := newMiddleware(t, store, idempotency.Config{SpoolThreshold: threshold}).Handler(spy.handler("any"))
					served := make(chan struct{}, 2)
					s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						guarded.ServeHTTP(w, r)
						served <- struct{}{}
					}))
					conn := dialRaw(t, s)
					conn.write(t, tc.text)
					if gone {
						require.NoError(t, conn.Close())
					} else {
						require.NoError(t, conn.CloseWrite())
						a := conn.read(t, "POST")
						require.Equal(t, http.StatusBadRequest, a.status)
						require.Equal(t, "broken-body", a.code(t))
					}
					<-served
					dir.requireEmpty(t)
					require.Empty(t, spy.take())
					require.Zero(t, store.Len())
					require.Equal(t, http.StatusCreated, exchangeRaw(t, s, "POST", requestText("POST", "/", "amount=1")).status)
				})
			}
		}
	}
}

// S17: a reader in front that wraps io.EOF tells of a fault, not of the end.
func TestS17WrappedEndIsNoEnd(t *testing.T) {
	for _, threshold := range []int64{1, 4, 1000} {
		dir := newSpoolDir(t)
		var spy routeSpy
		guarded := newMiddleware(t, noStore{}, idempotency.Config{SpoolThreshold: threshold}).Handler(spy.handler("any"))
		s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			broken := iotest.ErrReader(fmt.Errorf("upstream broke off: %w", io.EOF))
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader("half"), broken))
			r.ContentLength = -1
			guarded.ServeHTTP(w, r)
		}))
		a := s.do(t.Context(), call{})
		require.Equal(t, http.StatusBadRequest, a.status)
		require.Equal(t, "broken-body", a.code(t))
		require.Empty(t, spy.take())
		dir.requireEmpty(t)
	}
}

// S17: a body that somebody in front has read already is refused, and never taken
// for an empty one: all payloads would be the same then.
func TestS17BodyIsGone(t *testing.T) {
	for _, tc := range []struct {
		name  string
		outer func(r *http.Request)
		code  string
	}{
		{"read", func(r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }, "retry"},
		{"read, and replaced by none", func(r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			r.Body = http.NoBody
		}, "retry"},
		{"read, and taken away", func(r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			r.Body = nil
		}, "retry"},
		{"read in part", func(r *http.Request) { _, _ = io.CopyN(io.Discard, r.Body, 4) }, "retry"},
		{"parsed as a form, without a length", func(r *http.Request) {
			r.ContentLength = -1
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			_ = r.ParseForm()
		}, "retry"},
		{"parsed as a form, without a length, and replaced by none", func(r *http.Request) {
			r.ContentLength = -1
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			_ = r.ParseForm()
			r.Body = http.NoBody
		}, "retry"},
		{"read as a multipart form, without a length", func(r *http.Request) {
			r.ContentLength = -1
			r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
			_, _ = r.MultipartReader()
			_, _ = io.Copy(io.Discard, r.Body)
		}, "retry"},
		{"closed", func(r *http.Request) { _ = r.Body.Close() }, "broken-body"},
	} {
		for _, threshold := range []int64{1, 1000} {
			t.Run(fmt.Sprintf("%s, threshold %d", tc.name, threshold), func(t *testing.T) {
				var logs syncBuffer
				m := newMiddleware(t, noStore{}, idempotency.Config{
					SpoolThreshold: threshold, Logger: slog.New(slog.NewTextHandler(&logs, nil)),
				})
				var spy routeSpy
				guarded := m.Handler(spy.handler("any"))
				s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					tc.outer(r)
					guarded.ServeHTTP(w, r)
				}))
				a := s.do(t.Context(), call{body: "amount=1"})
				require.Equal(t, tc.code, a.code(t))
				require.Empty(t, spy.take())
				if tc.code == "retry" {
					require.Contains(t, logs.String(), "level=ERROR")
				}
			})
		}
	}

	t.Run("read and put back", func(t *testing.T) {
		guarded := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}).Handler(http.HandlerFunc(echo))
		s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			guarded.ServeHTTP(w, r)
		}))
		require.Equal(t, "amount=1", s.do(t.Context(), call{body: "amount=1"}).body)
		require.Equal(t, "key-reused", s.do(t.Context(), call{body: "amount=2"}).code(t))
	})

	for _, tc := range []struct{ name, text, body string }{
		{"not read, since it is no form", chunkedText("POST", "/", `{"amount":1}`, "Content-Type: application/json"), `{"amount":1}`},
		{"there was none", requestText("POST", "/", "", "Content-Type: application/x-www-form-urlencoded"), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			guarded := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}).Handler(http.HandlerFunc(echo))
			s := newSite(t, http1, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_ = r.FormValue("tenant")
				guarded.ServeHTTP(w, r)
			}))
			a := exchangeRaw(t, s, "POST", tc.text)
			require.Equal(t, http.StatusCreated, a.status, a.body)
			require.Equal(t, tc.body, a.body)
		})
	}
}

// S17: where the body cannot be kept, the client is asked to come back, and
// nothing is claimed.
func TestS17NoTemporaryFile(t *testing.T) {
	dir := newSpoolDir(t)
	dir.set(t, filepath.Join(string(dir), "missing"))
	store := idempotency.NewMemoryStore()
	var logs syncBuffer
	s := attemptSite(t, store, idempotency.Config{SpoolThreshold: 10, Logger: slog.New(slog.NewTextHandler(&logs, nil))})
	a := s.do(t.Context(), call{body: testBytes(11)})
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, "retry", a.code(t))
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.NotContains(t, a.body, string(dir))
	require.Contains(t, logs.String(), "level=ERROR")
	require.Zero(t, s.runs.Load())
	require.Zero(t, store.Len())
	require.Equal(t, "attempt 1", s.do(t.Context(), call{path: "/small", body: testBytes(10)}).body)

	dir.use(t)
	require.Equal(t, "attempt 1", s.do(t.Context(), call{body: testBytes(11)}).body)
	dir.requireEmpty(t)
}

var errDown = errors.New("SELECT loud FROM idempotency_records: connection refused")

// A downStore cannot be reached.
type downStore struct{}

func (downStore) Claim(context.Context, idempotency.Claim) (idempotency.Record, error) {
	return idempotency.Record{}, errDown
}

func (downStore) Complete(context.Context, idempotency.Lease, idempotency.Response) error {
	return errDown
}
func (downStore) Release(context.Context, idempotency.Lease) error { return errDown }
func (downStore) Extend(context.Context, idempotency.Lease) error  { return errDown }

// S17: the file is removed however the request ends.
func TestS17FileIsAlwaysRemoved(t *testing.T) {
	const target = "/"
	body := testBytes(50_000)
	first := requestText("POST", target, body)
	down := idempotency.Config{UnguardedWhenStoreDown: true, Lease: 100 * time.Millisecond}
	for _, tc := range []struct {
		name    string
		store   idempotency.Store // nil: a memory store
		cfg     idempotency.Config
		handler http.HandlerFunc
		text    string // after first, if it is not ""
		answer  string // to the last one: code, or body; "" for a connection that ends
	}{
		{name: "handler that reads nothing", handler: func(http.ResponseWriter, *http.Request) {}, answer: ""},
		{name: "handler that closes early", handler: func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.CopyN(io.Discard, r.Body, 10)
			_ = r.Body.Close()
			_, _ = io.WriteString(w, "closed")
		}, answer: "closed"},
		{name: "panic", handler: func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, answer: "EOF"},
		{name: "Goexit", handler: func(http.ResponseWriter, *http.Request) { runtime.Goexit() }, answer: "EOF"},
		{name: "streamed answer", handler: func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "a")
			_ = http.NewResponseController(w).Flush()
			_, _ = io.WriteString(w, "b")
		}, answer: "ab"},
		{name: "replay", handler: echoShort, text: first, answer: "short"},
		{name: "other payload", handler: echoShort, text: requestText("POST", target, body+"x"), answer: "key-reused"},
		{name: "replay refused", handler: echoShort, text: first, answer: "replay-refused", cfg: idempotency.Config{
			CheckReplay: func(r *http.Request) error {
				_, err := io.Copy(io.Discard, r.Body)
				return errors.Join(errDown, err)
			},
		}},
		{name: "store down", store: downStore{}, answer: "store-unavailable", cfg: idempotency.Config{Lease: 100 * time.Millisecond}},
		{name: "store down, unguarded", store: downStore{}, handler: echoShort, answer: "short", cfg: down},
		{name: "fingerprint fails", store: noStore{}, answer: "broken-body", cfg: idempotency.Config{
			Fingerprint: func(*http.Request, io.Reader) ([]byte, error) { return nil, errDown },
		}},
		{name: "fingerprint panics", store: noStore{}, answer: "EOF", cfg: idempotency.Config{
			Fingerprint: func(*http.Request, io.Reader) ([]byte, error) { panic(http.ErrAbortHandler) },
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := newSpoolDir(t)
			tc.cfg.SpoolThreshold = 1000
			if tc.store == nil {
				tc.store = idempotency.NewMemoryStore()
			}
			s := newGuardedSite(t, tc.store, tc.cfg, tc.handler)
			texts := []string{first}
			if tc.text != "" {
				texts = append(texts, tc.text)
			}
			for i, text := range texts {
				conn := dialRaw(t, s)
				conn.write(t, text)
				if tc.answer == "EOF" {
					_, err := conn.reader.ReadByte()
					require.ErrorIs(t, err, io.EOF)
				} else if a := conn.read(t, "POST"); i == len(texts)-1 {
					require.Contains(t, a.body, tc.answer)
				}
				dir.requireEmpty(t)
			}
		})
	}

	t.Run("client gone", func(t *testing.T) {
		dir := newSpoolDir(t)
		started, ended := make(chan struct{}), make(chan struct{})
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: 1000},
			func(_ http.ResponseWriter, r *http.Request) {
				close(started)
				<-r.Context().Done()
				_, err := io.Copy(io.Discard, r.Body)
				require.NoError(t, err, "the handler can still read")
				close(ended)
			})
		conn := dialRaw(t, s)
		conn.write(t, first)
		<-started
		require.NoError(t, conn.Close())
		<-ended
		s.Close() // when the request is done
		dir.requireEmpty(t)
	})

	t.Run("in flight", func(t *testing.T) {
		dir := newSpoolDir(t)
		started, end := make(chan struct{}), make(chan struct{})
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: 1000},
			func(http.ResponseWriter, *http.Request) {
				close(started)
				<-end
			})
		release := sync.OnceFunc(func() { close(end) })
		t.Cleanup(release)
		conn := dialRaw(t, s)
		conn.write(t, first)
		<-started
		require.Equal(t, "in-flight", exchangeRaw(t, s, "POST", first).code(t))
		require.Empty(t, dir.named())
		if runtime.GOOS == "linux" {
			require.Len(t, dir.open(), 1)
		}
		release()
		require.Equal(t, http.StatusOK, conn.read(t, "POST").status)
		dir.requireEmpty(t)
	})
}

// echoShort reads all of the body, and answers little.
func echoShort(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		panic(err)
	}
	_, _ = io.WriteString(w, "short")
}

// S17: the request that the handler gets is a copy, so net/http does not know of
// the files that it parses a form into. They are removed all the same.
func TestS17FilesOfAForm(t *testing.T) {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	file, err := form.CreateFormFile("file", "name")
	require.NoError(t, err)
	_, err = io.WriteString(file, testBytes(50_000))
	require.NoError(t, err)
	require.NoError(t, form.Close())
	upload := call{body: body.String(), header: http.Header{"Content-Type": {form.FormDataContentType()}}}

	dir := newSpoolDir(t)
	parse := func(r *http.Request) error {
		if err := r.ParseMultipartForm(1); err != nil {
			return err
		}
		if len(dir.named()) == 0 {
			return errors.New("no file to remove")
		}
		f, _, err := r.FormFile("file")
		if err != nil {
			return err
		}
		defer f.Close()
		b, err := io.ReadAll(f)
		if err == nil && string(b) != testBytes(50_000) {
			err = errors.New("other bytes")
		}
		return err
	}
	handler := func(w http.ResponseWriter, r *http.Request) {
		if err := parse(r); err != nil {
			http.Error(w, err.Error(), http.StatusTeapot)
		}
	}
	for _, tc := range []struct {
		name    string
		store   idempotency.Store
		cfg     idempotency.Config
		handler http.HandlerFunc
		fails   bool
	}{
		{"handler returns", idempotency.NewMemoryStore(), idempotency.Config{}, handler, false},
		{"handler panics", idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			handler(w, r)
			panic(http.ErrAbortHandler)
		}, true},
		{"store down, unguarded", downStore{}, idempotency.Config{UnguardedWhenStoreDown: true, Lease: 100 * time.Millisecond}, handler, false},
		{"check of a replay", idempotency.NewMemoryStore(), idempotency.Config{CheckReplay: parse}, echoShort, false},
		{"fingerprint", idempotency.NewMemoryStore(), idempotency.Config{Fingerprint: func(r *http.Request, _ io.Reader) ([]byte, error) {
			return nil, parse(r)
		}}, echoShort, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newGuardedSite(t, tc.store, tc.cfg, tc.handler)
			for range 2 {
				a := s.do(t.Context(), upload)
				if tc.fails {
					require.Error(t, a.err)
				} else {
					require.NoError(t, a.err)
					require.Equal(t, http.StatusOK, a.status, a.body)
				}
				dir.requireEmpty(t)
			}
		})
	}
}

// S17: trailers of the request are where a handler looks for them.
func TestS17RequestTrailers(t *testing.T) {
	for _, threshold := range []int64{1, 1000} {
		var got []http.Header
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{SpoolThreshold: threshold},
			func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				got = append(got, r.Trailer.Clone())
			})
		text := strings.TrimSuffix(chunkedText("POST", "/", "amount=1", "Trailer: X-Checksum"), "\r\n") + "X-Checksum: 42\r\n\r\n"
		require.Equal(t, http.StatusOK, exchangeRaw(t, s, "POST", text).status)
		require.Equal(t, []http.Header{{"X-Checksum": {"42"}}}, got)
	}
}

// S17, S13, S11: a client that waits before it sends the body is not asked for it
// where the answer is known without.
func TestS17ExpectContinue(t *testing.T) {
	s := newGuardedSite(t, noStore{}, idempotency.Config{}, echo)
	requireRefusedUnread(t, s, "", http.StatusBadRequest, "missing-key")
	requireRefusedUnread(t, s, "bare", http.StatusBadRequest, "invalid-key")
	requireRefusedUnread(t, s, `""`, http.StatusBadRequest, "invalid-key")
	for _, missing := range []string{headerTenant, headerCaller} {
		head := rawHead("POST", "/charges", `"k"`, "Host: api.test", "Content-Length: 2", "Expect: 100-continue") + "\r\n"
		a := exchangeRaw(t, s, "POST", strings.Replace(head, missing, "Other", 1))
		require.Equal(t, http.StatusForbidden, a.status, a.body)
		require.Equal(t, "no-identity", a.code(t))
	}

	s = newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, echo)
	for range 2 {
		conn := dialRaw(t, s)
		conn.write(t, rawHead("POST", "/", `"k"`, "Host: api.test", "Content-Length: 8", "Expect: 100-continue")+"\r\n")
		require.Equal(t, http.StatusContinue, conn.read(t, "POST").status)
		conn.write(t, "amount=1")
		a := conn.read(t, "POST")
		require.Equal(t, http.StatusCreated, a.status)
		require.Equal(t, "amount=1", a.body)
	}
	require.EqualValues(t, 1, s.runs.Load())
}
