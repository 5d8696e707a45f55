package integration_test

import (
	"compress/gzip"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5/middleware"
	"github.com/klauspost/compress/gzhttp"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"

	"github.com/keytuple/idempotency"
)

// A wrapper is a middleware that hands a writer of its own to what is inside it.
type wrapper struct {
	name    string
	wrap    func(http.Handler) http.Handler
	encodes bool
}

var wrappers = []wrapper{
	{"gzhttp", func(next http.Handler) http.Handler { return gzhttp.GzipHandler(next) }, true},
	{"otelhttp", otelhttp.NewMiddleware("charge"), false},
	{"chi Compress", middleware.Compress(gzip.DefaultCompression, "text/plain"), true},
	{"chi Logger", middleware.RequestLogger(quietLog{}), false},
	{"chi WrapResponseWriter with a tee", teed, false},
	{"chi Recoverer", middleware.Recoverer, false},
	{"chi Timeout", middleware.Timeout(time.Minute), false},
	{"all at once", func(next http.Handler) http.Handler {
		for _, wrap := range []func(http.Handler) http.Handler{
			middleware.Timeout(time.Minute), teed, middleware.Compress(gzip.DefaultCompression, "text/plain"),
			middleware.Recoverer, otelhttp.NewMiddleware("charge"),
		} {
			next = wrap(next)
		}
		return next
	}, true},
}

// A quietLog lets chi log nothing, panics included.
type quietLog struct{}

func (quietLog) NewLogEntry(*http.Request) middleware.LogEntry { return quietLog{} }

func (quietLog) Write(int, int, http.Header, time.Duration, any) {}

func (quietLog) Panic(any, []byte) {}

// teed copies the body elsewhere, too.
func teed(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wrapped := middleware.NewWrapResponseWriter(w, r.ProtoMajor)
		wrapped.Tee(io.Discard)
		next.ServeHTTP(wrapped, r)
	})
}

// forEachPlacement runs a test with each wrapper outside of the guard and inside
// of it, over each protocol.
func forEachPlacement(t *testing.T, f func(t *testing.T, p placement)) {
	t.Helper()
	for _, wr := range wrappers {
		for _, inside := range []bool{false, true} {
			name := wr.name + " outside"
			if inside {
				name = wr.name + " inside"
			}
			t.Run(name, func(t *testing.T) {
				forEachProtocol(t, func(t *testing.T, proto protocol) {
					t.Helper()
					f(t, placement{wr, inside, proto})
				})
			})
		}
	}
}

// A placement is where a wrapper is, and over what its site is reached.
type placement struct {
	wrapper
	inside bool
	proto  protocol
}

func (p placement) site(t *testing.T, m *idempotency.Middleware, handler http.Handler) *site {
	t.Helper()
	if p.inside {
		return newSite(t, p.proto, m.Handler(p.wrap(handler)))
	}
	return newSite(t, p.proto, p.wrap(m.Handler(handler)))
}

var text = strings.Repeat("the same text, ", 1000)

func write(w http.ResponseWriter, s string) { _, _ = io.WriteString(w, s) }

