package idempotency

import (
	"context"

	"github.com/google/uuid"
)

// CheckAliases implements [AliasStore]: every PostgresStore can.
func (s *PostgresStore) CheckAliases() error { return nil }

// tryClaimAll makes one attempt at a claim that has aliases: it reads what stands under
// its names, and takes them, if they are to be taken, in one transaction. That fails
// where one of them does not stand as it was read.
func (s *PostgresStore) tryClaimAll(ctx context.Context, c Claim) (Record, error) {
	rows, met, err := s.lookAll(ctx, c)
	if err != nil {
		return Record{}, err
	}
	if won, isWon := wonBefore(c, rows, met); isWon {
		return won, nil
	}
	plan := c.plan(met)
	if len(plan.taken) == 0 {
		return plan.record, nil
	}
	statements := make([]*statement, len(plan.taken))
	for n, i := range plan.taken {
		statements[n] = s.takeName(c, i, &rows[i], plan.record)
	}
	err = s.runTogether(ctx, statements)
	if isNotAsItStood(err) {
		err = errOvertaken
	}
	return plan.record, err
}

// lookAll reads what stands under the names of a claim.
func (s *PostgresStore) lookAll(ctx context.Context, c Claim) (rows []standingRow, met []standing, err error) {
	names := c.names()
	rows = make([]standingRow, len(names))
	statements := make([]*statement, len(names))
	for i, name := range names {
		statements[i] = &statement{key: name, sql: s.sql.look, args: lookArgs(name, c), read: rows[i].read}
	}
	if len(statements) == 1 {
		statements[0].ofClaim = true
		err = s.run(ctx, statements[0])
	} else {
		err = s.runTogether(ctx, statements)
	}
	if err == nil {
		met, err = standings(rows)
	}
	return rows, met, err
}

// runTogether sends statements as one transaction, which no others join.
func (s *PostgresStore) runTogether(ctx context.Context, statements []*statement) error {
	if s.batcher != nil {
		s.batcher.beginApart()
		defer s.batcher.endApart()
	}
	return sendTogether(ctx, s.db, statements)
}

func standings(rows []standingRow) ([]standing, error) {
	met := make([]standing, len(rows))
	for i := range rows {
		var err error
		if met[i], err = rows[i].standing(); err != nil {
			return nil, err
		}
	}
	return met, nil
}

// wonBefore returns what the claim has won by a try whose answer was lost. Once its lease
// is over, it may have lost some of it again, and counts no more.
func wonBefore(c Claim, rows []standingRow, met []standing) (won Record, isWon bool) {
	for i, name := range c.names() {
		if met[i].record.State == StateInProgress && rows[i].owner.Bytes == c.Owner {
			won.State, won.Fingerprint, won.Attempt = StateClaimed, met[i].record.Fingerprint, met[i].record.Attempt
			won.Origin = met[i].originOf(name.Digest())
			won.Keys = append(won.Keys, name)
		}
	}
	return won, won.Keys != nil
}

// takeName returns the statement by which a claim takes its i-th name, as won says.
func (s *PostgresStore) takeName(c Claim, i int, row *standingRow, won Record) *statement {
	name := c.names()[i]
	st := &statement{key: name, sql: s.sql.claimName, args: append(ownerArgs(name, c.Owner),
		won.Fingerprint[:], c.Hold, won.Attempt, interval(c.Lease), interval(c.TTL),
		digestArg(c.aliasOf(i)), originArg(won.Origin, name))}
	if row.found {
		st.sql, st.args = s.sql.takeName, append(st.args, row.owner)
	}
	return st
}

// changeAll reports whether owner holds all records. If not, none is changed.
func (s *PostgresStore) changeAll(ctx context.Context, keys []ScopedKey, owner uuid.UUID, c change) (bool, error) {
	c.sql = orFail(c.sql)
	statements := make([]*statement, len(keys))
	for i, k := range keys {
		statements[i] = c.statement(k, owner)
	}
	err := s.runTogether(ctx, statements)
	if isNotAsItStood(err) {
		return false, nil
	}
	return err == nil, err
}
