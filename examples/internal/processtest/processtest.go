// Package processtest lets a test run its own binary as a server in a process of
// its own, and see that process die.
package processtest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// asServer is set in the environment of a process that is to serve.
const asServer = "PROCESSTEST_SERVE"

// Main is for TestMain. It runs the tests; in a process that Start has started, it
// runs serve instead, whose context ends with the test.
func Main(m *testing.M, serve func(ctx context.Context) error) {
	if os.Getenv(asServer) == "" {
		os.Exit(m.Run())
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test's process ends it, or ends
		cancel()
	}()
	if err := serve(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Die ends the process as a crash does: nothing of it runs any more.
func Die() {
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		panic(err)
	}
	select {}
}

// A Process is a server that a test has started.
type Process struct {
	// URL is where it listens.
	URL string

	cmd *exec.Cmd
}

// patience is how long a process may take to do what it must.
const patience = 30 * time.Second

// Start starts a server with further environment variables, and waits until it says
// "listening on" a URL.
func Start(tb testing.TB, environment ...string) *Process {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(append(os.Environ(), asServer+"=1"), environment...)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe()
	require.NoError(tb, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
	})
	urls := make(chan string, 1)
	go func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if url, found := strings.CutPrefix(lines.Text(), "listening on "); found {
				urls <- url
			}
		}
		close(urls)
	}()
	select {
	case url, ok := <-urls:
		require.True(tb, ok, "it ended")
		return &Process{URL: url, cmd: cmd}
	case <-time.After(patience):
		require.FailNow(tb, "it does not listen")
	}
	return nil
}

// RequireDead waits until the process has died.
func (p *Process) RequireDead(tb testing.TB) {
	tb.Helper()
	dead := make(chan error, 1)
	go func() { dead <- p.cmd.Wait() }()
	select {
	case err := <-dead:
		var exit *exec.ExitError
		require.ErrorAs(tb, err, &exit)
		require.Equal(tb, -1, exit.ExitCode(), "killed, not ended")
	case <-time.After(patience):
		require.FailNow(tb, "it lives")
	}
}
