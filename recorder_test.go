package idempotency_test

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// forEachProtocol runs a test over HTTP/1.1, and over HTTP/2 with and without TLS.
func forEachProtocol(t *testing.T, f func(t *testing.T, proto protocol)) {
	t.Helper()
	for _, proto := range []protocol{http1, http2, h2c} {
		t.Run(string(proto), func(t *testing.T) { f(t, proto) })
	}
}

// A comparison is what one handler's answer looks like: from the bare server, from the
// guarded one, and replayed.
type comparison struct {
	bare, first, replay reply
	errors              string // the guarded server's log
	stored              idempotency.Response
}

func onTheWire(t *testing.T, proto protocol, handler http.HandlerFunc) comparison {
	t.Helper()
	store := &recordingStore{Store: idempotency.NewMemoryStore()}
	bare := newSite(t, proto, handler)
	guarded := newSite(t, proto, newMiddleware(t, store, idempotency.Config{}).Handler(handler))
	w := comparison{bare: bare.do(t.Context(), call{}), first: guarded.do(t.Context(), call{}), replay: guarded.do(t.Context(), call{})}
	w.errors, w.stored = guarded.errors.String(), store.stored
	return w
}

// requireSame fails unless the first answer is the bare server's, and the replay
// the first answer but for its mark and informational responses.
func (w comparison) requireSame(t *testing.T) {
	t.Helper()
	bare, first, replay := w.bare, w.first, w.replay
	bare.length, first.length, replay.length = 0, 0, 0 // known in advance, or not
	require.Equal(t, bare, first)
	require.True(t, replay.replayed(), "%+v", replay)
	replay.header.Del(idempotency.HeaderReplayed)
	require.Empty(t, replay.informs)
	first.informs = nil
	require.Equal(t, first, replay)
	require.Equal(t, first.body, string(w.stored.Body), "what is recorded is what went over the wire")
	require.NotContains(t, w.errors, "recorder.go", "no log line blames the recorder")
}

