package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A scopeStore is an empty store, of each kind there is.
type scopeStore struct {
	name string
	open func(t *testing.T) idempotency.Store
}

var scopeStores = []scopeStore{
	{"memory", func(*testing.T) idempotency.Store { return idempotency.NewMemoryStore() }},
	{"postgres", func(t *testing.T) idempotency.Store {
		t.Helper()
		return idempotency.NewPostgresStore(migrated(t))
	}},
}

// onEachStore runs a test on each kind of store.
func onEachStore(t *testing.T, test func(t *testing.T, store idempotency.Store)) {
	t.Helper()
	for _, s := range scopeStores {
		t.Run(s.name, func(t *testing.T) { test(t, s.open(t)) })
	}
}

// A scopeChange is a change of what a scope means: the configurations before and
// after it.
type scopeChange struct {
	name         string
	before, then idempotency.Config
}

// tenantAgain is the principal of an API that does not tell callers apart.
func tenantAgain(r *http.Request) string { return tenantOf(r) }

func numbered(r *http.Request) string { return "tenant-0001/" + tenantOf(r) }

// scopeChanges are changes by which every operation gets another name.
var scopeChanges = []scopeChange{
	{"principal added", idempotency.Config{Principal: tenantAgain}, idempotency.Config{
		Version: "v2", EarlierScopes: []idempotency.EarlierScope{
			{Kind: idempotency.AliasRenamed, Version: "v1", Principal: tenantAgain},
		},
	}},
	{"routes named", idempotency.Config{}, idempotency.Config{
		Version: "v2", Route: idempotency.RouteName("charge"), EarlierScopes: []idempotency.EarlierScope{
			{Kind: idempotency.AliasRenamed, Version: "v1", Route: idempotency.DefaultRoute},
		},
	}},
	{"routes named, same version", idempotency.Config{}, idempotency.Config{
		Route: idempotency.RouteName("charge"), EarlierScopes: []idempotency.EarlierScope{
			{Kind: idempotency.AliasRenamed, Route: idempotency.DefaultRoute},
		},
	}},
	{"tenant ids changed", idempotency.Config{}, idempotency.Config{
		Version: "v2", KeyScope: numbered, EarlierScopes: []idempotency.EarlierScope{
			{Kind: idempotency.AliasRenamed, Version: "v1", KeyScope: tenantOf},
		},
	}},
	{"tenants merged", idempotency.Config{}, idempotency.Config{
		KeyScope: numbered, EarlierScopes: []idempotency.EarlierScope{
			{Kind: idempotency.AliasMerged, KeyScope: tenantOf},
		},
	}},
}

// onEachChange runs a test on each change and store, and both ways: what the first
// configuration has done is met by the second.
func onEachChange(t *testing.T, test func(t *testing.T, store idempotency.Store, first, second idempotency.Config)) {
	t.Helper()
	for _, change := range scopeChanges {
		onEachStore(t, func(t *testing.T, store idempotency.Store) {
			t.Helper()
			t.Run(change.name, func(t *testing.T) { test(t, store, change.before, change.then) })
		})
		onEachStore(t, func(t *testing.T, store idempotency.Store) {
			t.Helper()
			t.Run(change.name+", rolled back", func(t *testing.T) { test(t, store, change.then, change.before) })
		})
	}
}

// requireDone expects that a was answered from the record of what has run under a
// configuration; of what was done for a successor, the predecessor is not told the answer.
func (a reply) requireDone(t *testing.T, ran, asked idempotency.Config) {
	t.Helper()
	merged := func(e idempotency.EarlierScope) bool { return e.Kind == idempotency.AliasMerged }
	if slices.ContainsFunc(ran.EarlierScopes, merged) && len(asked.EarlierScopes) == 0 {
		a.requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable)
		return
	}
	require.True(t, a.replayed(), a.body)
}

// S43: what was done under one scope is replayed under the other, and a key that it has
// used up is so under both.
func TestS43DoneUnderTheOtherScope(t *testing.T) {
	onEachChange(t, func(t *testing.T, store idempotency.Store, first, second idempotency.Config) {
		t.Helper()
		one, two := attemptSite(t, store, first), attemptSite(t, store, second)
		c := call{path: "/v1/charges", body: "pay"}
		require.Equal(t, "attempt 1", one.do(t.Context(), c).body)
		two.do(t.Context(), c).requireDone(t, first, second)
		require.Zero(t, two.runs.Load())
		require.True(t, one.do(t.Context(), c).replayed())

		other := call{path: "/v1/charges", body: "pay more"}
		a := two.do(t.Context(), other)
		if kind := append(first.EarlierScopes, second.EarlierScopes...)[0].Kind; kind == idempotency.AliasRenamed || len(second.EarlierScopes) == 0 {
			a.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			return
		}
		require.Equal(t, "attempt 1", a.body, "S44: another identity's key is no other payload's")
		require.False(t, a.replayed())
		one.do(t.Context(), other).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
	})
}

