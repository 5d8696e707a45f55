package idempotency_test

import (
	"net/http"
	"strconv"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// S36: of any number of requests at once, through any number of pools as
// processes have them, one runs.
func TestS36PostgresConcurrentFirstRequests(t *testing.T) {
	for _, pools := range []int{1, 2} {
		t.Run(strconv.Itoa(pools)+" pools", func(t *testing.T) {
			const keys, atOnce = 200, 64
			dbURL := pgtest.Database(t)
			require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
			sites := make([]*site, pools)
			for i := range sites {
				pool := newPool(t, dbURL, func(cfg *pgxpool.Config) { cfg.MaxConns = 8 })
				sites[i] = newGuardedSite(t, idempotency.NewPostgresStore(pool), idempotency.Config{}, echo)
				sites[i].Client().Transport.(*http.Transport).MaxIdleConnsPerHost = atOnce
			}
			var inFlight int
			for k := range keys {
				replies := make([]reply, atOnce)
				var wg sync.WaitGroup
				for i := range replies {
					wg.Go(func() {
						replies[i] = sites[i%pools].do(t.Context(), call{key: strconv.Quote(strconv.Itoa(k)), body: strconv.Itoa(k)})
					})
				}
				wg.Wait()
				executed := 0
				for _, a := range replies {
					require.NoError(t, a.err)
					switch {
					case a.status == http.StatusConflict:
						require.Equal(t, string(idempotency.CodeInFlight), a.code(t))
						inFlight++
					case a.replayed():
					default:
						executed++
						require.Equal(t, http.StatusCreated, a.status, a.body)
					}
				}
				require.Equal(t, 1, executed)
			}
			var runs int64
			for _, s := range sites {
				runs += s.runs.Load()
			}
			require.EqualValues(t, keys, runs)
			t.Logf("%d of %d requests met one that was running", inFlight, keys*atOnce)
		})
	}
}
