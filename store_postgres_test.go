package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/internal/pgtest"
	"github.com/keytuple/idempotency/storetest"
)

// S36, S37: the contract, in every mode that a pooler may force, in tables whose
// names need quoting: each statement by itself, and in batches with those of others.
func TestPostgresStoreContract(t *testing.T) {
	for _, mode := range modes {
		for _, alone := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v, alone %t", mode, alone), func(t *testing.T) {
				pool := newPool(t, pgtest.Database(t), withMode(mode))
				var tables atomic.Int64
				storetest.Run(t, func(t *testing.T) storetest.Subject {
					t.Helper()
					cfg := idempotency.PostgresConfig{
						Schema: `it's "the" schema`, Table: fmt.Sprintf(`Records %d"; --`, tables.Add(1)), DisableBatching: alone,
					}
					require.NoError(t, idempotency.MigrateWith(t.Context(), pool, cfg))
					table := pgx.Identifier{cfg.Schema, cfg.Table}.Sanitize()
					store := idempotency.NewPostgresStoreWith(pool, cfg)
					if !alone {
						crowded(t, store)
					}
					return storetest.Subject{
						Store:   store,
						Advance: func(d time.Duration) { advance(t, pool, table, d) },
					}
				})
			})
		}
	}
}

// crowded keeps a store busy with renewals of leases that nobody holds, until the
// end of the test, so that other statements travel together with them.
func crowded(t *testing.T, store *idempotency.PostgresStore) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 4 {
		lease := memoryLeaseOf(memoryClaim(t, fmt.Sprintf("of the crowd %d", i)))
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := store.Extend(ctx, lease); !errors.Is(err, idempotency.ErrLeaseLost) && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// S36: stricter isolation levels, as a database may have by default, change
// nothing but that more claims have to be made again.
func TestS36PostgresIsolationByDefault(t *testing.T) {
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			pool := migrated(t, withSetting("default_transaction_isolation", level))
			store := idempotency.NewPostgresStore(pool)
			for i := range 20 {
				require.Equal(t, 1, winners(t, 16, func(int) *idempotency.PostgresStore { return store }, memoryClaim(t, strconv.Itoa(i))))
			}
		})
	}
}

