package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
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
// Where all transactions are taken, see [PostgresConfig].MaxTransactions, keys whose
// record decides, whatever transactions are open, are still answered; the others wait
// until ctx ends.
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
	running := s.txs.isRunning(c.names())
	if running && len(c.Aliases) == 0 {
		return openTransaction(c), nil, nil
	}
	if running || !s.txs.tryTake() {
		plan, err := s.look(ctx, c)
		switch {
		case err == nil && plan.isFinal(c):
			return plan.record, nil, nil
		case err == nil && running:
			return openTransaction(c), nil, nil
		case err == nil:
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

// look returns what would become of a claim, as far as records tell.
func (s *PostgresStore) look(ctx context.Context, c Claim) (claimPlan, error) {
	_, met, err := s.lookAll(ctx, c)
	if err != nil {
		return claimPlan{}, err
	}
	return c.plan(met), nil
}

// isFinal reports whether the plan decides about the claim, whatever transactions are
// open: one of them may be this operation's, under another of its names.
func (p claimPlan) isFinal(c Claim) bool {
	return len(p.taken) == 0 && (p.stands || len(c.Aliases) == 0)
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
	s.txs.enter(tx.plan.record.Keys)
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
	rows    []standingRow // what stands under the names of the claim
	met     []standing
	plan    claimPlan
	session handlerSession
}

// queueLock queues the locks of the claim's names. It scans into locked whether it has got
// all. They are asked for one after the other, in the order of the names, up to the
// first that another transaction has: of two that are after the same, one gets them.
func (s *PostgresStore) queueLock(b *pgx.Batch, names []ScopedKey, locked *bool) {
	sorted := slices.SortedFunc(slices.Values(names), ScopedKey.compare)
	sql := "true"
	args := make([]any, len(sorted))
	for i := len(sorted) - 1; i >= 0; i-- {
		args[i] = s.lockID(sorted[i])
		sql = "CASE WHEN pg_try_advisory_xact_lock($" + strconv.Itoa(i+1) + "::bigint) THEN " + sql + " ELSE false END"
	}
	b.Queue("SELECT "+sql, args...).QueryRow(func(r pgx.Row) error { return r.Scan(locked) })
}

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
	c, names := tx.claim, tx.claim.names()
	var locked bool
	var b pgx.Batch
	b.BeginTx(tx.store.txs.options)
	tx.store.queueLock(&b, names, &locked)
	tx.rows = make([]standingRow, len(names))
	for i, name := range names {
		b.Queue(tx.store.sql.look, lookArgs(name, c)...).Query(tx.rows[i].read)
	}
	b.Queue("SAVEPOINT " + handlerSavepoint)
	results := tx.conn.SendBatch(ctx, &b)
	if err := results.Close(); err != nil {
		return Record{}, err
	}
	var err error
	if tx.met, err = standings(tx.rows); err != nil {
		return Record{}, err
	}
	tx.plan = c.plan(tx.met)
	if !locked && !tx.plan.isFinal(c) {
		return openTransaction(c), nil
	}
	tx.inner = results.Tx()
	return tx.plan.record, nil
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
	outcome, err := tx.outcome(r)
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

// outcome returns, for each name that the claim has taken, the parameters that store r.
func (tx *postgresTransaction) outcome(r Response) (map[ScopedKey][]any, error) {
	won := tx.plan.record
	lease := Lease{Keys: won.Keys, Withhold: tx.claim.withheld(won.Keys)}
	outcome := make(map[ScopedKey][]any, len(won.Keys))
	for _, name := range won.Keys {
		args, err := responseArgs(lease.outcome(name, r))
		if err != nil {
			return nil, err
		}
		outcome[name] = args
	}
	return outcome, nil
}

func (tx *postgresTransaction) commit(ctx context.Context, status int, outcome map[ScopedKey][]any) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	if err := tx.check(); err != nil {
		return err
	}
	if err := tx.settleWrites(ctx, status); err != nil {
		return err
	}
	return tx.record(ctx, outcome)
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

// record writes the records and commits, in one round trip: where a name does not stand
// as it was read, its statement fails, and nothing is committed.
func (tx *postgresTransaction) record(ctx context.Context, outcome map[ScopedKey][]any) error {
	steps := []commitStep{stepHandler}
	var b pgx.Batch
	b.Queue(releaseHandlerSQL)
	for _, i := range tx.takenInOrder() {
		sql, args := tx.recordName(i, outcome)
		b.Queue(sql, args...)
		steps = append(steps, stepRecord)
	}
	b.Queue("COMMIT")
	tag, err := tx.send(ctx, &b, append(steps, stepCommit)...)
	return committed(tag, err)
}

// takenInOrder returns the names that the claim has taken, in the order in which every
// writer locks them.
func (tx *postgresTransaction) takenInOrder() []int {
	names := tx.claim.names()
	return slices.SortedFunc(slices.Values(tx.plan.taken), func(i, j int) int { return names[i].compare(names[j]) })
}

// recordName returns the statement that writes the record of the claim's i-th name.
func (tx *postgresTransaction) recordName(i int, outcome map[ScopedKey][]any) (sql string, args []any) {
	c, won, name := tx.claim, tx.plan.record, tx.claim.names()[i]
	args = append(ownerArgs(name, c.Owner), won.Fingerprint[:], c.Hold, interval(c.TTL))
	args = append(args, outcome[name]...)
	args = append(args, won.Attempt, digestArg(c.aliasOf(i)), originArg(won.Origin, name))
	if row := &tx.rows[i]; row.found {
		return tx.store.sql.overwrite, append(args, row.owner)
	}
	return tx.store.sql.record, args
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
	case step == stepRecord && (server.Code == codeUniqueViolation || isNotAsItStood(err) || isConflict(err)):
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
	name := c.names()[tx.plan.taken[0]] // one stands for all
	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	s.queueLock(&b, []ScopedKey{name}, &over)
	b.Queue(s.sql.settled, append(ownerArgs(name, c.Owner), statusCompleted)...).Query(func(rows pgx.Rows) error {
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
	defer tx.store.txs.leave(tx.plan.record.Keys)
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