// S20, S31: the bare net/http server is the reference for the first answer, and
// the first answer for the replay.
func TestS31TheWireIsTheBareServers(t *testing.T) {
	write := func(w http.ResponseWriter, s string) { _, _ = io.WriteString(w, s) }
	long := strings.Repeat("0123456789abcdef", 5<<10) // 80 KiB
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
	}{
		{"write without a status", func(w http.ResponseWriter, _ *http.Request) { write(w, "body") }},
		{"neither status nor body", func(http.ResponseWriter, *http.Request) {}},
		{"status without body", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) }},
		{"empty write", func(w http.ResponseWriter, _ *http.Request) { write(w, "") }},
		{"the first status counts", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusCreated)
			w.WriteHeader(http.StatusInternalServerError)
			write(w, "body")
		}},
		{"informational responses", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "</style.css>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Set("Link", "</script.js>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del("Link")
			w.WriteHeader(http.StatusCreated)
			write(w, "body")
		}},
		{"io.Copy of 80 KiB", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.Copy(w, strings.NewReader(long))
		}},
		{"io.WriteString of 80 KiB", func(w http.ResponseWriter, _ *http.Request) { write(w, long) }},
		{"many writes", func(w http.ResponseWriter, _ *http.Request) {
			for i := range 1000 {
				write(w, strconv.Itoa(i))
			}
		}},
		{"204 without body", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
			if _, err := w.Write([]byte("no")); !errors.Is(err, http.ErrBodyNotAllowed) {
				panic(err)
			}
		}},
		{"304 without body", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Etag", `"1"`)
			w.WriteHeader(http.StatusNotModified)
			if _, err := w.Write([]byte("no")); !errors.Is(err, http.ErrBodyNotAllowed) {
				panic(err)
			}
		}},
		{"declared length", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "4")
			write(w, "body")
		}},
		{"malformed length", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "four")
			write(w, "body")
		}},
		{"malformed length, for more than it says", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", " 4")
			write(w, "the body")
		}},
		{"sniffed HTML", func(w http.ResponseWriter, _ *http.Request) { write(w, "<html><body>") }},
		{"sniffed JSON", func(w http.ResponseWriter, _ *http.Request) { write(w, `{"a":1}`) }},
		{"sniffed bytes", func(w http.ResponseWriter, _ *http.Request) { write(w, "\x00\x01\x02") }},
		{"sniffed after a flush", func(w http.ResponseWriter, _ *http.Request) {
			write(w, "plain ")
			w.(interface{ Flush() }).Flush()
			write(w, "<html>")
		}},
		{"nothing sniffed: flush before the first write", func(w http.ResponseWriter, _ *http.Request) {
			w.(interface{ Flush() }).Flush()
			write(w, "<html>")
		}},
		{"nothing sniffed: explicit nil", func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			write(w, "<html>")
		}},
		{"nothing sniffed: encoded", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			write(w, "<html>")
		}},
		{"header set after the status", func(w http.ResponseWriter, _ *http.Request) {
			header := w.Header()
			header.Set("X-Before", "1")
			w.WriteHeader(http.StatusCreated)
			header.Set("X-After", "1")
			header.Set("X-Before", "2")
			write(w, "body")
		}},
		{"declared trailers", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "X-Sum, X-Unset")
			w.Header().Add("Trailer", "x-count")
			write(w, "body")
			w.Header().Set("X-Sum", "1, 2")
			w.Header().Add("X-Count", "3")
			w.Header().Add("X-Count", "4")
		}},
		{"declared trailers, streamed", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			write(w, "body")
			w.(interface{ Flush() }).Flush()
			w.Header().Set("X-Sum", "1")
		}},
		{"prefixed trailers, streamed", func(w http.ResponseWriter, _ *http.Request) {
			write(w, "body")
			w.(interface{ Flush() }).Flush()
			w.Header().Set(http.TrailerPrefix+"X-Sum", "1")
		}},
		{"prefixed trailers, set before the status", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(http.TrailerPrefix+"X-Sum", "1")
			write(w, "body")
		}},
		{"flush between writes", func(w http.ResponseWriter, _ *http.Request) {
			for i := range 5 {
				write(w, strconv.Itoa(i))
				if err := http.NewResponseController(w).Flush(); err != nil {
					panic(err)
				}
			}
		}},
		{"status survives a flush", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusCreated)
			_ = http.NewResponseController(w).Flush()
			w.WriteHeader(http.StatusInternalServerError)
		}},
		{"lines with commas", func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["X-Lines"] = []string{"a, b", "", "c"}
			write(w, "body")
		}},
		{"every byte", func(w http.ResponseWriter, _ *http.Request) {
			var all [256]byte
			for i := range all {
				all[i] = byte(i)
			}
			_, _ = w.Write(all[:])
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				onTheWire(t, proto, tc.handler).requireSame(t)
			})
		})
	}
}

// S20: the record holds what the handler sent, down to the sniffed content type,
// and nothing it set too late.
func TestS20StoredIsWhatWasSent(t *testing.T) {
	w := onTheWire(t, http1, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("X-Kept", "1")
		w.WriteHeader(http.StatusAccepted)
		w.Header().Set("X-Late", "1")
		_, _ = io.WriteString(w, "body")
		w.Header().Set("X-Sum", "1")
	})
	require.Equal(t, idempotency.Response{
		Status: http.StatusAccepted,
		Header: http.Header{
			"Trailer": {"X-Sum"}, "X-Kept": {"1"}, "Content-Type": {"text/plain; charset=utf-8"},
		},
		Trailer: http.Header{"X-Sum": {"1"}},
		Body:    []byte("body"),
	}, w.stored)
}

// S20, S09: whether an answer is replayed, or not deduplicated, is the guard's to
// say. A handler that copies the header of an upstream does not say it for it.
func TestS20MarksAreNotTheHandlers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		outer  http.Header
		stream bool
		marks  []string // of the first answer: replayed, deduplicated
	}{
		{"held back", nil, false, []string{"", ""}},
		{"streamed", nil, true, []string{"", ""}},
		{"set outside", http.Header{idempotency.HeaderDeduplicated: {"false"}}, false, []string{"", "false"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
				guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set(idempotency.HeaderReplayed, "true")
					w.Header().Set(idempotency.HeaderDeduplicated, "upstream")
					w.WriteHeader(http.StatusCreated)
					if tc.stream {
						_ = http.NewResponseController(w).Flush()
					}
				}))
				s := newSite(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					maps.Copy(w.Header(), tc.outer)
					guarded.ServeHTTP(w, r)
				}))
				first := s.do(t.Context(), call{})
				require.Equal(t, http.StatusCreated, first.status)
				require.Equal(t, tc.marks[0], first.header.Get(idempotency.HeaderReplayed))
				require.Equal(t, tc.marks[1], first.header.Get(idempotency.HeaderDeduplicated))
				retry := eventually(t, s)
				require.True(t, retry.replayed())
				require.Equal(t, tc.marks[1], retry.header.Get(idempotency.HeaderDeduplicated))
			})
		})
	}
}