// winners makes n claims like c at once and returns how many won.
func winners(t *testing.T, n int, store func(i int) *idempotency.PostgresStore, c idempotency.Claim) int {
	t.Helper()
	var won atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			c := c
			c.Owner = uuid.New()
			r, err := store(i).Claim(t.Context(), c)
			if errs[i] = err; err == nil && r.State == idempotency.StateClaimed {
				won.Add(1)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	return int(won.Load())
}

// S29: of the claims of an expired record, whoever takes it over first has it.
func TestS29PostgresExpiredHasOneWinner(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	const records, takers = 500, 24
	claims := make([]idempotency.Claim, records)
	for i := range claims {
		claims[i] = memoryClaim(t, strconv.Itoa(i))
		require.Equal(t, 1, winners(t, 1, func(int) *idempotency.PostgresStore { return store }, claims[i]))
	}
	advance(t, pool, "idempotency_records", memoryTTL)
	for _, c := range claims {
		require.Equal(t, 1, winners(t, takers, func(int) *idempotency.PostgresStore { return store }, c))
	}
	require.Equal(t, records, count(t, pool, "attempt = 1 AND expires_at > now()"))
}

// S27: a late completion and a take-over exclude each other, and one of them is.
func TestS27PostgresLateCompletionAgainstTakeOver(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	ctx := t.Context()
	const races = 1000
	late, taken := 0, 0
	for i := range races {
		c := memoryClaim(t, strconv.Itoa(i))
		_, err := store.Claim(ctx, c)
		require.NoError(t, err)
		l := memoryLeaseOf(c)
		l.Duration = 0
		require.NoError(t, store.Extend(ctx, l))

		next := c
		next.Owner = uuid.New()
		var r idempotency.Record
		var claimErr, completeErr error
		var wg sync.WaitGroup
		wg.Go(func() { r, claimErr = store.Claim(ctx, next) })
		wg.Go(func() { completeErr = store.Complete(ctx, l, idempotency.Response{Status: http.StatusCreated}) })
		wg.Wait()
		require.NoError(t, claimErr)
		if completeErr == nil {
			late++
			require.Equal(t, idempotency.StateCompleted, r.State)
		} else {
			taken++
			require.ErrorIs(t, completeErr, idempotency.ErrLeaseLost)
			require.Equal(t, idempotency.StateClaimed, r.State)
			require.Equal(t, 2, r.Attempt)
		}
	}
	require.Equal(t, races, late+taken)
	t.Logf("completed late %d times, taken over %d times", late, taken)
}

// S29: the sweep takes nothing from claims and take-overs, and hinders none.
func TestS29PostgresSweepAgainstClaims(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	ctx, stop := context.WithCancel(t.Context())
	var sweeping sync.WaitGroup
	for range 2 {
		sweeping.Go(func() {
			for ctx.Err() == nil {
				_, err := store.DeleteExpired(context.WithoutCancel(ctx), 7)
				if !noError(t, err) {
					return
				}
			}
		})
	}
	for i := range 60 {
		c := memoryClaim(t, strconv.Itoa(i))
		c.TTL = time.Microsecond // expired as soon as it is settled or its lease is over
		require.Equal(t, 1, winners(t, 8, func(int) *idempotency.PostgresStore { return store }, c), "live, and past its TTL")
		advance(t, pool, "idempotency_records", memoryLease)
		c.TTL = memoryTTL
		require.Equal(t, 1, winners(t, 8, func(int) *idempotency.PostgresStore { return store }, c), "expired, under the sweep")
	}
	stop()
	sweeping.Wait()
	require.Equal(t, 60, count(t, pool, "attempt = 1 AND expires_at > now()"))
}

func noError(t *testing.T, err error) bool {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
	return err == nil
}

// S36: the insertion meets a rival's record that the reading half cannot see yet;
// the claim looks again.
func TestS36PostgresEmptyAnswerIsRetried(t *testing.T) {
	pool := migrated(t)
	spy := &spyDB{PostgresDB: pool}
	store := idempotency.NewPostgresStore(spy)
	c := memoryClaim(t, "raced")
	rival := c
	rival.Owner = uuid.New()

	// The rival's insertion is not committed until the claim waits for it.
	tx := claimInTx(t, pool, rival)
	type result struct {
		r   idempotency.Record
		err error
	}
	done := make(chan result)
	go func() {
		r, err := store.Claim(t.Context(), c)
		done <- result{r, err}
	}()
	awaitBlocked(t, pool)
	require.NoError(t, tx.Commit(t.Context()))

	got := <-done
	require.NoError(t, got.err)
	require.Equal(t, idempotency.StateInProgress, got.r.State)
	require.EqualValues(t, 2, spy.queries.Load(), "an empty answer, and a second look")

	spy.empty.Store(true)
	_, err := store.Claim(t.Context(), c)
	require.ErrorContains(t, err, "overtaken by another claim")
	require.Less(t, spy.queries.Load(), int64(100), "bounded")
}

// awaitBlocked waits until a session of the database waits for another one.
func awaitBlocked(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		return queryOne[bool](t, pool, "SELECT EXISTS (SELECT FROM pg_stat_activity"+
			" WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0)")
	}, 10*time.Second, time.Millisecond)
}

// claimInTx makes a claim of a new key in a transaction that is not ended.
func claimInTx(t *testing.T, pool *pgxpool.Pool, c idempotency.Claim) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = idempotency.NewPostgresStore(inTx{PostgresDB: pool, tx: tx}).Claim(t.Context(), c)
	require.NoError(t, err)
	return tx
}

// inTx is a pool whose queries all run in one transaction.
type inTx struct {
	idempotency.PostgresDB
	tx pgx.Tx
}

func (db inTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return db.tx.Query(ctx, sql, args...)
}

// A spyDB counts queries, and answers them with nothing if told so.
type spyDB struct {
	idempotency.PostgresDB
	queries atomic.Int64
	empty   atomic.Bool
}

func (db *spyDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.queries.Add(1)
	if db.empty.Load() {
		return db.PostgresDB.Query(ctx, "SELECT WHERE false")
	}
	return db.PostgresDB.Query(ctx, sql, args...)
}

// S03, S35: keys of the greatest length fit into the index, and each is its own.
func TestS35PostgresLongestKeys(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	// Random, so that the index cannot compress it, and the longest in bytes.
	random := func(n int) string {
		var b strings.Builder
		for b.Len() < n {
			b.WriteString(uuid.NewString())
		}
		return b.String()[:n]
	}
	c := memoryClaim(t, "longest")
	var err error
	c.Key, err = idempotency.ServerKey(idempotency.Scope{
		Version: random(idempotency.MaxVersionLen), Tenant: random(idempotency.MaxTenantLen),
		Principal: random(idempotency.MaxPrincipalLen), Route: random(idempotency.MaxRouteLen),
	}, random(idempotency.MaxKeyLen))
	require.NoError(t, err)
	require.Equal(t, 1, winners(t, 2, func(int) *idempotency.PostgresStore { return store }, c))
	require.Equal(t, 1, count(t, pool, "tenant_id = $1 AND idem_key = $2", c.Key.Tenant(), c.Key.Key()))
}

