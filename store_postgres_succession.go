package idempotency

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// successionsMaxAge is how old what a process knows of successions may be.
	successionsMaxAge = 5 * time.Second

	// SuccessionDelay is how long after its declaration a succession begins, and after it
	// was ended it ends: every process knows by then (10 seconds).
	SuccessionDelay = 2 * successionsMaxAge
)

// PostgresSuccessions are the successions of identities that are kept in a table beside
// that of a [PostgresStore], which [Migrate] makes, too: "idempotency_successors", or,
// where the other one has a name of its own, that name and "_successors" behind it.
// [PostgresSuccessions.Predecessors] is for [Config].Predecessors.
//
// What they say does not chain: who succeeds B, which has succeeded A, has A's operations
// only if that was declared as well. How to move an identity while it is in use is told
// in docs/scope-changes.md.
//
// They are safe for concurrent use, and start no goroutine. Make them with
// [NewPostgresSuccessions].
type PostgresSuccessions struct {
	db     PostgresDB
	sql    successionSQL
	faults []error
	now    func() time.Time

	known   atomic.Pointer[knownSuccessions]
	loading chan struct{} // held by the one who loads
}

type successionSQL struct{ lock, all, insert, end, load string }

// NewPostgresSuccessions returns the successions beside the table that cfg names. What is
// wrong with db or cfg is reported by every method.
func NewPostgresSuccessions(db PostgresDB, cfg PostgresConfig) *PostgresSuccessions {
	cfg = cfg.withDefaults()
	r := strings.NewReplacer("{table}", cfg.successorTable())
	return &PostgresSuccessions{
		db: db, faults: cfg.validate(db), now: now, loading: make(chan struct{}, 1),
		sql: successionSQL{
			lock: r.Replace(lockSuccessionsSQL), all: r.Replace(allSuccessionsSQL), insert: r.Replace(insertSuccessionSQL),
			end: r.Replace(endSuccessionSQL), load: r.Replace(loadSuccessionsSQL),
		},
	}
}

const (
	// lockSuccessionsSQL lets others read: who closes a cycle must see the rest of it.
	lockSuccessionsSQL = `LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE`

	allSuccessionsSQL = `SELECT old_tenant, old_principal, new_tenant, new_principal, begins_at, ends_at FROM {table}
ORDER BY begins_at, old_tenant, old_principal, new_tenant, new_principal`

	// insertSuccessionSQL renews one that has not ended: it goes on, or begins as if it were
	// declared now.
	insertSuccessionSQL = `INSERT INTO {table} AS s (old_tenant, old_principal, new_tenant, new_principal, begins_at, ends_at)
VALUES ($1, $2, $3, $4, now() + $5::interval, now() + $5::interval + $6::interval)
ON CONFLICT (old_tenant, old_principal, new_tenant, new_principal) DO UPDATE SET
	begins_at = CASE WHEN s.begins_at <= now() AND s.ends_at >= excluded.begins_at THEN s.begins_at ELSE excluded.begins_at END,
	ends_at = excluded.ends_at
RETURNING begins_at, ends_at`

	// endSuccessionSQL ends one, but not before every process knows.
	endSuccessionSQL = `UPDATE {table} SET ends_at = least(ends_at, now() + $5::interval)
WHERE old_tenant = $1 AND old_principal = $2 AND new_tenant = $3 AND new_principal = $4 AND ends_at > now()
RETURNING begins_at, ends_at`

	// loadSuccessionsSQL counts from now on, so that a process needs no clock but its own.
	loadSuccessionsSQL = `SELECT old_tenant, old_principal, new_tenant, new_principal,
	(date_part('epoch', begins_at - now()) * 1000000)::bigint, (date_part('epoch', ends_at - now()) * 1000000)::bigint
FROM {table} WHERE ends_at > now()`
)

// Declare makes the operations of one identity those of another as well, from
// [SuccessionDelay] after now on, for as long as lasting says: for its TTL at least after
// the last request of the old identity. Until it begins, the new identity must not send
// retries of the old one's. Declared again, it lasts from now on as long as lasting says.
//
// The error wraps [ErrBadSuccession], [ErrSuccessionCycle], or is the database's: then it
// is not known whether it was declared, and is to be declared again.
func (s *PostgresSuccessions) Declare(ctx context.Context, from, to Identity, lasting time.Duration) (Succession, error) {
	declared := Succession{Old: from, New: to}
	if err := errors.Join(s.faults...); err != nil {
		return Succession{}, err
	}
	if err := declared.validate(); err != nil {
		return Succession{}, err
	}
	if lasting <= 0 {
		return Succession{}, errSuccessionDuration
	}
	// What is committed later than this would not be known to all when it begins.
	ctx, cancel := context.WithTimeout(ctx, successionsMaxAge)
	defer cancel()
	err := s.declare(ctx, &declared, lasting)
	switch {
	case errors.Is(err, ErrSuccessionCycle):
		return Succession{}, err
	case err != nil:
		return Succession{}, postgresError("declare a succession", err)
	}
	return declared, nil
}

