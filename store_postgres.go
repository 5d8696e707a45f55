package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// A PostgresDB is what a [PostgresStore] needs of a connection pool: a
// *pgxpool.Pool is one. It must be safe for concurrent use and give each call a
// connection that is in no transaction, so a single connection or a transaction
// will not do.
//
// Every query execution mode of pgx works, and so does a pooler in transaction
// mode between the two: the store keeps no state in a session, and holds no
// connection while a handler runs (S37), but for [Config].Transactional. That needs
// a *pgxpool.Pool, or what embeds one.
type PostgresDB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	Begin(ctx context.Context) (pgx.Tx, error)
}

var (
	_ AliasStore         = (*PostgresStore)(nil)
	_ TransactionalStore = (*PostgresStore)(nil)
	_ ExpiredDeleter     = (*PostgresStore)(nil)
	_ ConfigChecker      = (*PostgresStore)(nil)
)

// A PostgresStore is a [Store] in a table of PostgreSQL 14 or later, for any
// number of processes. [Migrate] makes the table.
//
// A claim of a new key is one round trip and one commit, and so is the settlement
// of its outcome; taking over a record takes one round trip more. A claim that
// meets a record which is not free (a replay, a request in flight, another
// payload) is one round trip that writes nothing (S36). Every time is the
// database's (S28).
//
// Under load it does better than that, by group commit: calls that come while others
// are on their way wait, and travel together, as one transaction in one round trip,
// on at most two connections. What they return counts, as ever, only once it is
// committed. Claims of one key at the same time share one. A call that meets no
// other is sent at once, by its own goroutine. See [PostgresConfig].DisableBatching.
//
// A claim with aliases, and what is then done with their records, travels by itself, as
// one transaction: the claim takes two round trips, but one where it does not win.
//
// It is a [TransactionalStore] as well: see [Config].Transactional and [PostgresTx].
//
// It has goroutines only while statements are on their way, which may be a moment
// longer than their callers wait; [PostgresStore.Close] waits for them. Expired
// records stay until [PostgresStore.DeleteExpired] is called. It is safe for
// concurrent use. Make one with [NewPostgresStore] or [NewPostgresStoreWith]; the
// zero value is not usable.
type PostgresStore struct {
	db      PostgresDB
	sql     postgresSQL
	batcher *batcher // nil: each statement is sent by itself, by its caller
	flights claimFlights
	txs     *transactions // nil: db lends no connections
	closed  atomic.Bool
	faults  []error // of its configuration; every method returns them
}

// NewPostgresStore returns a store with the defaults of [PostgresConfig].
func NewPostgresStore(db PostgresDB) *PostgresStore {
	return NewPostgresStoreWith(db, PostgresConfig{})
}

// NewPostgresStoreWith returns a store. What is wrong with db or cfg is reported
// by [PostgresStore.CheckConfig], which [New] calls, and by every other method.
func NewPostgresStoreWith(db PostgresDB, cfg PostgresConfig) *PostgresStore {
	cfg = cfg.withDefaults()
	s := &PostgresStore{db: db, sql: newPostgresSQL(cfg.table()), faults: cfg.validate(db)}
	if !cfg.DisableBatching {
		s.batcher = newBatcher(db)
	}
	if lender, ok := db.(postgresLender); ok && len(s.faults) == 0 {
		s.txs = newTransactions(lender, cfg)
	}
	return s
}

// CheckConfig implements [ConfigChecker].
func (s *PostgresStore) CheckConfig() error { return errors.Join(s.faults...) }

// Close refuses claims from now on, and waits until all that was sent is answered, but
// not for open transactions: those end with their handlers. It returns ctx's error if
// ctx ends first, and may be called again. What ends an operation (Complete, Release,
// Extend, the end of a transaction) is not refused. Call it after
// [Middleware.Shutdown] and before the pool is closed; a store that is never closed
// leaves nothing behind either.
func (s *PostgresStore) Close(ctx context.Context) error {
	s.closed.Store(true)
	if s.batcher == nil {
		return nil
	}
	if err := s.batcher.drain(ctx); err != nil {
		return postgresError("close", err)
	}
	return nil
}

// errStoreClosed is the error of a claim after Close.
var errStoreClosed = errors.New("store is closed")

// maxTries bounds one call. Each try that does not decide comes from another
// process that was faster, or from a connection that broke; a pool may hold many
// such after a failover.
const maxTries = 20