// S20: what is not stored of a header is not stored of the trailers either. The
// first client gets all of them.
func TestS20StoredTrailers(t *testing.T) {
	trailers := http.Header{
		"Set-Cookie": {"id=1"}, "Www-Authenticate": {"Basic"}, "Proxy-Authenticate": {"Basic"},
		idempotency.HeaderReplayed: {"false"}, "X-Sum": {"1"},
	}
	for _, tc := range []struct {
		name    string
		cookies bool
		stored  http.Header
	}{
		{"without cookies", false, http.Header{"X-Sum": {"1"}}},
		{"with cookies", true, http.Header{"X-Sum": {"1"}, "Set-Cookie": {"id=1"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				store := &recordingStore{Store: idempotency.NewMemoryStore()}
				m := newMiddleware(t, store, idempotency.Config{StoreCookies: tc.cookies})
				handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Trailer", "Set-Cookie")
					_, _ = io.WriteString(w, "body")
					for name, values := range trailers {
						if name != "Set-Cookie" {
							name = http.TrailerPrefix + name
						}
						w.Header()[name] = values
					}
				})
				bare := newSite(t, proto, handler).do(t.Context(), call{})
				require.Equal(t, []string{"id=1"}, bare.trailer["Set-Cookie"])
				s := newSite(t, proto, m.Handler(handler))
				require.Equal(t, bare.trailer, s.do(t.Context(), call{}).trailer)
				require.Equal(t, tc.stored, store.stored.Trailer)
				retry := s.do(t.Context(), call{})
				require.True(t, retry.replayed())
				require.Equal(t, "body", retry.body)
				for name := range trailers {
					require.Equal(t, tc.stored[name], retry.trailer[name], name)
				}
			})
		})
	}
}

// S20: a long answer is sent with its length, so that a client sees a broken
// connection for what it is.
func TestContentLengthIsComputed(t *testing.T) {
	w := onTheWire(t, http1, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("x", 100_000))
	})
	require.EqualValues(t, 100_000, w.first.length)
	require.EqualValues(t, 100_000, w.replay.length)
}

// A gzipper compresses what is written, as a middleware in front of a guard does.
type gzipper struct {
	http.ResponseWriter
	compressed *gzip.Writer
}

func (g gzipper) Write(p []byte) (int, error) { return g.compressed.Write(p) }

func gzipped(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		compressed := gzip.NewWriter(w)
		defer compressed.Close()
		next.ServeHTTP(gzipper{w, compressed}, r)
	})
}

// S20, S31: where a middleware in front encodes the body, nobody inside knows its
// length.
func TestNoContentLengthInsideOfAnEncoder(t *testing.T) {
	text := strings.Repeat("hello ", 10_000)
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
		s := newSite(t, proto, gzipped(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, text)
		}))))
		for _, replayed := range []bool{false, true} {
			a := s.do(t.Context(), call{})
			require.NoError(t, a.err)
			require.Equal(t, replayed, a.replayed())
			require.True(t, a.body == text, len(a.body)) // the client has decoded it
		}
	})

	t.Run("the handler encodes", func(t *testing.T) {
		w := onTheWire(t, http1, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			_, _ = io.WriteString(w, text)
		})
		require.EqualValues(t, len(text), w.first.length)
		require.EqualValues(t, len(text), w.replay.length)
	})
}

// S31: as the bare server, a handler cannot write more than it declared.
func TestDeclaredLengthIsKept(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		var failed error
		w := onTheWire(t, proto, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "2")
			_, err := io.WriteString(w, "ok")
			if err == nil {
				_, failed = io.WriteString(w, "too much")
			}
		})
		require.ErrorIs(t, failed, http.ErrContentLength)
		for _, a := range []reply{w.first, w.replay} {
			require.NoError(t, a.err)
			require.Equal(t, "ok", a.body)
			require.EqualValues(t, 2, a.length)
		}
	})
}