// S43: an attempt that left no outcome is taken over under the other scope, as the next
// one, with the same downstream keys (S45); and so to and fro.
func TestS43TakenOverUnderTheOtherScope(t *testing.T) {
	onEachChange(t, func(t *testing.T, store idempotency.Store, first, second idempotency.Config) {
		t.Helper()
		var log []string
		fails := true
		handler := func(w http.ResponseWriter, r *http.Request) {
			exec, _ := idempotency.FromContext(r.Context())
			log = append(log, fmt.Sprint(exec.Attempt(), " ", exec.DownstreamKey("provider")))
			if fails {
				w.WriteHeader(http.StatusBadGateway)
			}
		}
		one, two := newGuardedSite(t, store, first, handler), newGuardedSite(t, store, second, handler)
		c := call{path: "/v1/charges"}
		for _, s := range []*site{one, two, one, two, two} {
			require.Equal(t, http.StatusBadGateway, s.do(t.Context(), c).status)
		}
		fails = false
		require.Equal(t, http.StatusOK, one.do(t.Context(), c).status)
		two.do(t.Context(), c).requireDone(t, first, second)
		require.Len(t, log, 6)
		_, downstream, _ := strings.Cut(log[0], " ")
		for i, l := range log {
			require.Equal(t, fmt.Sprint(i+1, " ", downstream), l, "S45")
		}
	})
}

// S43, S45: an operation that was first tried under both names keeps its downstream keys
// when the earlier one is no longer configured.
func TestS45DownstreamKeyOutlivesTheEarlierScope(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		both := scopeChanges[0].then
		alone := both
		alone.EarlierScopes = nil
		var keys []string
		handler := func(w http.ResponseWriter, r *http.Request) {
			exec, _ := idempotency.FromContext(r.Context())
			keys = append(keys, exec.DownstreamKey("provider").String())
			if exec.Attempt() < 3 {
				w.WriteHeader(http.StatusBadGateway)
			}
		}
		for _, cfg := range []idempotency.Config{both, alone, both} {
			newGuardedSite(t, store, cfg, handler).do(t.Context(), call{})
		}
		require.Len(t, keys, 3)
		require.Equal(t, []string{keys[0], keys[0], keys[0]}, keys)
	})
}

// S45: operations that are told apart have downstream keys of their own, though they might
// have had one name in common.
func TestS45DownstreamKeysAreToldApart(t *testing.T) {
	toA := mergedIntoC("A")
	toA.EarlierScopes[0].KeyScope = func(*http.Request) string { return "A" }
	for _, tc := range []struct {
		name  string
		cfg   idempotency.Config
		calls []call
	}{
		{"principals", scopeChanges[0].then, []call{{caller: "alice"}, {caller: "bob"}, {caller: "carol"}}},
		{"successors", toA, []call{{tenant: "C"}, {tenant: "D"}, {tenant: "A"}}},
	} {
		onEachStore(t, func(t *testing.T, store idempotency.Store) {
			t.Helper()
			t.Run(tc.name, func(t *testing.T) {
				seen := make(map[uuid.UUID]bool)
				s := newGuardedSite(t, store, tc.cfg, func(_ http.ResponseWriter, r *http.Request) {
					exec, _ := idempotency.FromContext(r.Context())
					seen[exec.DownstreamKey("provider")] = true
				})
				for _, c := range tc.calls[:2] {
					require.Equal(t, http.StatusOK, s.do(t.Context(), c).status)
				}
				require.Len(t, seen, 2, "S45: one operation's call is taken for another's")
			})
		})
	}
}