// Claim implements [Store]. Where a rival was faster, or the connection broke,
// it looks again, with the same owner, until it knows how the record stands. An
// outage is [ErrNotClaimed] unless a statement was sent whose answer did not come.
// So is a claim that finds thousands of others waiting for the database.
func (s *PostgresStore) Claim(ctx context.Context, c Claim) (Record, error) {
	if err := errors.Join(c.Validate(), s.CheckConfig()); err != nil {
		return Record{}, err
	}
	if s.closed.Load() {
		return Record{}, postgresError("claim", notClaimed(errStoreClosed))
	}
	switch {
	case len(c.Aliases) > 0:
		return s.claim(ctx, c, s.tryClaimAll)
	case s.batcher == nil:
		return s.claimKey(ctx, c)
	}
	return s.flights.claim(ctx, c, s.claimKey)
}

// claimKey makes a claim without aliases.
func (s *PostgresStore) claimKey(ctx context.Context, c Claim) (Record, error) {
	args := claimArgs(c)
	return s.claim(ctx, c, func(ctx context.Context, c Claim) (Record, error) { return s.tryClaim(ctx, c, args) })
}

// claim tries until it is known how the claim stands.
func (s *PostgresStore) claim(ctx context.Context, c Claim, try func(context.Context, Claim) (Record, error)) (Record, error) {
	var err error
	inDoubt := false
	for range maxTries {
		var rec Record
		rec, err = try(ctx, c)
		if err == nil {
			return rec, nil
		}
		inDoubt = inDoubt || !isWithoutEffect(err)
		if !isTransient(err) || ctx.Err() != nil {
			break
		}
	}
	if !inDoubt {
		err = notClaimed(err)
	}
	return Record{}, postgresError("claim", err)
}

func notClaimed(err error) error { return fmt.Errorf("%w: %w", ErrNotClaimed, err) }

// errOvertaken reports that another claim changed the record between two looks
// at it.
var errOvertaken = errors.New("overtaken by another claim")

// tryClaim makes one attempt at a claim: it takes a key without a record or reads
// the record, and takes that over if it is free.
func (s *PostgresStore) tryClaim(ctx context.Context, c Claim, args []any) (Record, error) {
	row, err := s.queryClaim(ctx, c, args)
	switch {
	case err != nil:
		return Record{}, err
	case row.owner.Bytes == c.Owner && row.status == statusInProgress: // now, or by a try whose answer was lost
		return s.own(ctx, c, row)
	case row.free:
		return s.takeOver(ctx, c, append(slices.Clip(args), row.owner))
	}
	return row.record()
}

// own returns what a claim has won. Only a record that it has taken over may have an
// origin, which is known to whoever did; a try whose answer was lost has to look.
func (s *PostgresStore) own(ctx context.Context, c Claim, row claimRow) (Record, error) {
	rec := Record{State: StateClaimed, Fingerprint: c.Fingerprint, Attempt: row.attempt}
	if row.attempt <= 1 {
		return rec, nil
	}
	_, met, err := s.lookAll(ctx, c)
	if err == nil {
		rec.Origin = met[0].origin
	}
	return rec, err
}

// queryClaim sends the claim and returns the row that stands there. There is none
// where a rival committed after the statement had begun: its row stops the
// insertion, but is not visible yet. A server may also return two (Citus, where
// the reading half sees what the inserting half did): the row of the claim's own
// owner decides.
func (s *PostgresStore) queryClaim(ctx context.Context, c Claim, args []any) (claimRow, error) {
	var decisive claimRow
	var seen bool
	err := s.run(ctx, &statement{key: c.Key, sql: s.sql.claim, args: args, ofClaim: true, read: func(rows pgx.Rows) error {
		for seen = false; rows.Next(); seen = true {
			var row claimRow
			if err := row.scan(rows); err != nil {
				return err
			}
			if !seen || row.owner.Bytes == c.Owner {
				decisive = row
			}
		}
		return rows.Err()
	}})
	switch {
	case err != nil:
		return claimRow{}, err
	case !seen:
		return claimRow{}, errOvertaken
	}
	return decisive, nil
}

// takeOver claims a record that was free when it was read, unless its owner or
// its state has changed since.
func (s *PostgresStore) takeOver(ctx context.Context, c Claim, args []any) (Record, error) {
	rec := Record{State: StateClaimed, Fingerprint: c.Fingerprint}
	var origin []byte
	st := statement{key: c.Key, sql: s.sql.takeOver, args: args, ofClaim: true, read: func(rows pgx.Rows) error {
		if !rows.Next() {
			return rows.Err()
		}
		return rows.Scan(&rec.Attempt, &origin)
	}}
	switch err := s.run(ctx, &st); {
	case err != nil:
		return Record{}, err
	case st.touched == 0:
		return Record{}, errOvertaken
	}
	return rec, scanDigest(origin, &rec.Origin)
}

