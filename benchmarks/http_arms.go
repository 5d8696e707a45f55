package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// A web is a server with one handler, which is bare at one path and behind the
// middleware at others, and its client.
type web struct {
	server   *http.Server
	client   *http.Client
	base     string
	seededAs map[string][]string // keys with records, by path and size
}

// Paths of the handler.
const (
	pathBare     = "/bare"
	pathFirst    = "/first"
	pathDone     = "/done"      // whose requests are done already
	pathInFlight = "/in-flight" // whose requests are in flight already
)

func newWeb(ctx context.Context, first, seeded idempotency.Store) (*web, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathBare, echo)
	for path, store := range map[string]idempotency.Store{
		pathFirst: first, pathDone: seeded, pathInFlight: unfinishing{seeded},
	} {
		guard, err := idempotency.New(store, idempotency.Config{
			KeyScope:  func(*http.Request) string { return "acme" },
			Principal: func(*http.Request) string { return "alice" },
		})
		if err != nil {
			return nil, err
		}
		mux.Handle("POST "+path, guard.Named(path).Handler(http.HandlerFunc(echo)))
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	w := &web{
		server: &http.Server{
			Handler: mux, ReadHeaderTimeout: time.Minute,
			BaseContext: func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
		},
		client: &http.Client{Transport: &http.Transport{
			MaxIdleConnsPerHost: 256, DisableCompression: true,
		}},
		base:     "http://" + listener.Addr().String(),
		seededAs: make(map[string][]string),
	}
	go func() { _ = w.server.Serve(listener) }() // until it is closed
	return w, nil
}

func (w *web) close(ctx context.Context) {
	w.client.CloseIdleConnections()
	_ = w.server.Shutdown(context.WithoutCancel(ctx))
}

// echo answers with what it was sent.
func echo(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(text) // the client's side of the measurement reports it
}

// An unfinishing store loses outcomes, so that its records stay in progress.
type unfinishing struct{ idempotency.Store }

func (s unfinishing) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	c.Lease = lease
	return s.Store.Claim(ctx, c)
}

func (unfinishing) Complete(context.Context, idempotency.Lease, idempotency.Response) error {
	return nil
}

// arms returns what is compared in a cell.
func (w *web) arms(ctx context.Context, c cell) ([]arm, error) {
	text := body(c.Bytes)
	path, status := pathFirst, http.StatusCreated
	switch c.Case {
	case caseReplay:
		path = pathDone
	case caseInFlight:
		path, status = pathInFlight, http.StatusConflict
	case caseReused:
		path, status = pathDone, http.StatusUnprocessableEntity
	}
	var keys []string
	if path != pathFirst {
		var err error
		if keys, err = w.seed(ctx, path, text); err != nil {
			return nil, err
		}
	}
	if c.Case == caseReused {
		text = append(bytes.Clone(text), ' ')
	}
	guarded := func(ctx context.Context, client, n int) error {
		if keys == nil {
			return w.post(ctx, path, uuid.NewString(), text, status)
		}
		return w.post(ctx, path, keys[recordOf(c, client, n)], text, status)
	}
	bare := func(ctx context.Context, _, _ int) error {
		return w.post(ctx, pathBare, uuid.NewString(), text, http.StatusCreated)
	}
	return []arm{{kind: armLibrary, pool: libraryPool, do: guarded}, {kind: armBare, do: bare}}, nil
}

// seed returns keys whose requests have been sent once.
func (w *web) seed(ctx context.Context, path string, text []byte) ([]string, error) {
	kind := fmt.Sprint(path, len(text))
	if keys, ok := w.seededAs[kind]; ok {
		return keys, nil
	}
	keys := make([]string, records)
	for i := range keys {
		keys[i] = uuid.NewString()
		if err := w.post(ctx, path, keys[i], text, http.StatusCreated); err != nil {
			return nil, err
		}
	}
	w.seededAs[kind] = keys
	return keys, nil
}

func (w *web) post(ctx context.Context, path, key string, text []byte, status int) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.base+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(idempotency.HeaderKey, strconv.Quote(key))
	resp, err := w.client.Do(r)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if resp.StatusCode != status {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	return nil
}
