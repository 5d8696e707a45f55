package idempotency

import "strings"

// postgresSQL holds the statements of a PostgresStore. Parameters 1 to 6 are the
// key's components, 7 is the owner; what follows is each statement's own.
type postgresSQL struct {
	table         string
	claim         string
	takeOver      string
	claimName     string
	takeName      string
	complete      string
	release       string
	extend        string
	settled       string
	look          string
	record        string
	overwrite     string
	deleteExpired string
}

func newPostgresSQL(table string) postgresSQL {
	r := strings.NewReplacer(
		"{table}", table,
		"{key}", "scope_version = $1 AND tenant_id = $2 AND principal_id = $3 AND route = $4 AND ns = $5 AND idem_key = $6",
		"{expired}", expiredSQL,
	)
	return postgresSQL{
		table:         table,
		claim:         r.Replace(claimSQL),
		takeOver:      r.Replace(takeOverSQL),
		claimName:     r.Replace(claimNameSQL),
		takeName:      orFail(r.Replace(takeNameSQL)),
		complete:      r.Replace(completeSQL),
		release:       r.Replace(releaseSQL),
		extend:        r.Replace(extendSQL),
		settled:       r.Replace(settledSQL),
		look:          r.Replace(lookSQL),
		record:        r.Replace(recordSQL),
		overwrite:     orFail(r.Replace(overwriteSQL)),
		deleteExpired: r.Replace(deleteExpiredSQL),
	}
}

// expiredSQL is the condition that a record is as good as none (S29).
const expiredSQL = `(expires_at <= now() AND (status <> 'in_progress' OR NOT held AND lease_expires_at <= now()))`

// staleSQL is the condition that a claim which holds, or not, as $9 says, may take a
// record over whose fingerprint it has.
const staleSQL = `(status = 'released' OR status = 'in_progress' AND NOT held AND NOT $9::boolean AND lease_expires_at <= now())`

// freeSQL is the condition that a claim with the fingerprint $8 may take a record over.
const freeSQL = `({expired} OR fingerprint = $8 AND ` + staleSQL + `)`

// attemptSQL is the latest attempt of an operation: none if it is forgotten.
const attemptSQL = `CASE WHEN {expired} THEN 0 ELSE attempt END`

// standingSQL is a record as it stands towards a claim.
const standingSQL = `owner, status, ` + freeSQL + `, fingerprint, ` + attemptSQL + `,
	(date_part('epoch', lease_expires_at - now()) * 1000000)::bigint,
	response_code, response_headers, response_trailers, response_body, not_replayable`

// claimSQL inserts a record, or else reads the one that stands there. An INSERT
// that updates on conflict would be one statement, too, but lock and write the
// record, and the log, on each replay.
//
// It returns no row if a rival's record was committed after the statement began.
const claimSQL = `WITH claimed AS (
	INSERT INTO {table} (scope_version, tenant_id, principal_id, route, ns, idem_key, owner, fingerprint, held,
		status, attempt, lease_expires_at, created_at, expires_at)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9,
		'in_progress', 1, now() + $10::interval, now(), now() + $11::interval)
	ON CONFLICT DO NOTHING
	RETURNING owner)
SELECT owner, 'in_progress', false, NULL::bytea, 1, 0::bigint,
	NULL::integer, NULL::bytea, NULL::bytea, NULL::bytea, false
FROM claimed
UNION ALL
SELECT ` + standingSQL + ` FROM {table} WHERE {key}`

// takeOverSQL claims a record that was free under the owner $12. The condition is
// asked again: it holds for the record that is updated, not the one that was read.
const takeOverSQL = `UPDATE {table} SET owner = $7, fingerprint = $8, held = $9, status = 'in_progress',
	attempt = ` + attemptSQL + ` + 1,
	created_at = CASE WHEN {expired} THEN now() ELSE created_at END,
	alias_of = NULL,
	origin = CASE WHEN {expired} THEN NULL ELSE origin END,
	lease_expires_at = now() + $10::interval, expires_at = now() + $11::interval,
	` + noResponseSQL + `
WHERE {key} AND owner = $12 AND ` + freeSQL + `
RETURNING attempt, origin`

const noResponseSQL = `response_code = NULL, response_headers = NULL, response_trailers = NULL, response_body = NULL,
	not_replayable = false`

