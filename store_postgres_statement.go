package idempotency

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
)

// A statement is one SQL statement about the record under one key. It may be sent
// again: what it read before is then overwritten.
type statement struct {
	key     ScopedKey
	sql     string
	args    []any
	ofClaim bool                 // a part of a claim
	read    func(pgx.Rows) error // takes the rows of the answer; nil if there are none
	touched int64                // how many rows it returned or changed, once answered
}

// send sends the statement by itself and reads the answer.
func (st *statement) send(ctx context.Context, db postgresQuerier) error {
	rows, err := db.Query(ctx, st.sql, st.args...)
	if err != nil {
		return err
	}
	return st.receive(rows)
}

// sendTogether sends statements about different keys as one transaction, in one round
// trip, and reads their answers. They count once it returns nil: only then is the
// transaction committed. Their order is that of the keys, so that no two transactions
// wait for each other.
func sendTogether(ctx context.Context, db PostgresDB, statements []*statement) error {
	slices.SortFunc(statements, func(a, b *statement) int { return a.key.compare(b.key) })
	var b pgx.Batch
	for _, st := range statements {
		b.Queue(st.sql, st.args...)
	}
	results := db.SendBatch(ctx, &b)
	for _, st := range statements {
		rows, err := results.Query()
		if err == nil {
			err = st.receive(rows)
		}
		if err != nil {
			_ = results.Close()
			return err
		}
	}
	return results.Close()
}

// receive reads the answer.
func (st *statement) receive(rows pgx.Rows) error {
	defer rows.Close()
	if st.read != nil {
		if err := st.read(rows); err != nil {
			return err
		}
	}
	rows.Close()
	st.touched = rows.CommandTag().RowsAffected()
	return rows.Err()
}

// size is about how many bytes the statement is when it is sent.
func (st *statement) size() int {
	n := len(st.sql)
	for _, arg := range st.args {
		switch v := arg.(type) {
		case string:
			n += len(v)
		case []byte:
			n += len(v)
		}
	}
	return n
}
