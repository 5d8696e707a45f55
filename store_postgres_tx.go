package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// What a transaction's status says, as PostgreSQL reports it after each message.
const (
	txIdle   = 'I' // there is none
	txFailed = 'E'
)

// Why an operation in a transaction was not committed.
var (
	errStillInUse     = fmt.Errorf("%w: the handler left a statement unfinished", ErrCommitFailed)
	errEndedEarly     = fmt.Errorf("%w: the handler ended the transaction by SQL", ErrCommitFailed)
	errWritesUndone   = fmt.Errorf("%w: the handler reports success, but its writes failed or were rolled back", ErrCommitFailed)
	errRolledBack     = fmt.Errorf("%w: the database rolled back", ErrCommitFailed)
	errConnectionLost = fmt.Errorf("%w: the connection broke while the handler ran", ErrNotCommitted)
)

// CheckTransactional implements [TransactionalStore].
func (s *PostgresStore) CheckTransactional() error {
	if s.txs == nil && len(s.faults) == 0 {
		return &ConfigError{Field: "db", Reason: "lends no connections for transactions: a *pgxpool.Pool is required"}
	}
	return nil
}

// ClaimInTransaction implements [TransactionalStore]. Winning is one round trip on a
// connection that the handler then has for itself, and writes nothing. The transaction
// holds an advisory lock, so that another claim of the key is answered and does not
// wait; what makes sure that one operation is committed is the record's primary key.
//
// Where all transactions are taken, see [PostgresConfig].MaxTransactions, keys that
// have a record are still answered; the others wait until ctx ends.
func (s *PostgresStore) ClaimInTransaction(ctx context.Context, c Claim) (Record, Transaction, error) {
	if err := c.Validate(); err != nil {
		return Record{}, nil, err
	}
	err := errors.Join(s.CheckConfig(), s.CheckTransactional())
	if err == nil && s.closed.Load() {
		err = errStoreClosed
	}
	if err != nil {
		return Record{}, nil, postgresError("claim", notClaimed(err))
	}
	rec, tx, err := s.claimInTransaction(ctx, c)
	switch {
	case err != nil:
		return Record{}, nil, postgresError("claim", notClaimed(err))
	case tx == nil:
		return rec, nil, nil
	}
	return rec, tx, nil
}

func (s *PostgresStore) claimInTransaction(ctx context.Context, c Claim) (Record, *postgresTransaction, error) {
	if s.txs.isRunning(c.Key) {
		return openTransaction(c), nil, nil
	}
	if !s.txs.tryTake() {
		row, found, err := s.look(ctx, c)
		if err == nil && found && !row.free {
			rec, err := row.record()
			return rec, nil, err
		}
		if err == nil {
			err = s.txs.take(ctx)
		}
		if err != nil {
			return Record{}, nil, err
		}
	}
	rec, tx, err := s.begin(ctx, c)
	if tx == nil {
		s.txs.give()
	}
	return rec, tx, err
}

// openTransaction is the record that a claim meets while another's transaction is open.
func openTransaction(c Claim) Record { return Record{State: StateInProgress, LeaseLeft: c.Lease} }

// look reads the record that a claim would meet.
func (s *PostgresStore) look(ctx context.Context, c Claim) (row claimRow, found bool, err error) {
	err = s.run(ctx, &statement{key: c.Key, sql: s.sql.look, args: lookArgs(c), ofClaim: true, read: func(rows pgx.Rows) error {
		row, found, err = readRow(rows)
		return err
	}})
	return row, found, err
}

func readRow(rows pgx.Rows) (row claimRow, found bool, err error) {
	if !rows.Next() {
		return claimRow{}, false, rows.Err()
	}
	err = row.scan(rows)
	return row, true, err
}

// begin opens a transaction, unless the key is not free. It may always be tried again:
// all that was done is reading.
func (s *PostgresStore) begin(ctx context.Context, c Claim) (Record, *postgresTransaction, error) {
	var err error
	for range maxTries {
		var rec Record
		var tx *postgresTransaction
		rec, tx, err = s.tryBegin(ctx, c)
		if err == nil {
			return rec, tx, nil
		}
		if !isTransient(err) || ctx.Err() != nil {
			break
		}
	}
	return Record{}, nil, err
}

func (s *PostgresStore) tryBegin(ctx context.Context, c Claim) (Record, *postgresTransaction, error) {
	conn, err := s.txs.lender.Acquire(ctx)
	if err != nil {
		return Record{}, nil, err
	}
	tx := &postgresTransaction{store: s, claim: c, conn: conn}
	rec, err := tx.begin(ctx)
	if err != nil || rec.State != StateClaimed {
		_ = tx.giveBack(ctx) // it is closed if it is of no use any more
		return rec, nil, err
	}
	s.txs.enter(c.Key)
	return rec, tx, nil
}

// A postgresTransaction is an operation that runs in a transaction. Nothing of it is
// written before the handler has returned: a record would block other claims of its
// key, and the batches that they travel in.
type postgresTransaction struct {
	store   *PostgresStore
	claim   Claim
	conn    lentConn
	inner   pgx.Tx
	found   *claimRow // what is to be overwritten; nil: there is no record
	session handlerSession
}

