package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

// serverSettings are all that differs from a server's defaults. Nothing in them
// makes a commit less durable; what runs now and then would hit one arm only.
var serverSettings = []string{
	"fsync=on", "synchronous_commit=on", "full_page_writes=on",
	"autovacuum=off", "checkpoint_timeout=1h", "max_wal_size=16GB",
}

// The tables. Those with first requests are emptied after each cell.
var (
	firstRecords  = idempotency.PostgresConfig{Table: "first_records"}
	floorRecords  = idempotency.PostgresConfig{Table: "floor_records"}
	seededRecords = idempotency.PostgresConfig{Table: "seeded_records"}
)

// A site is the database with all that uses it.
type site struct {
	meter   meter
	machine machine
	pools   map[int]*pgxpool.Pool
	first   *idempotency.PostgresStore // for first requests
	seeded  *idempotency.PostgresStore // for those that meet a record
	inTx    *idempotency.PostgresStore // for those whose handler has a transaction
	keys    map[string][]idempotency.ScopedKey
	web     *web
}

func newSite(ctx context.Context, databaseURL string) (s *site, err error) {
	trips := new(atomic.Int64)
	s = &site{pools: make(map[int]*pgxpool.Pool), keys: make(map[string][]idempotency.ScopedKey)}
	defer func() {
		if err != nil {
			s.close(ctx)
		}
	}()
	if s.meter.admin, err = newPool(ctx, databaseURL, 1, new(atomic.Int64)); err != nil {
		return s, err
	}
	s.meter.trips = trips
	for _, n := range floorPools {
		if s.pools[n], err = newPool(ctx, databaseURL, n, trips); err != nil {
			return s, err
		}
	}
	for _, cfg := range []idempotency.PostgresConfig{firstRecords, floorRecords, seededRecords} {
		if err = idempotency.MigrateWith(ctx, s.meter.admin, cfg); err != nil {
			return s, err
		}
	}
	s.machine = machine{System: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version()}
	if err = s.meter.admin.QueryRow(ctx, "SHOW server_version").Scan(&s.machine.PostgreSQL); err != nil {
		return s, err
	}
	pool := s.pools[libraryPool]
	s.first = idempotency.NewPostgresStoreWith(pool, firstRecords)
	s.seeded = idempotency.NewPostgresStoreWith(pool, seededRecords)
	s.inTx = idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{
		Table: firstRecords.Table, MaxTransactions: libraryPool, // as many as the floor has
	})
	if _, err = s.meter.admin.Exec(ctx, createOrdersSQL); err != nil {
		return s, err
	}
	s.web, err = newWeb(ctx, s.first, s.seeded)
	return s, err
}

func (s *site) close(ctx context.Context) {
	if s.web != nil {
		s.web.close(ctx)
	}
	for _, pool := range s.pools {
		if pool != nil {
			pool.Close()
		}
	}
	if s.meter.admin != nil {
		s.meter.admin.Close()
	}
}

// arms returns what is compared in a cell, the library first. Tables that it writes
// to are empty then.
func (s *site) arms(ctx context.Context, c cell) ([]arm, error) {
	if _, err := s.meter.admin.Exec(ctx, "TRUNCATE first_records, floor_records, orders"); err != nil {
		return nil, err
	}
	if c.Level == levelHTTP {
		return s.web.arms(ctx, c)
	}
	switch c.Case {
	case caseFirst:
		return s.firstArms(c), nil
	case caseAlias:
		return s.aliasArms(c), nil
	case caseTransaction:
		return s.transactionArms(c), nil
	}
	return s.readArms(ctx, c)
}

// records is how many records there are to meet. No two clients are at one at the
// same time: claims of one key would share one.
const records = 1024

// recordOf returns the number of the record that is next for a client.
func recordOf(c cell, client, n int) int { return (client + n*c.Clients) % records }

// body returns JSON that compresses about as well as an API's does.
func body(bytes int) []byte {
	random := rand.New(rand.NewPCG(1, uint64(bytes))) //nolint:gosec // the same bytes in each run
	text := []byte(`{"items":[`)
	const item, end = 90, `"]}`
	for i := 0; len(text)+item+len(end) < bytes; i++ {
		text = fmt.Appendf(text, `{"id":"item_%016x","position":%d,"amount":%d,"currency":"EUR"},`, random.Uint64(), i, random.IntN(100000))
	}
	text = append(text, '"')
	text = append(text, strings.Repeat("x", bytes-len(text)-len(end))...)
	return append(text, end...)
}

func scope(route string) idempotency.Scope {
	return idempotency.Scope{Version: "v1", Tenant: "acme", Principal: "alice", Route: route}
}

func responseOf(bytes int) idempotency.Response {
	return idempotency.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(bytes)}},
		Body:   body(bytes),
	}
}
