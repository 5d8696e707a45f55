package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// An execCancelled is a handler that does nothing until its context is cancelled,
// and notes when that was, after the handler began, and why.
type execCancelled struct {
	after time.Duration
	cause error
}

func (h *execCancelled) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	started := time.Now()
	<-r.Context().Done()
	h.after, h.cause = time.Since(started), context.Cause(r.Context())
}

// since returns when calls were made, counted from a moment.
func execSince(start time.Time, calls []execCall) []time.Duration {
	var times []time.Duration
	for _, c := range calls {
		times = append(times, c.at.Sub(start))
	}
	return times
}

// S27: the lease is renewed each time that a third of it is over, and so holds for
// as long as the handler runs.
func TestS27RenewalKeepsTheKey(t *testing.T) {
	for _, tc := range []struct {
		name   string
		extend execHook
	}{
		{"at once", nil},
		{"slowly", execSlow(3 * time.Second)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const takes = 10*execLease + 5*time.Second
				g := newExecRig(t, execRuns(takes, http.StatusCreated), nil)
				if tc.extend != nil {
					g.store.on(execExtend, tc.extend)
				}
				started := time.Now()
				first := g.start(execRequest(t.Context(), "a"))
				var want []time.Duration
				for at := execLease / 3; at < takes; at += execLease / 3 {
					want = append(want, at)
				}
				time.Sleep(time.Second)
				for time.Since(started) < takes {
					g.serve("a").requireInFlight(t)
					time.Sleep(7 * time.Second)
				}
				a := first()
				a.requireRun(t, http.StatusCreated, "run 1")
				g.serve("a").requireReplay(t, a)
				require.Equal(t, []int{1}, g.ran())
				extends := g.store.seen(execExtend)
				require.Equal(t, want, execSince(started, extends))
				for _, c := range extends {
					require.Equal(t, execLease, c.lease.Duration)
					require.Equal(t, g.store.won()[0].Owner, c.lease.Owner)
				}

				// Nothing that renews is left.
				calls := g.store.countAll()
				time.Sleep(execTTL)
				require.Equal(t, calls, g.store.countAll())
			})
		})
	}
}

// S27: a short execution costs no renewal.
func TestS27ShortExecutionIsNotRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(execLease/3-1, http.StatusCreated), nil)
		g.serve("a").requireRun(t, http.StatusCreated, "run 1")
		time.Sleep(execTTL)
		require.Zero(t, g.store.count(execExtend))
	})
}

// S27: renewals that fail are tried again, sooner, and one that succeeds before
// the deadline makes all good.
func TestS27RenewalRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(5*time.Minute, http.StatusCreated), nil)
		started := time.Now()
		g.store.on(execExtend, execUntil(execLease-3*time.Second, execFail))
		first := g.start(execRequest(t.Context(), "a"))
		time.Sleep(4 * time.Minute)
		g.serve("a").requireInFlight(t)
		first().requireRun(t, http.StatusCreated, "run 1")
		require.Equal(t, idempotency.OutcomeStored, g.last().Outcome)

		// At 10 s the first one, then each twelfth of the lease, then as ever.
		at := execSince(started, g.store.seen(execExtend))
		faults := g.countEvents(idempotency.EventStoreFault)
		require.Equal(t, 7, faults)
		for i, d := range at[:faults] {
			require.Equal(t, execLease/3+time.Duration(i)*execLease/12, d)
		}
		require.Equal(t, at[faults]+execLease/3, at[faults+1])
	})
}