// S20, S31: inside and outside of other wrappers, the first answer is what it is
// without a guard, and the replay is the first answer.
func TestS20WrappersInsideAndOutside(t *testing.T) {
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
		body    string
	}{
		{"long", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.WriteHeader(http.StatusCreated)
			for rest := text; rest != ""; rest = rest[1000:] {
				write(w, rest[:1000])
			}
		}, text},
		{"long, with its length", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			w.Header().Set("Etag", `"1"`)
			write(w, text)
		}, text},
		{"short", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Add("Vary", "Accept")
			w.Header()["X-Lines"] = []string{"a, b", "c"}
			w.WriteHeader(http.StatusAccepted)
			write(w, `{"a":1}`)
		}, `{"a":1}`},
		{"flushed", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.WriteHeader(http.StatusCreated)
			for rest := text; rest != ""; rest = rest[5000:] {
				write(w, rest[:5000])
				_ = http.NewResponseController(w).Flush()
			}
		}, text},
		{"encoded by the handler", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Content-Encoding", "br")
			write(w, text)
		}, text},
		{"early hints", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			w.Header().Set("Link", "</style.css>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			w.WriteHeader(http.StatusCreated)
			write(w, text)
		}, text},
		{"trailers", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set("Trailer", "X-Sum")
			write(w, text)
			w.Header().Set("X-Sum", "1")
		}, text},
		{"no body", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachPlacement(t, func(t *testing.T, p placement) {
				t.Helper()
				store := &recordingStore{Store: idempotency.NewMemoryStore()}
				s := p.site(t, newGuard(t, store, idempotency.Config{}), tc.handler)
				bare := newSite(t, p.proto, p.wrap(tc.handler)).do(t, call{})
				first := s.do(t, call{})
				retry := s.do(t, call{})
				for !retry.replayed() { // a streamed answer can be here before it is stored
					retry = s.do(t, call{})
				}
				require.Empty(t, s.errors.String(), "one header block")

				require.Equal(t, tc.body, first.decoded)
				require.Equal(t, bare.status, first.status)
				require.Equal(t, bare.trailer, first.trailer)
				bare.header.Del("Content-Length") // known in advance, or not
				first.header.Del("Content-Length")
				require.Equal(t, bare.header, first.header)

				retry.header.Del("Content-Length")
				retry.header.Del(idempotency.HeaderReplayed)
				require.Equal(t, first.status, retry.status)
				require.Equal(t, first.header, retry.header)
				require.Equal(t, first.decoded, retry.decoded)
				require.Equal(t, first.trailer, retry.trailer)

				if p.inside {
					require.Equal(t, first.raw, retry.raw)
					require.Equal(t, first.raw, string(store.stored.Body))
					require.Equal(t, first.header["Content-Encoding"], store.stored.Header["Content-Encoding"])
				} else {
					require.Equal(t, tc.body, string(store.stored.Body))
					require.NotEqual(t, "gzip", store.stored.Header.Get("Content-Encoding"))
				}
			})
		})
	}
}

// S20: outside of the guard, an encoder serves each caller what it accepts, be it
// the first or a retry.
func TestS20EncoderOutsideServesEachCaller(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		write(w, text)
	})
	for _, wr := range wrappers {
		if !wr.encodes {
			continue
		}
		t.Run(wr.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				s := placement{wr, false, proto}.site(t, newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{}), handler)
				for i, plain := range []bool{false, true, false} {
					a := s.do(t, call{plain: plain})
					require.Equal(t, i > 0, a.replayed())
					require.Equal(t, text, a.decoded)
					require.Equal(t, plain, a.header.Get("Content-Encoding") == "")
				}
			})
		})
	}
}

// S22, S31: a flushed chunk reaches the client through all wrappers while the
// handler still runs.
func TestS22StreamThroughWrappers(t *testing.T) {
	forEachPlacement(t, func(t *testing.T, p placement) {
		t.Helper()
		read := make(chan struct{})
		s := p.site(t, newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{}), http.HandlerFunc(
			func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/plain")
				write(w, text)
				if err := http.NewResponseController(w).Flush(); err != nil {
					panic(err)
				}
				select {
				case <-read:
				case <-r.Context().Done():
				}
				write(w, "the end")
			}))
		resp := s.open(t.Context(), t, call{})
		require.Equal(t, p.encodes, resp.Header.Get("Content-Encoding") == "gzip")
		body := io.Reader(resp.Body)
		if p.encodes {
			decoder, err := gzip.NewReader(resp.Body)
			require.NoError(t, err)
			body = decoder
		}
		chunk := make([]byte, len(text))
		_, err := io.ReadFull(body, chunk)
		require.NoError(t, err)
		require.Equal(t, text, string(chunk))
		close(read)
		rest, err := io.ReadAll(body)
		require.NoError(t, err)
		require.Equal(t, "the end", string(rest))
		retry := s.do(t, call{})
		for !retry.replayed() {
			retry = s.do(t, call{})
		}
		require.Equal(t, text+"the end", retry.decoded)
	})
}

