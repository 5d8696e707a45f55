package main

import (
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/examples/internal/processtest"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// dieAt names the step at which a process kills itself.
const dieAt = "DIE_AT"

func TestMain(m *testing.M) {
	processtest.Main(m, func(ctx context.Context) error {
		return run(ctx, os.Getenv("DATABASE_URL"), "127.0.0.1:0", os.Stdout, io.Discard, func(s step) {
			if s == step(os.Getenv(dieAt)) {
				processtest.Die()
			}
		})
	})
}

type answer struct {
	status   int
	body     string
	replayed bool
}

func charge(ctx context.Context, url, key, body string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/charges", strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("X-Account", "acme")
	r.Header.Set("X-User", "alice")
	r.Header.Set(idempotency.HeaderKey, key)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, string(text), resp.Header.Get(idempotency.HeaderReplayed) == "true"}, err
}

func totalsOf(t *testing.T, url string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/totals", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return strings.TrimSpace(string(text))
}

const (
	sale    = `{"reference":"A-1","amount":1000}`
	nothing = `{"Orders":0,"Ledger":0,"Outbox":0}`
	once    = `{"Orders":1,"Ledger":1,"Outbox":1}`
)

// S38: a process that dies before its commit leaves no trace: the retry, at another
// process, is a first attempt. One that dies after it has done everything: the retry
// gets its answer.
func TestS38KilledAtEachStep(t *testing.T) {
	for _, s := range []step{stepClaimed, stepOrder, stepLedger, stepOutbox, stepAnswered, stepCommitted} {
		t.Run(string(s), func(t *testing.T) {
			t.Parallel()
			database := "DATABASE_URL=" + pgtest.Database(t)
			other := processtest.Start(t, database)
			dying := processtest.Start(t, database, dieAt+"="+string(s))
			_, err := charge(t.Context(), dying.URL, `"order-1"`, sale)
			require.Error(t, err, "the client hears nothing")
			dying.RequireDead(t)
			committed := s == stepCommitted
			if committed {
				require.Equal(t, once, totalsOf(t, other.URL))
			} else {
				require.Equal(t, nothing, totalsOf(t, other.URL))
			}

			retry := retried(t, other.URL)
			require.Equal(t, http.StatusCreated, retry.status, retry.body)
			require.Equal(t, committed, retry.replayed)
			require.Equal(t, once, totalsOf(t, other.URL))
			again, err := charge(t.Context(), other.URL, `"order-1"`, sale)
			require.NoError(t, err)
			require.Equal(t, answer{retry.status, retry.body, true}, again)
		})
	}
}

// retried sends the charge until the server has noticed that its connection to the
// dead process is gone.
func retried(t *testing.T, url string) answer {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; {
		a, err := charge(t.Context(), url, `"order-1"`, sale)
		require.NoError(t, err)
		if a.status != http.StatusConflict {
			return a
		}
		require.True(t, time.Now().Before(deadline), "it stays in flight")
	}
}

// A refusal that is kept after a statement failed is stored, without writes.
func TestS38RefusalIsStoredWithoutWrites(t *testing.T) {
	database := pgtest.Database(t)
	server := processtest.Start(t, "DATABASE_URL="+database)
	first, err := charge(t.Context(), server.URL, `"order-1"`, sale)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, first.status, first.body)
	for _, replayed := range []bool{false, true} {
		a, err := charge(t.Context(), server.URL, `"order-2"`, sale)
		require.NoError(t, err)
		require.Equal(t, http.StatusUnprocessableEntity, a.status)
		require.Contains(t, a.body, "charged already")
		require.Equal(t, replayed, a.replayed)
	}
	require.Equal(t, once, totalsOf(t, server.URL))
	bad, err := charge(t.Context(), server.URL, `"order-3"`, `{"reference":"A-2"}`)
	require.NoError(t, err)
	require.Equal(t, http.StatusBadRequest, bad.status)

	pool, err := pgxpool.New(t.Context(), database)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(t.Context(), "ALTER TABLE outbox ADD CHECK (false) NOT VALID")
	require.NoError(t, err)
	for range 2 {
		a, err := charge(t.Context(), server.URL, `"order-4"`, `{"reference":"A-2","amount":1}`)
		require.NoError(t, err)
		require.Equal(t, http.StatusInternalServerError, a.status, "not kept")
		require.False(t, a.replayed)
	}
	require.Equal(t, once, totalsOf(t, server.URL))
}

func TestRunNeedsADatabase(t *testing.T) {
	none := func(step) {}
	require.ErrorContains(t, run(t.Context(), "", "127.0.0.1:0", io.Discard, io.Discard, none), "DATABASE_URL is not set")
	require.ErrorContains(t, run(t.Context(), "postgres://%", "127.0.0.1:0", io.Discard, io.Discard, none), "DATABASE_URL")
	nowhere := "postgres://postgres@/postgres?host=" + t.TempDir()
	require.Error(t, run(t.Context(), nowhere, "127.0.0.1:0", io.Discard, io.Discard, none))
}
