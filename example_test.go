package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

// account and user stand for what an authentication in front has established.
func account(r *http.Request) string { return r.Header.Get("X-Account") }
func user(r *http.Request) string    { return r.Header.Get("X-User") }

// post sends a request of alice at acme to a handler and prints the answer.
func post(h http.Handler, path, key, body string) {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("X-Account", "acme")
	r.Header.Set("X-User", "alice")
	if key != "" {
		r.Header.Set(idempotency.HeaderKey, key)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	answer, _ := io.ReadAll(w.Result().Body)
	replayed := ""
	if w.Header().Get(idempotency.HeaderReplayed) == "true" {
		replayed = " (replayed)"
	}
	fmt.Printf("%d %s%s\n", w.Code, answer, replayed)
}

func Example() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{KeyScope: account, Principal: user})
	if err != nil {
		fmt.Println(err)
		return
	}
	charges, refunds := 0, 0
	mux := http.NewServeMux()
	mux.Handle("POST /v1/charges", idem.Named("charge").Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		charges++
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "charge %d", charges)
	})))
	mux.Handle("POST /v1/refunds", idem.Named("refund").Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		refunds++
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, "refund %d", refunds)
	})))

	post(mux, "/v1/charges", `"order-42"`, "10 euro")
	post(mux, "/v1/charges", `"order-42"`, "10 euro")
	post(mux, "/v1/refunds", `"order-42"`, "10 euro")
	post(mux, "/v1/charges", `"order-43"`, "10 euro")
	// Output:
	// 201 charge 1
	// 201 charge 1 (replayed)
	// 201 refund 1
	// 201 charge 2
}

// All faults of a Config come back at once.
func ExampleNew_faults() {
	_, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{
		KeyScope: account,
		Lease:    time.Minute,
		TTL:      time.Second,
	})
	fmt.Println(err)
	var fault *idempotency.ConfigError
	fmt.Println(errors.As(err, &fault), fault.Field)
	// Output:
	// idempotency: config: Principal: is required: without a caller, one user's key is another's
	// idempotency: config: TTL: "1s" is shorter than the Lease of 1m0s
	// true Principal
}

// A handler can see which attempt it is, and decide about its outcome.
func ExampleFromContext() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{KeyScope: account, Principal: user})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := idem.Named("charge").Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		exec, ok := idempotency.FromContext(r.Context())
		if ok && exec.Attempt() == 1 {
			exec.Discard() // "pending" is not an outcome: let the retry ask again
			fmt.Fprint(w, "pending")
			return
		}
		fmt.Fprint(w, "paid")
	}))
	post(handler, "/v1/charges", `"order-42"`, "")
	post(handler, "/v1/charges", `"order-42"`, "")
	post(handler, "/v1/charges", `"order-42"`, "")
	// Output:
	// 200 pending
	// 200 paid
	// 200 paid (replayed)
}

// Every attempt of one operation asks a service with the same key.
func ExampleExecution_DownstreamKey() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{KeyScope: account, Principal: user})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := idem.Named("charge").Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		exec, _ := idempotency.FromContext(r.Context()) // always there in a guarded handler
		fmt.Println("attempt", exec.Attempt(), "asks with", exec.DownstreamKey("payment"))
		if exec.Attempt() == 1 {
			http.Error(w, "did they take it?", http.StatusBadGateway) // not kept: the retry asks again
			return
		}
		fmt.Fprint(w, "paid")
	}))
	post(handler, "/v1/charges", `"order-42"`, "10 euro")
	post(handler, "/v1/charges", `"order-42"`, "10 euro")
	// Output:
	// attempt 1 asks with 49bb2112-d915-8145-bcde-f59f140e5fdb
	// 502 did they take it?
	//
	// attempt 2 asks with 49bb2112-d915-8145-bcde-f59f140e5fdb
	// 200 paid
}

// What a handler writes in its transaction is committed together with its outcome.
func ExamplePostgresTx() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/test")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	idem, err := idempotency.New(idempotency.NewPostgresStore(pool), idempotency.Config{
		KeyScope: account, Principal: user, Transactional: true,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := idem.Named("order").Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.PostgresTx(r.Context()) // always there in a guarded handler
		if _, err := tx.Exec(r.Context(), "INSERT INTO orders (account) VALUES ($1)", account(r)); err != nil {
			http.Error(w, "not ordered", http.StatusInternalServerError) // not kept, so everything is undone
			return
		}
		w.WriteHeader(http.StatusCreated) // leaves after the commit
	}))
	http.NewServeMux().Handle("POST /v1/orders", handler)
	// Output:
}

// Problems can be written in the application's own shape.
func ExampleProblemRenderer() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{
		KeyScope: account, Principal: user,
		RenderProblem: func(w http.ResponseWriter, _ *http.Request, p idempotency.Problem) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(p.Status)
			fmt.Fprintf(w, `{"error":%q}`, p.Code)
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	post(idem.Handler(http.NotFoundHandler()), "/v1/charges", "", "")
	post(idem.Handler(http.NotFoundHandler()), "/v1/charges", "order-42", "")
	// Output:
	// 400 {"error":"missing-key"}
	// 400 {"error":"invalid-key"}
}

