package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

// Run runs a command with the variable DATABASE_URL set to the connection URL of
// a new, empty database, on a server as that of [Database], and returns its exit
// code: 128 plus the signal if one ended it. Database and server are removed
// when it returns.
//
// The signals SIGINT, SIGTERM and SIGHUP are passed on to the command. If the
// process has a terminal, SIGINT is not: Ctrl-C reaches the command by itself.
// When ctx ends, the command is killed.
func Run(ctx context.Context, name string, args ...string) (code int, err error) {
	passedOn := []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP}
	starting, stop := signal.NotifyContext(ctx, passedOn...)
	defer stop()

	base := os.Getenv(envURL)
	if base == "" {
		own, remove, err := Serve(starting)
		if errors.Is(err, errNoBinaries) {
			return 0, fmt.Errorf("%w, or set %s", err, envURL)
		}
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, remove()) }()
		base = own
	}
	d, err := createDatabase(starting, base)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.drop(context.WithoutCancel(ctx))) }()

	signals := make(chan os.Signal, 8)
	signal.Notify(signals, passedOn...)
	defer signal.Stop(signals)
	if err := starting.Err(); err != nil {
		return 0, err
	}
	stop()

	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+d.url)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("pgtest: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if s != os.Interrupt || !hasTerminal() {
				_ = cmd.Process.Signal(s) // it may have ended just now
			}
		case err := <-ended:
			if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
				return 0, fmt.Errorf("pgtest: %w", err)
			}
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
				return 128 + int(status.Signal()), nil
			}
			return cmd.ProcessState.ExitCode(), nil
		}
	}
}

// Serve does for a program what [Start] does for a test: it starts a server with
// the settings, and returns the connection URL of an empty database on it, and the
// function that removes it. The ctx is only for the start.
func Serve(ctx context.Context, settings ...string) (databaseURL string, remove func() error, err error) {
	s, err := startServer(ctx, settings...)
	if err != nil {
		return "", nil, err
	}
	return s.url(), s.close, nil
}

func hasTerminal() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	_ = tty.Close()
	return true
}
