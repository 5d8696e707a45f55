// Command quickstart accepts charges: each of them once, however often it is sent.
package main

import (
	"fmt"
	"log"
	"net/http"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

func main() {
	idem, err := idempotency.New(idempotency.NewMemoryStore(), idempotency.Config{
		// Who asks, as your authentication in front established it; "" is refused.
		KeyScope:  func(r *http.Request) string { return r.Header.Get("X-Account") },
		Principal: func(r *http.Request) string { return r.Header.Get("X-User") },
	})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("POST /v1/charges", idem.Named("charge").Handler(http.HandlerFunc(createCharge)))
	log.Fatal(http.ListenAndServe("127.0.0.1:8080", mux))
}

func createCharge(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, "charged: %s\n", uuid.New())
}