// What a claim with aliases does to each of the names that it takes, in one transaction:
// each statement fails if the name does not stand as it was read.
const (
	claimNameSQL = `INSERT INTO {table} (scope_version, tenant_id, principal_id, route, ns, idem_key, owner, fingerprint, held,
	status, attempt, lease_expires_at, created_at, expires_at, alias_of, origin)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9,
	'in_progress', $10, now() + $11::interval, now(), now() + $12::interval, $13, $14)`

	// takeNameSQL takes over a record that stood under the owner $15: with the owner, its
	// fingerprint is another one.
	takeNameSQL = `UPDATE {table} SET owner = $7, fingerprint = $8, held = $9, status = 'in_progress', attempt = $10,
	created_at = CASE WHEN {expired} THEN now() ELSE created_at END,
	lease_expires_at = now() + $11::interval, expires_at = now() + $12::interval, alias_of = $13, origin = $14,
	` + noResponseSQL + `
WHERE {key} AND owner = $15 AND ({expired} OR ` + staleSQL + `)`
)

// orFail makes a statement that changes nothing fail, and with it the transaction that
// it is a part of: what the server cannot read as a number is what it says then.
func orFail(sql string) string {
	return `WITH changed AS (` + sql + ` RETURNING 1)
SELECT (CASE count(*) WHEN 1 THEN '1' ELSE 'idempotency: not as it stood' END)::integer FROM changed`
}

// The statements of an owner do not change expires_at, which has an index.
const (
	ownedSQL = `WHERE {key} AND owner = $7 AND status = 'in_progress'`

	completeSQL = `UPDATE {table} SET status = 'completed', response_code = $8, response_headers = $9,
	response_trailers = $10, response_body = $11, not_replayable = $12
` + ownedSQL

	releaseSQL = `UPDATE {table} SET status = 'released' ` + ownedSQL

	// extendSQL reads the clock when it has the record, not when it began: of two
	// renewals, the older one may have waited and be the last to write. One that
	// waited for an end of a lease that is held comes too late.
	extendSQL = `UPDATE {table} SET lease_expires_at = clock_timestamp() + $8::interval ` + ownedSQL + `
	AND (NOT held OR $8::interval = '0' OR lease_expires_at > clock_timestamp())`

	// settledSQL finds what an owner has settled before, as $8.
	settledSQL = `SELECT FROM {table} WHERE {key} AND owner = $7 AND status = $8`
)

// What an operation in a transaction does with its record: it looks at it at first,
// and writes it at the end, as the record of a completed operation (S38). A claim with
// aliases looks first, too.
const (
	// lookSQL has no owner to ask for, but its parameter.
	lookSQL = `SELECT ` + standingSQL + `, held, alias_of, origin
FROM {table} WHERE {key} AND $7::uuid IS NOT NULL`

	// recordSQL fails where a record stands: what the handler wrote must not be
	// committed then.
	recordSQL = `INSERT INTO {table} (scope_version, tenant_id, principal_id, route, ns, idem_key, owner, fingerprint, held,
	status, lease_expires_at, created_at, expires_at,
	response_code, response_headers, response_trailers, response_body, not_replayable, attempt, alias_of, origin)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9,
	'completed', now(), now(), now() + $10::interval, $11, $12, $13, $14, $15, $16, $17, $18)`

	// overwriteSQL does it where the record that stood there was free, under the owner
	// $19, and changes nothing unless it still is.
	overwriteSQL = `UPDATE {table} SET owner = $7, fingerprint = $8, held = $9, status = 'completed',
	created_at = CASE WHEN {expired} THEN now() ELSE created_at END,
	lease_expires_at = now(), expires_at = now() + $10::interval,
	response_code = $11, response_headers = $12, response_trailers = $13, response_body = $14, not_replayable = $15,
	attempt = $16, alias_of = $17, origin = $18
WHERE {key} AND owner = $19 AND ({expired} OR ` + staleSQL + `)`
)

// deleteExpiredSQL passes over the records that a claim is taking over.
const deleteExpiredSQL = `DELETE FROM {table} WHERE ctid = ANY (ARRAY (
	SELECT ctid FROM {table} WHERE {expired} ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))`
