package idempotency_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S30: where the store cannot be reached for a claim, the handler does not run.
func TestS30StoreDownAtClaim(t *testing.T) {
	for _, tc := range []struct {
		name string
		hook execHook
		took time.Duration
	}{
		{"fails", execFail, 0},
		{"hangs", execHang, execStoreTimeout},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				for _, method := range []string{execClaim, execRelease} {
					g.store.on(method, tc.hook)
				}
				a := g.serve("a")
				a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
				require.Equal(t, "2", a.header.Get("Retry-After"))
				require.Equal(t, tc.took, a.took)
				require.NotContains(t, a.body, errExecStore.Error(), "S33")
				require.Empty(t, g.ran())
				require.Equal(t, []idempotency.EventKind{idempotency.EventStoreFault, idempotency.EventRefused}, g.kinds())
				require.Contains(t, g.logged(), "level=ERROR")
			})
		})
	}
}

// S17, S30: by configuration a request runs unguarded then, with a warning, a mark
// on its response, and its body, be that in memory or in a file.
func TestS30UnguardedWhenStoreDown(t *testing.T) {
	for _, tc := range []struct {
		name string
		body string
		hook execHook
		took time.Duration
	}{
		{"fails", "a", execFail, 0},
		{"hangs", "a", execHang, execStoreTimeout},
		{"body in a file", strings.Repeat("0123456789", 20_000), execFail, 0},
		{"no body", "", execFail, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				guarded := true
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					_, guarded = idempotency.FromContext(r.Context())
					body, err := io.ReadAll(r.Body)
					if err != nil {
						body = []byte(err.Error())
					}
					execWrite(w, http.StatusCreated, string(body))
				}, func(c *idempotency.Config) { c.UnguardedWhenStoreDown = true })
				g.store.on(execClaim, tc.hook)
				for range 2 {
					a := g.serve(tc.body)
					require.Equal(t, http.StatusCreated, a.status)
					require.Equal(t, tc.body, a.body)
					require.Equal(t, "false", a.header.Get(idempotency.HeaderDeduplicated))
					require.Equal(t, tc.took, a.took)
					require.False(t, guarded, "no execution without a claim")
					require.Equal(t, idempotency.EventUnguarded, g.last().Kind)
					require.Equal(t, idempotency.CodeStoreUnavailable, g.last().Code)
					require.Equal(t, tc.took, g.last().ClaimTime)
				}
				require.Equal(t, []int{0, 0}, g.ran())
				require.Equal(t, 2, strings.Count(g.logged(), "level=WARN"))
				require.Contains(t, g.logged(), "running without deduplication")
				require.Zero(t, g.store.count(execComplete))

				g.store.on(execClaim, nil)
				a := g.serve(tc.body)
				a.requireRun(t, http.StatusCreated, tc.body)
				require.True(t, guarded)
			})
		})
	}
}

// S30: a store that cannot be told how an operation ended gets one short budget of
// time. Then the client has its answer, and settling goes on in the background.
func TestS30StoreDownAtSettlement(t *testing.T) {
	for _, tc := range []struct {
		name    string
		method  string
		hold    bool
		status  int
		down    execHook
		outage  time.Duration
		settled func(t *testing.T, g *execRig, first execAnswer)
	}{
		{
			"complete fails", execComplete, false, http.StatusCreated, execFail, 20 * time.Second,
			requireExecStored,
		},
		{
			"complete hangs", execComplete, false, http.StatusCreated, execHang, 20 * time.Second,
			requireExecStored,
		},
		{
			"complete fails for longer than the lease", execComplete, false, http.StatusCreated, execFail, 10 * time.Minute,
			requireExecStored,
		},
		{
			"complete fails for hours", execComplete, false, http.StatusCreated, execFail, 12 * time.Hour,
			requireExecStored,
		},
		{
			"release fails", execRelease, false, http.StatusServiceUnavailable, execFail, 10 * time.Second,
			func(t *testing.T, g *execRig, first execAnswer) {
				t.Helper()
				g.serve("a").requireRun(t, first.status, "run 2")
				require.Equal(t, []int{1, 2}, g.ran())
			},
		},
		{
			"hold fails", execExtend, true, http.StatusServiceUnavailable, execFail, 10 * time.Second,
			func(t *testing.T, g *execRig, _ execAnswer) {
				t.Helper()
				g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				require.Equal(t, []int{1}, g.ran())
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.status), func(c *idempotency.Config) { c.HoldAbandoned = tc.hold })
				g.store.on(tc.method, execUntil(tc.outage, tc.down))
				first := g.serve("a")
				first.requireRun(t, tc.status, "run 1")
				require.Equal(t, execStoreTimeout, first.took)
				event := g.last()
				require.Equal(t, idempotency.OutcomePending, event.Outcome)
				require.Error(t, event.Err)
				require.Equal(t, execStoreTimeout, event.SettleTime)
				require.Equal(t, []idempotency.EventKind{idempotency.EventStoreFault, idempotency.EventExecuted}, g.kinds())
				require.Contains(t, g.logged(), "level=ERROR")
				g.serve("a").requireInFlight(t)

				// One more call may have been on its way when the store came back.
				time.Sleep(tc.outage - execStoreTimeout + execLastRetry + execStoreTimeout)
				synctest.Wait()
				calls := g.store.countAll()
				tc.settled(t, g, first)
				require.LessOrEqual(t, calls, int(tc.outage/time.Second)+20, "no haste")
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost))
			})
		})
	}
}

