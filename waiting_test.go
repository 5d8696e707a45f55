package idempotency_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

func execWaiting(limit time.Duration) func(*idempotency.Config) {
	return func(c *idempotency.Config) { c.WaitInFlight = limit }
}

// S21: a waiting retry gets the outcome soon after it is stored.
func TestS21WaitReplays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(3*time.Second, http.StatusCreated), execWaiting(10*time.Second))
		first := g.start(execRequest(t.Context(), "a"))
		time.Sleep(time.Second)
		retry := g.serve("a")
		retry.requireReplay(t, first())
		require.GreaterOrEqual(t, retry.took, 2*time.Second)
		require.LessOrEqual(t, retry.took, 2*time.Second+500*time.Millisecond)
		require.Equal(t, retry.took, g.last().ClaimTime, "S46: waiting is part of the claim's time")
		require.Equal(t, []int{1}, g.ran())
	})
}

// S21: at its limit a waiting retry gets 409. While it waits, it looks at the
// record no oftener than it must.
func TestS21WaitEndsAtItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		g := newExecRig(t, execRuns(90*time.Second, http.StatusCreated), execWaiting(limit))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		started := time.Now()
		retry := g.serve("a")
		retry.requireInFlight(t)
		require.Equal(t, limit, retry.took)

		looks, late := 0, 0
		for _, c := range g.store.seen(execClaim)[1:] {
			looks++
			if c.at.Sub(started) > limit-time.Second {
				late++
			}
		}
		require.Greater(t, looks, int(limit/(600*time.Millisecond)))
		require.Less(t, looks, int(limit/(250*time.Millisecond))+10)
		require.LessOrEqual(t, late, 5, "no haste at the end")
		first().requireRun(t, http.StatusCreated, "run 1")
	})
}

// S21: a waiting retry whose client leaves waits no longer, and claims nothing.
func TestS21WaitEndsWithItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(3*time.Second, http.StatusServiceUnavailable, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		ctx, hangUp := context.WithCancel(t.Context())
		time.AfterFunc(time.Second+time.Millisecond, hangUp)
		retry := g.start(execRequest(ctx, "a"))()
		require.Equal(t, time.Second+time.Millisecond, retry.took)
		retry.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)

		looks := g.store.count(execClaim)
		first().requireRun(t, http.StatusServiceUnavailable, "run 1")
		time.Sleep(time.Hour)
		require.Equal(t, looks, g.store.count(execClaim))
		require.Len(t, g.store.won(), 1)
		require.Equal(t, 1, g.store.count(execRelease), "the first one's")
		g.serve("a").requireRun(t, http.StatusCreated, "run 2")
	})
}

// S21, S24: when the first execution is released, one of those that wait runs as
// the next attempt, and the others get its outcome.
func TestS21WaitersAfterRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(3*time.Second, http.StatusServiceUnavailable, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		waiters := g.startMany(20)
		first().requireRun(t, http.StatusServiceUnavailable, "run 1")
		ran := 0
		for _, a := range waiters() {
			require.Equal(t, http.StatusCreated, a.status)
			require.Equal(t, "run 2", a.body)
			if a.header.Get(idempotency.HeaderReplayed) == "" {
				ran++
			}
		}
		require.Equal(t, 1, ran)
		require.Equal(t, []int{1, 2}, g.ran())
	})
}

// S21, S27: when the process of the first execution has died, one of those that
// wait takes over as soon as the lease is over.
func TestS21WaiterTakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), execWaiting(time.Minute))
		g.crash(false)
		retry := g.serve("a")
		retry.requireRun(t, http.StatusCreated, "run 1")
		require.GreaterOrEqual(t, retry.took, execLease)
		require.LessOrEqual(t, retry.took, execLease+500*time.Millisecond)
		require.Equal(t, []int{2}, g.ran())
	})
}

// S21, S30: a store that fails while a retry waits is no reason to run beside the
// first one, not even where requests run unguarded for want of a store.
func TestS21StoreDownWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(5*time.Second, http.StatusCreated), func(c *idempotency.Config) {
			c.WaitInFlight = time.Minute
			c.UnguardedWhenStoreDown = true
		})
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		await := g.startMany(10)
		synctest.Wait()
		g.store.on(execClaim, execFail)
		for _, retry := range await() {
			retry.requireInFlight(t)
		}
		require.Equal(t, 1, g.countEvents(idempotency.EventStoreFault))
		first().requireRun(t, http.StatusCreated, "run 1")
		require.Equal(t, []int{1}, g.ran())
	})
}

