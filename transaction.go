package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
)

// A TransactionalStore is a [Store] that can run an operation in a transaction of its
// database, so that what the handler writes there, the claim and the outcome are
// committed together, or none of them (S38). See [Config].Transactional.
type TransactionalStore interface {
	Store

	// CheckTransactional returns why this store cannot do it as it was made, as a
	// [*ConfigError]; nil if it can. [New] asks it.
	CheckTransactional() error

	// ClaimInTransaction is Claim, in a transaction that stays open for the handler.
	// Where the claim wins, the record comes with the transaction, which must be ended
	// by Commit or Rollback; until then nobody else sees anything of it, but a second
	// claim of the key. That meets, at once, a record in progress: one whose fingerprint
	// is zero, since it is not known while the transaction is open.
	//
	// After an error nothing was taken. It wraps [ErrNotClaimed], or [ErrInvalidClaim].
	ClaimInTransaction(ctx context.Context, c Claim) (Record, Transaction, error)
}

// A Transaction is an operation that runs in a database's transaction. It is used by
// one goroutine.
type Transaction interface {
	// Context returns the handler's context: parent, in which the handler finds the
	// transaction.
	Context(parent context.Context) context.Context

	// Commit stores r as the outcome of the operation and commits it, with all that the
	// handler wrote. Unless it returns nil, the answer must not leave. An error that
	// wraps
	//
	//   - [ErrBadResponse] says that the store cannot hold such an outcome, and that the
	//     transaction is open as before;
	//   - [ErrLeaseLost] says that another claim was faster: nothing was committed, and
	//     the record is to be looked at again;
	//   - [ErrCommitFailed] or [ErrNotCommitted] says that nothing was committed.
	//
	// Any other error leaves unknown what was committed.
	Commit(ctx context.Context, r Response) error

	// Rollback undoes everything. Whatever it returns, nothing of the transaction will
	// be committed.
	Rollback(ctx context.Context) error
}

// Errors of a [Transaction] that a caller must tell apart.
var (
	// ErrCommitFailed reports that the database refuses to commit what a handler wrote,
	// and would again: a deferred constraint, say.
	ErrCommitFailed = errors.New("idempotency: commit failed")
	// ErrNotCommitted reports that nothing was committed this time, as after a
	// serialization failure: a retry may well be.
	ErrNotCommitted = errors.New("idempotency: not committed")
)

// What a handler in a transaction cannot have.
var (
	// errFlushInTransaction is a flush: the answer would precede the commit.
	errFlushInTransaction = fmt.Errorf("%w: an answer cannot be flushed before its transaction is committed", http.ErrNotSupported)
	// errTooLargeForTransaction is an answer that cannot be held back until the commit.
	errTooLargeForTransaction = errors.New("idempotency: the answer of a transaction is larger than MaxResponseBytes")
	// errOuterGuard is a request whose outer guard, for the same key, runs it without one.
	errOuterGuard = errors.New("idempotency: an outer guard runs this key without a transaction")
)

// transactional returns store as one that runs operations in transactions.
func transactional(store Store) (TransactionalStore, error) {
	ts, ok := store.(TransactionalStore)
	if !ok {
		return nil, &ConfigError{Field: "Transactional", Reason: "is set, but the store has no transactions"}
	}
	return ts, ts.CheckTransactional()
}

// claimInTransaction makes one claim whose operation, if it wins, has a transaction.
// A won claim comes without its operation where its caller has left.
func (x *executor) claimInTransaction(ctx context.Context, c Claim) (Record, *operation, error) {
	detached := context.WithoutCancel(ctx)
	op := newOperation(detached, x, c, now())
	rec, tx, err := x.sendTransaction(detached, c)
	switch {
	case err != nil:
		x.fault(ctx, "claim", c.Key, err)
		return Record{}, nil, fmt.Errorf("idempotency: claim: %w", err)
	case tx == nil:
		return rec, nil, nil
	}
	op.tx = tx
	op.won(c, rec)
	if isOver(ctx) {
		op.undo() //nolint:contextcheck // an operation has a detached context of its own
		return rec, nil, nil
	}
	return rec, op, nil
}

func (x *executor) sendTransaction(detached context.Context, c Claim) (Record, Transaction, error) {
	var ctx callContext
	ctx.begin(detached, x.storeTimeout)
	defer ctx.end()
	return x.txStore.ClaimInTransaction(&ctx, c) //nolint:contextcheck // a callContext is a child of detached
}

// undo ends a transaction that no handler ran in.
func (op *operation) undo() { _, _ = op.settle(settlement{end: endRelease}) }

// conclude ends the operation's transaction. Unless the outcome was to be kept and is
// stored, everything is undone, and a retry runs (S38). An error comes with an outcome
// that was to be kept, and is not.
func (op *operation) conclude(ctx context.Context, s settlement) (Outcome, error) {
	if s.end != endKeep || s.refused != nil {
		if err := op.tx.Rollback(ctx); err != nil {
			op.x.fault(ctx, "rollback", op.exec.key, err)
		}
		if s.refused != nil {
			op.x.logger.LogAttrs(ctx, slog.LevelError, "idempotency: answer impossible in a transaction",
				slog.Any("execution", &op.exec), slog.Any("error", s.refused))
			return OutcomeReleased, fmt.Errorf("%w: %w", ErrCommitFailed, s.refused)
		}
		return OutcomeReleased, nil
	}
	err := op.tx.Commit(ctx, s.response)
	if errors.Is(err, ErrBadResponse) { // the operation is done all the same
		err = op.tx.Commit(ctx, s.response.withoutAnswer())
	}
	switch {
	case err == nil:
		return OutcomeStored, nil
	case errors.Is(err, ErrLeaseLost):
		op.reportLost(ctx, err)
		return OutcomeLost, err
	}
	op.x.fault(ctx, "commit", op.exec.key, err)
	if errors.Is(err, ErrCommitFailed) || errors.Is(err, ErrNotCommitted) {
		return OutcomeReleased, err
	}
	return OutcomeUnknown, err
}

// uncommitted returns what is answered in place of a response that was to be kept.
func uncommitted(err error) Code {
	if errors.Is(err, ErrCommitFailed) {
		return CodeCommitFailed
	}
	return CodeRetry
}

// lookAgain answers a request whose execution was undone, since another one was
// faster, from that one's record. Where there is none, lost says why it was undone.
func (x *exchange) lookAgain(lost error) {
	decided, rec, op, err := x.begin()
	switch {
	case err != nil:
		x.refuse(Problem{Code: CodeRetry}, err)
	case decided == verdictRun: // nobody was, but for its effect on what was read
		op.undo()
		x.log(slog.LevelWarn, "not committed", lost)
		x.refuse(Problem{Code: CodeRetry}, lost)
	default:
		x.follow(decided, rec, op)
	}
}

// passThrough runs the handler for an outer guard of the same key, which must have a
// transaction for it where this one has to see to that.
func (x *exchange) passThrough(outer *Execution) {
	if x.m.cfg.Transactional && !outer.inTransaction {
		x.log(slog.LevelError, "no transaction", errOuterGuard)
		x.refuse(Problem{Code: CodeCommitFailed}, errOuterGuard)
		return
	}
	x.next.ServeHTTP(x.w, x.r)
}