// Usage is counted by executions: a replay is not a second use.
func ExampleEvent() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{
		KeyScope: account, Principal: user,
		OnEvent: func(_ context.Context, e idempotency.Event) {
			if e.Kind == idempotency.EventExecuted && e.Outcome == idempotency.OutcomeStored {
				fmt.Println("count one for", e.Key.Tenant())
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := idem.Named("charge").Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "paid")
	}))
	post(handler, "/v1/charges", `"order-42"`, "")
	post(handler, "/v1/charges", `"order-42"`, "")
	// Output:
	// count one for acme
	// 200 paid
	// 200 paid (replayed)
}

// A key's parts can be read, but no log shows them by accident.
func ExampleClientKey() {
	key, err := idempotency.ClientKey(idempotency.Scope{
		Version: idempotency.DefaultVersion, Tenant: "acme", Principal: "alice", Route: "charge",
	}, "order-42")
	fmt.Println(key, err)
	fmt.Printf("%q\n", key.Flat())

	_, err = idempotency.ClientKey(idempotency.Scope{
		Version: idempotency.DefaultVersion, Tenant: "acme", Route: "charge",
	}, "order-42")
	fmt.Println(err, errors.Is(err, idempotency.ErrMissingScope))
	// Output:
	// idempotency-key:7c2a8c4b222894ab <nil>
	// "v1\x00acme\x00alice\x00charge\x00u:\x00order-42"
	// idempotency: missing scope component: principal true
}

// A store can be used without HTTP: claim, run, complete.
func ExampleStore() {
	ctx := context.Background()
	var store idempotency.Store = idempotency.NewMemoryStore()
	key, err := idempotency.ServerKey(idempotency.Scope{
		Version: idempotency.DefaultVersion, Tenant: "acme", Principal: "redelivery", Route: "event",
	}, "replay:evt_1:")
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 {
		owner := uuid.New() // one owner for one claim
		record, err := store.Claim(ctx, idempotency.Claim{Key: key, Owner: owner, Lease: time.Minute, TTL: time.Hour})
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(record.State, record.Attempt)
		if record.State != idempotency.StateClaimed {
			continue
		}
		lease := idempotency.Lease{Keys: []idempotency.ScopedKey{key}, Owner: owner, Duration: time.Minute}
		if err := store.Complete(ctx, lease, idempotency.Response{Status: http.StatusOK}); err != nil {
			fmt.Println(err)
			return
		}
	}
	// Output:
	// claimed 1
	// completed 1
}

// For a migration tool of your own: one file for each version.
func ExampleMigrations() {
	migrations, err := idempotency.Migrations(idempotency.PostgresConfig{Schema: "payments"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range migrations {
		first, _, _ := strings.Cut(m.SQL, "\n")
		fmt.Printf("%03d.sql: %s\n", m.Version, first)
	}
	// Output: 001.sql: CREATE TABLE "payments"."idempotency_records" (
	// 002.sql: ALTER TABLE "payments"."idempotency_records" ADD COLUMN alias_of bytea, ADD COLUMN origin bytea;
	// 003.sql: CREATE TABLE "payments"."idempotency_successors" (
}

// What is wrong with a store's configuration is told when the middleware is made.
func ExampleNewPostgresStoreWith() {
	var pool idempotency.PostgresDB // forgotten
	store := idempotency.NewPostgresStoreWith(pool, idempotency.PostgresConfig{Table: "keys"})
	_, err := idempotency.New(store, idempotency.Config{KeyScope: account, Principal: user})
	fmt.Println(err)
	// Output: idempotency: config: db: is required
}

// Callers are told apart from version 2 on. What was done before is not done again.
func ExampleEarlierScope() {
	store := idempotency.NewMemoryStore()
	charges := 0
	charge := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		charges++
		fmt.Fprintf(w, "charge %d", charges)
	})
	v1, err1 := idempotency.New(store, idempotency.Config{Version: "v1", KeyScope: account, Principal: account})
	v2, err2 := idempotency.New(store, idempotency.Config{
		Version: "v2", KeyScope: account, Principal: user,
		EarlierScopes: []idempotency.EarlierScope{{Kind: idempotency.AliasRenamed, Version: "v1", Principal: account}},
	})
	if err := errors.Join(err1, err2); err != nil {
		fmt.Println(err)
		return
	}
	before, after := v1.Named("charge").Handler(charge), v2.Named("charge").Handler(charge)

	post(before, "/v1/charges", `"order-1"`, "10 euro")
	post(after, "/v1/charges", `"order-1"`, "10 euro") // the retry comes after the deploy
	post(after, "/v1/charges", `"order-2"`, "10 euro")
	post(before, "/v1/charges", `"order-2"`, "10 euro") // or goes to a process that it has not reached
	// Output:
	// 200 charge 1
	// 200 charge 1 (replayed)
	// 200 charge 2
	// 200 charge 2 (replayed)
}