// S27: when the deadline passes without a renewal, the handler's context is
// cancelled with a cause. The deadline counts from the moment that the claim, or
// the last renewal that succeeded, was sent.
func TestS27DeadlinePasses(t *testing.T) {
	hangForEver := func(context.Context, execCall, func() error) error {
		time.Sleep(3 * execLease)
		return errExecStore
	}
	acknowledgeLate := func(_ context.Context, _ execCall, apply func() error) error {
		err := apply()
		time.Sleep(3 * execLease)
		return err
	}
	after := func(n int, first, then execHook) execHook {
		return func(ctx context.Context, call execCall, apply func() error) error {
			if call.n <= n {
				return first(ctx, call, apply)
			}
			return then(ctx, call, apply)
		}
	}
	for _, tc := range []struct {
		name   string
		claim  execHook
		extend execHook
		after  time.Duration // from the start of the handler
	}{
		{"renewals fail", nil, execFail, execLease},
		{"renewals hang", nil, execHang, execLease},
		{"renewals hang for longer than they may", nil, hangForEver, execLease},
		{"renewals are acknowledged too late", nil, acknowledgeLate, execLease},
		{"later renewals fail", nil, after(3, execSlow(0), execFail), 2 * execLease},
		{"later renewals hang", nil, after(3, execSlow(0), execHang), 2 * execLease},
		{"slow renewals, later ones fail", nil, after(3, execSlow(4*time.Second), execFail), 2 * execLease},
		{"slow claim", execSlow(10 * time.Second), execFail, execLease - 10*time.Second},
		{"very slow claim", execSlow(execLease - time.Second), execHang, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var h execCancelled
				g := newExecRig(t, h.ServeHTTP, nil)
				g.store.on(execExtend, tc.extend)
				if tc.claim != nil {
					g.store.on(execClaim, tc.claim)
				}
				a := g.serve("a")
				require.Equal(t, tc.after, h.after)
				require.ErrorIs(t, h.cause, idempotency.ErrLeaseLost)
				require.NotErrorIs(t, h.cause, idempotency.ErrExecutionTooLong)

				// Nobody has taken over, so the owner can still say that nothing was done.
				a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
				synctest.Wait() // for a renewal that is sent at the very moment of the deadline
				extends := g.store.count(execExtend)
				time.Sleep(execTTL - 2*execLease)
				require.Equal(t, extends, g.store.count(execExtend))
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost), "S46: it was not lost after all")
			})
		})
	}
}

// S27, S30: a store that is away for longer than a lease while a handler runs, and
// still is when it ends. What its client gets is what becomes of its key.
func TestS27StoreAwayForLongerThanTheLease(t *testing.T) {
	silent := func(http.ResponseWriter) {}
	writes := func(w http.ResponseWriter) { execWrite(w, http.StatusCreated, "done") }
	for _, tc := range []struct {
		name  string
		hold  bool
		end   func(http.ResponseWriter) // when the handler is cancelled
		first func(t *testing.T, a execAnswer)
		ran   []int // by the end of a retry, when the store is back
	}{
		{"handler gives up", false, silent, func(t *testing.T, a execAnswer) {
			t.Helper()
			a.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
		}, []int{1, 2}},
		{"handler gives up, hold", true, silent, func(t *testing.T, a execAnswer) {
			t.Helper()
			a.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		}, []int{1}},
		{"handler goes on", false, writes, requireExecDone, []int{1}},
		{"handler goes on, hold", true, writes, requireExecDone, []int{1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var cause error
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					if exec, _ := idempotency.FromContext(r.Context()); exec.Attempt() > 1 {
						writes(w)
						return
					}
					<-r.Context().Done()
					cause = context.Cause(r.Context())
					tc.end(w)
				}, func(c *idempotency.Config) { c.HoldAbandoned = tc.hold })
				const outage = 2 * execLease
				for _, method := range []string{execExtend, execComplete, execRelease} {
					g.store.on(method, execUntil(outage, execFail))
				}
				first := g.serve("a")
				require.Equal(t, execLease+execStoreTimeout, first.took)
				tc.first(t, first)
				require.ErrorIs(t, cause, idempotency.ErrLeaseLost)
				require.Equal(t, idempotency.OutcomePending, g.last().Outcome)
				time.Sleep(outage)
				synctest.Wait()
				if retry := g.serve("a"); len(tc.ran) == 1 {
					require.Equal(t, first.status, retry.status)
				} else {
					requireExecDone(t, retry)
				}
				require.Equal(t, tc.ran, g.ran())
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost), "S46: it was not lost after all")
			})
		})
	}
}

func requireExecDone(t *testing.T, a execAnswer) {
	t.Helper()
	a.requireRun(t, http.StatusCreated, "done")
}

// S27: no renewal is waited for beyond the end of the lease: it could only make a
// lease that is given up hold again.
func TestS27RenewalEndsWithTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(time.Minute, http.StatusCreated), func(c *idempotency.Config) { c.StoreTimeout = 12 * time.Second })
		started := time.Now()
		var ended []time.Duration
		g.store.on(execExtend, func(ctx context.Context, _ execCall, _ func() error) error {
			<-ctx.Done()
			ended = append(ended, time.Since(started))
			return ctx.Err()
		})
		g.serve("a").requireRun(t, http.StatusCreated, "run 1")
		synctest.Wait()
		require.Equal(t, []time.Duration{22 * time.Second, execLease}, ended)
	})
}