const lockSQL = `SELECT pg_try_advisory_xact_lock($1::bigint)`

// lockID is what an open transaction locks for its key. Two keys with one ID cost a
// claim that is answered as in flight, while the other one's transaction is open.
func (s *PostgresStore) lockID(k ScopedKey) int64 {
	sum := sha256.Sum256([]byte(s.sql.table + "\x00" + k.Flat()))
	return int64(binary.BigEndian.Uint64(sum[:])) //nolint:gosec // any 64 bits will do
}

// begin begins the transaction, and reads the record once nobody else can be about to
// write it: the lock is asked for in a statement before. It returns how the record
// stands.
func (tx *postgresTransaction) begin(ctx context.Context) (Record, error) {
	c := tx.claim
	var locked, found bool
	var row claimRow
	var b pgx.Batch
	b.BeginTx(tx.store.txs.options)
	b.Queue(lockSQL, tx.store.lockID(c.Key)).QueryRow(func(r pgx.Row) error { return r.Scan(&locked) })
	b.Queue(tx.store.sql.look, lookArgs(c)...).Query(func(rows pgx.Rows) (err error) {
		row, found, err = readRow(rows)
		return err
	})
	b.Queue("SAVEPOINT " + handlerSavepoint)
	results := tx.conn.SendBatch(ctx, &b)
	if err := results.Close(); err != nil {
		return Record{}, err
	}
	switch {
	case found && !row.free:
		return row.record()
	case !locked:
		return openTransaction(c), nil
	case found:
		tx.found = &row
	}
	tx.inner = results.Tx()
	return Record{State: StateClaimed, Fingerprint: c.Fingerprint, Attempt: row.attempt + 1}, nil
}

// Context implements [Transaction].
func (tx *postgresTransaction) Context(parent context.Context) context.Context {
	return context.WithValue(parent, handlerTxKey{}, &handlerTx{session: &tx.session, Tx: tx.inner})
}

// Rollback implements [Transaction].
func (tx *postgresTransaction) Rollback(ctx context.Context) error {
	if err := tx.end(ctx); err != nil {
		return postgresError("rollback", err)
	}
	return nil
}

// Commit implements [Transaction]. Where the answer to the commit does not come, half
// of the time is left for finding out.
func (tx *postgresTransaction) Commit(ctx context.Context, r Response) error {
	outcome, err := responseArgs(r)
	if err != nil {
		return err
	}
	err = tx.commit(ctx, r.Status, outcome)
	endErr := tx.end(ctx)
	switch {
	case err == nil:
		return nil
	case isUndecided(err):
		err = tx.findOut(ctx, errors.Join(err, endErr))
	}
	if err != nil {
		return postgresError("commit", err)
	}
	return nil
}

func (tx *postgresTransaction) commit(ctx context.Context, status int, outcome []any) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	if err := tx.check(); err != nil {
		return err
	}
	if err := tx.settleWrites(ctx, status); err != nil {
		return err
	}
	args := append(lookArgs(tx.claim), interval(tx.claim.TTL))
	args = append(args, outcome...)
	if tx.found != nil {
		return tx.overwrite(ctx, append(args, tx.found.owner))
	}
	return tx.insert(ctx, args)
}

// halfOf returns a context that ends after half of the time that ctx leaves.
func halfOf(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	started := now()
	return context.WithDeadline(ctx, started.Add(deadline.Sub(started)/2))
}

// check ends the handler's use of the transaction, and returns why that cannot be
// committed.
func (tx *postgresTransaction) check() error {
	busy := tx.session.end()
	pg := tx.conn.Conn().PgConn()
	switch {
	case busy || pg.IsBusy():
		return errStillInUse
	case pg.IsClosed():
		return errConnectionLost
	case pg.TxStatus() == txIdle:
		return errEndedEarly
	}
	return nil
}

// settleWrites makes sure that an answer whose writes are undone does not say that
// they were made.
func (tx *postgresTransaction) settleWrites(ctx context.Context, status int) error {
	failed := tx.conn.Conn().PgConn().TxStatus() == txFailed
	switch {
	case !failed && !tx.session.isUndone():
		return nil
	case status < http.StatusBadRequest:
		return errWritesUndone
	case failed:
		_, err := tx.conn.Exec(ctx, undoHandlerSQL)
		return refusal(stepHandler, err)
	}
	return nil
}

// The steps of a commit, which tell whose fault an error is.
type commitStep int

const (
	stepHandler commitStep = iota // what the handler did is brought to an end
	stepRecord
	stepCommit
)

const releaseHandlerSQL = "RELEASE SAVEPOINT " + handlerSavepoint

// insert writes the record and commits, in one round trip: where a record stands,
// the insertion fails, and nothing is committed.
func (tx *postgresTransaction) insert(ctx context.Context, args []any) error {
	var b pgx.Batch
	b.Queue(releaseHandlerSQL)
	b.Queue(tx.store.sql.record, args...)
	b.Queue("COMMIT")
	tag, err := tx.send(ctx, &b, stepHandler, stepRecord, stepCommit)
	return committed(tag, err)
}