// S03, S33: no two tenants are one, however alike they look, and nothing in a
// name means anything to the database.
func TestS03PostgresTenantsAreBytes(t *testing.T) {
	tenants := []string{
		`a'b`, `a''b`, `a"b`, `a%b`, `a_b`, `a\b`, `a\\b`, `$1`, `'; DROP TABLE idempotency_records; --`, `a{key}b`, `a{table}b`,
		"😀", "😁", "caf\u00e9", "cafe\u0301", "Straße", "STRASSE", " a", "a ", "a", "A", "a\tb", "a\nb", "\u202ea",
	}
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			pool := migrated(t, withMode(mode))
			for _, tenant := range tenants {
				c := memoryClaim(t, "k")
				var err error
				c.Key, err = idempotency.ClientKey(idempotency.Scope{Version: "v1", Tenant: tenant, Principal: "p", Route: "r"}, "k")
				require.NoError(t, err)
				r, err := idempotency.NewPostgresStore(pool).Claim(t.Context(), c)
				require.NoError(t, err)
				require.Equal(t, idempotency.StateClaimed, r.State, "%q", tenant)
				require.Equal(t, 1, count(t, pool, "tenant_id = $1", tenant), "%q", tenant)
			}
			require.Equal(t, len(tenants), count(t, pool, "true"))
		})
	}
}

// What is no pool is refused, by New and by every method.
func TestPostgresStoreRefusesWhatIsNoPool(t *testing.T) {
	pool := migrated(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, tt := range []struct {
		name   string
		db     idempotency.PostgresDB
		reason string
	}{
		{"nothing", nil, "is required"},
		{"no pool", (*pgxpool.Pool)(nil), "is required"},
		{"a connection", conn.Conn(), "single connection"},
		{"a connection of a pool", conn, "single connection"},
		{"a transaction", tx, "single connection"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			store := idempotency.NewPostgresStore(tt.db)
			c := memoryClaim(t, "k")
			_, newErr := idempotency.New(store, identified(idempotency.Config{}))
			_, claimErr := store.Claim(t.Context(), c)
			_, sweepErr := store.DeleteExpired(t.Context(), 1)
			for call, err := range map[string]error{
				"New": newErr, "CheckConfig": store.CheckConfig(), "Migrate": idempotency.Migrate(t.Context(), tt.db),
				"Claim": claimErr, "DeleteExpired": sweepErr,
				"Complete": store.Complete(t.Context(), memoryLeaseOf(c), idempotency.Response{Status: http.StatusOK}),
				"Release":  store.Release(t.Context(), memoryLeaseOf(c)),
				"Extend":   store.Extend(t.Context(), memoryLeaseOf(c)),
			} {
				var fault *idempotency.ConfigError
				require.ErrorAs(t, err, &fault, call)
				require.Equal(t, "db", fault.Field, call)
				require.Contains(t, fault.Reason, tt.reason, call)
			}
		})
	}
	require.NoError(t, idempotency.NewPostgresStore(pool).CheckConfig())
}

// Names that PostgreSQL would cut off, or that cannot be in its statements.
func TestPostgresConfigNames(t *testing.T) {
	long := strings.Repeat("é", 40)
	for _, tt := range []struct{ field, schema, table, reason string }{
		{"Schema", long, "", "longer than 63 bytes"},
		{"Table", "", strings.Repeat("x", 53), "longer than 52 bytes"},
		{"Schema", "a\x00", "", "U+0000"},
		{"Table", "", "a$$; DROP TABLE x; --", "dollar sign"},
		{"Table", "", "\xff", "UTF-8"},
	} {
		cfg := idempotency.PostgresConfig{Schema: tt.schema, Table: tt.table}
		_, err := idempotency.Migrations(cfg)
		var fault *idempotency.ConfigError
		require.ErrorAs(t, err, &fault)
		require.Equal(t, tt.field, fault.Field)
		require.Contains(t, fault.Reason, tt.reason)
		require.ErrorAs(t, idempotency.NewPostgresStoreWith(&pgxpool.Pool{}, cfg).CheckConfig(), &fault)
	}
}