// S27: the first renewal after a slow claim is due by what is left of the lease.
func TestS27RenewalAfterSlowClaim(t *testing.T) {
	for _, tc := range []struct {
		name  string
		claim time.Duration
		first time.Duration // renewal, from when the claim was sent
	}{
		{"quick", 0, execLease / 3},
		{"slow", 4 * time.Second, execLease / 3},
		{"slower than a third of the lease", 12 * time.Second, 12 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(time.Minute, http.StatusCreated), func(c *idempotency.Config) { c.StoreTimeout = 20 * time.Second })
				g.store.on(execClaim, execSlow(tc.claim))
				started := time.Now()
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, tc.first, execSince(started, g.store.seen(execExtend))[0])
			})
		})
	}
}

// S27: an owner that is told that its lease is lost is cancelled at once.
func TestS27LeaseLostAtRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h execCancelled
		g := newExecRig(t, h.ServeHTTP, nil)
		lost := fmt.Errorf("taken over: %w", idempotency.ErrLeaseLost)
		for _, method := range []string{execExtend, execRelease} {
			g.store.on(method, func(context.Context, execCall, func() error) error { return lost })
		}
		g.serve("a").requireInFlight(t)
		require.Equal(t, execLease/3, h.after)
		require.Equal(t, lost, h.cause)
		require.Equal(t, 1, g.store.count(execExtend))
		require.Equal(t, 1, g.store.count(execRelease), "S27: nothing is gained by trying again")
		require.Equal(t, []idempotency.EventKind{idempotency.EventLeaseLost, idempotency.EventExecuted}, g.kinds())
		require.Equal(t, idempotency.OutcomeLost, g.last().Outcome)
		require.ErrorIs(t, g.last().Err, idempotency.ErrLeaseLost)
	})
}

// S27: a claim that is acknowledged when its lease is over is not run. It is
// released, if it still can be.
func TestS27ClaimAcknowledgedTooLate(t *testing.T) {
	for _, tc := range []struct {
		name  string
		after time.Duration
		run   bool
	}{
		{"just in time", execLease - 1, true},
		{"at the end of the lease", execLease, false},
		{"later", 3 * execLease, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				g.store.on(execClaim, execFirst(func(_ context.Context, _ execCall, apply func() error) error {
					err := apply()
					time.Sleep(tc.after)
					return err
				}))
				first := g.serve("a")
				if tc.run {
					first.requireRun(t, http.StatusCreated, "run 1")
					return
				}
				first.requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				require.Equal(t, "1", first.header.Get("Retry-After"))
				require.Empty(t, g.ran())
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, []int{2}, g.ran())
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost))
			})
		})
	}
}

// S27: the same, but another process has taken over: its execution is not touched.
func TestS27ClaimAcknowledgedAfterTakeOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		g.store.on(execClaim, execFirst(func(_ context.Context, _ execCall, apply func() error) error {
			err := apply()
			time.Sleep(execLease + time.Minute)
			return err
		}))
		late := g.start(execRequest(t.Context(), "a"))
		time.Sleep(execLease)
		other := newExecRigOn(g.store, execRuns(2*time.Minute, http.StatusCreated), nil)
		second := other.start(execRequest(t.Context(), "a"))
		late().requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
		synctest.Wait()
		require.Equal(t, 1, g.store.count(execRelease))
		a := second()
		a.requireRun(t, http.StatusCreated, "run 1")
		require.Equal(t, idempotency.OutcomeStored, other.last().Outcome)
		g.serve("a").requireReplay(t, a)
		require.Empty(t, g.ran())
	})
}

// S27: a handler that runs for longer than the longest execution time is cancelled
// with that cause, whatever becomes of its client.
func TestS27MaxExecution(t *testing.T) {
	for _, outlives := range []bool{false, true} {
		t.Run(fmt.Sprintf("outlives=%v", outlives), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var h execCancelled
				g := newExecRig(t, h.ServeHTTP, func(c *idempotency.Config) {
					c.MaxExecution = 65 * time.Second
					c.HandlerOutlivesClient = outlives
				})
				g.serve("a").requireProblem(t, http.StatusServiceUnavailable, idempotency.CodeRetry)
				require.Equal(t, 65*time.Second, h.after)
				require.Equal(t, idempotency.ErrExecutionTooLong, h.cause)
				require.NotErrorIs(t, h.cause, idempotency.ErrLeaseLost)
				require.Equal(t, idempotency.OutcomeReleased, g.last().Outcome)
			})
		})
	}
}