// S43: scopes that came one after the other are all names of an operation, whichever
// processes have tried it.
func TestS43ScopesOneAfterTheOther(t *testing.T) {
	v1 := idempotency.EarlierScope{Kind: idempotency.AliasRenamed, Version: "v1", Principal: tenantAgain}
	v2 := idempotency.EarlierScope{Kind: idempotency.AliasRenamed, Version: "v2"}
	configs := []idempotency.Config{
		{Principal: tenantAgain},
		{Version: "v2", EarlierScopes: []idempotency.EarlierScope{v1}},
		{Version: "v3", EarlierScopes: []idempotency.EarlierScope{v2, v1}},
	}
	for _, order := range [][]int{{1, 0, 2}, {1, 2, 0}, {2, 1, 0}, {2, 0, 1}, {0, 1, 2}, {0, 2, 1}, {1, 1, 2, 0}, {2, 2, 0, 1}} {
		onEachStore(t, func(t *testing.T, store idempotency.Store) {
			t.Helper()
			t.Run(fmt.Sprint(order), func(t *testing.T) {
				var keys []string
				for i, version := range order {
					s := newGuardedSite(t, store, configs[version], func(w http.ResponseWriter, r *http.Request) {
						exec, _ := idempotency.FromContext(r.Context())
						keys = append(keys, fmt.Sprint(exec.DownstreamKey("provider")))
						if i < len(order)-2 {
							w.WriteHeader(http.StatusBadGateway)
							return
						}
						attempt(w, r)
					})
					a := s.do(t.Context(), call{})
					switch i {
					case len(order) - 2:
						require.Equal(t, fmt.Sprint("attempt ", i+1), a.body)
					case len(order) - 1:
						require.True(t, a.replayed(), a.body)
					}
				}
				for version := range configs {
					require.True(t, attemptSite(t, store, configs[version]).do(t.Context(), call{}).replayed(), "version %d", version+1)
				}
				for _, key := range keys {
					require.Equal(t, keys[0], key, "S45")
				}
			})
		})
	}
}

// S43: what a process of the old scope has taken over is nobody's by the new one: it does
// not run again for the one that asked for it.
func TestS43TakenOverByTheOldScope(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		var ran []string
		fails := true
		handler := func(w http.ResponseWriter, r *http.Request) {
			ran = append(ran, callerOf(r))
			if fails {
				w.WriteHeader(http.StatusBadGateway)
			}
		}
		old, s := newGuardedSite(t, store, scopeChanges[0].before, handler), newGuardedSite(t, store, scopeChanges[0].then, handler)
		require.Equal(t, http.StatusBadGateway, s.do(t.Context(), call{caller: "alice"}).status)
		fails = false
		require.Equal(t, http.StatusOK, old.do(t.Context(), call{caller: "bob"}).status)
		require.True(t, s.do(t.Context(), call{caller: "bob"}).replayed())
		require.Equal(t, []string{"alice", "bob"}, ran)
	})
}

// S27, S43: where nothing may run twice, an operation that broke off under one scope is in
// doubt under the other.
func TestS27HeldUnderTheOtherScope(t *testing.T) {
	onEachChange(t, func(t *testing.T, store idempotency.Store, first, second idempotency.Config) {
		t.Helper()
		first.HoldAbandoned, second.HoldAbandoned = true, true
		one := newGuardedSite(t, store, first, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
		two := newGuardedSite(t, store, second, echo)
		c := call{path: "/v1/charges"}
		require.Equal(t, http.StatusBadGateway, one.do(t.Context(), c).status)
		for _, s := range []*site{two, one} {
			s.do(t.Context(), c).requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		}
		require.Zero(t, two.runs.Load())
		require.EqualValues(t, 1, one.runs.Load())
	})
}

// S33, S44: whoever still has the old identity does not see what the new one was answered,
// neither while it is the successor nor afterwards; what it has done itself it sees.
func TestS44PredecessorSeesOnlyItsOwn(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		fails := false
		answer := func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Secret", tenantOf(r))
			if fails {
				w.WriteHeader(http.StatusBadGateway)
			}
			_, _ = fmt.Fprint(w, "done for ", tenantOf(r))
		}
		s := newGuardedSite(t, store, mergedIntoC("A", "B"), answer)
		after := newGuardedSite(t, store, idempotency.Config{}, answer)
		do := func(s *site, tenant, key, body string) reply {
			t.Helper()
			return s.do(t.Context(), call{tenant: tenant, key: `"` + key + `"`, body: body})
		}
		require.Equal(t, "done for C", do(s, "C", "new", "x").body)
		for _, site := range []*site{s, after} {
			for _, tenant := range []string{"A", "B"} {
				a := do(site, tenant, "new", "x")
				a.requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable)
				require.NotContains(t, a.body, "done for")
				require.Empty(t, a.header.Get("Secret"))
			}
			require.True(t, do(site, "C", "new", "x").replayed())
		}

		// Of an operation that is recorded under the old names alone, the successor must get
		// the answer there.
		require.Equal(t, "done for C", do(after, "C", "k", "another payload").body)
		fails = true
		require.Equal(t, http.StatusBadGateway, do(after, "A", "k", "x").status)
		fails = false
		require.Equal(t, "done for C", do(s, "C", "k", "x").body)
		require.True(t, do(s, "C", "k", "x").replayed())
		require.True(t, do(after, "A", "k", "x").replayed(), "it was A's operation")
	})
}

