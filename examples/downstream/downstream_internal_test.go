package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/examples/internal/processtest"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// dieWhenPaid makes a process kill itself when it has the provider's answer.
const dieWhenPaid = "DIE_WHEN_PAID"

// shortLease is how long a retry has to wait after a process has died.
const shortLease = time.Second

func TestMain(m *testing.M) {
	processtest.Main(m, func(ctx context.Context) error {
		s := setting{
			addr: "127.0.0.1:0", databaseURL: os.Getenv("DATABASE_URL"), providerURL: os.Getenv("PROVIDER_URL"),
			lease: shortLease, paid: func() {},
		}
		if os.Getenv(dieWhenPaid) != "" {
			s.paid = processtest.Die
		}
		return run(ctx, s, os.Stdout, io.Discard)
	})
}

type answer struct {
	status   int
	body     string
	replayed bool
}

func charge(ctx context.Context, url, body string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/charges", strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	r.Header.Set("X-Account", "acme")
	r.Header.Set("X-User", "alice")
	r.Header.Set(idempotency.HeaderKey, `"order-1"`)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, string(text), resp.Header.Get(idempotency.HeaderReplayed) == "true"}, err
}

func (p *provider) counts() (asked, made int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked, p.made
}

const sale = `{"card":"tok_1","amount":1000}`

// S45: a process that dies between the provider's answer and its own has paid. The
// retry asks the provider again, with the same key, and so pays nothing.
func TestS45KilledWhenPaid(t *testing.T) {
	p, err := newProvider()
	require.NoError(t, err)
	server := httptest.NewServer(p)
	defer server.Close()
	environment := []string{"DATABASE_URL=" + pgtest.Database(t), "PROVIDER_URL=" + server.URL}
	other := processtest.Start(t, environment...)
	dying := processtest.Start(t, append(environment, dieWhenPaid+"=1")...)
	_, err = charge(t.Context(), dying.URL, sale)
	require.Error(t, err, "the client hears nothing")
	dying.RequireDead(t)
	asked, made := p.counts()
	require.Equal(t, 1, asked)
	require.Equal(t, 1, made)

	var retry answer
	require.Eventually(t, func() bool { // while the lease holds, it is in flight
		retry, err = charge(t.Context(), other.URL, sale)
		return err == nil && retry.status != http.StatusConflict
	}, 30*time.Second, 50*time.Millisecond)
	require.Equal(t, http.StatusCreated, retry.status, retry.body)
	require.False(t, retry.replayed)
	require.Contains(t, retry.body, `"attempt":2`)
	asked, made = p.counts()
	require.Equal(t, 2, asked)
	require.Equal(t, 1, made, "charged once")

	again, err := charge(t.Context(), other.URL, sale)
	require.NoError(t, err)
	require.Equal(t, answer{retry.status, retry.body, true}, again)
}

// The program alone has a provider within, and a store in memory.
func TestAlone(t *testing.T) {
	server := processtest.Start(t, "DATABASE_URL=", "PROVIDER_URL=")
	for _, replayed := range []bool{false, true} {
		a, err := charge(t.Context(), server.URL, sale)
		require.NoError(t, err)
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.Equal(t, replayed, a.replayed)
	}
	bad, err := charge(t.Context(), server.URL, `{}`)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnprocessableEntity, bad.status, "another payload")

	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/provider/payments", nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	var totals map[string]int
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&totals))
	require.Equal(t, map[string]int{"asked": 1, "made": 1}, totals)
}

// S24: a provider that is down leaves the operation to be tried again.
func TestProviderDown(t *testing.T) {
	server := processtest.Start(t, "DATABASE_URL=", "PROVIDER_URL=http://127.0.0.1:1")
	for range 2 {
		a, err := charge(t.Context(), server.URL, sale)
		require.NoError(t, err)
		require.Equal(t, http.StatusBadGateway, a.status, a.body)
		require.False(t, a.replayed)
	}
}

func TestRunReportsWhatItCannotOpen(t *testing.T) {
	for _, s := range []setting{
		{addr: "127.0.0.1:0", databaseURL: "postgres://%"},
		{addr: "127.0.0.1:0", databaseURL: "postgres://postgres@/postgres?host=" + t.TempDir()},
		{addr: "nowhere:x"},
		{addr: "127.0.0.1:0", lease: -1},
	} {
		require.Error(t, run(t.Context(), s, io.Discard, io.Discard))
	}
}