func (s *PostgresSuccessions) declare(ctx context.Context, declared *Succession, lasting time.Duration) error {
	tx, err := s.db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after the commit
	if _, err := tx.Exec(ctx, s.sql.lock); err != nil {
		return err
	}
	all, err := s.list(ctx, tx)
	if err != nil {
		return err
	}
	now, err := queryValue[time.Time](ctx, tx, "SELECT now()")
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(other Succession) bool { return !other.Ends.After(now) })
	if declared.closesCycle(all) {
		return ErrSuccessionCycle
	}
	args := append(declared.args(), interval(SuccessionDelay), interval(lasting))
	if err := scanOne(ctx, tx, s.sql.insert, args, &declared.Begins, &declared.Ends); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// End ends a succession, [SuccessionDelay] after now at the earliest. Retries by the new
// identity of what only the old one has done run from then on. The error wraps
// [ErrNoSuccession], or is the database's.
func (s *PostgresSuccessions) End(ctx context.Context, from, to Identity) (Succession, error) {
	if err := errors.Join(s.faults...); err != nil {
		return Succession{}, err
	}
	ended := Succession{Old: from, New: to}
	err := scanOne(ctx, s.db, s.sql.end, append(ended.args(), interval(SuccessionDelay)), &ended.Begins, &ended.Ends)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Succession{}, ErrNoSuccession
	case err != nil:
		return Succession{}, postgresError("end a succession", err)
	}
	return ended, nil
}

// List returns all successions that were declared, those that have ended among them, in
// the order of their begin.
func (s *PostgresSuccessions) List(ctx context.Context) ([]Succession, error) {
	if err := errors.Join(s.faults...); err != nil {
		return nil, err
	}
	all, err := s.list(ctx, s.db)
	if err != nil {
		return nil, postgresError("list successions", err)
	}
	return all, nil
}

func (s *PostgresSuccessions) list(ctx context.Context, db postgresQuerier) ([]Succession, error) {
	rows, err := db.Query(ctx, s.sql.all)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Succession, err error) {
		err = row.Scan(&s.Old.Tenant, &s.Old.Principal, &s.New.Tenant, &s.New.Principal, &s.Begins, &s.Ends)
		return s, err
	})
}

// Predecessors is a [PredecessorsFunc]. It asks the database once in a few seconds, and
// returns an error where what it knows is older than that and the database does not
// answer.
func (s *PostgresSuccessions) Predecessors(ctx context.Context, today Identity) ([]Identity, error) {
	known, err := s.current(ctx)
	if err != nil {
		return nil, err
	}
	return known.predecessors(today, s.now()), nil
}

// current returns what is known, if that is young enough, or loads it. One loads at a
// time; the others wait for that.
func (s *PostgresSuccessions) current(ctx context.Context) (*knownSuccessions, error) {
	if known := s.known.Load(); known.isCurrent(s.now()) {
		return known, nil
	}
	select {
	case s.loading <- struct{}{}:
	case <-ctx.Done():
		return nil, postgresError("load successions", context.Cause(ctx))
	}
	defer func() { <-s.loading }()
	if known := s.known.Load(); known.isCurrent(s.now()) {
		return known, nil
	}
	known, err := s.load(ctx)
	if err != nil {
		return nil, postgresError("load successions", err)
	}
	s.known.Store(known)
	return known, nil
}

func (s *PostgresSuccessions) load(ctx context.Context) (*knownSuccessions, error) {
	if err := errors.Join(s.faults...); err != nil {
		return nil, err
	}
	known := &knownSuccessions{asked: s.now(), byTenant: make(map[string][]Succession)}
	rows, err := s.db.Query(ctx, s.sql.load)
	if err != nil {
		return nil, err
	}
	var one Succession
	var begins, ends int64
	_, err = pgx.ForEachRow(rows,
		[]any{&one.Old.Tenant, &one.Old.Principal, &one.New.Tenant, &one.New.Principal, &begins, &ends}, func() error {
			one.Begins = known.asked.Add(time.Duration(begins) * time.Microsecond)
			one.Ends = known.asked.Add(time.Duration(ends) * time.Microsecond)
			known.byTenant[one.New.Tenant] = append(known.byTenant[one.New.Tenant], one)
			return nil
		})
	return known, err
}

// knownSuccessions are those that a process knows of. Their times are by its own clock.
type knownSuccessions struct {
	asked    time.Time
	byTenant map[string][]Succession // by new tenant
}

func (k *knownSuccessions) isCurrent(at time.Time) bool {
	return k != nil && at.Sub(k.asked) < successionsMaxAge
}

func (k *knownSuccessions) predecessors(today Identity, at time.Time) []Identity {
	var found []Identity
	for _, s := range k.byTenant[today.Tenant] {
		if id, ok := s.predecessor(today); ok && !at.Before(s.Begins) && at.Before(s.Ends) {
			found = append(found, id)
		}
	}
	return found
}

func (s *Succession) args() []any {
	return []any{s.Old.Tenant, s.Old.Principal, s.New.Tenant, s.New.Principal}
}

// scanOne scans the one row that a query returns.
func scanOne(ctx context.Context, db postgresQuerier, sql string, args []any, dest ...any) error {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	if !rows.Next() {
		return errors.Join(rows.Err(), pgx.ErrNoRows)
	}
	if err := rows.Scan(dest...); err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}