// S18, S21: another payload is refused at once, also where retries wait.
func TestS21OtherPayloadDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(3*time.Second, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		other := g.serve("b")
		other.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		require.Zero(t, other.took)
		first().requireRun(t, http.StatusCreated, "run 1")
	})
}

// mostLooks is the most that any number of retries may look at one record in a
// time.
func mostLooks(d time.Duration) int { return int(d/(250*time.Millisecond)) + 10 }

// S21: however many retries wait for one operation, one of them looks at the
// record at a time, as seldom as if it were alone, and all get the outcome.
func TestS21WaitersShareTheirLooks(t *testing.T) {
	for _, tc := range []struct {
		name  string
		takes time.Duration // a look
	}{
		{"fast store", 0},
		{"slow store", 300 * time.Millisecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const waiters, runs = 500, 20 * time.Second
				g := newExecRig(t, execRuns(runs, http.StatusCreated), execWaiting(time.Minute))
				first := g.start(execRequest(t.Context(), "a"))
				synctest.Wait()
				var looking, most atomic.Int32
				g.store.on(execClaim, func(_ context.Context, call execCall, apply func() error) error {
					if call.n > 1+waiters {
						most.Store(max(most.Load(), looking.Add(1)))
						defer looking.Add(-1)
						time.Sleep(tc.takes)
					}
					return apply()
				})
				await := g.startMany(waiters)
				a := first()
				for _, retry := range await() {
					retry.requireReplay(t, a)
					require.LessOrEqual(t, retry.took, runs+500*time.Millisecond+2*tc.takes)
				}
				require.EqualValues(t, 1, most.Load())
				looks := g.store.count(execClaim) - 1 - waiters
				require.LessOrEqual(t, looks, mostLooks(runs))
				require.Greater(t, looks, int(runs/(500*time.Millisecond+tc.takes)))
				require.Equal(t, []int{1}, g.ran())
			})
		})
	}
}

// S21: retries that came one after the other have their limits one after the
// other, too, and each ends at its own. The last looks stay few.
func TestS21EachWaiterHasItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const waiters, apart, limit = 400, 5 * time.Millisecond, 3 * time.Second
		g := newExecRig(t, execRuns(time.Minute, http.StatusCreated), execWaiting(limit))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		awaits := make([]func() execAnswer, waiters)
		for i := range awaits {
			awaits[i] = g.start(execRequest(t.Context(), "a"))
			time.Sleep(apart)
		}
		for i, await := range awaits {
			a := await()
			a.requireInFlight(t)
			require.Equal(t, limit, a.took, "waiter %d", i)
		}
		looks := g.store.count(execClaim) - 1 - waiters
		require.LessOrEqual(t, looks, mostLooks(limit)+int(waiters*apart/(50*time.Millisecond)))
		first().requireRun(t, http.StatusCreated, "run 1")
	})
}

// S21: a wait ends with a look: an outcome that was there before is replayed.
func TestS21LastLookIsAtTheLimit(t *testing.T) {
	for _, limit := range []time.Duration{time.Millisecond, time.Second, 1500 * time.Millisecond} {
		t.Run(limit.String(), func(t *testing.T) {
			for range 20 { // looks come at random times
				synctest.Test(t, func(t *testing.T) {
					g := newExecRig(t, execRuns(limit*9/10, http.StatusCreated), execWaiting(limit))
					first := g.start(execRequest(t.Context(), "a"))
					synctest.Wait()
					retry := g.serve("a")
					retry.requireReplay(t, first())
					require.LessOrEqual(t, retry.took, limit)
				})
			}
		})
	}
}

// S21: the retry whose turn it was may leave; another looks in its place.
func TestS21WaiterLeavesOthersStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(3*time.Second, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		for range 5 {
			ctx, hangUp := context.WithCancel(t.Context())
			gone := g.start(execRequest(ctx, "a"))
			synctest.Wait()
			time.AfterFunc(300*time.Millisecond, hangUp)
			require.Equal(t, 300*time.Millisecond, gone().took)
		}
		await := g.startMany(5)
		a := first()
		for _, retry := range await() {
			retry.requireReplay(t, a)
			require.LessOrEqual(t, retry.took, 2*time.Second)
		}
	})
}

