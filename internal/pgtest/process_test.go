//go:build unix

package pgtest_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency/internal/pgtest"
)

// modeEnv makes this test binary, run by a test, do something else.
const modeEnv = "PGTEST_MODE"

func TestMain(m *testing.M) {
	switch os.Getenv(modeEnv) {
	case "run": // as the command with
		code, err := pgtest.Run(context.Background(), "/bin/sh", "-c", os.Args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 99
		}
		os.Exit(code)
	default:
		os.Exit(m.Run())
	}
}

// self returns this test binary as a command.
func self(t *testing.T, mode string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), modeEnv+"="+mode, "IDEMPOTENCY_TEST_DATABASE_URL=")
	cmd.Stderr = os.Stderr
	return cmd
}

// postmaster is a server seen from outside.
type postmaster struct {
	dir string
	pid int
}

func newPostmaster(t *testing.T, dir string) postmaster {
	t.Helper()
	lock, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(lock), "\n")
	pid, err := strconv.Atoi(first)
	require.NoError(t, err)
	return postmaster{dir, pid}
}

func (p postmaster) alive() bool {
	if syscall.Kill(p.pid, 0) == syscall.ESRCH {
		return false
	}
	// A zombie, if there is no init to reap it, is dead.
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	return err != nil || !bytes.Contains(stat, []byte(") Z "))
}

func (p postmaster) requireGone(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(p.dir)
		return os.IsNotExist(err) && !p.alive()
	}, 20*time.Second, 20*time.Millisecond)
}

// TestHelperServer is run by TestServerDoesNotOutliveProcess in a process that is
// killed.
func TestHelperServer(t *testing.T) {
	if os.Getenv(modeEnv) != "helper" {
		t.Skip("not started by another test")
	}
	conn := connect(t, pgtest.Database(t))
	fmt.Println(query1[string](t, conn, `SHOW unix_socket_directories`))
	_, _ = io.Copy(io.Discard, os.Stdin)
	go panic("as go test does at its timeout")
	select {}
}

func TestServerDoesNotOutliveProcess(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		end  func(helper *os.Process, stdin io.Closer) error
	}{
		{"killed", func(helper *os.Process, _ io.Closer) error { return helper.Kill() }},
		{"panics", func(_ *os.Process, stdin io.Closer) error { return stdin.Close() }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cmd := self(t, "helper", "-test.run=^TestHelperServer$")
			cmd.Stderr = nil // a panic
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			out := bufio.NewReader(stdout)
			dir, err := out.ReadString('\n')
			require.NoError(t, err, "the helper has no server: %s", dir)
			server := newPostmaster(t, strings.TrimSpace(dir))
			require.True(t, server.alive())

			require.NoError(t, tc.end(cmd.Process, stdin))
			// Ends only if nothing that the process left behind holds its output.
			_, err = io.Copy(io.Discard, out)
			require.NoError(t, err)
			require.Error(t, cmd.Wait())
			server.requireGone(t)
		})
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	base := pgtest.Database(t)
	onBase := func(cmd *exec.Cmd) *exec.Cmd {
		cmd.Env = append(cmd.Env, "IDEMPOTENCY_TEST_DATABASE_URL="+base)
		return cmd
	}
	t.Run("exit code", func(t *testing.T) {
		cmd := onBase(self(t, "run", `echo "$DATABASE_URL"; exit 7`))
		out, err := cmd.Output()
		require.Equal(t, 7, cmd.ProcessState.ExitCode(), "%v", err)
		_, err = pgx.Connect(t.Context(), strings.TrimSpace(string(out)))
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "3D000", pgErr.Code, "the database is dropped")
	})
	t.Run("signal", func(t *testing.T) {
		cmd := self(t, "run", `trap 'echo caught; exit 8' TERM; echo "$DATABASE_URL"; while :; do sleep 0.05; done`)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		out := bufio.NewReader(stdout)
		line, err := out.ReadString('\n')
		require.NoError(t, err)
		u, err := url.Parse(strings.TrimSpace(line))
		require.NoError(t, err)
		server := newPostmaster(t, u.Query().Get("host"))
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		rest, err := io.ReadAll(out)
		require.NoError(t, err)
		require.Equal(t, "caught\n", string(rest))
		_ = cmd.Wait()
		require.Equal(t, 8, cmd.ProcessState.ExitCode())
		require.False(t, server.alive())
		require.NoDirExists(t, server.dir)
	})
	t.Run("ended by a signal", func(t *testing.T) {
		cmd := onBase(self(t, "run", `kill -KILL $$`))
		_ = cmd.Run()
		require.Equal(t, 128+9, cmd.ProcessState.ExitCode())
	})
}
