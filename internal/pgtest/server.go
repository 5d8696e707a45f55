package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	startTimeout = time.Minute
	// stopTimeout is more than the 5 s that the postmaster gives its children.
	stopTimeout = 30 * time.Second
	// maxSocketPath is below the limit of every system (104 bytes on macOS).
	maxSocketPath = 99
)

// watchdog removes a server when its standard input, a pipe that only the
// process under test holds, ends. Before that it reads "SIGNAL PID" of the
// process to end, or an empty line when that has ended. $0 is the directory.
//
// The lock file is looked at too because a process that nobody reaps can be
// signalled for ever.
const watchdog = `
trap '' HUP INT TERM
while read -r s p; do signal=$s pid=$p; done
i=0
if [ -n "$pid" ]; then
	kill -"$signal" "$pid"
	while [ -e "$0/data/postmaster.pid" ] && kill -0 "$pid" && [ $((i += 1)) -lt 100 ]; do sleep 0.1; done
	kill -KILL "$pid"
fi
until rm -rf "$0" || [ $((i += 1)) -gt 200 ]; do sleep 0.1; done
`

// gate waits for a line before it becomes the program $0. By then the watchdog
// knows its process ID.
const gate = `read -r go && exec "$0" "$@" </dev/null`

// A Server is a PostgreSQL server of a test's own. Its methods Stop and Restart
// are not safe for concurrent use.
type Server struct {
	bin     string // directory of the programs
	account account
	dir     string // for data, socket and log
	args    []string
	leash   *os.File // the watchdog's standard input
	dog     *exec.Cmd
	process *process // the last one started
}

// process is one that was started, and is waited for.
type process struct {
	*os.Process
	done chan struct{} // closed when it has ended
	err  error         // of Wait, to be read after done
}

// Start starts a server for this test from the machine's PostgreSQL programs,
// with settings such as "full_page_writes=off". It is removed at the end of the
// test. Without such programs the test is skipped or fails, as in [Database].
//
// Unless a setting says otherwise, fsync is off: the server survives
// [Server.Stop], but not a crash of the machine.
func Start(tb testing.TB, settings ...string) *Server {
	tb.Helper()
	s, err := startServer(tb.Context(), settings...)
	if errors.Is(err, errNoBinaries) {
		unavailable(tb, err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Database returns the connection URL of a new, empty database on s, which is
// dropped at the end of the test if s is running then.
func (s *Server) Database(tb testing.TB) string {
	tb.Helper()
	d, err := createDatabase(tb.Context(), s.url())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if !s.running() {
			return
		}
		if err := d.drop(context.WithoutCancel(tb.Context())); err != nil {
			tb.Error(err)
		}
	})
	return d.url
}

// Stop ends s as a crash does: nothing is flushed, no transaction is finished,
// and the next start recovers from the log. It returns when s is gone.
func (s *Server) Stop(tb testing.TB) {
	tb.Helper()
	if err := s.stop(); err != nil {
		tb.Fatal(err)
	}
}

// Restart starts s again on the same data and socket, after a [Server.Stop] if it
// is running. It returns when s accepts connections. URLs stay valid.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	if err := s.stop(); err != nil {
		tb.Fatal(err)
	}
	if err := s.start(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// startServer returns a new server that accepts connections.
func startServer(ctx context.Context, settings ...string) (*Server, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	bin, err := binDir(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := newDir(ctx, account)
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, account: account, dir: dir, args: []string{
		"-D", filepath.Join(dir, "data"),
		"-c", "listen_addresses=",
		"-c", "unix_socket_directories=" + dir,
		"-c", "port=5432", // the environment may say otherwise
		"-c", "fsync=off",
		"-c", "max_connections=300",
	}}
	for _, setting := range settings {
		s.args = append(s.args, "-c", setting)
	}
	if err := s.watch(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := s.create(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// newDir makes a directory that the account can use, with a path that is short
// enough for a socket.
func newDir(ctx context.Context, a account) (string, error) {
	var errs []error
	for _, base := range slices.Compact([]string{os.TempDir(), "/tmp", "/var/tmp"}) {
		dir, err := os.MkdirTemp(base, "pgtest-")
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err = tryDir(ctx, a, dir); err == nil {
			return dir, nil
		}
		errs = append(errs, err, os.RemoveAll(dir))
	}
	return "", fmt.Errorf("pgtest: no directory for a server: %w", errors.Join(errs...))
}

func tryDir(ctx context.Context, a account, dir string) error {
	if socket := filepath.Join(dir, ".s.PGSQL.5432"); len(socket) > maxSocketPath {
		return fmt.Errorf("%s is too long for a socket", socket)
	}
	if err := a.own(dir); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `cd "$0" && : >try && rm try`, dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = a.attr()
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("%s cannot be used by user %q: %w", dir, a.name, err)
	}
	if err != nil && a.name != "" {
		return fmt.Errorf("root cannot run a program as user %s (it needs CAP_SETUID and CAP_SETGID): %w", a.name, err)
	}
	return err
}

// watch starts the watchdog, which holds neither standard output nor error of
// this process: go test waits for all who do.
func (s *Server) watch(ctx context.Context) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	s.dog = exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", watchdog, s.dir)
	s.dog.Dir = "/"
	s.dog.Stdin = r
	s.dog.SysProcAttr = account{}.attr()
	err = s.dog.Start()
	if err = errors.Join(err, r.Close()); err != nil {
		return errors.Join(fmt.Errorf("pgtest: start watchdog: %w", err), w.Close())
	}
	s.leash = w
	return nil
}

// create makes the data directory.
func (s *Server) create(ctx context.Context) error {
	p, err := s.spawn(ctx, "KILL", "initdb", "-D", filepath.Join(s.dir, "data"),
		"--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync")
	if err != nil {
		return err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		_ = p.Kill()
		<-p.done
		return fmt.Errorf("pgtest: initdb: %w", context.Cause(ctx))
	}
	if p.err != nil {
		return fmt.Errorf("pgtest: initdb: %w\n%s", p.err, s.logTail())
	}
	return nil
}

// start starts the server and waits until it accepts connections.
func (s *Server) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	p, err := s.spawn(ctx, "QUIT", "postgres", s.args...)
	if err != nil {
		return err
	}
	s.process = p
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, s.url())
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("pgtest: postgres ended: %w\n%s", errors.Join(p.err, err), s.logTail())
		case <-ctx.Done():
			return fmt.Errorf("pgtest: postgres does not accept connections: %w\n%s", err, s.logTail())
		}
	}
}

