//go:build unix

package idempotency_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// processEnv makes this test binary, run by a test, a server of its own. It holds
// a processConfig as JSON.
const processEnv = "IDEMPOTENCY_TEST_PROCESS"

// A processConfig is what a test tells a server that it starts.
type processConfig struct {
	DatabaseURL string
	Lease       time.Duration
	Hold        bool
	Crash       *crashConfig // nil: it runs handlers until it is stopped
	Deploy      *deployConfig
}

func TestMain(m *testing.M) {
	cfg := os.Getenv(processEnv)
	if cfg == "" {
		code := m.Run()
		if err := leaks(); err != nil {
			fmt.Fprintln(os.Stderr, "left behind:", err)
			code = 1
		}
		os.Exit(code)
	}
	if err := serveAsProcess(context.Background(), cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serveAsProcess serves guarded requests until standard input ends, and then shuts
// down in good order. It says on standard output what happens. Each line of input
// lets one handler end.
func serveAsProcess(ctx context.Context, config string) error {
	var cfg processConfig
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		return err
	}
	switch {
	case cfg.Crash != nil:
		return serveToBeKilled(ctx, cfg)
	case cfg.Deploy != nil:
		return serveDeploy(ctx, cfg)
	}
	pool, err := pgxpool.New(ctx, cfg.DatabaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	m, err := idempotency.New(idempotency.NewPostgresStore(pool), identified(idempotency.Config{
		Lease: cfg.Lease, HoldAbandoned: cfg.Hold,
		OnEvent: func(_ context.Context, e idempotency.Event) {
			if e.Kind == idempotency.EventExecuted {
				fmt.Println("executed:", e.Outcome)
			}
		},
	}))
	if err != nil {
		return err
	}
	proceed, ended := make(chan struct{}, 10), make(chan struct{})
	go func() {
		defer close(ended)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			proceed <- struct{}{}
		}
	}()
	return serveUntil(ctx, ended, pool, m, func(w http.ResponseWriter, r *http.Request) {
		fmt.Println("running")
		select {
		case <-proceed:
		case <-r.Context().Done():
			fmt.Println("cancelled, lease lost:", errors.Is(context.Cause(r.Context()), idempotency.ErrLeaseLost))
			<-proceed
		}
		attempt(w, r)
	})
}

// serveUntil serves guarded requests until ended is closed, and then shuts down in good
// order.
func serveUntil(ctx context.Context, ended <-chan struct{}, pool *pgxpool.Pool, m *idempotency.Middleware, h http.HandlerFunc) error {
	server := &http.Server{Handler: m.Handler(h)}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Println("http://" + listener.Addr().String())
	select {
	case err := <-served:
		return err
	case <-ended:
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := errors.Join(server.Shutdown(ctx), m.Shutdown(ctx)); err != nil {
		return err
	}
	for pool.Stat().AcquiredConns() > 0 { // one whose statement was given up takes a moment to close
		if ctx.Err() != nil {
			return fmt.Errorf("%d connections are still in use", pool.Stat().AcquiredConns())
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// A process is a server in a process of its own, and a client for it.
type process struct {
	*site
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string // of its output, closed at its end
	ran   int         // times that it has said so
}

func startProcess(t *testing.T, cfg processConfig) *process {
	t.Helper()
	config, err := json.Marshal(cfg)
	require.NoError(t, err)
	p := &process{cmd: exec.Command(os.Args[0]), lines: make(chan string, 100)}
	p.cmd.Env = append(os.Environ(), processEnv+"="+string(config))
	p.cmd.Stderr = os.Stderr
	// The system ends a group whose parent is gone, also one that is stopped.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	})
	go func() {
		defer close(p.lines)
		for out := bufio.NewScanner(stdout); out.Scan(); {
			p.lines <- out.Text()
		}
	}()
	p.site = newSite(t, http1, http.NotFoundHandler()) // for its client
	p.URL = p.says(t, "http://")
	return p
}

// says waits for a line that begins so, and returns it.
func (p *process) says(t *testing.T, prefix string) string {
	t.Helper()
	for timeout := time.After(30 * time.Second); ; {
		select {
		case line, ok := <-p.lines:
			require.True(t, ok, "it ended without saying %q", prefix)
			if line == "running" {
				p.ran++
			}
			if strings.HasPrefix(line, prefix) {
				return line
			}
		case <-timeout:
			require.FailNow(t, "it does not say "+prefix)
		}
	}
}

// proceed lets one handler end.
func (p *process) proceed(t *testing.T) {
	t.Helper()
	_, err := io.WriteString(p.stdin, "\n")
	require.NoError(t, err)
}

// pause returns when nothing runs in the process any more.
func (p *process) pause(t *testing.T) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGSTOP))
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(p.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		require.NoError(t, err)
		require.True(t, status.Stopped())
		return
	}
}

func (p *process) resume(t *testing.T) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGCONT))
}

// stop shuts the process down, which must have nothing left to be settled then, and
// returns how many handlers it has run.
func (p *process) stop(t *testing.T) (runs int) {
	t.Helper()
	require.NoError(t, p.stdin.Close())
	for line := range p.lines {
		if line == "running" {
			p.ran++
		}
	}
	require.NoError(t, p.cmd.Wait())
	return p.ran
}

