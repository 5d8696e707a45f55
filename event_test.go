package idempotency_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// S46: each request has one event that says what became of it, with all that
// applies and nothing else. Executions and replays are told apart, for metering.
func TestS46Events(t *testing.T) {
	const (
		claim  = time.Second
		run    = 2 * time.Second
		settle = 3 * time.Second
	)
	denied := errors.New("denied")
	slow := func(g *execRig) {
		g.store.on(execClaim, execSlow(claim))
		for _, method := range []string{execComplete, execRelease, execExtend} {
			g.store.on(method, execSlow(settle))
		}
	}
	for _, tc := range []struct {
		name   string
		edit   func(*idempotency.Config)
		status int                            // of the handler; 0 if it panics
		before func(g *execRig)               // the requests before this one
		send   func(g *execRig, body string)  // this one
		want   func(e *idempotency.Event)     // of the last event, but its key
		noKey  bool                           // whether the event has no key
		more   map[idempotency.EventKind]bool // what else the request caused
	}{
		{
			name: "executed and stored", status: 201,
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Status: 201, Outcome: idempotency.OutcomeStored,
					ClaimTime: claim, RunTime: run, SettleTime: settle,
				}
			},
		},
		{
			name: "executed and released", status: 503,
			before: func(g *execRig) { g.serve("a"); g.serve("a") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 3, Status: 503, Outcome: idempotency.OutcomeReleased,
					ClaimTime: claim, RunTime: run, SettleTime: settle,
				}
			},
		},
		{
			name: "executed and held", status: 503,
			edit: func(c *idempotency.Config) { c.HoldAbandoned = true },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Status: 503, Outcome: idempotency.OutcomeHeld,
					ClaimTime: claim, RunTime: run, SettleTime: settle,
				}
			},
		},
		{
			name: "executed, did not return", status: 0,
			send: func(g *execRig, _ string) { g.requireNoReturn("a", "boom") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Outcome: idempotency.OutcomeReleased,
					ClaimTime: claim, RunTime: run, SettleTime: settle,
				}
			},
		},
		{
			name: "executed and pending", status: 201,
			before: func(g *execRig) { g.store.on(execComplete, execUntil(time.Minute, execFail)) },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Status: 201, Outcome: idempotency.OutcomePending, Err: errExecStore,
					ClaimTime: claim, RunTime: run, SettleTime: execStoreTimeout,
				}
			},
			more: map[idempotency.EventKind]bool{idempotency.EventStoreFault: true},
		},
		{
			name: "executed and lost", status: 201,
			before: func(g *execRig) {
				g.store.on(execComplete, func(context.Context, execCall, func() error) error { return idempotency.ErrLeaseLost })
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Status: 201, Outcome: idempotency.OutcomeLost,
					Err: idempotency.ErrLeaseLost, ClaimTime: claim, RunTime: run,
				}
			},
			more: map[idempotency.EventKind]bool{idempotency.EventLeaseLost: true},
		},
		{
			name: "replayed", status: 201,
			before: func(g *execRig) { g.serve("a") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventReplayed, Attempt: 1, Status: 201, ClaimTime: claim}
			},
		},
		{
			name: "replayed, of a later attempt", status: 201,
			before: func(g *execRig) {
				g.crash(false)
				time.Sleep(execLease)
				g.serve("a")
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventReplayed, Attempt: 2, Status: 201, ClaimTime: claim}
			},
		},
		{
			name: "in flight", status: 201,
			before: func(g *execRig) { g.crash(false) },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventInFlight, Status: 409, Code: idempotency.CodeInFlight, ClaimTime: claim,
				}
			},
		},
		{
			name: "reused", status: 201,
			before: func(g *execRig) { g.serve("b") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventKeyReused, Status: 422, Code: idempotency.CodeKeyReused, ClaimTime: claim,
				}
			},
		},
		{
			name: "outcome unknown", status: 503,
			edit:   func(c *idempotency.Config) { c.HoldAbandoned = true },
			before: func(g *execRig) { g.serve("a") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 409, Code: idempotency.CodeOutcomeUnknown, ClaimTime: claim,
				}
			},
		},
		{
			name: "replay refused", status: 201,
			edit: func(c *idempotency.Config) {
				c.CheckReplay = func(*http.Request) error { return denied }
			},
			before: func(g *execRig) { g.serve("a") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 403, Code: idempotency.CodeReplayRefused, Err: denied, ClaimTime: claim,
				}
			},
		},
		{
			name: "not replayable", status: 201,
			edit:   func(c *idempotency.Config) { c.MaxResponseBytes = 1 },
			before: func(g *execRig) { g.serve("a") },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 409, Code: idempotency.CodeNotReplayable, ClaimTime: claim,
				}
			},
		},
		{
			name: "client gone", status: 201,
			send: func(g *execRig, body string) {
				ctx, hangUp := context.WithCancel(g.t.Context())
				hangUp()
				g.start(execRequest(ctx, body))()
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 503, Code: idempotency.CodeRetry, Err: context.Canceled, ClaimTime: claim,
				}
			},
		},
		{
			name: "client gone during the handler", status: -1,
			send: func(g *execRig, body string) {
				ctx, hangUp := context.WithTimeout(g.t.Context(), claim+run)
				defer hangUp()
				g.start(execRequest(ctx, body))()
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventExecuted, Attempt: 1, Outcome: idempotency.OutcomeReleased,
					ClaimTime: claim, RunTime: run, SettleTime: settle,
				}
			},
		},
		{
			name: "store down", status: 201,
			before: func(g *execRig) { g.store.on(execClaim, execFail) },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 503, Code: idempotency.CodeStoreUnavailable, Err: errExecStore,
				}
			},
			more: map[idempotency.EventKind]bool{idempotency.EventStoreFault: true},
		},
		{
			name: "store down, unguarded", status: 201,
			edit:   func(c *idempotency.Config) { c.UnguardedWhenStoreDown = true },
			before: func(g *execRig) { g.store.on(execClaim, execFail) },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventUnguarded, Code: idempotency.CodeStoreUnavailable}
			},
			more: map[idempotency.EventKind]bool{idempotency.EventStoreFault: true},
		},
		{
			name: "no key", status: 201, send: execSendKey(""), noKey: true,
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventRefused, Status: 400, Code: idempotency.CodeMissingKey}
			},
		},
		{
			name: "no key, unguarded", status: 201, send: execSendKey(""), noKey: true,
			edit: func(c *idempotency.Config) { c.OptionalKeys = true },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventUnguarded, Code: idempotency.CodeMissingKey}
			},
		},
		{
			name: "no identity, unguarded", status: 201, noKey: true,
			edit: func(c *idempotency.Config) {
				c.KeyScope = func(*http.Request) string { return "" }
				c.UnguardedWithoutIdentity = true
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{Kind: idempotency.EventUnguarded, Code: idempotency.CodeNoIdentity}
			},
		},
		{
			name: "no identity", status: 201, noKey: true,
			edit: func(c *idempotency.Config) { c.KeyScope = func(*http.Request) string { return "" } },
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 403, Code: idempotency.CodeNoIdentity, Err: idempotency.ErrMissingScope,
				}
			},
		},
		{
			name: "bad identity", status: 201, noKey: true,
			edit: func(c *idempotency.Config) {
				c.Principal = func(*http.Request) string { return execPrincipal + "\x00" }
			},
			want: func(e *idempotency.Event) {
				*e = idempotency.Event{
					Kind: idempotency.EventRefused, Status: 500, Code: idempotency.CodeBadIdentity, Err: idempotency.ErrBadScope,
				}
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					time.Sleep(run)
					switch tc.status {
					case 0:
						panic("boom")
					case -1:
						<-r.Context().Done()
					default:
						execWrite(w, tc.status, "done")
					}
				}, tc.edit)
				slow(g)
				if tc.before != nil {
					tc.before(g)
				}
				before := len(g.seenEvents())
				send := tc.send
				if send == nil {
					send = func(g *execRig, body string) { g.serve(body) }
				}
				send(g, "a")

				events := g.seenEvents()[before:]
				got := events[len(events)-1]
				var want idempotency.Event
				tc.want(&want)
				require.ErrorIs(t, got.Err, want.Err)
				want.Err, got.Err = nil, nil
				require.Equal(t, tc.noKey, got.Key.IsZero())
				if !tc.noKey {
					require.Equal(t, g.store.seen(execClaim)[0].claim.Key, got.Key)
				}
				want.Key = got.Key
				require.Equal(t, want, got)

				require.Len(t, events, 1+len(tc.more))
				for _, e := range events[:len(events)-1] {
					require.True(t, tc.more[e.Kind], e.Kind)
					require.Equal(t, got.Key, e.Key)
					require.Error(t, e.Err)
				}
			})
		})
	}
}