// S15, S43: a guard inside another passes through where the two have a name in common that
// the outer one has claimed.
func TestS15NestedGuardsOfSeveralNames(t *testing.T) {
	change := scopeChanges[0]
	renamed := idempotency.Config{EarlierScopes: []idempotency.EarlierScope{
		{Kind: idempotency.AliasRenamed, Route: idempotency.DefaultRoute},
	}}
	for _, tc := range []struct {
		name         string
		outer, inner idempotency.Config
		named        bool
	}{
		{"old inside new", change.then, change.before, false},
		{"new inside old", change.before, change.then, false},
		{"new inside new", change.then, change.then, false},
		{"named inside unnamed", renamed, renamed, true},
	} {
		onEachStore(t, func(t *testing.T, store idempotency.Store) {
			t.Helper()
			t.Run(tc.name, func(t *testing.T) {
				outer, inner := newMiddleware(t, store, tc.outer), newMiddleware(t, store, tc.inner)
				if tc.named {
					inner = inner.Named("charge")
				}
				s := newSite(t, http1, outer.Handler(inner.Handler(http.HandlerFunc(attempt))))
				require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body)
				require.True(t, s.do(t.Context(), call{}).replayed())
			})
		})
	}
}

// S21, S43: what runs under one scope is in flight under the other.
func TestS43InFlightUnderTheOtherScope(t *testing.T) {
	onEachChange(t, func(t *testing.T, store idempotency.Store, first, second idempotency.Config) {
		t.Helper()
		entered, leave := make(chan struct{}), make(chan struct{})
		one := newGuardedSite(t, store, first, func(w http.ResponseWriter, r *http.Request) {
			close(entered)
			<-leave
			echo(w, r)
		})
		two := newGuardedSite(t, store, second, echo)
		c := call{path: "/v1/charges", body: "pay"}
		done := make(chan reply, 1)
		go func() { done <- one.do(t.Context(), c) }()
		<-entered
		two.do(t.Context(), c).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
		close(leave)
		require.Equal(t, http.StatusCreated, receive(t, done).status)
		two.do(t.Context(), c).requireDone(t, first, second)
		require.Zero(t, two.runs.Load())
	})
}

// S43: a principal added to the scope does not let the second principal have the first
// one's answer, nor be refused for the first one's key.
func TestS43SecondPrincipalIsAnother(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		s := newGuardedSite(t, store, scopeChanges[0].then, func(w http.ResponseWriter, r *http.Request) {
			_, _ = fmt.Fprint(w, "for ", callerOf(r))
		})
		for _, body := range []string{"same payload", "same payload, sent again"} {
			for _, caller := range []string{"alice", "bob", "carol"} {
				c := call{caller: caller, key: `"` + body + `"`, body: body}
				if caller == "carol" {
					c.body = "another payload"
				}
				first, second := s.do(t.Context(), c), s.do(t.Context(), c)
				require.Equal(t, "for "+caller, first.body)
				require.False(t, first.replayed(), "S43: %s gets what another did", caller)
				require.Equal(t, "for "+caller, second.body)
				require.True(t, second.replayed())
			}
		}
		// A process that runs the old scope knows one of them, and runs none again.
		old := newGuardedSite(t, store, scopeChanges[0].before, echo)
		require.Equal(t, "for alice", old.do(t.Context(), call{caller: "alice", key: `"same payload"`, body: "same payload"}).body)
		require.Zero(t, old.runs.Load())
	})
}

