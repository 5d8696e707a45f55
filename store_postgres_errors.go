package idempotency

import (
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
	codeUndefinedTable       = "42P01"
	codeUndefinedColumn      = "42703"
)

// isTransient reports whether a claim that failed so should be tried again at
// once: a rival was faster, the server says that the statement did nothing, or
// the connection broke and it is not known what the statement did. A server that
// accepts no connection, refuses to write, or takes too long is down.
func isTransient(err error) bool {
	var server *pgconn.PgError
	var connect *pgconn.ConnectError
	switch {
	case errors.Is(err, errOvertaken):
		return true
	case errors.As(err, &connect):
		return false
	case errors.As(err, &server):
		return isServerTransient(server)
	}
	return isBrokenConnection(err)
}

func isServerTransient(err *pgconn.PgError) bool {
	switch err.Code {
	case codeUniqueViolation, codeSerializationFailure, codeDeadlockDetected:
		return true
	}
	// An administrator, a crash or a pooler ended the session.
	return err.SeverityUnlocalized == "FATAL" || err.SeverityUnlocalized == "PANIC"
}

func isBrokenConnection(err error) bool {
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
