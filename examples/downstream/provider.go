package main

import (
	"crypto/rand"
	"encoding/json"
	"net/http"
	"sync"

	"github.com/keytuple/idempotency"
)

// A provider is a payment service with an idempotency of its own. It is safe for
// concurrent use.
type provider struct {
	http.Handler

	mu    sync.Mutex
	asked int // payments asked for
	made  int // payments made
}

func newProvider() (*provider, error) {
	// It has one customer here, so that all keys are that one's.
	customer := func(*http.Request) string { return "example" }
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{KeyScope: customer, Principal: customer})
	if err != nil {
		return nil, err
	}
	p := &provider{}
	pay := idem.Named("payment").Handler(http.HandlerFunc(p.pay))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /payments", func(w http.ResponseWriter, r *http.Request) {
		p.count(&p.asked)
		pay.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /payments", p.totals)
	p.Handler = mux
	return p, nil
}

func (p *provider) count(what *int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*what++
}

// pay would take the money.
func (p *provider) pay(w http.ResponseWriter, r *http.Request) {
	var what payment
	if err := json.NewDecoder(r.Body).Decode(&what); err != nil {
		reply(w, http.StatusBadRequest, map[string]string{"error": "not a payment"})
		return
	}
	p.count(&p.made)
	reply(w, http.StatusCreated, receipt{ID: "pay_" + rand.Text()})
}

func (p *provider) totals(w http.ResponseWriter, _ *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reply(w, http.StatusOK, map[string]int{"asked": p.asked, "made": p.made})
}
