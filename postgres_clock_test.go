package idempotency_test

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// S28: all times are the database's. Inside the bubble the application's clock
// shows the year 2000, and it jumps.
func TestS28PostgresApplicationClockIsOff(t *testing.T) {
	dbURL := pgtest.Database(t)
	admin := newPool(t, dbURL)
	require.NoError(t, idempotency.Migrate(t.Context(), admin))
	synctest.Test(t, func(t *testing.T) {
		pool := newPool(t, dbURL)
		store := idempotency.NewPostgresStore(pool)
		c := memoryClaim(t, "k")
		claim := func(want idempotency.State, attempt int) idempotency.Record {
			t.Helper()
			c.Owner = uuid.New()
			r, err := store.Claim(t.Context(), c)
			require.NoError(t, err)
			require.Equal(t, want, r.State)
			require.Equal(t, attempt, r.Attempt)
			return r
		}
		claim(idempotency.StateClaimed, 1)
		owner := memoryLeaseOf(c)

		for range 2 {
			r := claim(idempotency.StateInProgress, 1)
			require.InDelta(t, memoryLease, r.LeaseLeft, float64(memoryLease/2))
			time.Sleep(10 * time.Minute) // of the bubble's clock: past the lease, if it counted
		}
		require.NoError(t, store.Extend(t.Context(), owner))
		require.NoError(t, store.Complete(t.Context(), owner, idempotency.Response{Status: http.StatusCreated}))
		time.Sleep(2 * memoryTTL)
		claim(idempotency.StateCompleted, 1)
		n, err := store.DeleteExpired(t.Context(), 10)
		require.NoError(t, err)
		require.Zero(t, n)
		pool.Close()
	})
	require.Equal(t, 1, count(t, admin, "created_at > now() - interval '10 min' AND expires_at BETWEEN now() AND now() + $1::interval", memoryTTL))
}
