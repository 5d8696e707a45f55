package idempotency_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A wireStore counts the calls that reach the store inside it.
type wireStore struct {
	idempotency.Store

	mu    sync.Mutex
	calls map[string]int
}

func (s *wireStore) count(method string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[method]++
}

func (s *wireStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	s.count("Claim")
	return s.Store.Claim(ctx, c)
}

func (s *wireStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	s.count("Complete")
	return s.Store.Complete(ctx, l, r)
}

func (s *wireStore) Release(ctx context.Context, l idempotency.Lease) error {
	s.count("Release")
	return s.Store.Release(ctx, l)
}

func (s *wireStore) Extend(ctx context.Context, l idempotency.Lease) error {
	s.count("Extend")
	return s.Store.Extend(ctx, l)
}

// A wire is a guarded handler on a real server, and what reached it.
type wire struct {
	addr  string
	store *wireStore

	mu   sync.Mutex
	keys []string // of the handler's runs
}

func newWire(t *testing.T, bare bool) *wire {
	t.Helper()
	w := &wire{store: &wireStore{Store: idempotency.NewMemoryStore(), calls: map[string]int{}}}
	m, err := idempotency.New(w.store, idempotency.Config{
		KeyScope:       func(r *http.Request) string { return r.Header.Get("Tenant") },
		Principal:      func(*http.Request) string { return "alice" },
		AcceptBareKeys: bare,
	})
	require.NoError(t, err)
	srv := httptest.NewUnstartedServer(m.Handler(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		key := "(no execution)"
		if exec, ok := idempotency.FromContext(r.Context()); ok {
			key = exec.Key().Key()
		}
		w.mu.Lock()
		w.keys = append(w.keys, key)
		w.mu.Unlock()
		rw.WriteHeader(http.StatusCreated)
	})))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.Start()
	t.Cleanup(srv.Close)
	w.addr = srv.Listener.Addr().String()
	return w
}

// A wireAnswer is what came back, and what happened meanwhile.
type wireAnswer struct {
	status   int
	header   http.Header
	code     string         // of a problem; "" for anything else
	ran      []string       // keys the handler saw
	calls    map[string]int // of the store
	problems bool           // it is a problem, and so the middleware's own
}

// send writes a POST with the header fields as they are, line breaks included,
// and reads the response. The fields must end in a line break.
func (w *wire) send(t *testing.T, tenant, fields string) wireAnswer {
	t.Helper()
	return w.sendRaw(t, "POST /v1/charges HTTP/1.1\r\nHost: wire.test\r\nTenant: "+tenant+
		"\r\n"+fields+"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
}

func (w *wire) sendRaw(t *testing.T, request string) wireAnswer {
	t.Helper()
	w.mu.Lock()
	w.keys = nil
	w.mu.Unlock()
	w.store.mu.Lock()
	clear(w.store.calls)
	w.store.mu.Unlock()

	dialer := net.Dialer{Timeout: 10 * time.Second}
	conn, err := dialer.DialContext(t.Context(), "tcp", w.addr)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(conn, request)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)

	a := wireAnswer{status: resp.StatusCode, header: resp.Header}
	if resp.Header.Get("Content-Type") == "application/problem+json" {
		var problem struct {
			Code string `json:"code"`
		}
		require.NoError(t, json.Unmarshal(body, &problem))
		a.problems, a.code = true, problem.Code
	}
	w.mu.Lock()
	a.ran = w.keys
	w.mu.Unlock()
	w.store.mu.Lock()
	a.calls = maps.Clone(w.store.calls)
	w.store.mu.Unlock()
	return a
}

// requireRan fails unless the handler ran once, for key, between a claim and a
// completion.
func (a wireAnswer) requireRan(t *testing.T, key string) {
	t.Helper()
	require.Equal(t, http.StatusCreated, a.status)
	require.Equal(t, []string{key}, a.ran)
	require.Equal(t, map[string]int{"Claim": 1, "Complete": 1}, a.calls)
}

// requireRefused fails unless the middleware answered 400 with code, by itself.
func (a wireAnswer) requireRefused(t *testing.T, code string) {
	t.Helper()
	require.Equal(t, http.StatusBadRequest, a.status)
	require.Equal(t, code, a.code)
	require.Empty(t, a.ran, "the handler ran")
	require.Empty(t, a.calls, "the store was called")
}

