package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
)

// A caller is who a request comes from: a till of a shop.
type caller struct{ tenant, principal string }

func (c caller) String() string { return c.tenant + "/" + c.principal }

// callerHeader stands for the authentication that a real API has in front.
const callerHeader = "X-Caller"

func callerOf(r *http.Request) caller {
	tenant, principal, _ := strings.Cut(r.Header.Get(callerHeader), "/")
	return caller{tenant: tenant, principal: principal}
}

// An effect is something that has really happened and cannot be undone.
type effect struct {
	ID    string `json:"id"`
	Owner string `json:"owner"` // the caller it was done for
}

// An application makes things happen. It knows nothing of idempotency: called
// twice, it does a thing twice.
type application struct {
	mu      sync.Mutex
	effects []effect
}

func (a *application) perform(prefix string, c caller) effect {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := effect{ID: fmt.Sprintf("%s_%d", prefix, len(a.effects)+1), Owner: c.String()}
	a.effects = append(a.effects, e)
	return e
}

// happened counts the effects.
func (a *application) happened() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.effects)
}

// handler answers each request with a new effect.
func (a *application) handler(prefix string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e := a.perform(prefix, callerOf(r))
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(e) // a failed write is the connection's end
	})
}
