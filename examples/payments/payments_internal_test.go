package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

const sale = `{"amount":1000,"currency":"EUR"}`

// A request to the API; an empty key sends no header.
type request struct {
	path, token, key, body string
}

// A reply is an answer with its body read.
type reply struct {
	status int
	header http.Header
	body   string
}

func (r reply) id(t *testing.T) string {
	t.Helper()
	var p struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(r.body), &p), r.body)
	return p.ID
}

func (r reply) replayed() bool { return r.header.Get(idempotency.HeaderReplayed) == "true" }

func startServer(t *testing.T, process processor) *httptest.Server {
	t.Helper()
	handler, idem, err := newServer(idempotency.NewMemoryStore(), process, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	srv := httptest.NewServer(handler)
	t.Cleanup(func() {
		srv.Close()
		require.NoError(t, idem.Shutdown(context.WithoutCancel(t.Context())))
	})
	return srv
}

func post(ctx context.Context, url string, q request) (reply, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+q.path, strings.NewReader(q.body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("Authorization", "Bearer "+q.token)
	req.Header.Set("Content-Type", "application/json")
	if q.key != "" {
		req.Header.Set(idempotency.HeaderKey, q.key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(b)}, err
}

func TestPayments(t *testing.T) {
	first := request{path: "/v1/charges", token: "token-a", key: `"order-1"`, body: sale}
	with := func(change func(*request)) request {
		q := first
		change(&q)
		return q
	}
	for _, tc := range []struct {
		name   string
		second request // sent after first
		status int
		id     string // prefix of the id of a new payment, "" if there is none
		replay bool
		code   string // of a problem
	}{
		{name: "retry", second: first, status: 201, replay: true},
		{name: "other tenant", second: with(func(q *request) { q.token = "token-b" }), status: 201, id: "ch_"},
		{name: "refund with the key of a charge", second: with(func(q *request) { q.path = "/v1/refunds" }), status: 201, id: "re_"},
		{name: "other key", second: with(func(q *request) { q.key = `"order-2"` }), status: 201, id: "ch_"},
		{name: "other amount", second: with(func(q *request) { q.body = `{"amount":2000,"currency":"EUR"}` }), status: 422, code: "key-reused"},
		{name: "no key", second: with(func(q *request) { q.key = "" }), status: 400, code: "missing-key"},
		{name: "unquoted key", second: with(func(q *request) { q.key = "order-1" }), status: 400, code: "invalid-key"},
		{name: "unknown token", second: with(func(q *request) { q.token = "token-x" }), status: 401},
		{name: "no token", second: with(func(q *request) { q.token = "" }), status: 401},
		{name: "zero amount", second: with(func(q *request) { q.key, q.body = `"k"`, `{"amount":0,"currency":"EUR"}` }), status: 400},
		{name: "fractional amount", second: with(func(q *request) { q.key, q.body = `"k"`, `{"amount":1.5,"currency":"EUR"}` }), status: 400},
		{name: "no currency", second: with(func(q *request) { q.key, q.body = `"k"`, `{"amount":1000}` }), status: 400},
		{name: "bad currency", second: with(func(q *request) { q.key, q.body = `"k"`, `{"amount":1000,"currency":"eu1"}` }), status: 400},
		{name: "unknown field", second: with(func(q *request) { q.key, q.body = `"k"`, `{"amount":1000,"currency":"EUR","x":1}` }), status: 400},
		{name: "two orders", second: with(func(q *request) { q.key, q.body = `"k"`, sale+sale }), status: 400},
		{name: "no JSON", second: with(func(q *request) { q.key, q.body = `"k"`, `amount=1000` }), status: 400},
	} {
		t.Run(tc.name, func(t *testing.T) {
			srv := startServer(t, slow(0))
			one, err := post(t.Context(), srv.URL, first)
			require.NoError(t, err)
			require.Equal(t, http.StatusCreated, one.status, one.body)
			require.True(t, strings.HasPrefix(one.id(t), "ch_"), one.body)
			require.False(t, one.replayed())

			two, err := post(t.Context(), srv.URL, tc.second)
			require.NoError(t, err)
			require.Equal(t, tc.status, two.status, two.body)
			require.Equal(t, tc.replay, two.replayed())
			if tc.replay {
				require.Equal(t, one.body, two.body)
				require.Equal(t, one.header.Get("Content-Type"), two.header.Get("Content-Type"))
				require.Equal(t, one.header.Get("Location"), two.header.Get("Location"))
			}
			if tc.id != "" {
				require.True(t, strings.HasPrefix(two.id(t), tc.id), two.body)
				require.NotEqual(t, one.id(t), two.id(t))
			}
			if tc.code != "" {
				require.Equal(t, "application/problem+json", two.header.Get("Content-Type"))
				require.Contains(t, two.header.Get("Link"), `rel="describedby"`)
				require.Contains(t, two.body, `"code":"`+tc.code+`"`)
			}
		})
	}
}

func TestTwoAtOnce(t *testing.T) {
	entered, finish := make(chan struct{}), make(chan struct{})
	srv := startServer(t, func(context.Context) error {
		close(entered)
		<-finish
		return nil
	})
	q := request{path: "/v1/charges", token: "token-a", key: `"order-1"`, body: sale}
	var first reply
	var firstErr error
	var wg sync.WaitGroup
	wg.Go(func() { first, firstErr = post(t.Context(), srv.URL, q) })
	<-entered

	second, err := post(t.Context(), srv.URL, q)
	close(finish)
	wg.Wait()
	require.NoError(t, err)
	require.Equal(t, http.StatusConflict, second.status, second.body)
	require.Contains(t, second.body, `"code":"in-flight"`)
	require.NotEmpty(t, second.header.Get("Retry-After"))
	require.NoError(t, firstErr)
	require.Equal(t, http.StatusCreated, first.status, first.body)
}

func TestFailedPaymentCanBeRetried(t *testing.T) {
	runs := 0
	srv := startServer(t, func(context.Context) error {
		runs++
		if runs == 1 {
			return errors.New("processor is down")
		}
		return nil
	})
	q := request{path: "/v1/charges", token: "token-a", key: `"order-1"`, body: sale}
	for _, want := range []int{http.StatusServiceUnavailable, http.StatusCreated, http.StatusCreated} {
		got, err := post(t.Context(), srv.URL, q)
		require.NoError(t, err)
		require.Equal(t, want, got.status, got.body)
	}
	require.Equal(t, 2, runs)
}

func TestSlowIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, slow(time.Hour)(ctx), context.Canceled)
}

// output is a writer that tells when it has been written to.
type output struct {
	mu      sync.Mutex
	b       bytes.Buffer
	written chan struct{}
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.b.Write(p)
	select {
	case o.written <- struct{}{}:
	default:
	}
	return n, err
}

// serve runs the program until stop is called, and returns its URL.
func serve(t *testing.T, databaseURL string) (url string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out := &output{written: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"-addr", "127.0.0.1:0", "-delay", "0s"}, databaseURL, out, io.Discard)
	}()
	select {
	case <-out.written:
	case err := <-done:
		cancel()
		t.Fatalf("run ended early: %v", err)
	}
	line, rest, _ := strings.Cut(out.b.String(), "\n")
	url, ok := strings.CutPrefix(line, "listening on ")
	require.True(t, ok, line)
	require.NotContains(t, url, ":0")
	require.Contains(t, rest, "curl -i "+url+"/v1/charges")
	return url, func() {
		cancel()
		require.NoError(t, <-done)
	}
}