// S27: a process that was paused past its lease while a handler ran, and comes back
// when another one has taken over, has lost it: what it ends with touches nothing,
// and its client does not get an answer that no retry would ever see.
func TestS27PostgresProcessPaused(t *testing.T) {
	parallel(t)
	for _, tc := range []struct {
		name   string
		atOnce bool // the handler ends before anything can tell it
	}{
		{"handler ends when it is told", false},
		{"handler ends at once", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			p := startProcess(t, processConfig{DatabaseURL: db.url, Lease: shortLease})
			other := newLifeSite(t, db.url, idempotency.Config{Lease: shortLease}, attempt)
			await := p.start(t.Context())
			p.says(t, "running")
			p.pause(t)
			second := other.takesOver(t, db)
			require.Equal(t, "attempt 2", second.body)
			version := db.version(t)

			if tc.atOnce {
				p.proceed(t)
			}
			p.resume(t)
			if !tc.atOnce {
				require.Equal(t, "cancelled, lease lost: true", p.says(t, "cancelled"))
				p.proceed(t)
			}
			await(t).requireProblem(t, http.StatusConflict, idempotency.CodeInFlight)
			require.Equal(t, "executed: lost", p.says(t, "executed"))
			for _, s := range []*site{p.site, other.site} {
				retry := s.do(t.Context(), call{})
				require.True(t, retry.replayed())
				require.Equal(t, second.body, retry.body)
			}
			require.Equal(t, 1, p.stop(t))
			require.EqualValues(t, 1, other.runs.Load())
			require.Equal(t, version, db.version(t), "a late outcome was written")
			other.quiet(t)
		})
	}
}

// S27: where nothing may run twice, nobody takes over from a process that is paused.
// Its retries are in doubt until it comes back.
func TestS27PostgresHoldProcessPaused(t *testing.T) {
	parallel(t)
	db := newLifeDB(t)
	p := startProcess(t, processConfig{DatabaseURL: db.url, Lease: shortLease, Hold: true})
	other := newLifeSite(t, db.url, idempotency.Config{Lease: shortLease, HoldAbandoned: true}, attempt)
	await := p.start(t.Context())
	p.says(t, "running")
	p.pause(t)
	other.refused(t, call{}, http.StatusConflict, idempotency.CodeInFlight)
	db.untilRecord(t, "in_progress 1, ended")
	other.refused(t, call{}, http.StatusConflict, idempotency.CodeOutcomeUnknown)
	p.resume(t)
	require.Equal(t, "cancelled, lease lost: true", p.says(t, "cancelled"))
	p.proceed(t)
	first := await(t)
	require.Equal(t, "attempt 1", first.body)
	require.Equal(t, first.body, other.created(t, call{}, true).body)
	require.Equal(t, 1, p.stop(t))
	require.Zero(t, other.runs.Load())
	other.quiet(t)
}

// S26, S27: a process that was paused past its lease before it had the answer to its
// claim does not run it. Another one may have taken over; where that must not be, the
// claim is released, so that its key is not held for ever.
func TestS27PostgresProcessPausedInClaim(t *testing.T) {
	parallel(t)
	for _, hold := range []bool{false, true} {
		t.Run(fmt.Sprintf("hold=%v", hold), func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			p := startProcess(t, processConfig{DatabaseURL: db.proxy.URL(), Lease: shortLease, Hold: hold})
			other := newLifeSite(t, db.url, idempotency.Config{Lease: shortLease, HoldAbandoned: hold}, attempt)
			held, release := db.proxy.HoldAnswer("8e03978e")
			await := p.start(t.Context())
			receive(t, held)
			p.pause(t)
			release()
			var version string
			if hold {
				db.untilRecord(t, "in_progress 1, ended")
				other.refused(t, call{}, http.StatusConflict, idempotency.CodeOutcomeUnknown)
			} else {
				other.takesOver(t, db)
				version = db.version(t)
			}
			p.resume(t)
			a := await(t)
			require.Equal(t, http.StatusServiceUnavailable, a.status, a.body)
			// Which it is depends on what the process sees first: the answer, or that its time is over.
			require.Contains(t, []string{string(idempotency.CodeRetry), string(idempotency.CodeStoreUnavailable)}, a.code(t))
			require.Zero(t, p.stop(t))
			if hold {
				require.Equal(t, "released 1", db.record(t))
				other.created(t, call{}, false)
			} else {
				require.Equal(t, version, db.version(t), "a claim given up was written")
			}
			require.Equal(t, "attempt 2", other.created(t, call{}, true).body)
			require.EqualValues(t, 1, other.runs.Load())
			other.quiet(t)
		})
	}
}

// S27: a process that is killed while a handler runs is taken over from when its
// lease is over, and not before; or, where nothing may run twice, its outcome is
// unknown from then on.
func TestS27PostgresProcessKilled(t *testing.T) {
	parallel(t)
	const lease = time.Minute
	for _, hold := range []bool{false, true} {
		t.Run(fmt.Sprintf("hold=%v", hold), func(t *testing.T) {
			parallel(t)
			db := newLifeDB(t)
			p := startProcess(t, processConfig{DatabaseURL: db.url, Lease: lease, Hold: hold})
			other := newLifeSite(t, db.url, idempotency.Config{Lease: lease, HoldAbandoned: hold}, attempt)
			await := p.start(t.Context())
			p.says(t, "running")
			p.kill(t)
			require.Error(t, await(t).err)

			other.refused(t, call{}, http.StatusConflict, idempotency.CodeInFlight)
			require.Equal(t, "in_progress 1", db.record(t))
			advance(t, db.Pool, "idempotency_records", lease)
			require.Equal(t, "in_progress 1, ended", db.record(t))
			other.refused(t, call{body: "other"}, http.StatusUnprocessableEntity, idempotency.CodeKeyReused)
			if hold {
				for range 2 {
					other.refused(t, call{}, http.StatusConflict, idempotency.CodeOutcomeUnknown)
				}
				require.Zero(t, other.runs.Load())
			} else {
				require.Equal(t, "attempt 2", other.created(t, call{}, false).body)
				require.Equal(t, "attempt 2", other.created(t, call{}, true).body)
				require.EqualValues(t, 1, other.runs.Load())
			}
			other.quiet(t)
		})
	}
}
