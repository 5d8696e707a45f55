package main

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

const (
	lease = time.Hour // longer than any cell takes
	ttl   = 24 * time.Hour

	// route is that of the keys at the level of the store.
	route = "POST /v1/charges"
)

// The floors: the least that a service would do by itself. They have the same
// columns, and with them the same indexes, as the library.
const (
	insertSQL = `INSERT INTO floor_records (scope_version, tenant_id, principal_id, route, ns, idem_key, owner, fingerprint,
	held, status, attempt, lease_expires_at, created_at, expires_at)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, false, 'in_progress', 1, now() + $9::interval, now(), now() + $10::interval)`

	updateSQL = `UPDATE floor_records SET status = 'completed', response_code = $7, response_headers = $8, response_body = $9
	WHERE scope_version = $1 AND tenant_id = $2 AND principal_id = $3 AND route = $4 AND ns = $5 AND idem_key = $6`

	selectSQL = `SELECT owner, status, fingerprint, attempt, lease_expires_at, response_code, response_headers, response_trailers,
	response_body, not_replayable FROM seeded_records
	WHERE scope_version = $1 AND tenant_id = $2 AND principal_id = $3 AND route = $4 AND ns = $5 AND idem_key = $6`
)

func (s *site) firstArms(c cell) []arm {
	response := responseOf(c.Bytes)
	arms := []arm{{kind: armLibrary, pool: libraryPool, do: func(ctx context.Context, _, _ int) error {
		return first(ctx, s.first, response)
	}}}
	for _, n := range c.pools() {
		arms = append(arms, arm{kind: armFloor, pool: n, do: func(ctx context.Context, _, _ int) error {
			return plainFirst(ctx, s.pools[n], response)
		}})
	}
	return arms
}

// aliasArms compare an operation with two names with what it has without.
func (s *site) aliasArms(c cell) []arm {
	response := responseOf(c.Bytes)
	arms := s.firstArms(c)
	arms[0].do = func(ctx context.Context, _, _ int) error { return firstOfTwoNames(ctx, s.first, response) }
	return arms
}

// firstOfTwoNames is first for an operation that may be recorded under another scope.
func firstOfTwoNames(ctx context.Context, store idempotency.Store, r idempotency.Response) error {
	c, err := claimOf(uuid.NewString())
	if err != nil {
		return err
	}
	earlier := scope(route)
	earlier.Version = "v0"
	alias, err := idempotency.ClientKey(earlier, c.Key.Key())
	if err != nil {
		return err
	}
	c.Aliases = []idempotency.Alias{{Key: alias, Kind: idempotency.AliasRenamed}}
	record, err := store.Claim(ctx, c)
	if err != nil {
		return err
	}
	if record.State != idempotency.StateClaimed || len(record.Keys) != 2 {
		return unexpected(record)
	}
	return store.Complete(ctx, idempotency.Lease{Keys: record.Keys, Owner: c.Owner, Duration: c.Lease}, r)
}

// first is a request that nobody has sent before, and its outcome.
func first(ctx context.Context, store idempotency.Store, r idempotency.Response) error {
	c, err := claimOf(uuid.NewString())
	if err != nil {
		return err
	}
	record, err := store.Claim(ctx, c)
	if err != nil {
		return err
	}
	if record.State != idempotency.StateClaimed {
		return unexpected(record)
	}
	return store.Complete(ctx, leaseOf(c), r)
}

func claimOf(key string) (idempotency.Claim, error) {
	k, err := idempotency.ClientKey(scope(route), key)
	return idempotency.Claim{Key: k, Owner: uuid.New(), Fingerprint: idempotency.Fingerprint{1}, Lease: lease, TTL: ttl}, err
}

func leaseOf(c idempotency.Claim) idempotency.Lease {
	return idempotency.Lease{Keys: []idempotency.ScopedKey{c.Key}, Owner: c.Owner, Duration: c.Lease}
}

func unexpected(r idempotency.Record) error { return fmt.Errorf("the record is %v", r.State) }

// plainFirst writes the same without asking whether it is there.
func plainFirst(ctx context.Context, pool *pgxpool.Pool, r idempotency.Response) error {
	key := uuid.NewString()
	if err := plainClaim(ctx, pool, key); err != nil {
		return err
	}
	return plainComplete(ctx, pool, key, r)
}

func plainClaim(ctx context.Context, pool *pgxpool.Pool, key string) error {
	owner, fingerprint := pgtype.UUID{Bytes: uuid.New(), Valid: true}, idempotency.Fingerprint{1}
	_, err := pool.Exec(ctx, insertSQL, "v1", "acme", "alice", route, "u:", key, owner, fingerprint[:], lease, ttl)
	return err
}

func plainComplete(ctx context.Context, pool *pgxpool.Pool, key string, r idempotency.Response) error {
	_, err := pool.Exec(ctx, updateSQL, "v1", "acme", "alice", route, "u:", key,
		r.Status, []byte("content-type: application/json; content-length: 200"), r.Body)
	return err
}

func (s *site) readArms(ctx context.Context, c cell) ([]arm, error) {
	keys, err := s.seed(ctx, c)
	if err != nil {
		return nil, err
	}
	fingerprint, state := idempotency.Fingerprint{1}, idempotency.StateCompleted
	switch c.Case {
	case caseInFlight:
		state = idempotency.StateInProgress
	case caseReused:
		fingerprint = idempotency.Fingerprint{2}
	}
	arms := []arm{{kind: armLibrary, pool: libraryPool, do: func(ctx context.Context, client, n int) error {
		claim := idempotency.Claim{
			Key: keys[recordOf(c, client, n)], Owner: uuid.New(), Fingerprint: fingerprint, Lease: lease, TTL: ttl,
		}
		record, err := s.seeded.Claim(ctx, claim)
		if err == nil && record.State != state {
			return unexpected(record)
		}
		return err
	}}}
	for _, n := range c.pools() {
		arms = append(arms, arm{kind: armFloor, pool: n, do: func(ctx context.Context, client, i int) error {
			return plainRead(ctx, s.pools[n], keys[recordOf(c, client, i)].Key())
		}})
	}
	return arms, nil
}

// seed returns keys with records in the cell's state.
func (s *site) seed(ctx context.Context, c cell) ([]idempotency.ScopedKey, error) {
	kind := fmt.Sprint(c.Case == caseInFlight, c.Bytes)
	if keys, ok := s.keys[kind]; ok {
		return keys, nil
	}
	response := responseOf(c.Bytes)
	keys := make([]idempotency.ScopedKey, records)
	for i := range keys {
		claim, err := claimOf(uuid.NewString())
		if err != nil {
			return nil, err
		}
		keys[i] = claim.Key
		if _, err := s.seeded.Claim(ctx, claim); err != nil {
			return nil, err
		}
		if c.Case == caseInFlight {
			continue
		}
		if err := s.seeded.Complete(ctx, leaseOf(claim), response); err != nil {
			return nil, err
		}
	}
	s.keys[kind] = keys
	return keys, nil
}

// plainRead reads the columns that the library reads.
func plainRead(ctx context.Context, pool *pgxpool.Pool, key string) error {
	var (
		owner                                pgtype.UUID
		status                               string
		fingerprint, headers, trailers, body []byte
		attempt                              int
		leaseExpires                         time.Time
		code                                 *int
		notReplayable                        bool
	)
	return pool.QueryRow(ctx, selectSQL, "v1", "acme", "alice", route, "u:", key).
		Scan(&owner, &status, &fingerprint, &attempt, &leaseExpires, &code, &headers, &trailers, &body, &notReplayable)
}
