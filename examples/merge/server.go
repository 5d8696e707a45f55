package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// A server charges, each order of a shop once.
type server struct {
	*httptest.Server
	run     string
	charges atomic.Int64
}

// shopHeader stands for what an authentication in front has established.
const shopHeader = "X-Shop"

func newServer(store idempotency.Store, predecessors idempotency.PredecessorsFunc) (*server, error) {
	shop := func(r *http.Request) string { return r.Header.Get(shopHeader) }
	idem, err := idempotency.New(store, idempotency.Config{
		KeyScope:     shop,
		Principal:    func(*http.Request) string { return "till" },
		Predecessors: predecessors,
	})
	if err != nil {
		return nil, err
	}
	s := &server{run: uuid.NewString()}
	s.Server = httptest.NewServer(idem.Named("charge").Handler(http.HandlerFunc(s.charge)))
	return s, nil
}

// tenant is what a shop is stored under: in a database, there may be others of that name.
func (s *server) tenant(shop string) string { return s.run + "/" + shop }

func (s *server) charge(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, "charge %d for %s", s.charges.Add(1), strings.TrimPrefix(r.Header.Get(shopHeader), s.run+"/"))
}

// send sends a request and says what came back.
func (s *server) send(ctx context.Context, r request) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, strings.NewReader(r.amount))
	if err != nil {
		return "", err
	}
	req.Header.Set(shopHeader, s.tenant(r.shop))
	req.Header.Set(idempotency.HeaderKey, `"order-`+r.order+`"`)
	resp, err := s.Client().Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode >= http.StatusBadRequest:
		var problem struct{ Code string }
		if err := json.Unmarshal(body, &problem); err != nil {
			return "", fmt.Errorf("%d: %w", resp.StatusCode, err)
		}
		return fmt.Sprintf("%d %s", resp.StatusCode, problem.Code), nil
	case resp.Header.Get(idempotency.HeaderReplayed) == "true":
		return string(body) + ", replayed", nil
	}
	return string(body), nil
}