// mergedIntoC returns a configuration in which the tenants were merged into C.
func mergedIntoC(merged ...string) idempotency.Config {
	var cfg idempotency.Config
	for _, old := range merged {
		cfg.EarlierScopes = append(cfg.EarlierScopes, idempotency.EarlierScope{
			Kind: idempotency.AliasMerged,
			KeyScope: func(r *http.Request) string {
				if tenantOf(r) != "C" {
					return ""
				}
				return old
			},
		})
	}
	return cfg
}

// S44: two tenants are merged into a third. What was done under one of them is replayed
// to it; of two records under one key the payload's counts; what was done under none runs
// once. Others have no part in it.
func TestS44MergedTenants(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		answer := func(w http.ResponseWriter, r *http.Request) { _, _ = fmt.Fprint(w, "done for ", tenantOf(r)) }
		before := newGuardedSite(t, store, idempotency.Config{}, answer)
		s := newGuardedSite(t, store, mergedIntoC("A", "B"), answer)
		do := func(s *site, tenant, key, body string) reply {
			t.Helper()
			return s.do(t.Context(), call{tenant: tenant, key: `"` + key + `"`, body: body})
		}
		require.Equal(t, "done for A", do(before, "A", "only A's", "x").body)
		require.Equal(t, "done for A", do(before, "A", "both's", "x").body)
		require.Equal(t, "done for B", do(before, "B", "both's", "y").body)

		for range 2 {
			for _, tc := range []struct{ key, body, done string }{
				{"only A's", "x", "done for A"},
				{"both's", "x", "done for A"},
				{"both's", "y", "done for B"},
			} {
				a := do(s, "C", tc.key, tc.body)
				require.Equal(t, tc.done, a.body)
				require.True(t, a.replayed())
			}
		}
		require.Zero(t, s.runs.Load())

		for i := range 2 {
			a := do(s, "C", "both's", "z")
			require.Equal(t, "done for C", a.body)
			require.Equal(t, i == 1, a.replayed(), "S44: matches neither, and runs once")
		}
		do(s, "C", "both's", "w").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		require.True(t, do(s, "C", "both's", "y").replayed(), "S44: a match beats the mismatch under its own name")
		do(s, "A", "only A's", "y").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		do(before, "A", "both's", "z").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused) // C's, under A's used key
		require.Equal(t, "done for D", do(s, "D", "both's", "x").body)
		require.EqualValues(t, 2, s.runs.Load())
	})
}

// S29, S44: what the old identity has done is forgotten for the new one when it is for the
// old one.
func TestS44MergeForgetsWhatHasExpired(t *testing.T) {
	clock := &printClock{}
	store := idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{Now: clock.now})
	before := attemptSite(t, store, idempotency.Config{TTL: time.Hour})
	cfg := mergedIntoC("A")
	cfg.TTL = time.Hour
	s := attemptSite(t, store, cfg)
	require.Equal(t, "attempt 1", before.do(t.Context(), call{tenant: "A"}).body)
	clock.advance(time.Hour - 1)
	require.True(t, s.do(t.Context(), call{tenant: "C"}).replayed())
	clock.advance(1)
	a := s.do(t.Context(), call{tenant: "C"})
	require.Equal(t, "attempt 1", a.body)
	require.False(t, a.replayed())
}

// S44: no row of the old identities is rewritten by what the new one does.
func TestS44StoredRowsStay(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	before := newGuardedSite(t, store, idempotency.Config{}, echo)
	for _, tenant := range []string{"A", "B"} {
		require.Equal(t, http.StatusCreated, before.do(t.Context(), call{tenant: tenant, body: tenant}).status)
	}
	const rows = `SELECT string_agg(format('%s %s', xmin, r), E'\n' ORDER BY r::text)
		FROM idempotency_records r WHERE tenant_id IN ('A', 'B')`
	stored := queryOne[string](t, pool, rows)
	s := newGuardedSite(t, store, mergedIntoC("A", "B"), echo)
	for _, body := range []string{"A", "B", "C", "D", "A"} {
		s.do(t.Context(), call{tenant: "C", body: body})
	}
	require.EqualValues(t, 1, s.runs.Load(), "C's own")
	require.Equal(t, stored, queryOne[string](t, pool, rows))
	require.Equal(t, 1, count(t, pool, "tenant_id = 'C'"))
}

