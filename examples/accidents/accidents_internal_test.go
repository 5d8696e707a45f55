package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const table = `
what was asked                                 header value as key                         tuple as key

What both are for: a retry after a lost answer
  shop-a/till-1: charge, key "order-1"         201 ch_1                                    201 ch_1
  shop-a/till-1: charge, key "order-1"         201 ch_1 replayed                           201 ch_1 replayed
  happened, of what was meant                  1 of 1                                      1 of 1

Cross-tenant replay: two shops use the same key (missing: tenant)
  shop-a/till-1: charge, key "order-1"         201 ch_1                                    201 ch_1
  shop-b/till-1: charge, key "order-1"         201 ch_1 replayed, made for shop-a/till-1   201 ch_2
  happened, of what was meant                  1 of 2  <- ACCIDENT                         2 of 2

Swallowed refund: it comes with the key of its charge (missing: route)
  shop-a/till-1: charge, key "order-1"         201 ch_1                                    201 ch_1
  shop-a/till-1: refund, key "order-1"         201 ch_1 replayed                           201 re_2
  happened, of what was meant                  1 of 2  <- ACCIDENT                         2 of 2

Poisoned delivery: a client sends what the server uses itself (missing: namespace)
  shop-a/till-1: charge, key "replay:evt_x:"   201 ch_1                                    201 ch_1
  the server: delivery of evt_x                422 refused                                 200 evt_2
  the server: delivery of evt_x                422 refused                                 200 evt_2 replayed
  happened, of what was meant                  1 of 2  <- ACCIDENT                         2 of 2

Colliding callers: two tills of a shop count their sales from 1 (missing: principal)
  shop-a/till-1: charge, key "sale-1"          201 ch_1                                    201 ch_1
  shop-a/till-2: charge, key "sale-1"          201 ch_1 replayed, made for shop-a/till-1   201 ch_2
  happened, of what was meant                  1 of 2  <- ACCIDENT                         2 of 2

accidents in 5 stories                         4                                           0
`

func TestTable(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out))
	got, ok := strings.CutPrefix(out.String(), intro)
	require.True(t, ok)
	require.Equal(t, strings.TrimPrefix(table, "\n"), got)
}

// The first story is none of the accidents: both servers play it right.
func TestEveryAccidentHappensWithTheHeaderAsKeyAndNoneWithTheTuple(t *testing.T) {
	for i, s := range stories() {
		t.Run(s.title, func(t *testing.T) {
			_, ok, err := play(t.Context(), newHeaderAsKey(), s)
			require.NoError(t, err)
			require.Equal(t, i == 0, ok, "header value as key")

			tuple, err := newTupleAsKey()
			require.NoError(t, err)
			_, ok, err = play(t.Context(), tuple, s)
			require.NoError(t, err)
			require.True(t, ok, "tuple as key")
		})
	}
}

func TestDeliverRefusesAnotherPayload(t *testing.T) {
	tuple, err := newTupleAsKey()
	require.NoError(t, err)
	for name, g := range map[string]guard{"header": newHeaderAsKey(), "tuple": tuple} {
		t.Run(name, func(t *testing.T) {
			app := new(application)
			to := caller{tenant: "shop-a", principal: "till-1"}
			run := func() effect { return app.perform("evt", to) }
			first, err := g.deliver(t.Context(), delivery{to: to, key: "k", payload: "one"}, run)
			require.NoError(t, err)
			require.Equal(t, answer{status: 200, effect: effect{ID: "evt_1", Owner: "shop-a/till-1"}}, first)
			other, err := g.deliver(t.Context(), delivery{to: to, key: "k", payload: "two"}, run)
			require.NoError(t, err)
			require.Equal(t, answer{status: 422}, other)
			require.Equal(t, 1, app.happened())
		})
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestRunReportsAFailedWrite(t *testing.T) {
	require.EqualError(t, run(t.Context(), brokenWriter{}), "broken pipe")
}
