// Command accidents shows what goes wrong where the value of the Idempotency-Key
// header is the storage key, and that it does not where that value is one part of
// a tuple. It sends the same requests to two servers that differ in nothing else,
// and prints what came back and what really happened.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/keytuple/idempotency"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "accidents:", err)
		os.Exit(1)
	}
}

// The operations of the API.
const (
	charge = "charge"
	refund = "refund"
)

const intro = `The same requests, sent to two servers that run the same application. One stores the
outcome under the value of the Idempotency-Key header, the other under the tuple
(version, tenant, principal, route, namespace, key). Both refuse a key that comes with
another payload (422). Callers are written shop/till: tenant and principal.

`

// A story is a few requests and how many things they are meant to make happen.
type story struct {
	title string
	meant int
	steps []step
}

// A step is one request, or one delivery by the server.
type step struct {
	what string
	who  caller
	do   func(context.Context, *world) (answer, error)
}

func stories() []story {
	const (
		sale  = `{"amount":1000,"currency":"EUR"}`
		event = `{"event":"evt_x","type":"charge.settled"}`
	)
	a1 := caller{tenant: "shop-a", principal: "till-1"}
	a2 := caller{tenant: "shop-a", principal: "till-2"}
	b1 := caller{tenant: "shop-b", principal: "till-1"}
	send := func(c caller, operation, key string) step {
		return step{
			what: fmt.Sprintf("%s: %s, key %q", c, operation, key),
			who:  c,
			do: func(ctx context.Context, w *world) (answer, error) {
				return w.send(ctx, c, operation, key, sale)
			},
		}
	}
	deliver := step{
		what: "the server: delivery of evt_x",
		who:  a1,
		do: func(ctx context.Context, w *world) (answer, error) {
			return w.guard.deliver(ctx, delivery{to: a1, key: "replay:evt_x:", payload: event}, func() effect {
				return w.app.perform("evt", a1)
			})
		},
	}
	return []story{
		{"What both are for: a retry after a lost answer", 1, []step{
			send(a1, charge, "order-1"), send(a1, charge, "order-1"),
		}},
		{"Cross-tenant replay: two shops use the same key (missing: tenant)", 2, []step{
			send(a1, charge, "order-1"), send(b1, charge, "order-1"),
		}},
		{"Swallowed refund: it comes with the key of its charge (missing: route)", 2, []step{
			send(a1, charge, "order-1"), send(a1, refund, "order-1"),
		}},
		{"Poisoned delivery: a client sends what the server uses itself (missing: namespace)", 2, []step{
			send(a1, charge, "replay:evt_x:"), deliver, deliver,
		}},
		{"Colliding callers: two tills of a shop count their sales from 1 (missing: principal)", 2, []step{
			send(a1, charge, "sale-1"), send(a2, charge, "sale-1"),
		}},
	}
}

// run plays every story against both servers and prints the table.
func run(ctx context.Context, out io.Writer) error {
	rows := [][3]string{{"what was asked", "header value as key", "tuple as key"}}
	var accidents [2]int
	all := stories()
	for _, s := range all {
		tuple, err := newTupleAsKey()
		if err != nil {
			return err
		}
		header, headerOK, err := play(ctx, newHeaderAsKey(), s)
		if err != nil {
			return err
		}
		scoped, scopedOK, err := play(ctx, tuple, s)
		if err != nil {
			return err
		}
		for i, ok := range [...]bool{headerOK, scopedOK} {
			if !ok {
				accidents[i]++
			}
		}
		rows = append(rows, [3]string{}, [3]string{s.title})
		for i, step := range s.steps {
			rows = append(rows, [3]string{"  " + step.what, header[i], scoped[i]})
		}
		last := len(s.steps)
		rows = append(rows, [3]string{"  happened, of what was meant", header[last], scoped[last]})
	}
	rows = append(rows, [3]string{}, [3]string{
		fmt.Sprintf("accidents in %d stories", len(all)), strconv.Itoa(accidents[0]), strconv.Itoa(accidents[1]),
	})
	if _, err := io.WriteString(out, intro); err != nil {
		return err
	}
	return printTable(out, rows)
}

// play runs a story in a world of its own. It returns a cell for each step and one
// for the sum, and whether everything that was meant to happen did, once.
func play(ctx context.Context, g guard, s story) (cells []string, ok bool, err error) {
	w := newWorld(g)
	defer w.server.Close()
	for _, step := range s.steps {
		a, err := step.do(ctx, w)
		if err != nil {
			return nil, false, fmt.Errorf("%s: %s: %w", s.title, step.what, err)
		}
		cells = append(cells, describe(a, step.who))
	}
	happened := w.app.happened()
	ok = happened == s.meant
	sum := fmt.Sprintf("%d of %d", happened, s.meant)
	if !ok {
		sum += "  <- ACCIDENT"
	}
	return append(cells, sum), ok, nil
}

// describe says what who got.
func describe(a answer, who caller) string {
	if a.effect == (effect{}) {
		return fmt.Sprintf("%d refused", a.status)
	}
	text := fmt.Sprintf("%d %s", a.status, a.effect.ID)
	if a.replayed {
		text += " replayed"
	}
	if a.effect.Owner != who.String() {
		text += ", made for " + a.effect.Owner
	}
	return text
}

// A world is one application behind one guard, on a server of its own.
type world struct {
	app    *application
	guard  guard
	server *httptest.Server
}

func newWorld(g guard) *world {
	app := new(application)
	mux := http.NewServeMux()
	mux.Handle("POST /v1/"+charge+"s", g.wrap(charge, app.handler("ch")))
	mux.Handle("POST /v1/"+refund+"s", g.wrap(refund, app.handler("re")))
	return &world{app: app, guard: g, server: httptest.NewServer(mux)}
}

// send posts a request to the world's server.
func (w *world) send(ctx context.Context, c caller, operation, key, body string) (answer, error) {
	url := w.server.URL + "/v1/" + operation + "s"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set(callerHeader, c.String())
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(idempotency.HeaderKey, `"`+key+`"`)
	resp, err := w.server.Client().Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		return answer{}, err
	}
	return decode(resp.StatusCode, b.Bytes(), resp.Header.Get(idempotency.HeaderReplayed) == "true")
}

// printTable aligns the columns. A row with a first cell only is a title.
func printTable(out io.Writer, rows [][3]string) error {
	var width [2]int
	for _, row := range rows {
		for i := range width {
			if row[1] != "" {
				width[i] = max(width[i], utf8.RuneCountInString(row[i]))
			}
		}
	}
	var b strings.Builder
	for _, row := range rows {
		line := fmt.Sprintf("%-*s   %-*s   %s", width[0], row[0], width[1], row[1], row[2])
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}