// run sends one statement about one key, alone or with others.
func (s *PostgresStore) run(ctx context.Context, st *statement) error {
	if s.batcher == nil {
		return st.send(ctx, s.db)
	}
	return s.batcher.run(ctx, st)
}

// Complete implements [Store].
func (s *PostgresStore) Complete(ctx context.Context, l Lease, r Response) error {
	if err := errors.Join(l.Validate(), s.CheckConfig()); err != nil {
		return err
	}
	args, err := responseArgs(r)
	if err != nil {
		return err
	}
	c := change{name: "complete", sql: s.sql.complete, to: statusCompleted, args: args, withhold: l.Withhold}
	if len(l.Withhold) > 0 {
		if c.withheld, err = responseArgs(r.withoutAnswer()); err != nil {
			return err
		}
	}
	return s.settle(ctx, l, c)
}

// Release implements [Store].
func (s *PostgresStore) Release(ctx context.Context, l Lease) error {
	if err := errors.Join(l.Validate(), s.CheckConfig()); err != nil {
		return err
	}
	return s.settle(ctx, l, change{name: "release", sql: s.sql.release, to: statusReleased})
}

// Extend implements [Store].
func (s *PostgresStore) Extend(ctx context.Context, l Lease) error {
	if err := errors.Join(l.Validate(), s.CheckConfig()); err != nil {
		return err
	}
	return s.settle(ctx, l, change{name: "extend", sql: s.sql.extend, args: []any{interval(l.Duration)}})
}

// DeleteExpired implements [ExpiredDeleter]. A limit of zero or less deletes
// nothing. Records that a claim is at are left to it.
func (s *PostgresStore) DeleteExpired(ctx context.Context, limit int) (int, error) {
	if err := s.CheckConfig(); err != nil || limit <= 0 {
		return 0, err
	}
	var err error
	for range maxTries {
		var tag pgconn.CommandTag
		tag, err = s.db.Exec(ctx, s.sql.deleteExpired, int64(limit))
		if err == nil {
			return int(tag.RowsAffected()), nil
		}
		if !isConflict(err) || ctx.Err() != nil {
			break
		}
	}
	return 0, postgresError("delete expired records", err)
}

// A change is what the owner of a lease does to its records.
type change struct {
	name string
	sql  string
	args []any  // beside key and owner
	to   string // status that says that it is done already; none if empty

	withhold []ScopedKey // keys that have other args
	withheld []any
}

// statement returns the change of one record, as a statement.
func (c change) statement(k ScopedKey, owner uuid.UUID) *statement {
	args := c.args
	if slices.Contains(c.withhold, k) {
		args = c.withheld
	}
	return &statement{key: k, sql: c.sql, args: append(ownerArgs(k, owner), args...)}
}

// settle makes a change to all records of a lease, or to none.
func (s *PostgresStore) settle(ctx context.Context, l Lease, c change) error {
	keys := l.Keys
	var done bool
	var err error
	if len(keys) == 1 {
		st := c.statement(keys[0], l.Owner)
		err = s.run(ctx, st)
		done = err == nil && st.touched > 0
	} else {
		keys = slices.Compact(slices.SortedFunc(slices.Values(keys), ScopedKey.compare))
		done, err = s.changeAll(ctx, keys, l.Owner, c)
	}
	switch {
	case err != nil:
		return postgresError(c.name, err)
	case done:
		return nil
	}
	return s.checkDone(ctx, keys, l.Owner, c)
}

// checkDone tells a change that the owner has made before from one that it may
// not make any more. What it finds stays true while the record is not expired.
func (s *PostgresStore) checkDone(ctx context.Context, keys []ScopedKey, owner uuid.UUID, c change) error {
	if c.to == "" {
		return ErrLeaseLost
	}
	for _, k := range keys {
		st := statement{key: k, sql: s.sql.settled, args: append(ownerArgs(k, owner), c.to)}
		if err := s.run(ctx, &st); err != nil {
			return postgresError(c.name, err)
		}
		if st.touched == 0 {
			return ErrLeaseLost
		}
	}
	return nil
}