// spawn starts a program of PostgreSQL, which the watchdog ends by the signal if
// this process cannot.
func (s *Server) spawn(ctx context.Context, signal, program string, args ...string) (*process, error) {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	path := filepath.Join(s.bin, program)
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", append([]string{"-c", gate, path}, args...)...)
	cmd.Dir = s.dir
	// On macOS the server does not start without a locale.
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = s.account.attr()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("pgtest: start %s: %w", path, err)
	}
	_, err = fmt.Fprintln(s.leash, signal, cmd.Process.Pid)
	if err == nil {
		_, err = io.WriteString(stdin, "go\n")
	}
	err = errors.Join(err, stdin.Close())
	p := &process{Process: cmd.Process, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		_, _ = fmt.Fprintln(s.leash)
		close(p.done)
	}()
	if err != nil {
		_ = p.Kill()
		<-p.done
		return nil, fmt.Errorf("pgtest: start %s: %w", path, err)
	}
	return p, nil
}

func (s *Server) running() bool {
	if s.process == nil {
		return false
	}
	select {
	case <-s.process.done:
		return false
	default:
		return true
	}
}

// stop makes the server shut down in immediate mode, and waits for it.
func (s *Server) stop() error {
	if !s.running() {
		return nil
	}
	if err := s.process.Signal(syscall.SIGQUIT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("pgtest: stop postgres: %w", err)
	}
	select {
	case <-s.process.done:
		return nil
	case <-time.After(stopTimeout):
		_ = s.process.Kill()
		<-s.process.done
		return fmt.Errorf("pgtest: postgres did not stop and was killed\n%s", s.logTail())
	}
}

// close stops the server and lets the watchdog remove all of it.
func (s *Server) close() error {
	err := errors.Join(s.stop(), s.leash.Close())
	if dogErr := s.dog.Wait(); dogErr != nil {
		err = errors.Join(err, fmt.Errorf("pgtest: watchdog: %w", dogErr))
	}
	return err
}

// url returns the connection URL of the database postgres. It leaves nothing to
// the environment (PGPORT) that would lead elsewhere.
func (s *Server) url() string {
	u := &url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/postgres"}
	setQuery(u, map[string]string{"host": s.dir, "port": "5432", "sslmode": "disable"})
	return u.String()
}

func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

// logTail returns the end of the server's log for an error message.
func (s *Server) logTail() string {
	log, err := os.ReadFile(s.logFile())
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-4096):])
}