// S27: what a handler answers in time, be it cancelled, counts.
func TestS27MaxExecutionAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			execWrite(w, http.StatusAccepted, "half done")
		}, func(c *idempotency.Config) { c.MaxExecution = time.Minute })
		first := g.serve("a")
		first.requireRun(t, http.StatusAccepted, "half done")
		g.serve("a").requireReplay(t, first)
	})
}

// S27: the lease of a handler that ignores its end runs out, and a retry takes
// over as the next attempt. The late outcome overwrites nothing, and its client
// does not get an answer that no retry would ever see.
func TestS27HungHandlerIsTakenOver(t *testing.T) {
	for _, tc := range []struct {
		name   string
		status int
	}{
		{"late outcome to keep", http.StatusCreated},
		{"late outcome not to keep", http.StatusServiceUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					if exec, _ := idempotency.FromContext(r.Context()); exec.Attempt() == 1 {
						time.Sleep(5 * time.Minute)
						execWrite(w, tc.status, "late")
						return
					}
					execWrite(w, http.StatusCreated, "second")
				}, func(c *idempotency.Config) { c.MaxExecution = 65 * time.Second })
				started := time.Now()
				first := g.start(execRequest(t.Context(), "a"))
				// Last renewed at 60 s.
				time.Sleep(time.Minute + execLease - 1)
				g.serve("a").requireInFlight(t)
				time.Sleep(time.Nanosecond)
				second := g.serve("a")
				second.requireRun(t, http.StatusCreated, "second")
				first().requireInFlight(t)
				require.Equal(t, 5*time.Minute, time.Since(started))

				require.Equal(t, []int{1, 2}, g.ran())
				require.Equal(t, time.Minute, g.store.seen(execExtend)[5].at.Sub(started))
				require.Equal(t, 6, g.store.count(execExtend))
				require.Equal(t, []idempotency.EventKind{
					idempotency.EventInFlight, idempotency.EventExecuted, idempotency.EventLeaseLost, idempotency.EventExecuted,
				}, g.kinds())
				lost := g.last()
				require.Equal(t, idempotency.OutcomeLost, lost.Outcome)
				require.Equal(t, 1, lost.Attempt)
				require.ErrorIs(t, lost.Err, idempotency.ErrLeaseLost)
				g.serve("a").requireReplay(t, second)
			})
		})
	}
}

// S27: where nothing may run twice, a handler that ignores its end is in doubt from
// the end of its lease on, until it ends after all.
func TestS27HungHandlerOfHeld(t *testing.T) {
	for _, status := range []int{http.StatusCreated, http.StatusBadGateway} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(5*time.Minute, status), func(c *idempotency.Config) {
					c.MaxExecution = 65 * time.Second
					c.HoldAbandoned = true
				})
				first := g.start(execRequest(t.Context(), "a"))
				time.Sleep(time.Minute + execLease - 1) // last renewed at 60 s
				g.serve("a").requireInFlight(t)
				time.Sleep(time.Nanosecond)
				g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				a := first()
				a.requireRun(t, status, "run 1")
				if retry := g.serve("a"); status == http.StatusCreated {
					retry.requireReplay(t, a)
				} else {
					retry.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				}
				require.Equal(t, []int{1}, g.ran())
				require.Zero(t, g.countEvents(idempotency.EventLeaseLost))
			})
		})
	}
}

// S27: what was already streamed when the lease was lost cannot be taken back.
func TestS27StreamedAnswerOfLostLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, func(w http.ResponseWriter, _ *http.Request) {
			execWrite(w, http.StatusCreated, "begun")
			_ = http.NewResponseController(w).Flush()
			_, _ = io.WriteString(w, ", done")
		}, nil)
		g.store.on(execComplete, func(context.Context, execCall, func() error) error { return idempotency.ErrLeaseLost })
		g.serve("a").requireRun(t, http.StatusCreated, "begun, done")
		require.Equal(t, idempotency.OutcomeLost, g.last().Outcome)
	})
}

// S27: when a process has died, its lease runs out, and the next retry with the
// same payload takes over, in whatever process it arrives. Handlers see which
// attempt they are.
func TestS27ProcessDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		for range 3 {
			g.crash(false)
			time.Sleep(execLease - 1)
			g.serve("a").requireInFlight(t)
			g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			time.Sleep(time.Nanosecond)
		}
		g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
		a := g.serve("a")
		a.requireRun(t, http.StatusCreated, "run 1")
		require.Equal(t, []int{4}, g.ran())
		other := newExecRigOn(g.store, execRuns(0, http.StatusCreated), nil)
		other.serve("a").requireReplay(t, a)
		require.Empty(t, other.ran())
	})
}