func requireExecStored(t *testing.T, g *execRig, first execAnswer) {
	t.Helper()
	g.serve("a").requireReplay(t, first)
	require.Equal(t, []int{1}, g.ran())
	require.Contains(t, g.logged(), "settled in the background")
}

// S30: a store that is back within the budget costs nothing but time.
func TestS30StoreBackWithinBudget(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		status int
		hook   execHook
	}{
		{"complete", execComplete, http.StatusCreated, execFail},
		{"complete, acknowledgement lost", execComplete, http.StatusCreated, execLoseAnswer},
		{"release", execRelease, http.StatusServiceUnavailable, execFail},
		{"release, acknowledgement lost", execRelease, http.StatusServiceUnavailable, execLoseAnswer},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.status), nil)
				g.store.on(tc.method, execFirst(tc.hook))
				first := g.serve("a")
				first.requireRun(t, tc.status, "run 1")
				require.Positive(t, first.took)
				require.LessOrEqual(t, first.took, 100*time.Millisecond)
				require.Equal(t, 2, g.store.count(tc.method))
				require.Equal(t, []idempotency.EventKind{idempotency.EventExecuted}, g.kinds())
				require.NoError(t, g.last().Err)
				if tc.method == execComplete {
					require.Equal(t, idempotency.OutcomeStored, g.last().Outcome)
					g.serve("a").requireReplay(t, first)
					return
				}
				require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
				g.serve("a").requireRun(t, tc.status, "run 2")
			})
		})
	}
}

// S27, S30: an execution that was taken over before its outcome could be stored
// has lost its lease. It overwrites nothing.
func TestS30TakenOverBeforeSettled(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		first  int
	}{
		{"complete", execComplete, http.StatusCreated},
		{"release", execRelease, http.StatusServiceUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.first), nil)
				g.store.on(tc.method, execUntil(5*time.Minute, execFail))
				g.serve("a").requireRun(t, tc.first, "run 1")
				g.serve("a").requireInFlight(t)
				time.Sleep(execLease)
				other := newExecRigOn(newExecStore(t, g.store.inner), execRuns(0, http.StatusAccepted), nil)
				second := other.serve("a")
				second.requireRun(t, http.StatusAccepted, "run 1")
				require.Equal(t, []int{2}, other.ran())
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost))

				time.Sleep(5 * time.Minute)
				synctest.Wait()
				lost := g.last()
				require.Equal(t, idempotency.EventLeaseLost, lost.Kind)
				require.Equal(t, 1, lost.Attempt)
				require.ErrorIs(t, lost.Err, idempotency.ErrLeaseLost)
				require.Equal(t, g.store.won()[0].Key, lost.Key)
				calls := g.store.count(tc.method)
				time.Sleep(time.Hour)
				require.Equal(t, calls, g.store.count(tc.method))
				g.serve("a").requireReplay(t, second)
			})
		})
	}
}

// S29, S30: settling in the background ends when the record has expired.
func TestS30BackgroundEndsAtTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = time.Hour
		g := newExecRig(t, execRuns(time.Minute, http.StatusCreated), func(c *idempotency.Config) { c.TTL = ttl })
		g.store.on(execComplete, execFail)
		started := time.Now()
		g.serve("a").requireRun(t, http.StatusCreated, "run 1")
		time.Sleep(ttl - time.Minute - execStoreTimeout - execLastRetry - 1)
		require.NotContains(t, g.logged(), "not settled")
		time.Sleep(execLastRetry + 1)
		synctest.Wait()
		require.Contains(t, g.logged(), "not settled")
		calls := g.store.seen(execComplete)
		require.LessOrEqual(t, calls[len(calls)-1].at.Sub(started), ttl)
		require.Greater(t, calls[len(calls)-1].at.Sub(started), ttl-2*execLastRetry)
		time.Sleep(ttl)
		require.Equal(t, len(calls), g.store.count(execComplete))
	})
}