// S10, S43: what an earlier scope makes of a request is no name ("" or the same), or is
// one, or is refused as the deployment's fault.
func TestS43NamesOfAnEarlierScope(t *testing.T) {
	fixed := func(s string) func(*http.Request) string { return func(*http.Request) string { return s } }
	for _, tc := range []struct {
		name    string
		earlier []idempotency.EarlierScope
		aliases []string // tenant, principal, route, version of each
		bad     idempotency.Component
	}{
		{"no tenant", []idempotency.EarlierScope{{KeyScope: fixed("")}}, nil, ""},
		{"no principal", []idempotency.EarlierScope{{Principal: fixed("")}}, nil, ""},
		{"no route", []idempotency.EarlierScope{{Route: fixed("")}}, nil, ""},
		{"the same", []idempotency.EarlierScope{{KeyScope: tenantOf, Version: "v1"}}, nil, ""},
		{"one twice", []idempotency.EarlierScope{{KeyScope: fixed("x")}, {KeyScope: fixed("x")}}, []string{"x alice charge v1"}, ""},
		{"all", []idempotency.EarlierScope{
			{Version: "v0"}, {Principal: fixed("p")}, {Version: "v00", KeyScope: fixed("t"), Principal: fixed("p"), Route: fixed("r")},
		}, []string{"acme alice charge v0", "acme p charge v1", "t p r v00"}, ""},
		{"NUL", []idempotency.EarlierScope{{KeyScope: fixed("secret\x00")}}, nil, idempotency.ComponentTenant},
		{"no UTF-8", []idempotency.EarlierScope{{Principal: fixed("secret\xff")}}, nil, idempotency.ComponentPrincipal},
		{"too long", []idempotency.EarlierScope{{KeyScope: fixed("secret" + strings.Repeat("x", 512))}}, nil, idempotency.ComponentTenant},
		{"route too long", []idempotency.EarlierScope{{Route: fixed(strings.Repeat("x", 513))}}, nil, ""},
		{"route with NUL", []idempotency.EarlierScope{{Route: fixed("secret\x00")}}, nil, idempotency.ComponentRoute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for i := range tc.earlier {
				tc.earlier[i].Kind = idempotency.AliasRenamed
			}
			logs := &syncBuffer{}
			store := &claimLog{MemoryStore: idempotency.NewMemoryStore()}
			m := newMiddleware(t, store, idempotency.Config{EarlierScopes: tc.earlier, Logger: slog.New(slog.NewTextHandler(logs, nil))})
			s := newSite(t, http1, m.Named("charge").Handler(http.HandlerFunc(echo)))
			a := s.do(t.Context(), call{})
			if tc.bad != "" {
				a.requireProblem(t, http.StatusInternalServerError, idempotency.CodeBadIdentity)
				require.Contains(t, logs.String(), string(tc.bad))
				require.NotContains(t, logs.String(), "secret")
				require.Empty(t, store.claims)
				return
			}
			require.Equal(t, http.StatusCreated, a.status)
			var aliases []string
			for _, alias := range store.claims[0].Aliases {
				k := alias.Key
				require.Equal(t, idempotency.NamespaceClient, k.Namespace())
				require.Equal(t, "8e03978e", k.Key())
				aliases = append(aliases, strings.Join([]string{k.Tenant(), k.Principal(), k.Route(), k.Version()}, " "))
			}
			require.Equal(t, tc.aliases, aliases)
		})
	}
}

// A scopeGuard is a guarded handler that is served without a network, as in a synctest
// bubble.
type scopeGuard struct {
	m       *idempotency.Middleware
	handler http.Handler
}

func newScopeGuard(t *testing.T, store idempotency.Store, cfg idempotency.Config, h http.HandlerFunc) scopeGuard {
	t.Helper()
	m := newMiddleware(t, store, cfg)
	return scopeGuard{m: m, handler: m.Named("charge").Handler(h)}
}

func (g scopeGuard) send(ctx context.Context, tenant, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/charges", strings.NewReader(body))
	r.Header.Set(headerTenant, tenant)
	r.Header.Set(headerCaller, "alice")
	r.Header.Set(idempotency.HeaderKey, `"8e03978e"`)
	w := httptest.NewRecorder()
	g.handler.ServeHTTP(w, r)
	return w
}

// key is what a scopeGuard's requests are stored under.
func (g scopeGuard) key(t *testing.T, tenant string) idempotency.ScopedKey {
	t.Helper()
	k, err := idempotency.ClientKey(idempotency.Scope{Version: "v1", Tenant: tenant, Principal: "alice", Route: "charge"}, "8e03978e")
	require.NoError(t, err)
	return k
}

