package idempotency

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// PostgresTx returns the transaction of the operation that a handler runs for, see
// [Config].Transactional; ok is false where there is none. It belongs to the handler
// until that returns:
//
//   - Commit says that the handler is done with it. It sends nothing: what was written
//     is committed with the outcome, once the handler has returned.
//   - Rollback undoes what was written with it, at once, and does nothing after Commit,
//     so that deferring it is safe.
//   - Begin makes a savepoint, as it does in any transaction.
//   - After the first Commit or Rollback, and after the handler's return, all of its
//     methods return pgx.ErrTxClosed. What Conn and LargeObjects returned must not be
//     used then: the connection serves others.
//
// A handler that does neither leaves its writes to be committed. Where they were undone
// or a statement has failed since, an answer below 400 would be untrue: it is replaced by
// 500 commit-failed. One from 400 up is stored without the writes, if it is kept (S38).
//
// It is no more safe for concurrent use than any pgx.Tx. A statement under way when its
// context ends, which is when the client hangs up, breaks the connection: everything is
// undone, and a retry runs. It may be refused as in flight before: until the server has
// cancelled the statement, or, where it missed the request to, until that has ended. SQL
// that ends the transaction, as COMMIT, gets the request 500 commit-failed, though the
// database has committed. What outlasts the transaction in its session, such as SET
// without LOCAL or a temporary table, is met by later users of the connection.
func PostgresTx(ctx context.Context) (tx pgx.Tx, ok bool) {
	tx, ok = ctx.Value(handlerTxKey{}).(pgx.Tx)
	return tx, ok
}

type handlerTxKey struct{}

// handlerSavepoint is before the first thing that a handler does.
const handlerSavepoint = "idempotency_operation"

const undoHandlerSQL = "ROLLBACK TO SAVEPOINT " + handlerSavepoint

// A handlerSession is what a handler's transaction, and those nested in it, have in
// common.
type handlerSession struct {
	mu     sync.Mutex
	calls  int  // under way
	ended  bool // the handler has no use of the transaction any more
	undone bool // its writes are rolled back
}

// enter begins a call. There are none after the end.
func (s *handlerSession) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.calls++
	return nil
}

func (s *handlerSession) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls--
}

// end lets no call begin any more. It reports whether one is still under way.
func (s *handlerSession) end() (busy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.calls > 0
}

// enterLast begins the call that is the last.
func (s *handlerSession) enterLast() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	s.calls++
	return nil
}

func (s *handlerSession) markUndone() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.undone = true
}

func (s *handlerSession) isUndone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.undone
}

// A handlerTx is a transaction, or one nested in it, as a handler gets it. It ends
// with its session, whatever the handler does.
type handlerTx struct {
	session *handlerSession
	pgx.Tx
}

// Commit says that the handler is done.
func (tx *handlerTx) Commit(ctx context.Context) error {
	if err := tx.session.enterLast(); err != nil {
		return err
	}
	defer tx.session.leave()
	if tx.Tx.Conn().PgConn().TxStatus() != txFailed {
		return nil
	}
	return errors.Join(pgx.ErrTxCommitRollback, tx.undo(ctx))
}

// Rollback undoes what the handler has written.
func (tx *handlerTx) Rollback(ctx context.Context) error {
	if err := tx.session.enterLast(); err != nil {
		return err
	}
	defer tx.session.leave()
	return tx.undo(ctx)
}

func (tx *handlerTx) undo(ctx context.Context) error {
	tx.session.markUndone()
	_, err := tx.Tx.Exec(ctx, undoHandlerSQL)
	return err
}

// Begin makes a savepoint.
func (tx *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := tx.session.enter(); err != nil {
		return nil, err
	}
	defer tx.session.leave()
	nested, err := tx.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &nestedTx{handlerTx{session: tx.session, Tx: nested}}, nil
}

// Exec implements [pgx.Tx].
func (tx *handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := tx.session.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer tx.session.leave()
	return tx.Tx.Exec(ctx, sql, args...)
}

// Query implements [pgx.Tx].
func (tx *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := tx.session.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	}
	defer tx.session.leave()
	return tx.Tx.Query(ctx, sql, args...)
}

// QueryRow implements [pgx.Tx].
func (tx *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := tx.session.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).QueryRow()
	}
	defer tx.session.leave()
	return tx.Tx.QueryRow(ctx, sql, args...)
}

// SendBatch implements [pgx.Tx].
func (tx *handlerTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := tx.session.enter(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	defer tx.session.leave()
	return tx.Tx.SendBatch(ctx, b)
}

// CopyFrom implements [pgx.Tx].
func (tx *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := tx.session.enter(); err != nil {
		return 0, err
	}
	defer tx.session.leave()
	return tx.Tx.CopyFrom(ctx, table, columns, src)
}

// Prepare implements [pgx.Tx].
func (tx *handlerTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := tx.session.enter(); err != nil {
		return nil, err
	}
	defer tx.session.leave()
	return tx.Tx.Prepare(ctx, name, sql)
}

// A nestedTx is a savepoint within a handler's transaction.
type nestedTx struct{ handlerTx }

// Commit releases the savepoint.
func (tx *nestedTx) Commit(ctx context.Context) error {
	if err := tx.session.enter(); err != nil {
		return err
	}
	defer tx.session.leave()
	return tx.Tx.Commit(ctx)
}

// Rollback undoes what was written since the savepoint.
func (tx *nestedTx) Rollback(ctx context.Context) error {
	if err := tx.session.enter(); err != nil {
		return err
	}
	defer tx.session.leave()
	return tx.Tx.Rollback(ctx)
}