// overwrite writes the record over the one that was free, and commits unless that one
// has changed since.
func (tx *postgresTransaction) overwrite(ctx context.Context, args []any) error {
	var b pgx.Batch
	b.Queue(releaseHandlerSQL)
	b.Queue(tx.store.sql.overwrite, args...)
	tag, err := tx.send(ctx, &b, stepHandler, stepRecord)
	switch {
	case err != nil:
		return err
	case tag.RowsAffected() == 0:
		return ErrLeaseLost
	}
	tag, err = tx.conn.Exec(ctx, "COMMIT")
	return committed(tag, refusal(stepCommit, err))
}

// send sends a batch, each statement of which is a step, and returns the tag of the
// last.
func (tx *postgresTransaction) send(ctx context.Context, b *pgx.Batch, steps ...commitStep) (tag pgconn.CommandTag, err error) {
	results := tx.conn.SendBatch(ctx, b)
	for _, step := range steps {
		tag, err = results.Exec()
		if err != nil {
			_ = results.Close()
			return tag, refusal(step, err)
		}
	}
	return tag, refusal(steps[len(steps)-1], results.Close())
}

// committed returns nil if the answer to a COMMIT is one.
func committed(tag pgconn.CommandTag, err error) error {
	if err == nil && tag.String() != "COMMIT" {
		return errRolledBack
	}
	return err
}

// refusal says what an error at a step means: that another claim was faster, that
// nothing was committed, or, by the error itself, that it is not known.
func refusal(step commitStep, err error) error {
	var server *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case pgconn.SafeToRetry(err):
		return fmt.Errorf("%w: %w", ErrNotCommitted, err)
	case !errors.As(err, &server) || isSessionEnd(server):
		return err
	case step == stepRecord && (server.Code == codeUniqueViolation || isConflict(err)):
		return fmt.Errorf("%w: %w", ErrLeaseLost, err)
	case step == stepHandler && server.Code == codeInvalidSavepoint:
		return fmt.Errorf("%w: %w", errEndedEarly, err)
	case isConflict(err) || isMomentary(server):
		return fmt.Errorf("%w: %w", ErrNotCommitted, err)
	}
	return fmt.Errorf("%w: %w", ErrCommitFailed, err)
}

// isUndecided reports whether the error of a commit leaves open what was committed.
func isUndecided(err error) bool {
	return !errors.Is(err, ErrLeaseLost) && !errors.Is(err, ErrCommitFailed) && !errors.Is(err, ErrNotCommitted)
}

// How long is left between two looks for an outcome that may still be committed.
const (
	firstFindOut = 10 * time.Millisecond
	lastFindOut  = 500 * time.Millisecond
)

// findOut looks for the outcome of a commit whose answer did not come, until that is
// committed, or the transaction is over and its lock free. It returns cause if it has
// not learned it by the end of ctx.
func (tx *postgresTransaction) findOut(ctx context.Context, cause error) error {
	pause := newBackoff(firstFindOut, lastFindOut)
	for {
		committed, over, err := tx.lookForOutcome(ctx)
		switch {
		case err != nil:
		case committed:
			return nil
		case over:
			return fmt.Errorf("%w: %w", ErrNotCommitted, cause)
		}
		timer := time.NewTimer(pause.next())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return cause
		}
	}
}

// lookForOutcome also takes the lock, if it is free: then the transaction is over, and
// the look, which comes after that, sees what it has committed.
func (tx *postgresTransaction) lookForOutcome(ctx context.Context) (committed, over bool, err error) {
	s, c := tx.store, tx.claim
	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(lockSQL, s.lockID(c.Key)).QueryRow(func(r pgx.Row) error { return r.Scan(&over) })
	b.Queue(s.sql.settled, append(ownerArgs(c.Key, c.Owner), statusCompleted)...).Query(func(rows pgx.Rows) error {
		committed = rows.Next()
		return rows.Err()
	})
	b.Queue("ROLLBACK")
	err = s.db.SendBatch(ctx, &b).Close()
	return committed, over, err
}

// end ends the transaction, if it has not ended, and gives back what it held.
func (tx *postgresTransaction) end(ctx context.Context) error {
	defer tx.store.txs.give()
	defer tx.store.txs.leave(tx.claim.Key)
	return tx.giveBack(ctx)
}

// giveBack gives the connection back, without a transaction: the pool closes one that
// is in another state. A statement of the handler's that is still under way keeps the
// connection to itself, which is closed under it.
func (tx *postgresTransaction) giveBack(ctx context.Context) error {
	if tx.session.end() {
		return tx.conn.Hijack().PgConn().Conn().Close()
	}
	defer tx.conn.Release()
	pg := tx.conn.Conn().PgConn()
	if pg.IsClosed() || pg.IsBusy() || pg.TxStatus() == txIdle {
		return nil
	}
	_, err := tx.conn.Exec(ctx, "ROLLBACK")
	return err
}