// A claimLog remembers the claims that it was asked for, and fails them if it is told to.
type claimLog struct {
	*idempotency.MemoryStore
	mu     sync.Mutex
	claims []idempotency.Claim
	fail   bool // after the claim was made
}

func (s *claimLog) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims = append(s.claims, c)
	rec, err := s.MemoryStore.Claim(ctx, c)
	if s.fail {
		s.fail = false
		return idempotency.Record{}, errors.New("answer lost")
	}
	return rec, err
}

// S26, S43: a claim of unknown fate is released under whichever of its names it took.
func TestS26ClaimOfSeveralNamesWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &claimLog{MemoryStore: idempotency.NewMemoryStore(), fail: true}
		cfg := mergedIntoC("A", "B")
		x := newScopeGuard(t, store, cfg, echo)
		// B's is some other operation, so that not all names are taken.
		other := memoryClaim(t, "8e03978e")
		other.Key = x.key(t, "B")
		_, err := store.MemoryStore.Claim(t.Context(), other)
		require.NoError(t, err)

		require.Equal(t, http.StatusServiceUnavailable, x.send(t.Context(), "C", "").Code)
		time.Sleep(time.Second) // of the bubble: less than a lease
		synctest.Wait()
		for _, tenant := range []string{"C", "A"} {
			c := store.claims[0]
			c.Key, c.Aliases = x.key(t, tenant), nil
			c.Fingerprint[5] ^= 1
			rec, err := store.MemoryStore.Claim(t.Context(), c)
			require.NoError(t, err)
			require.Equal(t, idempotency.StateReleased, rec.State, tenant)
		}
		time.Sleep(time.Minute) // until the claim cannot come any more
		require.NoError(t, x.m.Shutdown(t.Context()))
		require.Zero(t, idempotency.Unsettled(x.m))
	})
}

// S43: every fault of an earlier scope is told, with its place.
func TestS43EarlierScopeFaults(t *testing.T) {
	good := idempotency.EarlierScope{Kind: idempotency.AliasRenamed, Version: "v0"}
	many := make([]idempotency.EarlierScope, idempotency.MaxAliases+1)
	for i := range many {
		many[i] = good
	}
	for _, tc := range []struct {
		name    string
		earlier []idempotency.EarlierScope
		want    []idempotency.ConfigError
	}{
		{"good", []idempotency.EarlierScope{good}, nil},
		{"as many as can be", many[1:], nil},
		{"too many", many, []idempotency.ConfigError{{Field: "EarlierScopes", Value: "17", Reason: "are more than 16"}}},
		{"no kind", []idempotency.EarlierScope{good, {Version: "v0"}}, []idempotency.ConfigError{
			{Field: "EarlierScopes[1]", Reason: "has no Kind: AliasRenamed or AliasMerged"},
		}},
		{"unknown kind", []idempotency.EarlierScope{{Kind: 3, Version: "v0"}}, []idempotency.ConfigError{
			{Field: "EarlierScopes[0]", Reason: "has no Kind: AliasRenamed or AliasMerged"},
		}},
		{"nothing set", []idempotency.EarlierScope{{Kind: idempotency.AliasMerged}}, []idempotency.ConfigError{
			{Field: "EarlierScopes[0]", Reason: "is no other scope than today's"},
		}},
		{"version", []idempotency.EarlierScope{{Kind: idempotency.AliasMerged, Version: "v\x00"}}, []idempotency.ConfigError{{
			Field: "EarlierScopes[0]", Value: "v\x00",
			Reason: "has a Version that is no scope component: idempotency: scope component contains separator",
		}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := identified(idempotency.Config{EarlierScopes: tc.earlier})
			require.Equal(t, tc.want, configFaults(t, idempotency.NewMemoryStore(), cfg))
		})
	}
}

// A singleStore can claim one name at a time.
type singleStore struct{ idempotency.Store }

// An unableStore could claim several, but not as it was made.
type unableStore struct{ *idempotency.MemoryStore }

func (unableStore) CheckAliases() error {
	return &idempotency.ConfigError{Field: "db", Reason: "is several servers"}
}