// S21: a look that does not come back keeps nobody waiting beyond his limit, and
// one that never returns, since the store's code exits or panics, is made again by
// another.
func TestS21LookThatHangs(t *testing.T) {
	t.Run("hangs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, execRuns(20*time.Second, http.StatusCreated), execWaiting(2*time.Second))
			first := g.start(execRequest(t.Context(), "a"))
			synctest.Wait()
			await := g.startMany(10)
			synctest.Wait()
			g.store.on(execClaim, execHang)
			late := 0
			for _, retry := range await() {
				retry.requireInFlight(t)
				if retry.took != 2*time.Second {
					late++ // the one that looked
				}
			}
			require.Equal(t, 1, late)
			require.Equal(t, 12, g.store.count(execClaim))
			first().requireRun(t, http.StatusCreated, "run 1")
		})
	})
	t.Run("does not return", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, execRuns(3*time.Second, http.StatusCreated), execWaiting(time.Minute))
			first := g.start(execRequest(t.Context(), "a"))
			synctest.Wait()
			await := g.startMany(3)
			synctest.Wait()
			g.store.on(execClaim, func(_ context.Context, call execCall, apply func() error) error {
				if call.n == 5 {
					g.requests.Add(-1) // whoever looks has no event
					runtime.Goexit()
				}
				return apply()
			})
			a := first()
			replayed := 0
			for _, retry := range await() {
				if retry.returned {
					retry.requireReplay(t, a)
					replayed++
				}
			}
			require.Equal(t, 2, replayed)
		})
	})
}

// S21, S24: each time an execution is released, one waiter runs, and the others
// wait on.
func TestS21WaitersRunOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const runs = 3 * time.Second
		unavailable := http.StatusServiceUnavailable
		g := newExecRig(t, execRuns(runs, unavailable, unavailable, unavailable, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		await := g.startMany(50)
		first().requireRun(t, unavailable, "run 1")
		failed, ran, replayed := 0, 0, 0
		for _, a := range await() {
			switch {
			case a.status == unavailable:
				failed++
			case a.header.Get(idempotency.HeaderReplayed) != "":
				require.Equal(t, "run 4", a.body)
				replayed++
			default:
				a.requireRun(t, http.StatusCreated, "run 4")
				ran++
			}
		}
		require.Equal(t, []int{2, 1, 47}, []int{failed, ran, replayed})
		require.Equal(t, []int{1, 2, 3, 4}, g.ran())
		require.LessOrEqual(t, g.store.count(execClaim)-51, 4*mostLooks(runs))
	})
}

// S21, S27: of those that wait for an execution whose process has died, one takes
// over; where nobody may, all are told so.
func TestS21WaitersOfAnAbandonedExecution(t *testing.T) {
	t.Run("taken over", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, execRuns(time.Second, http.StatusCreated), execWaiting(time.Minute))
			g.crash(false)
			ran := 0
			for _, a := range g.startMany(20)() {
				require.Equal(t, "run 1", a.body)
				if a.header.Get(idempotency.HeaderReplayed) == "" {
					ran++
				}
			}
			require.Equal(t, 1, ran)
			require.Equal(t, []int{2}, g.ran())
		})
	})
	t.Run("held", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, nil, func(c *idempotency.Config) { c.WaitInFlight, c.HoldAbandoned = time.Minute, true })
			g.crash(true)
			started := time.Now()
			for _, a := range g.startMany(20)() {
				a.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				require.LessOrEqual(t, a.took, execLease+500*time.Millisecond)
			}
			last := 0
			for _, c := range g.store.seen(execClaim) {
				if c.at.Sub(started) >= execLease {
					last++
				}
			}
			require.Equal(t, 1, last)
		})
	})
}

// S18, S21: while retries wait, the key gets free, and is taken with another
// payload: they are refused, and those that wait for the other one are not.
func TestS21KeyIsReusedWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		handler := func(w http.ResponseWriter, r *http.Request) {
			if body, _ := io.ReadAll(r.Body); string(body) == "a" {
				time.Sleep(3 * time.Second)
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			time.Sleep(time.Second)
			execWrite(w, http.StatusCreated, "b is done")
		}
		g := newExecRig(t, handler, func(c *idempotency.Config) { c.WaitInFlight, c.TTL, c.Lease = time.Minute, 2*time.Second, time.Second })
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		await := g.startMany(20)
		require.Equal(t, http.StatusServiceUnavailable, first().status) // past its TTL: forgotten

		other := g.start(execRequest(t.Context(), "b"))
		synctest.Wait()
		retry := g.serve("b")
		retry.requireReplay(t, other())
		require.LessOrEqual(t, retry.took, 1500*time.Millisecond)
		for _, a := range await() {
			a.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			require.LessOrEqual(t, a.took, 3500*time.Millisecond)
		}
		require.Equal(t, []int{1, 1}, g.ran())
	})
}

