package idempotency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATE codes that the store tells apart.
const (
	codeUniqueViolation      = "23505"
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeInvalidSavepoint     = "3B001"
	codeInvalidText          = "22P02"
	codeReadOnly             = "25006"
	codeLockNotAvailable     = "55P03"
	codeUndefinedTable       = "42P01"
	codeUndefinedColumn      = "42703"
)

// isTransient reports whether a statement that failed so should be tried again at
// once: a rival was faster, the server says that the statement did nothing, or
// the connection broke and it is not known what the statement did. A server that
// accepts no connection, refuses to write, or takes too long is down.
func isTransient(err error) bool {
	var server *pgconn.PgError
	switch {
	case errors.Is(err, errOvertaken):
		return true
	case isOutage(err):
		return false
	case errors.As(err, &server):
		return isServerTransient(server)
	}
	return isBrokenConnection(err)
}

// isWithoutEffect reports whether a statement that failed so has done nothing, and
// will not: it was not sent, or the server says so. The end of a session, which a
// server reports as well, may have come after the commit.
func isWithoutEffect(err error) bool {
	var server *pgconn.PgError
	switch {
	case errors.Is(err, errInDoubt):
		return false
	case errors.Is(err, errOvertaken), errors.Is(err, errNotSent), errors.Is(err, errQueueFull),
		isOutage(err), pgconn.SafeToRetry(err):
		return true
	case errors.As(err, &server):
		return !isSessionEnd(server)
	}
	return false
}

// isOutage reports whether the server accepts no connection.
func isOutage(err error) bool {
	var connect *pgconn.ConnectError
	return errors.As(err, &connect)
}

func isServerTransient(err *pgconn.PgError) bool {
	if err.Code == codeUniqueViolation || isConflict(err) {
		return true
	}
	return isSessionEnd(err)
}

// isSessionEnd reports whether an administrator, a crash or a pooler ended the
// session.
func isSessionEnd(err *pgconn.PgError) bool {
	severity := cmp.Or(err.SeverityUnlocalized, err.Severity) // pgbouncer sends only the latter
	return severity == "FATAL" || severity == "PANIC"
}

// isConflict reports whether the server undid a statement because of another one.
func isConflict(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && (server.Code == codeSerializationFailure || server.Code == codeDeadlockDetected)
}

// isNotAsItStood reports whether a statement that was to change a record found it
// changed already. See orFail.
func isNotAsItStood(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && server.Code == codeInvalidText
}

// isMomentary reports whether the reason for a refusal passes: the server ran out of
// something, an operator intervened, a lock was not to be had, or the server does not
// write any more, after a failover.
func isMomentary(err *pgconn.PgError) bool {
	switch err.Code {
	case codeReadOnly, codeLockNotAvailable:
		return true
	}
	class := err.Code[:min(2, len(err.Code))]
	return class == "53" || class == "57" || class == "58"
}

func isBrokenConnection(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return false // of a pool with a deadline of its own
	}
	var network net.Error
	return pgconn.SafeToRetry(err) || errors.Is(err, pgconn.ErrConnClosed) || errors.As(err, &network) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}

// postgresError says which step failed.
func postgresError(step string, err error) error {
	var server *pgconn.PgError
	if errors.As(err, &server) && (server.Code == codeUndefinedTable || server.Code == codeUndefinedColumn) {
		return fmt.Errorf("idempotency: postgres: %s (is the table migrated? See Migrate): %w", step, err)
	}
	return fmt.Errorf("idempotency: postgres: %s: %w", step, err)
}