// S31: writing nothing is no error, as with net/http over HTTP/1.1, even where no
// body is allowed.
func TestS31EmptyWriteWithoutBody(t *testing.T) {
	s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
		_, err := w.Write(nil)
		require.NoError(t, err)
	})
	require.Equal(t, http.StatusNoContent, s.do(t.Context(), call{}).status)
}

// S31: a declared length that is not reached breaks the answer as it does on the
// bare server. S20: what is only a part of an answer is not replayed as the whole
// of it.
func TestDeclaredLengthNotReached(t *testing.T) {
	for _, tc := range []struct {
		name  string
		write func(w http.ResponseWriter)
	}{
		{"nothing", func(http.ResponseWriter) {}},
		{"a part", func(w http.ResponseWriter) { _, _ = io.WriteString(w, "ok") }},
		{"a part, streamed", func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, "ok")
			_ = http.NewResponseController(w).Flush()
		}},
		{"a part, and too much at once", func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, "ok")
			_, _ = io.WriteString(w, "too much")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				runs := 0
				handler := func(w http.ResponseWriter, _ *http.Request) {
					runs++
					w.Header().Set("Content-Length", "4")
					w.WriteHeader(http.StatusCreated)
					tc.write(w)
				}
				bare := newSite(t, proto, http.HandlerFunc(handler)).do(t.Context(), call{})
				m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
				s := newSite(t, proto, m.Handler(http.HandlerFunc(handler)))
				first := s.do(t.Context(), call{})
				require.Error(t, bare.err)
				require.Error(t, first.err)
				if proto == http1 { // with HTTP/2, the bare server lets too much pass
					require.Equal(t, bare, first)
				}
				retry := eventually(t, s)
				require.Equal(t, "not-replayable", retry.code(t))
				require.Contains(t, retry.body, `"original_status":201`)
				require.Equal(t, 2, runs)
			})
		})
	}
}

// S20: an answer that has no body by its nature declares the length of another.
func TestDeclaredLengthWithoutBody(t *testing.T) {
	for _, tc := range []struct {
		method string
		status int
	}{{http.MethodHead, http.StatusOK}, {http.MethodPost, http.StatusNotModified}} {
		s := newGuardedSite(t, idempotency.NewMemoryStore(), idempotency.Config{Methods: []string{tc.method}},
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "4")
				w.WriteHeader(tc.status)
			})
		for _, replayed := range []bool{false, true} {
			a := s.do(t.Context(), call{method: tc.method})
			require.Equal(t, tc.status, a.status)
			require.Equal(t, replayed, a.replayed())
		}
	}
}

// S31: an impossible status panics in the handler, as in net/http, and nothing is
// kept (S25).
func TestS31ImpossibleStatus(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		for _, status := range []int{0, 99, 1000, -1} {
			t.Run(strconv.Itoa(status), func(t *testing.T) {
				impossible := true
				s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
					if impossible {
						w.WriteHeader(status)
					}
				})
				require.Error(t, s.do(t.Context(), call{}).err)
				require.Eventually(t, func() bool { // HTTP/2 resets the stream first
					return strings.Contains(s.errors.String(), "invalid WriteHeader code "+strconv.Itoa(status))
				}, 5*time.Second, time.Millisecond)
				impossible = false
				retry := s.do(t.Context(), call{})
				require.Equal(t, http.StatusOK, retry.status)
				require.False(t, retry.replayed())
			})
		}
	})
}

// S31: what is honest works through http.ResponseController, Hijack does not, and
// there is no way around the recorder.
func TestS31ResponseController(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
			rc := http.NewResponseController(w)
			require.NoError(t, rc.EnableFullDuplex())
			require.NoError(t, rc.SetReadDeadline(time.Time{}))
			require.NoError(t, rc.SetWriteDeadline(time.Time{}))
			_, _, err := rc.Hijack()
			require.ErrorIs(t, err, http.ErrNotSupported)
			_, wraps := w.(interface{ Unwrap() http.ResponseWriter })
			require.False(t, wraps)
			w.WriteHeader(http.StatusCreated)
		})
		require.Equal(t, http.StatusCreated, s.do(t.Context(), call{}).status)
		require.True(t, s.do(t.Context(), call{}).replayed())
	})
}