// S27: a process that was only cut off from its store, and comes back when another
// one has taken over, changes nothing any more.
func TestS27TakenOverByAnotherProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(40*time.Second, http.StatusCreated), nil)
		g.store.on(execExtend, execHang)
		first := g.start(execRequest(t.Context(), "a"))
		time.Sleep(execLease)
		synctest.Wait()
		renewals := g.store.count(execExtend)

		other := newExecRigOn(newExecStore(t, g.store.inner), execRuns(time.Minute, http.StatusAccepted), nil)
		second := other.start(execRequest(t.Context(), "a"))
		first().requireInFlight(t)
		require.Equal(t, renewals, g.store.count(execExtend), "S27: a lease once given up is not renewed")
		g.serve("a").requireInFlight(t)
		a := second()
		a.requireRun(t, http.StatusAccepted, "run 1")
		require.Equal(t, []int{2}, other.ran())
		g.serve("a").requireReplay(t, a)
		require.Equal(t, []int{1}, g.ran())
	})
}

// S27: where nothing may run twice, what broke off is not run again.
func TestS27HoldAbandoned(t *testing.T) {
	execution := func(r *http.Request) *idempotency.Execution {
		exec, _ := idempotency.FromContext(r.Context())
		return exec
	}
	for _, tc := range []struct {
		name    string
		handler http.HandlerFunc
		first   int // status of its own answer
		code    idempotency.Code
		outcome idempotency.Outcome
	}{
		{"5xx", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadGateway)
		}, http.StatusBadGateway, "", idempotency.OutcomeHeld},
		{"silent", func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}, http.StatusConflict, idempotency.CodeOutcomeUnknown, idempotency.OutcomeHeld},
		{"silent, discarded", func(_ http.ResponseWriter, r *http.Request) {
			execution(r).Discard()
			<-r.Context().Done()
		}, http.StatusServiceUnavailable, idempotency.CodeRetry, idempotency.OutcomeReleased},
		{"silent, kept", func(_ http.ResponseWriter, r *http.Request) {
			execution(r).Keep()
			<-r.Context().Done()
		}, http.StatusOK, "", idempotency.OutcomeStored},
		{"5xx, discarded", func(w http.ResponseWriter, r *http.Request) {
			execution(r).Discard()
			w.WriteHeader(http.StatusBadGateway)
		}, http.StatusBadGateway, "", idempotency.OutcomeReleased},
		{"5xx, kept", func(w http.ResponseWriter, r *http.Request) {
			execution(r).Keep()
			w.WriteHeader(http.StatusBadGateway)
		}, http.StatusBadGateway, "", idempotency.OutcomeStored},
		{"429", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusTooManyRequests)
		}, http.StatusTooManyRequests, "", idempotency.OutcomeReleased},
		{"201", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusCreated)
		}, http.StatusCreated, "", idempotency.OutcomeStored},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, tc.handler, func(c *idempotency.Config) {
					c.HoldAbandoned = true
					c.MaxExecution = time.Second
				})
				first := g.serve("a")
				require.Equal(t, tc.first, first.status)
				if tc.code != "" {
					first.requireProblem(t, tc.first, tc.code)
				}
				require.Equal(t, tc.outcome, g.last().Outcome)
				for range 3 {
					retry := g.serve("a")
					switch tc.outcome { //nolint:exhaustive // the three that are meant to be
					case idempotency.OutcomeHeld:
						require.Zero(t, retry.took, "at once")
						retry.requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
						g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
					case idempotency.OutcomeStored:
						retry.requireReplay(t, first)
					default:
						require.Equal(t, tc.first, retry.status)
					}
				}
				if tc.outcome == idempotency.OutcomeReleased {
					require.Equal(t, []int{1, 2, 3, 4}, g.ran())
				} else {
					require.Equal(t, []int{1}, g.ran())
				}
			})
		})
	}
}

