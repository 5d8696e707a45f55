package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/keytuple/idempotency"
)

// A processor is the payment service that this API stands in front of. An error
// means that nothing was paid.
type processor func(context.Context) error

// slow is a processor that takes some time.
func slow(delay time.Duration) processor {
	return func(ctx context.Context) error {
		select {
		case <-time.After(delay):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// newServer returns the API and its middleware, which the caller shuts down after
// the server.
func newServer(
	store idempotency.Store, process processor, logger *slog.Logger,
) (http.Handler, *idempotency.Middleware, error) {
	idem, err := idempotency.New(store, idempotency.Config{
		KeyScope:  func(r *http.Request) string { return callerFrom(r.Context()).tenant },
		Principal: func(r *http.Request) string { return callerFrom(r.Context()).principal },
		Logger:    logger,
		OnEvent: func(ctx context.Context, e idempotency.Event) {
			// The key prints as a digest. Bill by executions: a replay is not a second use.
			logger.LogAttrs(ctx, slog.LevelInfo, "request", slog.String("kind", string(e.Kind)), slog.Any("key", e.Key),
				slog.Int("attempt", e.Attempt), slog.Int("status", e.Status), slog.String("code", string(e.Code)))
		},
	})
	if err != nil {
		return nil, nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /v1/charges", idem.Named("charge").Handler(create("ch_", process)))
	mux.Handle("POST /v1/refunds", idem.Named("refund").Handler(create("re_", process)))
	return authenticate(mux), idem, nil
}

// A caller is who a request comes from.
type caller struct{ tenant, principal string }

// tokens are the bearer tokens of the example, with the caller each one stands for.
func tokens() map[string]caller {
	return map[string]caller{
		"token-a": {tenant: "tenant-a", principal: "api-key-a1"},
		"token-b": {tenant: "tenant-b", principal: "api-key-b1"},
	}
}

type callerKey struct{}

// callerFrom returns the authenticated caller, or the zero caller, whose empty
// tenant the idempotency middleware refuses.
func callerFrom(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c
}

// authenticate stands outside the idempotency middleware: who calls must be known
// before a key means anything.
func authenticate(next http.Handler) http.Handler {
	known := make(map[[sha256.Size]byte]caller)
	for token, c := range tokens() {
		known[sha256.Sum256([]byte(token))] = c
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		sum := sha256.Sum256([]byte(token))
		var found caller
		for digest, c := range known {
			if subtle.ConstantTimeCompare(digest[:], sum[:]) == 1 {
				found = c
			}
		}
		if found == (caller{}) || !strings.EqualFold(scheme, "Bearer") {
			w.Header().Set("WWW-Authenticate", "Bearer")
			writeError(w, http.StatusUnauthorized, "unknown or missing bearer token")
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, found)))
	})
}

// An order is the body of a request.
type order struct {
	Amount   int64  `json:"amount"` // in the currency's smallest unit
	Currency string `json:"currency"`
}

// A payment is the body of an answer.
type payment struct {
	ID string `json:"id"`
	order
}

// create answers with a new payment whose id starts with prefix. It knows nothing
// of idempotency: run twice, it would pay twice.
func create(prefix string, process processor) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, err := readOrder(r.Body)
		if err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		if err := process(r.Context()); err != nil {
			// A 5xx is not kept: the same key may be tried again.
			writeError(w, http.StatusServiceUnavailable, "nothing was paid")
			return
		}
		p := payment{ID: prefix + rand.Text(), order: o}
		w.Header().Set("Location", r.URL.Path+"/"+p.ID)
		writeJSON(w, http.StatusCreated, p)
	})
}

func readOrder(body io.Reader) (order, error) {
	var o order
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(&o); err != nil {
		return order{}, errors.New("the body is not an order: " + err.Error())
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return order{}, errors.New("the body holds more than one order")
	}
	if o.Amount <= 0 {
		return order{}, errors.New("amount must be a positive integer")
	}
	if len(o.Currency) != 3 || strings.Trim(o.Currency, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
		return order{}, errors.New("currency must be three capital letters")
	}
	return o, nil
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]string{"error": message})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // a failed write is the connection's end
}