// S22: a flushed chunk reaches the client while the handler still runs, and the
// whole answer is recorded.
func TestS22FlushStreams(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		read := make(chan struct{})
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
		s := newSite(t, proto, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "one,")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-read:
			case <-r.Context().Done():
			}
			_, _ = io.WriteString(w, "two")
		})))
		r, err := s.request(t.Context(), call{})
		require.NoError(t, err)
		resp, err := s.Client().Do(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		chunk := make([]byte, 4)
		_, err = io.ReadFull(resp.Body, chunk)
		require.NoError(t, err)
		require.Equal(t, "one,", string(chunk))
		close(read)
		rest, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, "two", string(rest))
		retry := eventually(t, s)
		require.Equal(t, "one,two", retry.body)
	})
}

// eventually retries until the operation is not in flight any more: who streams
// can have the whole answer before its outcome is stored.
func eventually(t *testing.T, s *site) reply {
	t.Helper()
	for t.Context().Err() == nil {
		if a := s.do(t.Context(), call{}); a.status != http.StatusConflict || !strings.Contains(a.body, "in-flight") {
			return a
		}
		runtime.Gosched()
	}
	return reply{}
}

// S09, S15, S31: where a guard does not guard, be it for want of an identity or
// since one around it does, the handler gets the writer that the guard got.
func TestS31PassedThroughHandlerGetsTheOriginalWriter(t *testing.T) {
	var outer, inner http.ResponseWriter
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { inner = w })
	remember := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			outer = w
			next.ServeHTTP(w, r)
		})
	}
	anonymous, err := idempotency.New(noStore{}, idempotency.Config{
		KeyScope:                 func(*http.Request) string { return "" },
		Principal:                func(*http.Request) string { return "" },
		UnguardedWithoutIdentity: true,
	})
	require.NoError(t, err)
	m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}).Named("charge")
	for name, guarded := range map[string]http.Handler{
		"without identity": remember(anonymous.Handler(handler)),
		"nested":           m.Handler(remember(m.Handler(handler))),
	} {
		t.Run(name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				outer, inner = nil, nil
				require.Equal(t, http.StatusOK, newSite(t, proto, guarded).do(t.Context(), call{key: `"` + t.Name() + `"`}).status)
				require.NotNil(t, inner)
				require.Same(t, outer, inner)
			})
		})
	}
}

// S22: neither does a goroutine that writes on after its handler has returned change
// anything where the answer was streamed.
func TestS22WritesAfterAStreamedAnswer(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		returned, written := make(chan struct{}), make(chan error, 1)
		store := &blockingStore{Store: idempotency.NewMemoryStore(), completing: make(chan struct{}), proceed: make(chan struct{})}
		s := newGuardedSiteOver(t, proto, store, idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "one,")
			require.NoError(t, http.NewResponseController(w).Flush())
			_, _ = io.WriteString(w, "two")
			go func() {
				<-returned
				_, err := io.WriteString(w, "late")
				written <- err
			}()
		})
		go func() {
			<-store.completing
			close(returned)
			if err := <-written; err == nil {
				t.Error("a late write was accepted")
			}
			close(store.proceed)
		}()
		first := s.do(t.Context(), call{})
		require.NoError(t, first.err)
		require.Equal(t, "one,two", first.body)
		retry := s.do(t.Context(), call{})
		require.True(t, retry.replayed())
		require.Equal(t, "one,two", retry.body)
	})
}

// S31: a status without a body is replayed without one, and without the fields that
// describe one.
func TestS31ReplayWithoutBody(t *testing.T) {
	for _, status := range []int{http.StatusNoContent, http.StatusNotModified} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
					w.WriteHeader(status)
				})
				for i := range 2 {
					r, err := s.request(t.Context(), call{})
					require.NoError(t, err)
					resp, err := s.Client().Do(r)
					require.NoError(t, err)
					body, err := io.ReadAll(resp.Body)
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					require.Equal(t, status, resp.StatusCode)
					require.Equal(t, i == 1, resp.Header.Get(idempotency.HeaderReplayed) == "true")
					require.Empty(t, body)
					require.NotContains(t, resp.Header, "Content-Length")
					require.NotContains(t, resp.Header, "Content-Type")
				}
				require.EqualValues(t, 1, s.runs.Load())
			})
		})
	}
}