// received is the value that net/http makes of a field line that is sent as
// raw, and whether it lets the request through: white space around it is no
// part of a value; a line that goes on after white space is joined (obs-fold);
// what has no colon or holds other control characters is refused.
func received(raw string) (string, bool) {
	lines := strings.Split(raw, "\n")
	for i, line := range lines {
		if i > 0 && !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "\t") {
			return "", false
		}
		if i < len(lines)-1 {
			line = strings.TrimSuffix(line, "\r")
		}
		lines[i] = strings.Trim(line, " \t")
	}
	value := strings.Trim(strings.Join(lines, " "), " \t")
	for i := range len(value) {
		if value[i] < ' ' && value[i] != '\t' || value[i] == 0x7f {
			return "", false
		}
	}
	return value, true
}

// S11, S12: all vectors of the working group over TCP. Those that net/http lets
// through are judged as they are without it, but for the white space around the
// value and for obs-fold, which it has undone by then.
func TestS11VectorsOnTheWire(t *testing.T) {
	w := newWire(t, false)
	accepted, refused, byServer, changed := 0, 0, 0, 0
	for i, v := range keyVectors(t) {
		t.Run(fmt.Sprintf("%03d/%s/%s", i, v.File, v.Name), func(t *testing.T) {
			passes, same := true, true
			var fields strings.Builder
			var values []string
			for _, raw := range v.Raw {
				fields.WriteString("Idempotency-Key: " + raw + "\r\n")
				value, ok := received(raw)
				values, passes, same = append(values, value), passes && ok, same && value == raw
			}
			want, ok, _ := checkKeyLine(values[0])
			ok = ok && len(values) == 1 && want != "" && len(want) <= 255
			if passes && same {
				require.Equal(t, v.acceptable(), ok, "the vector as it is")
			}
			a := w.send(t, fmt.Sprint("tenant-", i), fields.String())
			switch {
			case !passes:
				require.Equal(t, http.StatusBadRequest, a.status, "%q", v.Raw)
				require.False(t, a.problems, "net/http was to refuse %q", v.Raw)
				require.Empty(t, a.ran)
				require.Empty(t, a.calls)
				byServer++
				return
			case ok:
				a.requireRan(t, want)
				accepted++
			default:
				a.requireRefused(t, "invalid-key")
				refused++
			}
			if !same {
				changed++
			}
		})
	}
	require.Equal(t, keyVectorCount, accepted+refused+byServer)
	require.Equal(t, keyVectorAccepted+2, accepted, "two vectors with a line feed are obs-fold on the wire")
	require.Equal(t, 128, byServer, "control characters")
	require.Equal(t, 8, changed, "six by the white space around them, two by obs-fold")
}