// S23: over the limit the first caller gets all through all wrappers, and a retry
// learns that the operation is done.
func TestS23OverTheLimitThroughWrappers(t *testing.T) {
	forEachPlacement(t, func(t *testing.T, p placement) {
		t.Helper()
		m := newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{MaxResponseBytes: 10})
		s := p.site(t, m, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			write(w, text)
		}))
		require.Equal(t, text, s.do(t, call{}).decoded)
		retry := s.do(t, call{})
		for strings.Contains(retry.decoded, "in-flight") {
			retry = s.do(t, call{})
		}
		require.Equal(t, http.StatusConflict, retry.status)
		require.Contains(t, retry.decoded, "not-replayable")
	})
}

// S25: Recoverer answers 500 in place of a handler that panics, outside of the
// guard as well as inside of it, and the key is free.
func TestS25RecovererFreesTheKey(t *testing.T) {
	silent := middleware.RequestLogger(quietLog{})
	for _, wr := range wrappers {
		for _, inside := range []bool{false, true} {
			name := "outside of " + wr.name
			if inside {
				name = "inside of the guard, " + wr.name
			}
			t.Run(name, func(t *testing.T) {
				forEachProtocol(t, func(t *testing.T, proto protocol) {
					t.Helper()
					m := newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{})
					handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						exec, _ := idempotency.FromContext(r.Context())
						w.Header().Set("Content-Type", "text/plain")
						if exec.Attempt() == 1 {
							panic("the first attempt breaks")
						}
						w.WriteHeader(http.StatusCreated)
						write(w, "attempt "+strconv.Itoa(exec.Attempt()))
					})
					guarded := silent(middleware.Recoverer(wr.wrap(m.Handler(handler))))
					if inside {
						guarded = m.Handler(silent(middleware.Recoverer(wr.wrap(handler))))
					}
					s := newSite(t, proto, guarded)
					require.Equal(t, http.StatusInternalServerError, s.do(t, call{}).status)
					retry := s.do(t, call{})
					require.Equal(t, http.StatusCreated, retry.status)
					require.Equal(t, "attempt 2", retry.decoded)
					require.False(t, retry.replayed())
					require.True(t, s.do(t, call{}).replayed())
					require.Empty(t, s.errors.String())
				})
			})
		}
	}
}

// S26, S24: chi's Timeout ends the context of a handler that has written nothing:
// outside of the guard as well as inside of it the key is free then.
func TestS26ChiTimeoutFreesTheKey(t *testing.T) {
	for _, tc := range []struct {
		name   string
		inside bool
		status int
	}{
		{"outside", false, http.StatusServiceUnavailable}, // the guard's 503 retry is first
		{"inside", true, http.StatusGatewayTimeout},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				first := true
				timeout := func(next http.Handler) http.Handler {
					return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						limit := time.Minute
						if first {
							limit = 20 * time.Millisecond
						}
						middleware.Timeout(limit)(next).ServeHTTP(w, r)
					})
				}
				handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if first {
						<-r.Context().Done()
						return
					}
					w.WriteHeader(http.StatusCreated)
				})
				m := newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{})
				s := placement{wrapper{wrap: timeout}, tc.inside, proto}.site(t, m, handler)
				require.Equal(t, tc.status, s.do(t, call{}).status)
				first = false
				retry := s.do(t, call{})
				require.Equal(t, http.StatusCreated, retry.status)
				require.False(t, retry.replayed())
				require.True(t, s.do(t, call{}).replayed())
			})
		})
	}
}
