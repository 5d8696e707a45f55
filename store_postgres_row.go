package idempotency

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Values of the column status. Whether a record is abandoned or expired is a
// question of the time.
const (
	statusInProgress = "in_progress"
	statusCompleted  = "completed"
	statusReleased   = "released"
)

// A claimRow is a record as the claim statement returns it.
type claimRow struct {
	owner       pgtype.UUID
	status      string
	free        bool // the claim may take it over
	fingerprint []byte
	attempt     int
	leaseLeft   int64 // microseconds; not positive once the lease has ended
	outcome     outcomeColumns
}

// outcomeColumns are what a completed record has beyond others.
type outcomeColumns struct {
	code          *int
	headers       []byte
	trailers      []byte
	body          []byte
	notReplayable bool
}

func (r *claimRow) scan(rows pgx.Rows) error { return rows.Scan(r.columns()...) }

func (r *claimRow) columns() []any {
	return []any{
		&r.owner, &r.status, &r.free, &r.fingerprint, &r.attempt, &r.leaseLeft,
		&r.outcome.code, &r.outcome.headers, &r.outcome.trailers, &r.outcome.body, &r.outcome.notReplayable,
	}
}

// A standingRow is a record as a look finds it.
type standingRow struct {
	claimRow
	found   bool
	held    bool
	aliasOf []byte
	origin  []byte
}

// read takes the answer to a look.
func (r *standingRow) read(rows pgx.Rows) error {
	*r = standingRow{}
	if !rows.Next() {
		return rows.Err()
	}
	r.found = true
	return rows.Scan(append(r.columns(), &r.held, &r.aliasOf, &r.origin)...)
}

// isExpired reports whether the record is as good as none.
func (r *standingRow) isExpired() bool { return r.attempt == 0 }

// standing returns r as one of several names that are judged together.
func (r *standingRow) standing() (s standing, err error) {
	if !r.found || r.isExpired() {
		return standing{}, nil
	}
	s.held = r.held
	s.record, err = r.record()
	return s, errors.Join(err, scanDigest(r.aliasOf, &s.aliasOf), scanDigest(r.origin, &s.origin))
}

// scanDigest takes a digest out of a column: none is the zero value.
func scanDigest(column []byte, d *KeyDigest) error {
	if n := len(column); n != 0 && n != len(d) {
		return fmt.Errorf("stored digest of %d bytes", n)
	}
	copy(d[:], column)
	return nil
}

// originArg is an origin as a parameter, for a record of that name.
func originArg(origin KeyDigest, name ScopedKey) []byte {
	if origin == name.Digest() {
		return nil
	}
	return digestArg(origin)
}

// digestArg is a digest as a parameter: the zero value is NULL.
func digestArg(d KeyDigest) []byte {
	if d == (KeyDigest{}) {
		return nil
	}
	return d[:]
}

// record returns r as it stands towards a claim that did not win.
func (r *claimRow) record() (Record, error) {
	rec := Record{Attempt: r.attempt}
	if len(r.fingerprint) != len(rec.Fingerprint) {
		return Record{}, fmt.Errorf("stored fingerprint of %d bytes", len(r.fingerprint))
	}
	copy(rec.Fingerprint[:], r.fingerprint)
	switch r.status {
	case statusCompleted:
		response, err := r.outcome.response()
		if err != nil {
			return Record{}, err
		}
		rec.State, rec.Response = StateCompleted, response
	case statusReleased:
		rec.State = StateReleased
	case statusInProgress:
		rec.State = StateAbandoned
		if r.leaseLeft > 0 {
			rec.State = StateInProgress
			rec.LeaseLeft = time.Duration(r.leaseLeft) * time.Microsecond
		}
	default:
		return Record{}, fmt.Errorf("stored status %q", r.status)
	}
	return rec, nil
}

func (o *outcomeColumns) response() (Response, error) {
	if o.code == nil {
		return Response{}, badResponse("no status code")
	}
	r := Response{Status: *o.code, Body: o.body, NotReplayable: o.notReplayable}
	err := errors.Join(decodeFields(o.headers, &r.Header, &r.AddedHeader), decodeFields(o.trailers, &r.Trailer))
	return r, err
}

// maxPostgresArgs is room for the parameters of any statement of the store.
const maxPostgresArgs = 20

func keyArgs(k ScopedKey) []any {
	return append(make([]any, 0, maxPostgresArgs), k.version, k.tenant, k.principal, k.route, k.namespace, k.key)
}

func ownerArgs(k ScopedKey, owner uuid.UUID) []any { return append(keyArgs(k), ownerArg(owner)) }

func claimArgs(c Claim) []any { return append(lookArgs(c.Key, c), interval(c.Lease), interval(c.TTL)) }

// lookArgs are the parameters of a look at the record that a claim would meet under
// one of its names.
func lookArgs(name ScopedKey, c Claim) []any {
	return append(ownerArgs(name, c.Owner), c.Fingerprint[:], c.Hold)
}

// responseArgs are the outcome's parameters of a statement that completes. What is
// empty is stored as NULL.
func responseArgs(r Response) ([]any, error) {
	headers, err := encodeFields(r.Header, r.AddedHeader)
	if err != nil {
		return nil, err
	}
	trailers, err := encodeFields(r.Trailer)
	if err != nil {
		return nil, err
	}
	body := r.Body
	if len(body) == 0 {
		body = nil
	}
	return []any{r.Status, headers, trailers, body, r.NotReplayable}, nil
}

// ownerArg is a UUID in the type that every mode of pgx can send.
func ownerArg(owner uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: owner, Valid: true} }

// interval is d as the database counts, in microseconds, rounded up: a lease is
// not shorter than its owner believes.
func interval(d time.Duration) pgtype.Interval {
	micros := int64(d / time.Microsecond)
	if d%time.Microsecond > 0 {
		micros++
	}
	return pgtype.Interval{Microseconds: micros, Valid: true}
}