// An operator who forgot the migration is told so.
func TestPostgresStoreWithoutTable(t *testing.T) {
	store := idempotency.NewPostgresStore(newPool(t, pgtest.Database(t)))
	_, err := store.Claim(t.Context(), memoryClaim(t, "k"))
	require.ErrorContains(t, err, "Migrate")
	var server *pgconn.PgError
	require.ErrorAs(t, err, &server)
	require.Equal(t, "42P01", server.Code)
}

// S35: what a record cannot be made of is an error, not an answer.
func TestS35PostgresDamagedRecord(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	c := memoryClaim(t, "k")
	_, err := store.Claim(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, store.Complete(t.Context(), memoryLeaseOf(c), idempotency.Response{Status: http.StatusOK}))
	for _, tt := range []struct{ damage, want string }{
		{`fingerprint = '\x01'`, "fingerprint of 1 bytes"},
		{`response_code = NULL`, "no status code"},
		{`response_headers = '\x'`, "unknown format"},
		{`response_headers = '\x02'`, "unknown format"},
		{`response_headers = '\x0100000000'`, "truncated"},
		{`response_trailers = '\x010000000000'`, "trailing bytes"},
	} {
		t.Run(tt.damage, func(t *testing.T) {
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(t.Context()) }()
			_, err = tx.Exec(t.Context(), "UPDATE idempotency_records SET "+tt.damage)
			require.NoError(t, err)
			again := c
			again.Owner = uuid.New()
			_, err = idempotency.NewPostgresStore(inTx{PostgresDB: pool, tx: tx}).Claim(t.Context(), again)
			require.ErrorContains(t, err, tt.want)
		})
	}
}

// Where a server lets the reading half see what the inserting half did (Citus),
// the row of the claim's own owner decides.
func TestPostgresClaimWithTwoRows(t *testing.T) {
	pool := migrated(t)
	c := memoryClaim(t, "k")
	const row = `SELECT $1::uuid, 'in_progress', false, '\x00'::bytea, $2::int, 60000000::bigint,
		NULL::int, NULL::bytea, NULL::bytea, NULL::bytea, false`
	sql := strings.Replace(row, "$1", "'"+uuid.NewString()+"'", 1) + " UNION ALL " + strings.Replace(row, "$1", "'"+c.Owner.String()+"'", 1)
	sql = strings.Replace(strings.Replace(sql, "$2", "7", 1), "$2", "1", 1)
	r, err := idempotency.NewPostgresStore(cannedDB{PostgresDB: pool, sql: sql}).Claim(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, idempotency.Record{State: idempotency.StateClaimed, Fingerprint: c.Fingerprint, Attempt: 1}, r)
}

// A cannedDB answers all queries with one.
type cannedDB struct {
	idempotency.PostgresDB
	sql string
}

func (db cannedDB) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	return db.PostgresDB.Query(ctx, db.sql)
}

// S36: leases that name the same keys in other orders do not wait for each other.
func TestS36PostgresSeveralKeysDoNotDeadlock(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	owner := uuid.New()
	var keys []idempotency.ScopedKey
	for i := range 8 {
		c := memoryClaim(t, strconv.Itoa(i))
		c.Owner = owner
		_, err := store.Claim(t.Context(), c)
		require.NoError(t, err)
		keys = append(keys, c.Key)
	}
	reversed := slices.Clone(keys)
	slices.Reverse(reversed)
	var wg sync.WaitGroup
	for i := range 8 {
		l := idempotency.Lease{Keys: keys, Owner: owner, Duration: memoryLease}
		if i%2 == 1 {
			l.Keys = reversed
		}
		wg.Go(func() {
			for range 50 {
				if !noError(t, store.Extend(t.Context(), l)) {
					return
				}
			}
		})
	}
	wg.Wait()
}

// What ends a session is not known to have done anything, or nothing: the claim
// is made again. A pooler names the severity in one of the two places only. A
// deadline of the pool's own is none of it.
func TestPostgresClaimIsMadeAgain(t *testing.T) {
	pool := migrated(t)
	for _, tt := range []struct {
		err   error
		calls int64
	}{
		{&pgconn.PgError{Severity: "FATAL", Code: "08P01"}, 2},
		{&pgconn.PgError{Severity: "FATALE", SeverityUnlocalized: "FATAL", Code: "57P01"}, 2},
		{&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40P01"}, 2},
		{&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "23505"}, 2},
		{io.ErrUnexpectedEOF, 2},
		{&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "57014"}, 1},
		{&pgconn.ConnectError{}, 1},
		{context.DeadlineExceeded, 1},
	} {
		db := &failingDB{spyDB: spyDB{PostgresDB: pool}, errs: []error{tt.err}}
		_, err := idempotency.NewPostgresStore(db).Claim(t.Context(), memoryClaim(t, uuid.NewString()))
		require.Equal(t, tt.calls, db.queries.Load(), "%#v", tt.err)
		require.Equal(t, tt.calls == 1, err != nil)
	}
}

