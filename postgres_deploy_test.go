//go:build unix

package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
)

// A deployConfig is what a server of a rolling deploy runs.
type deployConfig struct {
	Change string // of scopeChanges
	Scope  deployedScope
}

// A deployedScope is what a process scopes by.
type deployedScope string

const (
	scopeV1   deployedScope = "v1"
	scopeBoth deployedScope = "v2 with alias v1"
	scopeV2   deployedScope = "v2"
)

func (c *deployConfig) config() (idempotency.Config, error) {
	for _, change := range scopeChanges {
		if change.name != c.Change {
			continue
		}
		cfg := change.then
		switch c.Scope {
		case scopeV1:
			cfg = change.before
		case scopeV2:
			cfg.EarlierScopes = nil
		case scopeBoth:
		}
		return identified(cfg), nil
	}
	return idempotency.Config{}, fmt.Errorf("no change %q", c.Change)
}

// serveDeploy serves an operation that leaves a row for each time it runs, and answers
// with its number, until standard input ends.
func serveDeploy(ctx context.Context, process processConfig) error {
	pool, err := pgxpool.New(ctx, process.DatabaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	cfg, err := process.Deploy.config()
	if err != nil {
		return err
	}
	m, err := idempotency.New(idempotency.NewPostgresStore(pool), cfg)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	return serveUntil(ctx, ended, pool, m, func(w http.ResponseWriter, r *http.Request) {
		var run int
		err := pool.QueryRow(r.Context(), "INSERT INTO runs (key) VALUES ($1) RETURNING run", r.Header.Get(idempotency.HeaderKey)).Scan(&run)
		if err != nil {
			http.Error(w, err.Error(), http.StatusUnprocessableEntity)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprint(w, "run ", run)
	})
}

// A rollingDeploy is an API whose processes come and go, and its clients.
type rollingDeploy struct {
	db      *pgxpool.Pool
	url     string
	change  string
	running []*process
	answers map[string]string // by key
}

func newRollingDeploy(t *testing.T, change string) *rollingDeploy {
	t.Helper()
	d := &rollingDeploy{url: pgtest.Database(t), change: change, answers: make(map[string]string)}
	d.db = newPool(t, d.url)
	require.NoError(t, idempotency.Migrate(t.Context(), d.db))
	_, err := d.db.Exec(t.Context(), "CREATE TABLE runs (run serial, key text)")
	require.NoError(t, err)
	return d
}

// deploy starts a process of that scope; the one that is running for the longest is
// stopped, if there are two.
func (d *rollingDeploy) deploy(t *testing.T, scope deployedScope) {
	t.Helper()
	p := startProcess(t, processConfig{DatabaseURL: d.url, Deploy: &deployConfig{Change: d.change, Scope: scope}})
	d.running = append(d.running, p)
	if len(d.running) > 2 {
		d.running[0].stop(t)
		d.running = d.running[1:]
	}
}

// finalAnswer sends a request to one process after the other, until one has an answer
// that is final.
func (d *rollingDeploy) finalAnswer(ctx context.Context, c call, first int) (reply, error) {
	for i := first; ; i++ {
		a := d.running[i%len(d.running)].do(ctx, c)
		switch {
		case a.err != nil:
			return a, a.err
		case a.status == http.StatusCreated:
			return a, nil
		case a.status != http.StatusConflict:
			return a, fmt.Errorf("%d %s", a.status, a.body)
		}
		if ctx.Err() != nil {
			return a, errors.New("in flight for ever")
		}
	}
}

func deployCall(key string) call {
	return call{path: "/v1/charges", key: strconv.Quote(key), body: key}
}

// serve sends new requests to all processes at once, some many times, and every request
// of before to each process.
func (d *rollingDeploy) serve(t *testing.T, phase int) {
	t.Helper()
	const keys, clients = 12, 6
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for k := range keys {
		key := fmt.Sprintf("phase %d, key %d", phase, k)
		var replies [clients]reply
		var errs [clients]error
		var wg sync.WaitGroup
		for i := range clients {
			wg.Go(func() { replies[i], errs[i] = d.finalAnswer(ctx, deployCall(key), i) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs[:]...))
		d.answers[key] = replies[0].body
	}
	for key, answer := range d.answers {
		for _, p := range d.running {
			a := p.do(ctx, deployCall(key))
			require.True(t, a.replayed(), "%s: %d %s", key, a.status, a.body)
			require.Equal(t, answer, a.body, key)
		}
	}
	require.Equal(t, len(d.answers), queryOne[int](t, d.db, "SELECT count(*) FROM runs"), "S43: a request ran twice")
}

// S43: a rolling deploy of another scope, forward, rolled back and forward again, by real
// processes over one database: no request runs twice at any point, and every client gets
// the one answer, whichever process it asks.
func TestS43RollingDeploy(t *testing.T) {
	parallel(t)
	for _, change := range []string{"principal added", "routes named", "tenant ids changed"} {
		t.Run(change, func(t *testing.T) {
			parallel(t)
			d := newRollingDeploy(t, change)
			phase := 0
			rollOut := func(scopes ...deployedScope) {
				t.Helper()
				for _, scope := range scopes {
					d.deploy(t, scope)
					d.serve(t, phase)
					phase++
				}
			}
			rollOut(scopeV1, scopeV1)     // as it was
			rollOut(scopeBoth, scopeBoth) // the new scope knows the old one
			rollOut(scopeV1, scopeV1)     // rolled back
			rollOut(scopeBoth, scopeBoth)

			// One TTL later, whatever was done before is forgotten, under both names.
			advance(t, d.db, "idempotency_records", 24*time.Hour)
			_, err := d.db.Exec(t.Context(), "TRUNCATE runs")
			require.NoError(t, err)
			clear(d.answers)
			d.serve(t, phase)
			phase++
			rollOut(scopeV2, scopeV2) // the new scope by itself
			rollOut(scopeBoth)        // rolled back again
		})
	}
}