// S29, S30: a held record does not expire, so there settling in the background does
// not end at the TTL: the key would be held for ever, although the outcome is known.
func TestS30BackgroundOfHeldOutlastsTTL(t *testing.T) {
	const ttl = time.Hour
	for _, tc := range []struct {
		name   string
		method string
		status int
	}{
		{"complete", execComplete, http.StatusCreated},
		{"release", execRelease, http.StatusConflict},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.status), func(c *idempotency.Config) { c.TTL, c.HoldAbandoned = ttl, true })
				g.store.on(tc.method, execUntil(3*ttl, execFail))
				g.serve("a").requireRun(t, tc.status, "run 1")
				time.Sleep(2 * ttl)
				g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				time.Sleep(ttl + execLastRetry)
				synctest.Wait()
				require.NotContains(t, g.logged(), "not settled")
				require.Contains(t, g.logged(), "settled in the background")
				// Not held any more, and past its TTL, the key is free.
				g.serve("a").requireRun(t, tc.status, "run 2")
				require.Equal(t, []int{1, 1}, g.ran())
			})
		})
	}

	t.Run("claim of unknown fate", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.TTL, c.HoldAbandoned = ttl, true })
			g.store.on(execClaim, execFirst(execLoseAnswer))
			g.store.on(execRelease, execUntil(3*ttl, execFail))
			g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeStoreUnavailable)
			time.Sleep(3*ttl + execLastRetry)
			synctest.Wait()
			g.serve("a").requireRun(t, http.StatusCreated, "run 1")
		})
	})

	t.Run("Shutdown ends it", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.TTL, c.HoldAbandoned = ttl, true })
			g.store.on(execComplete, execFail)
			g.serve("a").requireRun(t, http.StatusCreated, "run 1")
			time.Sleep(2 * ttl)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			require.ErrorContains(t, g.m.Shutdown(ctx), "1 outcome")
			synctest.Wait()
			calls := g.store.count(execComplete)
			time.Sleep(time.Hour)
			require.Equal(t, calls, g.store.count(execComplete))
		})
	})
}

// S30: Shutdown waits for what is still to be settled.
func TestS30ShutdownWaits(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		status int
	}{
		{"outcome", execComplete, http.StatusCreated},
		{"release", execRelease, http.StatusServiceUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.status), nil)
				started := time.Now()
				g.store.on(tc.method, execUntil(20*time.Second, execFail))
				g.serve("a").requireRun(t, tc.status, "run 1")
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				require.NoError(t, g.m.Shutdown(ctx))
				require.GreaterOrEqual(t, time.Since(started), 20*time.Second)
				require.LessOrEqual(t, time.Since(started), 20*time.Second+execLastRetry)
				require.Contains(t, g.logged(), "settled in the background")
				g.requireNothingLater(tc.method)
			})
		})
	}
}

// requireNothingLater makes sure that after Shutdown nothing is settled in the
// background any more. The handler must have an outcome that method settles.
func (g *execRig) requireNothingLater(method string) {
	g.t.Helper()
	time.Sleep(execTTL) // the key is free
	g.store.on(method, execFail)
	a := g.serve("b")
	require.Equal(g.t, execStoreTimeout, a.took)
	require.Equal(g.t, idempotency.OutcomePending, g.last().Outcome)
	require.Contains(g.t, g.logged(), "shut down")
	calls := g.store.countAll()
	time.Sleep(time.Hour)
	require.Equal(g.t, calls, g.store.countAll())
}

// S30: Shutdown waits for claims that are given up, too.
func TestS30ShutdownWaitsForClaimsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		g.store.on(execClaim, execFirst(execLoseAnswer))
		g.store.on(execRelease, execSlow(3*time.Second))
		g.serve("a")
		require.NoError(t, g.m.Shutdown(t.Context()))
		other := newExecRigOn(g.store, execRuns(0, http.StatusCreated), nil)
		other.serve("a").requireRun(t, http.StatusCreated, "run 1")
	})
}