// S26: a claim that no server can have carried out, or will, says so. One try in
// doubt is enough to be in doubt.
func TestS26PostgresNotClaimed(t *testing.T) {
	server := func(code string) error {
		return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code}
	}
	end := &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}
	refused := &pgconn.ConnectError{}
	for _, tt := range []struct {
		name   string
		errs   []error
		inside bool // the key may have been taken
	}{
		{"no connection", []error{refused}, false},
		{"refused by the server", []error{server("25006")}, false},
		{"rival, then no connection", []error{server("40001"), refused}, false},
		{"session ended, then no connection", []error{end, refused}, true},
		{"connection broke, then no connection", []error{io.ErrUnexpectedEOF, refused}, true},
		{"no answer in time", []error{context.DeadlineExceeded}, true},
		{"unknown", []error{errors.New("unknown")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db := &failingDB{errs: tt.errs}
			_, err := idempotency.NewPostgresStore(db).Claim(t.Context(), memoryClaim(t, "k"))
			require.Error(t, err)
			require.Equal(t, !tt.inside, errors.Is(err, idempotency.ErrNotClaimed), "%v", err)
			require.ErrorIs(t, err, tt.errs[len(tt.errs)-1])
			require.EqualValues(t, len(tt.errs), db.queries.Load())
		})
	}
}

// A failingDB fails its first queries.
type failingDB struct {
	spyDB
	errs []error
}

func (db *failingDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if n := int(db.queries.Load()); n < len(db.errs) {
		db.queries.Add(1)
		return nil, db.errs[n]
	}
	return db.spyDB.Query(ctx, sql, args...)
}

// S29: sweeps beside each other do not fail where transactions are strict.
func TestS29PostgresSweepsAtOnce(t *testing.T) {
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			pool := migrated(t, withSetting("default_transaction_isolation", level))
			store := idempotency.NewPostgresStore(pool)
			const records = 400
			for i := range records {
				_, err := store.Claim(t.Context(), memoryClaim(t, strconv.Itoa(i)))
				require.NoError(t, err)
			}
			advance(t, pool, "idempotency_records", memoryTTL)
			var deleted atomic.Int64
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					for n := 1; n > 0; {
						var err error
						if n, err = store.DeleteExpired(t.Context(), 5); !noError(t, err) {
							return
						}
						deleted.Add(int64(n))
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, records, deleted.Load())
		})
	}
}

// S27: a renewal that had to wait ends no lease before its owner believes.
func TestS27PostgresLateRenewalDoesNotShorten(t *testing.T) {
	pool := migrated(t)
	store := idempotency.NewPostgresStore(pool)
	c := memoryClaim(t, "k")
	_, err := store.Claim(t.Context(), c)
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	done := make(chan error)
	go func() { done <- store.Extend(t.Context(), memoryLeaseOf(c)) }()
	awaitBlocked(t, pool)
	waiting := queryOne[time.Time](t, pool, "SELECT now()")
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-done)
	end := queryOne[time.Time](t, pool, "SELECT lease_expires_at FROM idempotency_records")
	require.False(t, end.Before(waiting.Add(memoryLease)), "counted from before it waited")
}

// S23: an outcome that a store cannot encode is done all the same, and does not
// run again.
func TestS23PostgresOutcomeThatCannotBeStored(t *testing.T) {
	pool := migrated(t)
	s := newPGSite(t, pool, idempotency.Config{}, func(w http.ResponseWriter, _ *http.Request) {
		for i := range idempotency.MaxFieldValues + 1 {
			w.Header().Add("Link", strconv.Itoa(i))
		}
		w.WriteHeader(http.StatusCreated)
	})
	first := s.created(t, call{}, false)
	require.Len(t, first.header["Link"], idempotency.MaxFieldValues+1)
	retry := s.do(t.Context(), call{})
	require.Equal(t, http.StatusConflict, retry.status)
	require.Equal(t, string(idempotency.CodeNotReplayable), retry.code(t))
	require.EqualValues(t, 1, s.runs.Load())
	s.settled(t)
}
