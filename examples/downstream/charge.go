package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// A payment is what a client wants to be paid, and what the provider is asked for.
type payment struct {
	Card   string `json:"card"`
	Amount int64  `json:"amount"` // in cents
}

// A receipt is what the provider answers.
type receipt struct {
	ID string `json:"id"`
}

// charging is the guarded handler.
type charging struct {
	provider client
	paid     func()
}

func (c charging) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var p payment
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil || p.Card == "" || p.Amount <= 0 {
		reply(w, http.StatusBadRequest, map[string]string{"error": "a card and a positive amount are needed"})
		return
	}
	exec, _ := idempotency.FromContext(r.Context()) // always there in a guarded handler
	// The name tells the calls of one operation apart: a second one would have another.
	got, err := c.provider.pay(r.Context(), exec.DownstreamKey("payment"), p)
	if err != nil {
		// It may or may not have been paid. A 5xx is not kept: the retry asks with the same key.
		reply(w, http.StatusBadGateway, map[string]string{"error": "the provider did not answer"})
		return
	}
	c.paid()
	reply(w, http.StatusCreated, map[string]any{"receipt": got.ID, "attempt": exec.Attempt()})
}

// A client asks the provider.
type client struct{ url string }

func (c client) pay(ctx context.Context, key uuid.UUID, p payment) (receipt, error) {
	body, err := json.Marshal(p)
	if err != nil {
		return receipt{}, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/payments", bytes.NewReader(body))
	if err != nil {
		return receipt{}, err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(idempotency.HeaderKey, `"`+key.String()+`"`)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return receipt{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusCreated {
		return receipt{}, fmt.Errorf("the provider answers %s", resp.Status)
	}
	var got receipt
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil || got.ID == "" {
		return receipt{}, errors.Join(errors.New("the provider's answer is no receipt"), err)
	}
	return got, nil
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // a failed write is the connection's end
}
