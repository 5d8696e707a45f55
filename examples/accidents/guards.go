package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// A guard runs each operation once, whether a client asks for it or the server
// itself.
type guard interface {
	// wrap guards the handler of an operation.
	wrap(operation string, next http.Handler) http.Handler
	// deliver runs an event's delivery to a caller under a key that the server made.
	deliver(ctx context.Context, d delivery, run func() effect) (answer, error)
}

// A delivery is work that the server starts itself, again if it is not sure that
// it was done.
type delivery struct {
	to      caller
	key     string
	payload string
}

// An answer is what became of a request or a delivery.
type answer struct {
	status   int
	effect   effect // the zero effect if refused
	replayed bool
}

// headerAsKey is the middleware that many services have: what the client sent is
// what the outcome is stored under. It refuses a key that comes with another
// payload, and it has no race: one operation runs at a time.
type headerAsKey struct {
	mu      sync.Mutex
	records map[string]headerRecord
}

type headerRecord struct {
	payload [sha256.Size]byte
	status  int
	body    []byte
}

func newHeaderAsKey() *headerAsKey {
	return &headerAsKey{records: make(map[string]headerRecord)}
}

func (h *headerAsKey) once(key string, payload []byte, run func() (int, []byte)) (status int, body []byte, replayed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	sum := sha256.Sum256(payload)
	if rec, ok := h.records[key]; ok {
		if rec.payload != sum {
			return http.StatusUnprocessableEntity, nil, false
		}
		return rec.status, rec.body, true
	}
	status, body = run()
	h.records[key] = headerRecord{payload: sum, status: status, body: body}
	return status, body, false
}

func (h *headerAsKey) wrap(_ string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		payload, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(payload))
		key := strings.Trim(r.Header.Get(idempotency.HeaderKey), `"`)
		status, body, replayed := h.once(key, payload, func() (int, []byte) {
			rec := httptest.NewRecorder()
			next.ServeHTTP(rec, r)
			return rec.Code, rec.Body.Bytes()
		})
		if replayed {
			w.Header().Set(idempotency.HeaderReplayed, "true")
		}
		w.WriteHeader(status)
		_, _ = w.Write(body)
	})
}

func (h *headerAsKey) deliver(_ context.Context, d delivery, run func() effect) (answer, error) {
	status, body, replayed := h.once(d.key, []byte(d.payload), func() (int, []byte) {
		return http.StatusOK, encode(run())
	})
	return decode(status, body, replayed)
}

// tupleAsKey is this library.
type tupleAsKey struct {
	store      idempotency.Store
	middleware *idempotency.Middleware
}

func newTupleAsKey() (*tupleAsKey, error) {
	store := idempotency.NewMemoryStore()
	m, err := idempotency.New(store, idempotency.Config{
		KeyScope:  func(r *http.Request) string { return callerOf(r).tenant },
		Principal: func(r *http.Request) string { return callerOf(r).principal },
	})
	if err != nil {
		return nil, err
	}
	return &tupleAsKey{store: store, middleware: m}, nil
}

func (t *tupleAsKey) wrap(operation string, next http.Handler) http.Handler {
	return t.middleware.Named(operation).Handler(next)
}

// deliver uses the very tenant, principal and route of a charge by the same
// caller. The key still cannot be the client's: it is in the server's namespace.
func (t *tupleAsKey) deliver(ctx context.Context, d delivery, run func() effect) (answer, error) {
	key, err := idempotency.ServerKey(idempotency.Scope{
		Version: idempotency.DefaultVersion, Tenant: d.to.tenant, Principal: d.to.principal, Route: charge,
	}, d.key)
	if err != nil {
		return answer{}, err
	}
	fingerprint := fingerprintOf(d.payload)
	claim := idempotency.Claim{
		Key: key, Fingerprint: fingerprint, Owner: uuid.New(), Lease: time.Minute, TTL: 24 * time.Hour,
	}
	record, err := t.store.Claim(ctx, claim)
	switch {
	case err != nil:
		return answer{}, err
	case record.State == idempotency.StateClaimed:
		outcome := idempotency.Response{Status: http.StatusOK, Body: encode(run())}
		lease := idempotency.Lease{Keys: []idempotency.ScopedKey{key}, Owner: claim.Owner, Duration: claim.Lease}
		if err := t.store.Complete(ctx, lease, outcome); err != nil {
			return answer{}, err
		}
		return decode(outcome.Status, outcome.Body, false)
	case record.Fingerprint != fingerprint:
		return answer{status: http.StatusUnprocessableEntity}, nil
	case record.State == idempotency.StateCompleted:
		return decode(record.Response.Status, record.Response.Body, true)
	}
	return answer{}, fmt.Errorf("delivery is %s", record.State)
}

// fingerprintOf is a digest of a payload under a scheme number of this program's
// own.
func fingerprintOf(payload string) idempotency.Fingerprint {
	const scheme = 255
	fp := idempotency.Fingerprint{scheme}
	sum := sha256.Sum256([]byte(payload))
	copy(fp[1:], sum[:])
	return fp
}

func encode(e effect) []byte {
	b, _ := json.Marshal(e) // two strings
	return b
}

func decode(status int, body []byte, replayed bool) (answer, error) {
	a := answer{status: status, replayed: replayed}
	if status >= http.StatusBadRequest {
		return a, nil
	}
	return a, json.Unmarshal(body, &a.effect)
}