// S22, S31: a flush before the first byte sends the header at once.
func TestS22FlushBeforeTheFirstWrite(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		seen := make(chan struct{})
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Early", "1")
			w.WriteHeader(http.StatusAccepted)
			require.NoError(t, http.NewResponseController(w).Flush())
			select {
			case <-seen:
			case <-r.Context().Done():
			}
			_, _ = io.WriteString(w, "body")
		})
		r, err := s.request(t.Context(), call{})
		require.NoError(t, err)
		resp, err := s.Client().Do(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, http.StatusAccepted, resp.StatusCode)
		require.Equal(t, "1", resp.Header.Get("X-Early"))
		close(seen) // the handler still runs
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, "body", string(body))
		require.Equal(t, "body", eventually(t, s).body)
	})
}

// S31: a wrapper of the handler's own that has Unwrap and nothing else finds no way
// past the recorder: a status set after its flush survives.
func TestS31FlushThroughTheHandlersWrapper(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
			rc := http.NewResponseController(onlyUnwrap{w, w})
			_, _, err := rc.Hijack()
			require.ErrorIs(t, err, http.ErrNotSupported)
			w.WriteHeader(http.StatusCreated)
			require.NoError(t, rc.Flush())
			_, _ = io.WriteString(w, "body")
		})
		first := s.do(t.Context(), call{})
		require.Equal(t, http.StatusCreated, first.status)
		retry := eventually(t, s)
		require.Equal(t, []any{http.StatusCreated, first.body}, []any{retry.status, retry.body})
	})
}

type onlyUnwrap struct {
	http.ResponseWriter
	inner http.ResponseWriter
}

func (w onlyUnwrap) Unwrap() http.ResponseWriter { return w.inner }

// S23: over the limit after a flush, or by a flush's worth, the client still gets
// all of it, trailers included, and a retry learns that it is done.
func TestS23OverTheLimitAfterAFlush(t *testing.T) {
	for _, declared := range []bool{true, false} {
		t.Run(fmt.Sprintf("declared=%v", declared), func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				cfg := idempotency.Config{MaxResponseBytes: 10}
				s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), cfg, func(w http.ResponseWriter, _ *http.Request) {
					name := http.TrailerPrefix + "X-Sum"
					if declared {
						name = "X-Sum"
						w.Header().Set("Trailer", name)
					}
					w.WriteHeader(http.StatusCreated)
					_, _ = io.WriteString(w, "12345")
					require.NoError(t, http.NewResponseController(w).Flush())
					_, err := io.WriteString(w, "678901")
					require.NoError(t, err)
					w.Header().Set(name, "11")
				})
				first := s.do(t.Context(), call{})
				require.NoError(t, first.err)
				require.Equal(t, "12345678901", first.body)
				require.Equal(t, "11", first.trailer.Get("X-Sum"))
				retry := s.do(t.Context(), call{})
				for retry.status == http.StatusConflict && retry.code(t) == "in-flight" {
					retry = s.do(t.Context(), call{})
				}
				require.Equal(t, "not-replayable", retry.code(t))
				require.Contains(t, retry.body, `"original_status":201`)
				require.EqualValues(t, 1, s.runs.Load())
			})
		})
	}
}

// S31: in full duplex a handler answers while it reads. The body was read for the
// fingerprint before it ran, so nothing waits for anything, and the connection is
// good for the next request.
func TestS31FullDuplex(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		body := strings.Repeat("0123456789abcdef", 20<<10) // over the spool's threshold
		var addresses sync.Map
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			addresses.Store(r.RemoteAddr, true)
			rc := http.NewResponseController(w)
			if r.ProtoMajor == 1 {
				require.NoError(t, rc.EnableFullDuplex())
			}
			buf := make([]byte, 16<<10)
			for {
				n, err := r.Body.Read(buf)
				_, _ = w.Write(buf[:n])
				require.NoError(t, rc.Flush())
				if err != nil {
					require.ErrorIs(t, err, io.EOF)
					return
				}
			}
		})
		for _, key := range []string{`"1"`, `"2"`, `"3"`} {
			first := s.do(t.Context(), call{key: key, body: body})
			require.NoError(t, first.err)
			require.Equal(t, body, first.body)
		}
		connections := 0
		addresses.Range(func(any, any) bool { connections++; return true })
		require.Equal(t, 1, connections)
		retry := s.do(t.Context(), call{key: `"3"`, body: body})
		require.True(t, retry.replayed())
		require.Equal(t, body, retry.body)
	})
}

