package integration_test

import (
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S08: wherever the guard is in a tree of chi routers, the default route tells
// operations apart whose patterns look the same in their sub-routers.
func TestS08ChiSubRouters(t *testing.T) {
	type guard = func(http.Handler) http.Handler
	pay := func(w http.ResponseWriter, r *http.Request) {
		exec, _ := idempotency.FromContext(r.Context())
		write(w, exec.Key().Route()+" ran")
	}
	for _, tc := range []struct {
		name  string
		build func(g guard) http.Handler
		route string // of the first operation
	}{
		{"around all", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				root.Route(prefix, func(r chi.Router) { r.Post("/{id}/pay", pay) })
			}
			return g(root)
		}, "POST /charges/1/pay"},
		{"Use on the root", func(g guard) http.Handler {
			root := chi.NewRouter()
			root.Use(g)
			for _, prefix := range []string{"/charges", "/refunds"} {
				root.Route(prefix, func(r chi.Router) { r.Post("/{id}/pay", pay) })
			}
			return root
		}, "POST /charges/1/pay"},
		{"Use in Route", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				root.Route(prefix, func(r chi.Router) {
					r.Use(g)
					r.Post("/{id}/pay", pay)
				})
			}
			return root
		}, "POST /charges/1/pay"},
		{"With on a route", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				root.Route(prefix, func(r chi.Router) { r.With(g).Post("/{id}/pay", pay) })
			}
			return root
		}, "POST /charges/{id}/pay"},
		{"With on a route with a regular expression", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				root.Route(prefix, func(r chi.Router) { r.With(g).Post("/{id:[0-9]+}/pay", pay) })
			}
			return root
		}, "POST /charges/{id:[0-9]+}/pay"},
		{"With on a mounted router", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				sub := chi.NewRouter()
				sub.With(g).Post("/{id}/pay", pay)
				root.Mount(prefix, sub)
			}
			return root
		}, "POST /charges/{id}/pay"},
		{"one router, mounted twice", func(g guard) http.Handler {
			sub := chi.NewRouter()
			sub.Use(g)
			sub.Post("/{id}/pay", pay)
			root := chi.NewRouter()
			root.Mount("/charges", sub)
			root.Mount("/refunds", sub)
			return root
		}, "POST /charges/1/pay"},
		{"mounted behind StripPrefix", func(g guard) http.Handler {
			root := chi.NewRouter()
			for _, prefix := range []string{"/charges", "/refunds"} {
				mux := http.NewServeMux()
				mux.Handle("POST /{id}/pay", g(http.HandlerFunc(pay)))
				root.Mount(prefix, http.StripPrefix(prefix, mux))
			}
			return root
		}, "POST /charges/1/pay"},
		{"a catch-all", func(g guard) http.Handler {
			root := chi.NewRouter()
			root.With(g).Post("/*", pay)
			return root
		}, "POST /charges/1/pay"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forEachProtocol(t, func(t *testing.T, proto protocol) {
				t.Helper()
				m := newGuard(t, idempotency.NewMemoryStore(), idempotency.Config{})
				s := newSite(t, proto, tc.build(m.Handler))
				charge, refund := s.do(t, call{path: "/charges/1/pay"}), s.do(t, call{path: "/refunds/1/pay"})
				require.Equal(t, tc.route+" ran", charge.decoded)
				require.Equal(t, http.StatusOK, refund.status, refund.decoded)
				require.False(t, refund.replayed())
				require.NotEqual(t, charge.decoded, refund.decoded)
				require.True(t, s.do(t, call{path: "/charges/1/pay"}).replayed())
				require.True(t, s.do(t, call{path: "/refunds/1/pay"}).replayed())
			})
		})
	}
}
