package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency/internal/pgtest"
)

const story = `
what was asked   not told of the merge   told of it

before the merge
  shop-a: order 1, 10 EUR   charge 1 for shop-a   charge 1 for shop-a
  shop-a: order 2, 20 EUR   charge 2 for shop-a   charge 2 for shop-a
  shop-b: order 2, 25 EUR   charge 3 for shop-b   charge 3 for shop-b

after it
  shop-c: order 1, 10 EUR   charge 4 for shop-c             charge 1 for shop-a, replayed
  shop-c: order 2, 20 EUR   charge 5 for shop-c             charge 2 for shop-a, replayed
  shop-c: order 2, 25 EUR   422 key-reused                  charge 3 for shop-b, replayed
  shop-c: order 2, 29 EUR   422 key-reused                  charge 4 for shop-c
  shop-c: order 3, 30 EUR   charge 6 for shop-c             charge 5 for shop-c
  shop-a: order 3, 30 EUR   charge 7 for shop-a             409 not-replayable
  shop-a: order 2, 20 EUR   charge 2 for shop-a, replayed   charge 2 for shop-a, replayed
`

func TestStoryInMemory(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), "", &out))
	require.Equal(t, strings.TrimPrefix(story, "\n"), out.String())
}

// The same with the merge as a row of the database, which takes its time to be known.
func TestStoryOnPostgres(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), pgtest.Database(t), &out))
	require.Equal(t, strings.TrimPrefix(story, "\n"), out.String())
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestRunReportsWhatFails(t *testing.T) {
	require.ErrorContains(t, run(t.Context(), "", brokenWriter{}), "broken pipe")
	require.ErrorContains(t, run(t.Context(), "postgres://[", &bytes.Buffer{}), "DATABASE_URL")
	require.ErrorContains(t, run(t.Context(), "postgres://127.0.0.1:1/none", &bytes.Buffer{}), "migrate")
	ended, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, run(ended, "", &bytes.Buffer{}), context.Canceled)
}
