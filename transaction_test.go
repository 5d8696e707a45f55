package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S38: under what a handler might find no transaction, there is no middleware.
func TestS38ConfigExcludes(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	faults := configFaults(t, store, identified(idempotency.Config{
		Transactional: true, OptionalKeys: true, UnguardedWithoutIdentity: true, UnguardedWhenStoreDown: true, HoldAbandoned: true,
	}))
	var fields []string
	for _, f := range faults {
		fields = append(fields, f.Field)
		require.Equal(t, "true", f.Value)
		require.Contains(t, f.Reason, "cannot be with Transactional")
	}
	require.Equal(t, []string{"OptionalKeys", "UnguardedWithoutIdentity", "UnguardedWhenStoreDown", "HoldAbandoned"}, fields)
	require.Nil(t, configFaults(t, store, identified(idempotency.Config{Transactional: true})))
}

// S38: a store that cannot do it is found at the start.
func TestS38ConfigNeedsAStoreWithTransactions(t *testing.T) {
	pool := migrated(t)
	noLender := struct{ idempotency.PostgresDB }{pool}
	for _, tc := range []struct {
		name   string
		store  idempotency.Store
		field  string
		reason string
	}{
		{"in memory", idempotency.NewMemoryStore(), "Transactional", "the store has no transactions"},
		{"no pool of connections", idempotency.NewPostgresStore(noLender), "db", "a *pgxpool.Pool is required"},
		{"no store", nil, "store", "is required"},
		{"no database", idempotency.NewPostgresStore(nil), "db", "is required"},
		{
			"isolation level", idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{Isolation: "snapshot"}),
			"Isolation", "is no isolation level",
		},
		{
			"number of transactions", idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{MaxTransactions: -1}),
			"MaxTransactions", "is negative",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := idempotency.New(tc.store, identified(idempotency.Config{Transactional: true}))
			var fault *idempotency.ConfigError
			require.ErrorAs(t, err, &fault)
			require.Equal(t, tc.field, fault.Field)
			require.Contains(t, fault.Reason, tc.reason)
			require.Equal(t, 1, strings.Count(err.Error(), "idempotency: config: "), err)
			store, ok := tc.store.(*idempotency.PostgresStore)
			if !ok {
				return
			}
			_, tx, err := store.ClaimInTransaction(t.Context(), memoryClaim(t, "k"))
			require.Nil(t, tx)
			require.ErrorIs(t, err, idempotency.ErrNotClaimed)
			require.ErrorContains(t, err, tc.reason)
		})
	}
	require.Nil(t, configFaults(t, idempotency.NewPostgresStore(noLender), identified(idempotency.Config{})),
		"without transactions, it is a store")
}

// S38: a claim that no store may accept, and one after Close, take nothing.
func TestS38ClaimInTransactionRefuses(t *testing.T) {
	store := idempotency.NewPostgresStore(migrated(t))
	_, tx, err := store.ClaimInTransaction(t.Context(), idempotency.Claim{})
	require.Nil(t, tx)
	require.ErrorIs(t, err, idempotency.ErrInvalidClaim)
	require.NoError(t, store.Close(t.Context()))
	_, tx, err = store.ClaimInTransaction(t.Context(), memoryClaim(t, "k"))
	require.Nil(t, tx)
	require.ErrorIs(t, err, idempotency.ErrNotClaimed)
}

// S38: requests without key or identity are refused, since their handler would have no
// transaction.
func TestS38KeyAndIdentityAreRequired(t *testing.T) {
	s := newTxSite(t, newOrders(t), idempotency.PostgresConfig{}, idempotency.Config{}, ordered)
	s.do(t.Context(), call{noKey: true}).requireProblem(t, http.StatusBadRequest, idempotency.CodeMissingKey)
	s.do(t.Context(), call{tenant: " "}).requireProblem(t, http.StatusForbidden, idempotency.CodeNoIdentity)
	require.Zero(t, s.runs.Load())
}

// S38: an outcome that the store cannot hold is done all the same, and committed.
func TestS38OutcomeThatCannotBeStored(t *testing.T) {
	pool := newOrders(t)
	s := newTxSite(t, pool, idempotency.PostgresConfig{}, idempotency.Config{}, func(tx pgx.Tx, w http.ResponseWriter, r *http.Request) {
		for range idempotency.MaxFieldValues + 1 {
			w.Header().Add("Many", "x")
		}
		ordered(tx, w, r)
	})
	require.Equal(t, "attempt 1", s.do(t.Context(), call{}).body, s.logs)
	require.Equal(t, 1, orders(t, pool))
	s.do(t.Context(), call{}).requireProblem(t, http.StatusConflict, idempotency.CodeNotReplayable)
	require.EqualValues(t, 1, s.runs.Load())
}

// S15, S38: a guard within another one for the same tuple passes through, with its
// transaction; where that has none, the handler does not run without.
func TestS38NestedGuards(t *testing.T) {
	for _, outer := range []bool{true, false} {
		t.Run(fmt.Sprintf("outer in a transaction: %t", outer), func(t *testing.T) {
			pool := newOrders(t)
			store := idempotency.NewPostgresStore(pool)
			inner := newMiddleware(t, store, idempotency.Config{Transactional: true, Route: idempotency.RouteName("order")})
			runs := 0
			guarded := inner.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				runs++
				tx, ok := idempotency.PostgresTx(r.Context())
				assert.True(t, ok)
				ordered(tx, w, r)
			}))
			s := newGuardedSite(t, store, idempotency.Config{Transactional: outer, Route: idempotency.RouteName("order")}, guarded.ServeHTTP)
			a := s.do(t.Context(), call{})
			if outer {
				require.Equal(t, "attempt 1", a.body)
				require.Equal(t, 1, orders(t, pool))
				require.True(t, s.do(t.Context(), call{}).replayed())
				require.Equal(t, 1, runs)
				return
			}
			a.requireProblem(t, http.StatusInternalServerError, idempotency.CodeCommitFailed)
			require.Zero(t, runs)
		})
	}
}

// S38: outside of a guarded handler there is no transaction.
func TestS38PostgresTxWithout(t *testing.T) {
	tx, ok := idempotency.PostgresTx(t.Context())
	require.False(t, ok)
	require.True(t, tx == nil)
}

// A leavingStore lets the client leave once its claim is won.
type leavingStore struct {
	*idempotency.PostgresStore
	leave context.CancelFunc
}

func (s *leavingStore) ClaimInTransaction(ctx context.Context, c idempotency.Claim) (idempotency.Record, idempotency.Transaction, error) {
	rec, tx, err := s.PostgresStore.ClaimInTransaction(ctx, c)
	s.leave()
	return rec, tx, err
}

// S26, S38: a client that has left by the time its claim is won has no handler run, and
// leaves nothing open.
func TestS38ClientLeavesWithItsClaim(t *testing.T) {
	pool := newOrders(t)
	store := &leavingStore{PostgresStore: idempotency.NewPostgresStore(pool)}
	runs := 0
	g := newScopeGuard(t, store, idempotency.Config{Transactional: true}, func(w http.ResponseWriter, _ *http.Request) {
		runs++
		w.WriteHeader(http.StatusCreated)
	})
	var ctx context.Context
	ctx, store.leave = context.WithCancel(t.Context())
	g.send(ctx, "acme", "")
	require.Zero(t, runs)
	require.Zero(t, pool.Stat().AcquiredConns())
	store.leave = func() {}
	require.Equal(t, http.StatusCreated, g.send(t.Context(), "acme", "").Code)
	require.Equal(t, 1, runs)
}