// S30: a Shutdown whose time is over gives up: it says so, cancels what hangs, and
// nothing is tried any more.
func TestS30ShutdownGivesUp(t *testing.T) {
	for _, tc := range []struct {
		name string
		hook execHook
	}{
		{"failing", execFail},
		{"hanging", execHang},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execComplete, tc.hook)
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")

				const patience = 3 * time.Second
				started := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				err := g.m.Shutdown(ctx)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.ErrorContains(t, err, "1 outcome")
				require.Equal(t, patience, time.Since(started))
				synctest.Wait()
				require.Contains(t, g.logged(), "not settled")

				calls := g.store.countAll()
				time.Sleep(time.Hour)
				require.Equal(t, calls, g.store.countAll())
				g.requireNothingLater(execComplete)
				require.NoError(t, g.m.Shutdown(t.Context()), "there is nothing left to wait for")
			})
		})
	}
}

// S30: what could not be settled at once after Shutdown is not tried again later.
func TestS30NothingStartsAfterShutdown(t *testing.T) {
	for _, tc := range []struct {
		name   string
		method string
		status int
	}{
		{"outcome", execComplete, http.StatusCreated},
		{"release", execRelease, http.StatusServiceUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, tc.status), nil)
				require.NoError(t, g.m.Shutdown(t.Context()))
				g.requireNothingLater(tc.method)
				require.Contains(t, g.logged(), "not settled")
			})
		})
	}
}

// S30: Shutdown with nothing to wait for returns at once, whatever its context
// says, and as often as it is called. It leaves the middleware working.
func TestS30ShutdownIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		over, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, g.m.Shutdown(over))
		first := g.serve("a")
		require.NoError(t, g.m.Shutdown(t.Context()))
		require.NoError(t, g.m.Shutdown(over))
		g.serve("a").requireReplay(t, first)
	})
}

// S30: any number of callers may wait in Shutdown, and what becomes pending while
// they do is waited for.
func TestS30ShutdownMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(8*time.Second, http.StatusCreated), nil)
		g.store.on(execComplete, execUntil(40*time.Second, execFail))
		started := time.Now()
		first := g.start(execRequest(t.Context(), "a"))
		time.Sleep(14 * time.Second) // pending from 13 s on
		var waited [3]time.Duration
		done := make(chan error, len(waited))
		for i := range waited {
			go func() {
				err := g.m.Shutdown(t.Context())
				waited[i] = time.Since(started)
				done <- err
			}()
		}
		first()
		for range waited {
			require.NoError(t, <-done)
		}
		for _, d := range waited {
			require.GreaterOrEqual(t, d, 40*time.Second)
			require.LessOrEqual(t, d, 40*time.Second+execLastRetry)
		}
	})
}

// S30: the copies that Named makes share their Shutdown.
func TestS30NamedSharesShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		g.handler = g.m.Named("charge").Handler(execRuns(0, http.StatusCreated))
		g.store.on(execComplete, execUntil(10*time.Second, execFail))
		started := time.Now()
		first := g.serve("a")
		require.NoError(t, g.m.Shutdown(t.Context()))
		require.GreaterOrEqual(t, time.Since(started), 10*time.Second)
		g.serve("a").requireReplay(t, first)
	})
}

// S30, S26: a hook that panics on the fault of the store loses neither the outcome
// nor the release of a claim: settling in the background has begun by then.
func TestS30HookThatPanicsLosesNothing(t *testing.T) {
	for _, tc := range []struct {
		name    string
		method  string
		hook    func() execHook
		settled func(t *testing.T, g *execRig)
	}{
		{"complete", execComplete, func() execHook { return execUntil(execStoreTimeout+time.Second, execFail) }, func(t *testing.T, g *execRig) {
			t.Helper()
			a := g.serve("a")
			require.Equal(t, "run 1", a.body)
			require.Equal(t, "true", a.header.Get(idempotency.HeaderReplayed))
			require.Equal(t, []int{1}, g.ran())
		}},
		{"claim", execClaim, func() execHook { return execFirst(execLoseAnswer) }, func(t *testing.T, g *execRig) {
			t.Helper()
			g.serve("a").requireRun(t, http.StatusCreated, "run 1")
			require.Equal(t, []int{2}, g.ran())
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) {
					told := c.OnEvent
					c.OnEvent = func(ctx context.Context, e idempotency.Event) {
						told(ctx, e)
						if e.Kind == idempotency.EventStoreFault {
							panic("bug in a hook")
						}
					}
				})
				g.store.on(tc.method, tc.hook())
				require.PanicsWithValue(t, "bug in a hook", func() {
					g.handler.ServeHTTP(httptest.NewRecorder(), execRequest(t.Context(), "a"))
				})
				require.NoError(t, g.m.Shutdown(t.Context()))
				tc.settled(t, g)
			})
		})
	}
}
