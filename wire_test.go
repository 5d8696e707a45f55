package idempotency_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A decider decides about the header when it is to be sent, be it the one of an
// informational response, as compressing middlewares do.
type decider struct {
	unwrapper
	decided bool
}

func (d *decider) WriteHeader(status int) {
	if !d.decided {
		d.decided = true
		d.Header().Add("Vary", "Accept-Encoding")
		d.Header().Del("X-Deleted")
	}
	d.unwrapper.WriteHeader(status)
}

func deciding(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(&decider{unwrapper: unwrapper{w}}, r)
	})
}

// S31, S20: what a middleware outside makes of the header of an informational
// response, it has made of the final one, as without a guard. It is no part of the
// record.
func TestS31OuterDecisionAtInformationalResponse(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Vary", "Accept")
		w.Header().Set("X-Deleted", "1")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusCreated)
	})
	forEachProtocol(t, func(t *testing.T, proto protocol) {
		t.Helper()
		store := &recordingStore{Store: idempotency.NewMemoryStore()}
		m := newMiddleware(t, store, idempotency.Config{})
		bare := newSite(t, proto, deciding(handler)).do(t.Context(), call{})
		s := newSite(t, proto, deciding(m.Handler(handler)))
		first, retry := s.do(t.Context(), call{}), s.do(t.Context(), call{})
		require.Equal(t, []string{"Accept", "Accept-Encoding"}, bare.header["Vary"])
		require.Len(t, bare.informs, 2)
		require.Equal(t, bare, first)
		require.Equal(t, []string{"Accept"}, store.stored.Header["Vary"])
		require.True(t, retry.replayed())
		retry.header.Del(idempotency.HeaderReplayed)
		require.Equal(t, bare.header, retry.header)
	})
}

// S31, S15, S13: a handler that runs unguarded gets the writer that the guard got.
func TestS31UnguardedHandlerGetsTheOriginalWriter(t *testing.T) {
	for _, tc := range []struct {
		name  string
		call  call
		cfg   idempotency.Config
		guard bool
	}{
		{"other method", call{method: http.MethodGet}, idempotency.Config{}, false},
		{"no key", call{noKey: true}, idempotency.Config{OptionalKeys: true}, false},
		{"guarded", call{}, idempotency.Config{}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				var outer, inner http.ResponseWriter
				guarded := newMiddleware(t, noStoreUnless(tc.guard), tc.cfg).Handler(http.HandlerFunc(
					func(w http.ResponseWriter, _ *http.Request) { inner = w }))
				s := newSite(t, proto, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					outer = w
					guarded.ServeHTTP(w, r)
				}))
				require.Equal(t, http.StatusOK, s.do(t.Context(), tc.call).status)
				require.Equal(t, tc.guard, outer != inner)
			})
		})
	}
}

func noStoreUnless(guarded bool) idempotency.Store {
	if guarded {
		return idempotency.NewMemoryStore()
	}
	return noStore{}
}