// S11, S12: what only a wire can show.
func TestS11FieldsOnTheWire(t *testing.T) {
	const ran = ""
	tests := []struct {
		name   string
		fields string
		code   string // "": the handler ran
		key    string
	}{
		{"plain", "Idempotency-Key: \"k\"\r\n", ran, "k"},
		{"no space behind the colon", "Idempotency-Key:\"k\"\r\n", ran, "k"},
		{"name in small letters", "idempotency-key: \"k\"\r\n", ran, "k"},
		{"name in capitals", "IDEMPOTENCY-KEY: \"k\"\r\n", ran, "k"},
		{"white space around", "Idempotency-Key: \t \"k\" \t \r\n", ran, "k"},
		{"parameters", "Idempotency-Key: \"k\";a=1;b\r\n", ran, "k"},
		{"obs-fold", "Idempotency-Key: \"foo\r\n bar\"\r\n", ran, "foo bar"},
		{"obs-fold with HTAB", "Idempotency-Key: \"foo\r\n\tbar\"\r\n", ran, "foo bar"},
		{"obs-fold with much space", "Idempotency-Key: \"foo  \r\n \t  bar\"\r\n", ran, "foo bar"},
		{"obs-fold with a bare line feed", "Idempotency-Key: \"foo\n bar\"\r\n", ran, "foo bar"},
		{"obs-fold before the value", "Idempotency-Key:\r\n \"k\"\r\n", ran, "k"},
		{"obs-fold behind the value", "Idempotency-Key: \"k\"\r\n \r\n", ran, "k"},
		{"obs-fold before a parameter", "Idempotency-Key: \"k\";\r\n a\r\n", ran, "k"},
		{"obs-fold to something invalid", "Idempotency-Key: \"k\"\r\n \"l\"\r\n", "invalid-key", ""},
		{"two lines that join to one string", "Idempotency-Key: \"foo\r\nIdempotency-Key: bar\"\r\n", "invalid-key", ""},
		{"two lines, apart and spelt differently", "Idempotency-Key: \"k\"\r\nX: y\r\nidempotency-KEY: \"k\"\r\n", "invalid-key", ""},
		{"two lines, one empty", "Idempotency-Key:\r\nIdempotency-Key: \"k\"\r\n", "invalid-key", ""},
		{"HTAB inside", "Idempotency-Key: \"a\tb\"\r\n", "invalid-key", ""},
		{"empty field value", "Idempotency-Key:\r\n", "invalid-key", ""},
		{"empty field value, white space", "Idempotency-Key: \t \r\n", "invalid-key", ""},
		{"empty string", "Idempotency-Key: \"\"\r\n", "invalid-key", ""},
		{"ISO 8859-1", "Idempotency-Key: \"\xfc\"\r\n", "invalid-key", ""},
		{"UTF-8", "Idempotency-Key: \"ü\"\r\n", "invalid-key", ""},
		{"without quotes", "Idempotency-Key: k\r\n", "invalid-key", ""},
		{"missing", "", "missing-key", ""},
		{"another field", "X-Idempotency-Key: \"k\"\r\n", "missing-key", ""},
		{"underscore", "Idempotency_Key: \"k\"\r\n", "missing-key", ""},
	}
	w := newWire(t, false)
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := w.send(t, fmt.Sprint("tenant-", i), tt.fields)
			if tt.code == ran {
				a.requireRan(t, tt.key)
				return
			}
			a.requireRefused(t, tt.code)
		})
	}
	t.Run("in the trailer", func(t *testing.T) {
		w.sendRaw(t, "POST /v1/charges HTTP/1.1\r\nHost: wire.test\r\nTenant: trailer\r\nTrailer: Idempotency-Key\r\n"+
			"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\nIdempotency-Key: \"k\"\r\n\r\n").
			requireRefused(t, "missing-key")
	})
	for _, refused := range []string{
		"Idempotency-Key : \"k\"\r\n", "Idempotency-Key: \"a\x00b\"\r\n", "Idempotency-Key: \"a\x7fb\"\r\n",
		"Idempotency-Key: \"a\rb\"\r\n", "Idempotency-Key: \"a\nb\"\r\n",
	} {
		a := w.send(t, "tenant", refused)
		require.Equal(t, http.StatusBadRequest, a.status)
		require.False(t, a.problems, "net/http was to refuse %q", refused)
		require.Empty(t, a.ran)
		require.Empty(t, a.calls)
	}
}

// S14: with the switch on, the bare and the quoted form of one key are one
// operation.
func TestS14BareKeysOnTheWire(t *testing.T) {
	w := newWire(t, true)
	const uuid = "8e03978e-40d5-43e8-bc93-6894a57f9324"
	w.send(t, "bare first", "Idempotency-Key: "+uuid+"\r\n").requireRan(t, uuid)
	w.send(t, "quoted first", "Idempotency-Key: \""+uuid+"\"\r\n").requireRan(t, uuid)
	for _, tenant := range []string{"bare first", "quoted first"} {
		for _, value := range []string{uuid, `"` + uuid + `"`, `"` + uuid + `";a=1`, " " + uuid + "\t"} {
			a := w.send(t, tenant, "Idempotency-Key: "+value+"\r\n")
			require.Equal(t, http.StatusCreated, a.status)
			require.Equal(t, "true", a.header.Get(idempotency.HeaderReplayed))
			require.Empty(t, a.ran)
			require.Equal(t, map[string]int{"Claim": 1}, a.calls)
		}
	}
	for _, value := range []string{"a b", "a,b", `"a`, "a;b", "", "ü", "a\tb", "a\r\nIdempotency-Key: a"} {
		w.send(t, "refused", "Idempotency-Key: "+value+"\r\n").requireRefused(t, "invalid-key")
	}
}