// S22, S26: a client that leaves in the middle of a stream can have all of it
// again.
func TestS26ClientGoneMidStream(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "one,")
			require.NoError(t, http.NewResponseController(w).Flush())
			<-r.Context().Done()
			_, _ = io.WriteString(w, "two")
		})
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		r, err := s.request(ctx, call{})
		require.NoError(t, err)
		resp, err := s.Client().Do(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		_, err = io.ReadFull(resp.Body, make([]byte, 4))
		require.NoError(t, err)
		leave()
		retry := eventually(t, s)
		require.True(t, retry.replayed())
		require.Equal(t, "one,two", retry.body)
		require.EqualValues(t, 1, s.runs.Load())
	})
}

// S17, S31: http.MaxBytesReader in the handler works on the body that was spooled.
func TestS17MaxBytesReaderInTheHandler(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			var tooLarge *http.MaxBytesError
			got, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 4))
			require.ErrorAs(t, err, &tooLarge)
			http.Error(w, string(got), http.StatusRequestEntityTooLarge)
		})
		for i := range 2 {
			a := s.do(t.Context(), call{body: "12345"})
			require.Equal(t, http.StatusRequestEntityTooLarge, a.status)
			require.Equal(t, "1234\n", a.body)
			require.Equal(t, i == 1, a.replayed())
		}
	})
}

// S23: a response over the limit reaches the first caller whole; a retry learns
// that the operation is done, and the handler does not run again.
func TestS23OverTheResponseLimit(t *testing.T) {
	const limit = 1000
	for _, tc := range []struct {
		name    string
		size    int
		chunk   int
		replays bool
	}{
		{"exactly the limit", limit, limit, true},
		{"one byte over, in one write", limit + 1, limit + 1, false},
		{"one byte over, byte by byte", limit + 1, 1, false},
		{"far over", 300 * limit, 7 * limit, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				body := strings.Repeat("<html>", tc.size)[:tc.size]
				runs := 0
				m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{MaxResponseBytes: limit})
				s := newSite(t, proto, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					runs++
					w.Header().Set("X-Kept", "1")
					w.WriteHeader(http.StatusCreated)
					for rest := body; rest != ""; {
						n := min(tc.chunk, len(rest))
						_, err := io.WriteString(w, rest[:n])
						if err != nil {
							panic(err)
						}
						rest = rest[n:]
					}
				})))
				first := s.do(t.Context(), call{})
				require.NoError(t, first.err)
				require.Equal(t, http.StatusCreated, first.status)
				require.Equal(t, body, first.body)
				require.Equal(t, "text/html; charset=utf-8", first.header.Get("Content-Type"))
				require.Equal(t, "1", first.header.Get("X-Kept"))
				retry := eventually(t, s)
				require.Equal(t, 1, runs)
				if tc.replays {
					require.Equal(t, body, retry.body)
					return
				}
				require.Equal(t, http.StatusConflict, retry.status)
				require.Equal(t, "not-replayable", retry.code(t))
				require.Contains(t, retry.body, `"original_status":201`)
			})
		})
	}
}

// S25: a panic goes on as it is, with nothing written: an outer middleware can
// still answer, and the next request runs.
func TestS25PanicReachesTheOuterRecovery(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		broken := true
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
		guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Handler", "1")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "never sent")
			if broken {
				panic("the same value")
			}
		}))
		s := newSite(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				if v := recover(); v != nil {
					http.Error(w, v.(string), http.StatusInternalServerError)
				}
			}()
			guarded.ServeHTTP(w, r)
		}))
		first := s.do(t.Context(), call{})
		require.Equal(t, http.StatusInternalServerError, first.status)
		require.Equal(t, "the same value\n", first.body)
		require.Empty(t, first.header.Get("X-Handler"))
		broken = false
		retry := s.do(t.Context(), call{})
		require.Equal(t, http.StatusCreated, retry.status)
		require.False(t, retry.replayed())
	})
}