// execSendKey sends a request with this Idempotency-Key field, or without.
func execSendKey(field string) func(*execRig, string) {
	return func(g *execRig, body string) {
		r := execRequest(g.t.Context(), body)
		r.Header.Del(idempotency.HeaderKey)
		if field != "" {
			r.Header.Set(idempotency.HeaderKey, field)
		}
		g.start(r)()
	}
}

// S46: a request that was passed through has no event.
func TestS46NoEventForUnguardedMethod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newExecRig(t, execRuns(0, http.StatusCreated), nil)
		r := execRequest(t.Context(), "a")
		r.Method = http.MethodPut
		g.start(r)()
		require.Empty(t, g.seenEvents())
		g.requests.Add(-1)
	})
}

// S46: neither what is logged nor an event or execution, however it is printed,
// shows tenant, principal or key. A rig holds every other test to that, too.
func TestS46NothingInTheClear(t *testing.T) {
	var out bytes.Buffer
	options := &slog.HandlerOptions{Level: slog.LevelDebug, AddSource: true}
	for _, tc := range []struct {
		name    string
		handler slog.Handler
	}{
		{"text", slog.NewTextHandler(&out, options)},
		{"JSON", slog.NewJSONHandler(&out, options)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out.Reset()
			logger := slog.New(tc.handler)
			synctest.Test(t, func(t *testing.T) {
				var printed bytes.Buffer
				show := func(v any) {
					for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x"} {
						_, _ = fmt.Fprintf(&printed, verb+"\n", v)
					}
					encoded, err := json.Marshal(v)
					require.NoError(t, err)
					_, _ = printed.Write(encoded)
					logger.Info("printed", "value", v, "group", slog.GroupValue(slog.Any("value", v)))
				}
				g := newExecRig(t, func(w http.ResponseWriter, r *http.Request) {
					exec, ok := idempotency.FromContext(r.Context())
					if ok {
						show(exec)
						show(struct{ Exec *idempotency.Execution }{exec})
					}
					switch body, _ := io.ReadAll(r.Body); string(body) {
					case "panics":
						panic(http.ErrAbortHandler)
					case "lasts":
						time.Sleep(time.Hour)
					}
					w.WriteHeader(http.StatusCreated)
				}, func(c *idempotency.Config) {
					c.Logger = logger
					c.UnguardedWhenStoreDown = true
					c.CheckReplay = func(*http.Request) error { return errors.New("denied") }
				})
				for _, field := range []string{
					execKey, // no quotes
					`"` + execKey + `", "b"`,
					`"` + execKey + strings.Repeat("x", idempotency.MaxKeyLen) + `"`,
				} {
					execSendKey(field)(g, "a")
				}
				g.requireNoReturn("panics", http.ErrAbortHandler)
				g.serve("a") // reused

				time.Sleep(execTTL)
				g.store.on(execClaim, execLoseAnswer)
				g.serve("a") // unguarded
				g.store.on(execClaim, nil)

				time.Sleep(execTTL)
				g.store.on(execExtend, execUntil(time.Minute, execFail))
				g.store.on(execComplete, execUntil(2*time.Hour, execFail))
				g.serve("lasts")
				time.Sleep(2 * time.Hour)
				g.serve("lasts") // refused by CheckReplay

				time.Sleep(execTTL)
				g.store.on(execComplete, func(context.Context, execCall, func() error) error { return idempotency.ErrLeaseLost })
				g.serve("a")
				require.NoError(t, g.m.Shutdown(t.Context()))
				for _, e := range g.seenEvents() {
					show(e)
					show(&e)
					show([]idempotency.Event{e})
				}
				synctest.Wait()
				execRequireAnonymous(t, printed.String())
				execRequireAnonymous(t, out.String())
				require.Contains(t, printed.String(), "idempotency-key:", "the digest is there")
				for _, message := range []string{
					"store fault", "running without deduplication", "replay refused", "settled in the background", "lease lost",
				} {
					require.Contains(t, out.String(), message)
				}
			})
		})
	}
}
