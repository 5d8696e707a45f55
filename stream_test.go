package idempotency_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S31: where a middleware outside cannot flush, a handler is told so, as it is
// without a guard, and its answer stays whole: a status that it sets afterwards
// counts.
func TestS31FlushThatIsNotSupported(t *testing.T) {
	timeout := func(next http.Handler) http.Handler { return http.TimeoutHandler(next, time.Minute, "") }
	guard := func(t *testing.T, route string) func(http.Handler) http.Handler {
		t.Helper()
		return newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{}).Named(route).Handler
	}
	for _, tc := range []struct {
		name  string
		outer func(t *testing.T, next http.Handler) http.Handler
	}{
		{"http.TimeoutHandler", func(_ *testing.T, next http.Handler) http.Handler { return timeout(next) }},
		{"a wrapper around it", func(_ *testing.T, next http.Handler) http.Handler { return timeout(unwrapping(next)) }},
		{"another guard inside of it", func(t *testing.T, next http.Handler) http.Handler {
			t.Helper()
			return timeout(guard(t, "outer")(next))
		}},
		{"a writer that hides all", func(_ *testing.T, next http.Handler) http.Handler { return hiding(next) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					err := http.NewResponseController(w).Flush()
					w.WriteHeader(http.StatusCreated)
					_, _ = io.WriteString(w, "flushed: "+errString(err))
					if errors.Is(err, http.ErrNotSupported) {
						_, _ = io.WriteString(w, ", not supported")
					}
				})
				bare := newSite(t, proto, timeout(handler)).do(t.Context(), call{})
				s := newSite(t, proto, tc.outer(t, guard(t, "inner")(handler)))
				first := s.do(t.Context(), call{})
				require.Equal(t, http.StatusCreated, first.status)
				require.Equal(t, bare.body, first.body)
				require.True(t, strings.HasSuffix(first.body, ", not supported"), first.body)
				retry := s.do(t.Context(), call{})
				require.True(t, retry.replayed())
				require.Equal(t, http.StatusCreated, retry.status)
				require.Equal(t, first.body, retry.body)
			})
		})
	}
}

func errString(err error) string {
	if err == nil {
		return "yes"
	}
	return err.Error()
}

// S31, S23: an answer that goes out because it exceeds the limit has the content
// type that the bare server finds, however small the first write was.
func TestS23ContentTypeOverTheLimit(t *testing.T) {
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for _, part := range []string{"<", "h", "tml>"} {
				_, _ = io.WriteString(w, part)
			}
		})
		m := newMiddleware(t, idempotency.NewMemoryStore(), idempotency.Config{MaxResponseBytes: 1})
		bare, s := newSite(t, proto, handler), newSite(t, proto, m.Handler(handler))
		first := s.do(t.Context(), call{})
		require.Equal(t, "<html>", first.body)
		require.Equal(t, bare.do(t.Context(), call{}).header, first.header)
		require.Equal(t, "not-replayable", eventually(t, s).code(t))
	})
}

// An unwrapper has nothing but a way to the writer inside it.
type unwrapper struct{ http.ResponseWriter }

func (u unwrapper) Unwrap() http.ResponseWriter { return u.ResponseWriter }

func unwrapping(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { next.ServeHTTP(unwrapper{w}, r) })
}

func hiding(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(struct{ http.ResponseWriter }{w}, r)
	})
}