// S43: a store that cannot claim several names at once is refused where there are any.
func TestS43StoreWithoutAliases(t *testing.T) {
	memory := idempotency.NewMemoryStore()
	for _, store := range []idempotency.Store{singleStore{memory}, unableStore{memory}} {
		require.Empty(t, configFaults(t, store, identified(idempotency.Config{})))
	}
	cfg := identified(mergedIntoC("A"))
	require.Equal(t, []idempotency.ConfigError{{
		Field: "EarlierScopes", Reason: "is set, but the store cannot claim several names at once",
	}}, configFaults(t, singleStore{memory}, cfg))
	require.Equal(t, []idempotency.ConfigError{{Field: "db", Reason: "is several servers"}}, configFaults(t, unableStore{memory}, cfg))
	require.Len(t, configFaults(t, nil, cfg), 1, "no store at all is one fault")
}

// The caller's slice is its own.
func TestS43EarlierScopesAreCopied(t *testing.T) {
	cfg := mergedIntoC("A")
	store := &claimLog{MemoryStore: idempotency.NewMemoryStore()}
	s := newGuardedSite(t, store, cfg, echo)
	cfg.EarlierScopes[0] = idempotency.EarlierScope{}
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{tenant: "C"}).status)
	require.Len(t, store.claims[0].Aliases, 1)
}

// S16, S43: a scheme of fingerprints that is new with the scope is no other payload:
// each record is compared by its own.
func TestS43FingerprintSchemeChanges(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		t.Helper()
		change := scopeChanges[0]
		then := change.then
		then.FingerprintSecret = []byte(printSecret)
		then.Fingerprint = wholeBody
		old, now := attemptSite(t, store, change.before), attemptSite(t, store, then)
		require.Equal(t, "attempt 1", old.do(t.Context(), call{body: "pay"}).body)
		require.True(t, now.do(t.Context(), call{body: "pay"}).replayed())
		now.do(t.Context(), call{body: "pay more"}).requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)

		fails := newGuardedSite(t, store, change.before, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
		c := call{key: `"failed"`, body: "pay"}
		require.Equal(t, http.StatusBadGateway, fails.do(t.Context(), c).status)
		require.Equal(t, "attempt 2", now.do(t.Context(), c).body)
		require.True(t, old.do(t.Context(), c).replayed(), "the record stays one that the old scope can read")
	})
}

// S13, S17: a fingerprint function that fails for a scheme of its own is a broken body.
func TestS43FingerprintFunctionFails(t *testing.T) {
	var calls atomic.Int64
	cfg := mergedIntoC("A")
	cfg.FingerprintSecret = []byte(printSecret)
	cfg.Fingerprint = func(*http.Request, io.Reader) ([]byte, error) {
		if calls.Add(1) == 2 {
			return nil, errors.New("no form")
		}
		return []byte("x"), nil
	}
	s := newGuardedSite(t, idempotency.NewMemoryStore(), cfg, echo)
	s.do(t.Context(), call{tenant: "C"}).requireProblem(t, http.StatusBadRequest, idempotency.CodeBrokenBody)
	require.Zero(t, s.runs.Load())
	require.Equal(t, http.StatusCreated, s.do(t.Context(), call{tenant: "C"}).status)
}

// S21, S44: who waits for an operation under an alias is told its outcome, and nobody
// else's: two operations of one key may run at the same time.
func TestS21WaitsUnderAnAlias(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := idempotency.NewMemoryStore()
		leave := map[string]chan struct{}{"a": make(chan struct{}), "b": make(chan struct{})}
		running := func(body string) http.HandlerFunc {
			return func(w http.ResponseWriter, _ *http.Request) {
				<-leave[body]
				_, _ = w.Write([]byte("outcome of " + body))
			}
		}
		a, b := newScopeGuard(t, store, idempotency.Config{}, running("a")), newScopeGuard(t, store, idempotency.Config{}, running("b"))
		cfg := mergedIntoC("A", "B")
		cfg.WaitInFlight = 20 * time.Second
		c := newScopeGuard(t, store, cfg, echo)

		answers := make(chan string, 4)
		go a.send(t.Context(), "A", "a")
		go b.send(t.Context(), "B", "b")
		synctest.Wait()
		for _, body := range []string{"a", "b", "a", "b"} {
			go func() { answers <- body + ": " + c.send(t.Context(), "C", body).Body.String() }()
		}
		synctest.Wait()
		require.Equal(t, 2, idempotency.WatchedKeys(c.m))
		close(leave["a"])
		for range 2 {
			require.Equal(t, "a: outcome of a", <-answers)
		}
		close(leave["b"])
		for range 2 {
			require.Equal(t, "b: outcome of b", <-answers)
		}
		require.Zero(t, idempotency.WatchedKeys(c.m))
	})
}