// S25: http.ErrAbortHandler breaks the connection and keeps nothing, streamed or
// not; runtime.Goexit counts as not having returned.
func TestS25AbortedHandler(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		for _, tc := range []struct {
			name  string
			abort func(w http.ResponseWriter)
		}{
			{"abort", func(http.ResponseWriter) { panic(http.ErrAbortHandler) }},
			{"abort after a flush", func(w http.ResponseWriter) {
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}},
			{"Goexit", func(http.ResponseWriter) { runtime.Goexit() }},
		} {
			t.Run(tc.name, func(t *testing.T) {
				var attempts []int
				var mu sync.Mutex
				s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
					exec, _ := idempotency.FromContext(r.Context())
					mu.Lock()
					attempts = append(attempts, exec.Attempt())
					mu.Unlock()
					_, _ = io.WriteString(w, "part")
					if exec.Attempt() == 1 {
						tc.abort(w)
					}
				})
				require.Error(t, s.do(t.Context(), call{}).err)
				retry := eventually(t, s)
				require.Equal(t, "part", retry.body)
				require.Equal(t, []int{1, 2}, attempts)
			})
		}
	})
}

// S26, S22: the client hanging up does not lose a finished outcome.
func TestS26ClientGoneAfterTheHandlerWrote(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		running, gone := make(chan struct{}), make(chan struct{})
		s := newGuardedSiteOver(t, proto, idempotency.NewMemoryStore(), idempotency.Config{}, func(w http.ResponseWriter, r *http.Request) {
			close(running)
			<-r.Context().Done()
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "done all the same")
			close(gone)
		})
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-running; cancel() }()
		require.ErrorIs(t, s.do(ctx, call{}).err, context.Canceled)
		<-gone
		retry := eventually(t, s)
		require.True(t, retry.replayed())
		require.Equal(t, http.StatusCreated, retry.status)
		require.Equal(t, "done all the same", retry.body)
	})
}

// S22: the connection failing while the answer is sent, be it half way, changes
// nothing about its outcome; a streaming handler sees the error.
func TestS22BrokenConnection(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stream bool
		passes int // bytes of the body
	}{
		{"held back", false, 0},
		{"held back, half way", false, 2},
		{"streamed", true, 0},
		{"streamed, half way", true, 6},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				var seen error
				m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{})
				guarded := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					_, _ = io.WriteString(w, "one,")
					if tc.stream {
						seen = http.NewResponseController(w).Flush()
					}
					_, err := io.WriteString(w, "two")
					seen = errors.Join(seen, err)
				}))
				broken := true
				s := newSite(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if broken {
						w = &failingWriter{unwrapper{w}, tc.passes}
					}
					guarded.ServeHTTP(w, r)
				}))
				require.Equal(t, "one,two"[:tc.passes], s.do(t.Context(), call{}).body)
				require.Equal(t, tc.stream, errors.Is(seen, errConnection), "%v", seen)
				broken = false
				retry := s.do(t.Context(), call{})
				require.True(t, retry.replayed())
				require.Equal(t, "one,two", retry.body)
			})
		})
	}
}

var errConnection = errors.New("connection is broken")

// A failingWriter fails once passes bytes are written.
type failingWriter struct {
	unwrapper
	passes int
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if len(p) <= w.passes {
		w.passes -= len(p)
		return w.unwrapper.Write(p)
	}
	n, err := w.unwrapper.Write(p[:w.passes])
	w.passes -= n
	return n, errors.Join(errConnection, err)
}

// S22: a goroutine that the handler left behind changes nothing stored or sent.
func TestS22WritesAfterTheHandlerReturned(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		returned, written := make(chan struct{}), make(chan error, 2)
		store := &blockingStore{Store: idempotency.NewMemoryStore(), completing: make(chan struct{}), proceed: make(chan struct{})}
		s := newGuardedSiteOver(t, proto, store, idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "body")
			go func() {
				<-returned
				w.Header().Set("X-Late", "1")
				w.WriteHeader(http.StatusTeapot)
				_, err := io.WriteString(w, "late")
				written <- err
				written <- http.NewResponseController(w).Flush()
			}()
		})
		go func() {
			<-store.completing
			close(returned)
			require.Error(t, <-written)
			require.Error(t, <-written)
			close(store.proceed)
		}()
		first := s.do(t.Context(), call{})
		require.Equal(t, "body", first.body)
		require.Equal(t, http.StatusOK, first.status)
		require.NotContains(t, first.header, "X-Late")
		require.Equal(t, "body", s.do(t.Context(), call{}).body)
	})
}