// S21: a record that is not free for the payload of the retry that looks may be so
// for that of another.
func TestS21FreeForOnePayloadOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		handler := func(w http.ResponseWriter, r *http.Request) {
			exec, _ := idempotency.FromContext(r.Context())
			switch body, _ := io.ReadAll(r.Body); {
			case string(body) == "a":
				time.Sleep(3 * time.Second)
				w.WriteHeader(http.StatusServiceUnavailable)
			case exec.Attempt() == 1:
				time.Sleep(time.Millisecond) // less than there is between two looks
				w.WriteHeader(http.StatusServiceUnavailable)
			default:
				execWrite(w, http.StatusCreated, "b is done")
			}
		}
		g := newExecRig(t, handler, func(c *idempotency.Config) { c.WaitInFlight, c.TTL, c.Lease = time.Minute, 2*time.Second, time.Second })
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		await := g.startMany(20)
		require.Equal(t, http.StatusServiceUnavailable, first().status)
		other := g.start(execRequest(t.Context(), "b"))
		synctest.Wait()
		retry := g.start(execRequest(t.Context(), "b"))
		require.Equal(t, http.StatusServiceUnavailable, other().status)
		for _, a := range await() {
			a.requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		}
		retry().requireRun(t, http.StatusCreated, "b is done")
		require.Equal(t, []int{1, 1, 2}, g.ran())
	})
}

// S21: what a look found that began before a retry came is nothing to that retry:
// it may be an operation of before, which has expired since.
func TestS21FindingFromBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started := time.Now()
		at := func(d time.Duration) { time.Sleep(d - time.Since(started)) }
		const ttl, answer, end = 3 * time.Second, 4 * time.Second, 5 * time.Second
		var runs atomic.Int32
		handler := func(w http.ResponseWriter, _ *http.Request) {
			n := runs.Add(1)
			at([]time.Duration{time.Second, end}[n-1])
			execWrite(w, http.StatusCreated, fmt.Sprintf("run %d", n))
		}
		g := newExecRig(t, handler, func(c *idempotency.Config) { c.WaitInFlight, c.TTL, c.Lease = time.Minute, ttl, time.Second })
		first := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		early := g.start(execRequest(t.Context(), "a"))
		a := first()
		var look atomic.Int32
		g.store.on(execClaim, func(_ context.Context, _ execCall, apply func() error) error {
			err := apply()
			if look.Add(1) == 1 {
				at(answer)
			}
			return err
		})
		at(ttl + 100*time.Millisecond)
		require.EqualValues(t, 1, look.Load(), "a look is on its way back")
		second := g.start(execRequest(t.Context(), "a"))
		synctest.Wait()
		late := g.serve("a")
		early().requireReplay(t, a)
		b := second()
		b.requireRun(t, http.StatusCreated, "run 2")
		late.requireReplay(t, b)
	})
}

// S21, S36: waiting costs the database a few small reads a second, however many
// wait.
func TestS21PostgresWaitersShareTheirLooks(t *testing.T) {
	dbURL := pgtest.Database(t)
	require.NoError(t, idempotency.Migrate(t.Context(), newPool(t, dbURL)))
	synctest.Test(t, func(t *testing.T) {
		const waiters, runs = 100, 10 * time.Second
		pool := newPool(t, dbURL)
		defer pool.Close()
		spy := &spyDB{PostgresDB: pool}
		g := newExecRigOn(newExecStore(t, idempotency.NewPostgresStore(spy)), execRuns(runs, http.StatusCreated), execWaiting(time.Minute))
		first := g.start(execRequest(t.Context(), "a"))
		for len(g.ran()) == 0 {
			time.Sleep(time.Microsecond)
		}
		await := g.startMany(waiters)
		a := first()
		for _, retry := range await() {
			retry.requireReplay(t, a)
		}
		require.Equal(t, []int{1}, g.ran())
		require.LessOrEqual(t, int(spy.queries.Load()), 1+waiters+mostLooks(runs))
	})
}
