package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/keytuple/idempotency"
)

const schema = `
CREATE TABLE IF NOT EXISTS orders (
	id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	account   text NOT NULL,
	reference text NOT NULL,
	amount    bigint NOT NULL CHECK (amount > 0),
	UNIQUE (account, reference));
CREATE TABLE IF NOT EXISTS ledger (
	order_id bigint NOT NULL REFERENCES orders,
	account  text NOT NULL,
	amount   bigint NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
	id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	topic   text NOT NULL,
	payload jsonb NOT NULL)`

// A step is a moment in the life of a charge.
type step string

const (
	stepClaimed   step = "claimed"   // the handler begins
	stepOrder     step = "order"     // the order is written
	stepLedger    step = "ledger"    // and the ledger
	stepOutbox    step = "outbox"    // and the outbox
	stepAnswered  step = "answered"  // the answer is made, but not committed
	stepCommitted step = "committed" // all is committed, and the answer is about to leave
)

// newServer makes the tables and returns the API. It calls reached at each step of
// a charge.
func newServer(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger, reached func(step)) (http.Handler, *idempotency.Middleware, error) {
	if err := idempotency.Migrate(ctx, pool); err != nil {
		return nil, nil, err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return nil, nil, err
	}
	idem, err := idempotency.New(idempotency.NewPostgresStore(pool), idempotency.Config{
		Transactional: true,
		// Who asks, as an authentication in front established it.
		KeyScope:  func(r *http.Request) string { return r.Header.Get("X-Account") },
		Principal: func(r *http.Request) string { return r.Header.Get("X-User") },
		Logger:    logger,
	})
	if err != nil {
		return nil, nil, err
	}
	charge := idem.Named("charge").Handler(charging{reached})
	mux := http.NewServeMux()
	mux.Handle("POST /v1/charges", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		charge.ServeHTTP(leaving{w, reached}, r)
	}))
	mux.Handle("GET /v1/totals", totals(pool))
	return mux, idem, nil
}

// A request is the body of a charge.
type request struct {
	Reference string `json:"reference"`
	Amount    int64  `json:"amount"` // in cents
}

// charging is the guarded handler.
type charging struct{ reached func(step) }

func (c charging) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var in request
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in.Reference == "" || in.Amount <= 0 {
		reply(w, http.StatusBadRequest, map[string]string{"error": "a reference and a positive amount are needed"})
		return
	}
	c.reached(stepClaimed)
	tx, _ := idempotency.PostgresTx(r.Context()) // always there in a guarded handler
	id, err := c.write(r.Context(), tx, r.Header.Get("X-Account"), in)
	switch {
	case isDuplicate(err):
		// Kept, so that a retry hears the same. The failed statement has undone the rest.
		reply(w, http.StatusUnprocessableEntity, map[string]string{"error": "the reference is charged already"})
	case err != nil:
		reply(w, http.StatusInternalServerError, map[string]string{"error": "nothing was charged"}) // not kept: may be retried
	default:
		reply(w, http.StatusCreated, map[string]int64{"order": id})
	}
	c.reached(stepAnswered)
}

// write knows nothing of idempotency. It does not commit: that is for the middleware.
func (c charging) write(ctx context.Context, tx pgx.Tx, account string, in request) (id int64, err error) {
	err = tx.QueryRow(ctx, "INSERT INTO orders (account, reference, amount) VALUES ($1, $2, $3) RETURNING id",
		account, in.Reference, in.Amount).Scan(&id)
	if err != nil {
		return 0, err
	}
	c.reached(stepOrder)
	if _, err := tx.Exec(ctx, "INSERT INTO ledger (order_id, account, amount) VALUES ($1, $2, $3)", id, account, -in.Amount); err != nil {
		return 0, err
	}
	c.reached(stepLedger)
	// A relay would read the outbox and tell others, with the row's id as its idempotency key.
	if _, err := tx.Exec(ctx, "INSERT INTO outbox (topic, payload) VALUES ('charged', jsonb_build_object('order', $1::bigint))", id); err != nil {
		return 0, err
	}
	c.reached(stepOutbox)
	return id, nil
}

func isDuplicate(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && server.Code == "23505"
}

// leaving says when an answer is about to leave.
type leaving struct {
	http.ResponseWriter

	reached func(step)
}

func (l leaving) WriteHeader(status int) {
	l.reached(stepCommitted)
	l.ResponseWriter.WriteHeader(status)
}

// totals answers with how many rows there are.
func totals(pool *pgxpool.Pool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var t struct{ Orders, Ledger, Outbox int }
		err := pool.QueryRow(r.Context(), `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM ledger),
			(SELECT count(*) FROM outbox)`).Scan(&t.Orders, &t.Ledger, &t.Outbox)
		if err != nil {
			reply(w, http.StatusInternalServerError, map[string]string{"error": "the database cannot be read"})
			return
		}
		reply(w, http.StatusOK, t)
	})
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // a failed write is the connection's end
}