func TestRun(t *testing.T) {
	first := request{path: "/v1/charges", token: "token-a", key: `"order-1"`, body: sale}
	for _, tc := range []struct {
		name        string
		databaseURL string
		remembers   bool
	}{
		{"in memory", "", false},
		{"on Postgres", pgtest.Database(t), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			url, stop := serve(t, tc.databaseURL)
			got, err := post(t.Context(), url, first)
			require.NoError(t, err)
			require.Equal(t, http.StatusCreated, got.status, got.body)
			stop()

			url, stop = serve(t, tc.databaseURL)
			defer stop()
			retry, err := post(t.Context(), url, first)
			require.NoError(t, err)
			require.Equal(t, http.StatusCreated, retry.status, retry.body)
			require.Equal(t, tc.remembers, retry.replayed())
			require.Equal(t, tc.remembers, retry.body == got.body)
		})
	}
}

func TestRunFaults(t *testing.T) {
	for _, tc := range []struct {
		name        string
		args        []string
		databaseURL string
		is          error // or nil for any
	}{
		{name: "help", args: []string{"-h"}, is: flag.ErrHelp},
		{name: "unknown flag", args: []string{"-x"}},
		{name: "bad address", args: []string{"-addr", "127.0.0.1:port"}},
		{name: "bad database URL", databaseURL: "postgres://host:port/"},
		{name: "no database", databaseURL: "postgres:///?host=" + t.TempDir()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := run(t.Context(), tc.args, tc.databaseURL, io.Discard, io.Discard)
			require.Error(t, err)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
		})
	}
}