// S27: a process that died is in flight for the time of its lease, and in doubt
// from there on.
func TestS27HoldAbandonedProcessDies(t *testing.T) {
	for _, tc := range []struct {
		name          string
		before, after bool // whether the processes hold, before and after
	}{
		{"holding", true, true},
		{"holding no more", true, false},
		{"holding from now on", false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.HoldAbandoned = tc.after })
				g.crash(tc.before)
				time.Sleep(execLease - 1)
				g.serve("a").requireInFlight(t)
				time.Sleep(time.Nanosecond)
				g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				g.serve("b").requireProblem(t, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
				require.Empty(t, g.ran())
			})
		})
	}
}

// S27: a renewal that was still on its way when the execution broke off does not
// put off what its retries are told.
func TestS27HoldOutlastsLateRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		arrived := make(chan struct{})
		handler := func(http.ResponseWriter, *http.Request) {
			time.Sleep(execLease/3 + time.Second)
			panic(errExecStore)
		}
		g := newExecRig(t, handler, func(c *idempotency.Config) { c.HoldAbandoned = true })
		g.store.on(execExtend, execFirst(func(_ context.Context, _ execCall, apply func() error) error {
			defer close(arrived)
			time.Sleep(3 * time.Second)
			err := apply()
			if !errors.Is(err, idempotency.ErrLeaseLost) {
				t.Errorf("the late renewal got %v", err)
			}
			return err
		}))
		require.Panics(t, func() {
			g.requests.Add(1)
			g.handler.ServeHTTP(httptest.NewRecorder(), execRequest(t.Context(), "a"))
		})
		g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		<-arrived
		g.serve("a").requireProblem(t, http.StatusConflict, idempotency.CodeOutcomeUnknown)
		require.Equal(t, 2, g.store.count(execExtend))
		require.Zero(t, g.countEvents(idempotency.EventLeaseLost))
	})
}

// S27: also where nothing may run twice, a claim that nobody ran is released.
func TestS27HoldReleasesWhatDidNotRun(t *testing.T) {
	for _, tc := range []struct {
		name  string
		claim func(hangUp func()) execHook
	}{
		{"client gone", func(hangUp func()) execHook {
			return func(_ context.Context, _ execCall, apply func() error) error {
				hangUp()
				return apply()
			}
		}},
		{"acknowledgement lost", func(func()) execHook { return execLoseAnswer }},
		{"acknowledged too late", func(func()) execHook { return execSlow(execLease) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, hangUp := context.WithCancel(t.Context())
				defer hangUp()
				g := newExecRig(t, execRuns(0, http.StatusCreated), func(c *idempotency.Config) { c.HoldAbandoned = true })
				g.store.on(execClaim, execFirst(tc.claim(hangUp)))
				a := g.start(execRequest(ctx, "a"))()
				require.Equal(t, http.StatusServiceUnavailable, a.status)
				synctest.Wait()
				require.Empty(t, g.ran())
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.Equal(t, []int{2}, g.ran())
			})
		})
	}
}

// S26: a context for a call to the store is one like any other, for a store that
// looks at it, waits for it, or derives its own from it.
func TestS26StoreContextIsOne(t *testing.T) {
	for _, tc := range []struct {
		name string
		use  func(context.Context) context.Context
	}{
		{"passed on", func(ctx context.Context) context.Context { return ctx }},
		{"waited for", func(ctx context.Context) context.Context {
			_ = ctx.Done()
			return ctx
		}},
		{"child", func(ctx context.Context) context.Context {
			child, cancel := context.WithCancel(ctx)
			context.AfterFunc(child, cancel)
			return child
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
				var ended []context.Context
				var during, late, cause error
				g.store.on(execClaim, func(ctx context.Context, _ execCall, apply func() error) error {
					ctx = tc.use(ctx)
					ended = append(ended, ctx)
					during = ctx.Err()
					return apply()
				})
				g.store.on(execComplete, execFirst(func(ctx context.Context, _ execCall, _ func() error) error {
					ctx = tc.use(ctx)
					time.Sleep(execStoreTimeout + time.Nanosecond)
					late = ctx.Err()
					<-ctx.Done()
					cause = context.Cause(ctx)
					return late
				}))
				g.serve("a").requireRun(t, http.StatusCreated, "run 1")
				require.NoError(t, during)
				for _, ctx := range ended {
					require.ErrorIs(t, ctx.Err(), context.Canceled, "it ends with its call")
					<-ctx.Done()
					require.ErrorIs(t, ctx.Err(), context.Canceled)
					require.Equal(t, "kept", ctx.Value(execMarker{}))
				}
				require.ErrorIs(t, late, context.DeadlineExceeded)
				require.ErrorIs(t, cause, context.DeadlineExceeded)
			})
		})
	}
}
