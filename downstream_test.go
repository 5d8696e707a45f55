package idempotency_test

import (
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// downstreamKeyOf runs one operation under cfg and returns the downstream key of
// its calls by that name, on each of its attempts.
func downstreamKeyOf(t *testing.T, cfg idempotency.Config, c call, name string) uuid.UUID {
	t.Helper()
	var keys []uuid.UUID
	s := newGuardedSite(t, idempotency.NewMemoryStore(), cfg, func(w http.ResponseWriter, r *http.Request) {
		exec, _ := idempotency.FromContext(r.Context())
		keys = append(keys, exec.DownstreamKey(name))
		if exec.Attempt() < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	for _, status := range []int{http.StatusServiceUnavailable, http.StatusServiceUnavailable, http.StatusOK, http.StatusOK} {
		require.Equal(t, status, s.do(t.Context(), c).status)
	}
	require.Len(t, keys, 3)
	require.Equal(t, []uuid.UUID{keys[0], keys[0], keys[0]}, keys, "S45: not the same on every attempt")
	return keys[0]
}

// S45: a downstream key is the same on every attempt of one operation, and another
// one wherever a part of the tuple, the payload or the name is another.
func TestS45DownstreamKey(t *testing.T) {
	route := idempotency.Config{Route: idempotency.RouteName("charge")}
	base := call{key: `"k"`, body: "pay"}
	first := downstreamKeyOf(t, route, base, "provider")
	require.Equal(t, uuid.Version(8), first.Version())
	require.Equal(t, uuid.RFC4122, first.Variant())
	require.Equal(t, first, downstreamKeyOf(t, route, base, "provider"), "S45: another store, the same operation")

	seen := map[uuid.UUID]string{first: "the first"}
	for _, tc := range []struct {
		name       string
		cfg        idempotency.Config
		call       call
		downstream string
	}{
		{"version", idempotency.Config{Route: route.Route, Version: "v2"}, base, "provider"},
		{"tenant", route, call{key: `"k"`, body: "pay", tenant: "globex"}, "provider"},
		{"principal", route, call{key: `"k"`, body: "pay", caller: "bob"}, "provider"},
		{"route", idempotency.Config{Route: idempotency.RouteName("refund")}, base, "provider"},
		{"key", route, call{key: `"l"`, body: "pay"}, "provider"},
		{"payload", route, call{key: `"k"`, body: "pay more"}, "provider"},
		{"call", route, base, "mail"},
		{"call without a name", route, base, ""},
		{"secret", idempotency.Config{Route: route.Route, FingerprintSecret: []byte("sixteen bytes or more")}, base, "provider"},
		{"other secret", idempotency.Config{Route: route.Route, FingerprintSecret: []byte("sixteen bytes, or more")}, base, "provider"},
	} {
		key := downstreamKeyOf(t, tc.cfg, tc.call, tc.downstream)
		require.NotContains(t, seen, key, "S45: the same key with another %s", tc.name)
		seen[key] = tc.name
	}
}

// S45: the parts of a downstream key do not run together.
func TestS45DownstreamKeyPartsAreSeparate(t *testing.T) {
	fp := idempotency.Fingerprint{1}
	k, kx := memoryClaim(t, "k").Key, memoryClaim(t, "kx").Key
	one := idempotency.DownstreamKeyOf(k, fp, "x")
	require.NotEqual(t, one, idempotency.DownstreamKeyOf(kx, fp, ""))
	require.Equal(t, one, idempotency.DownstreamKeyOf(k, fp, "x"))
	// A change of the derivation is one of the calls of every operation that is retried over it.
	require.Equal(t, "6941fb2e-8583-8b18-a3d1-e5dd8feec915", one.String())

	server, err := idempotency.ServerKey(idempotency.Scope{Version: "v1", Tenant: "acme", Principal: "alice", Route: "charge"}, "k")
	require.NoError(t, err)
	require.NotEqual(t, one, idempotency.DownstreamKeyOf(server, fp, "x"), "S45: the same key in another namespace")
}

// S45: a record that was made before the secret was configured is taken over with
// the downstream keys that it had.
func TestS45DownstreamKeySurvivesANewSecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var keys []uuid.UUID
		handler := func(w http.ResponseWriter, r *http.Request) {
			exec, _ := idempotency.FromContext(r.Context())
			keys = append(keys, exec.DownstreamKey("provider"))
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		before := newExecRig(t, handler, nil)
		before.serve("a")
		after := newExecRigOn(before.store, handler, func(c *idempotency.Config) {
			c.FingerprintSecret = []byte("sixteen bytes or more")
		})
		after.serve("a")
		require.Len(t, keys, 2)
		require.Equal(t, keys[0], keys[1])
	})
}
