package idempotency_test

import (
	"bytes"
	"encoding"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A tuple is what a ScopedKey is made of, as plain strings in the order of the
// flat form.
type tuple struct {
	version, tenant, principal, route, namespace, key string
}

func (u tuple) scope() idempotency.Scope {
	return idempotency.Scope{Version: u.version, Tenant: u.tenant, Principal: u.principal, Route: u.route}
}

// make goes through the exported constructor of the tuple's namespace.
func (u tuple) make() (idempotency.ScopedKey, error) {
	if u.namespace == idempotency.NamespaceServer {
		return idempotency.ServerKey(u.scope(), u.key)
	}
	return idempotency.ClientKey(u.scope(), u.key)
}

// A tuplePart is one component of a tuple that a caller chooses.
type tuplePart struct {
	name  idempotency.Component
	limit int
	field func(*tuple) *string
}

// tupleParts lists them with the limits of S03, written out again.
func tupleParts() []tuplePart {
	return []tuplePart{
		{"version", 32, func(u *tuple) *string { return &u.version }},
		{"tenant", 255, func(u *tuple) *string { return &u.tenant }},
		{"principal", 255, func(u *tuple) *string { return &u.principal }},
		{"route", 512, func(u *tuple) *string { return &u.route }},
		{"key", 255, func(u *tuple) *string { return &u.key }},
	}
}

func goodTuple(namespace string) tuple {
	return tuple{"v1", "acme", "alice", "charge", namespace, "k-1"}
}

func namespaces() []string {
	return []string{idempotency.NamespaceClient, idempotency.NamespaceServer}
}

// fillTo returns the longest repetition of unit that fits into limit bytes,
// brought to exactly limit by single letters.
func fillTo(unit string, limit int) string {
	s := strings.Repeat(unit, limit/len(unit))
	return s + strings.Repeat("x", limit-len(s))
}

// S01, S02, S03: each exported constructor judges each component, and says
// which one and why without its value.
func TestS01S02S03ConstructorsValidate(t *testing.T) {
	const secret = "hunter2" // part of every refused value that can hold it
	cases := []struct {
		name  string
		value func(limit int) string
		want  error // nil: accepted
	}{
		{"empty", func(int) string { return "" }, idempotency.ErrMissingScope},
		{"NUL only", func(int) string { return "\x00" }, idempotency.ErrBadScope},
		{"NUL first", func(int) string { return "\x00" + secret }, idempotency.ErrBadScope},
		{"NUL inside", func(int) string { return "a\x00" + secret }, idempotency.ErrBadScope},
		{"NUL last", func(int) string { return secret + "\x00" }, idempotency.ErrBadScope},
		{"NUL as its last byte at the limit", func(n int) string { return fillTo("x", n-1) + "\x00" }, idempotency.ErrBadScope},
		{"lone continuation byte", func(int) string { return secret + "\x80" }, idempotency.ErrScopeEncoding},
		{"overlong NUL", func(int) string { return secret + "\xc0\x80" }, idempotency.ErrScopeEncoding},
		{"truncated rune", func(int) string { return secret + "\xf0\x9f\x98" }, idempotency.ErrScopeEncoding},
		{"surrogate half", func(int) string { return secret + "\xed\xa0\x80" }, idempotency.ErrScopeEncoding},
		{"beyond Unicode", func(int) string { return secret + "\xf4\x90\x80\x80" }, idempotency.ErrScopeEncoding},
		{"invalid in its last byte at the limit", func(n int) string { return fillTo("x", n-1) + "\xff" }, idempotency.ErrScopeEncoding},
		{"one byte", func(int) string { return "a" }, nil},
		{"one space", func(int) string { return " " }, nil},
		{"U+0001", func(int) string { return "\x01" }, nil},
		{"U+001E", func(int) string { return "\x1e" }, nil},
		{"the escape of a NUL", func(int) string { return `\x00\u0000%00` }, nil},
		{"replacement character", func(int) string { return "\ufffd" }, nil},
		{"one below the limit", func(n int) string { return fillTo("x", n-1) }, nil},
		{"at the limit", func(n int) string { return fillTo("x", n) }, nil},
		{"at the limit, two-byte runes", func(n int) string { return fillTo("é", n) }, nil},
		{"at the limit, three-byte runes", func(n int) string { return fillTo("€", n) }, nil},
		{"at the limit, four-byte runes", func(n int) string { return fillTo("😀", n) }, nil},
		{"over the limit by one", func(n int) string { return fillTo(secret, n+1) }, idempotency.ErrScopeTooLong},
		{"over by one byte, fewer runes", func(n int) string { return fillTo("😀", n+1) }, idempotency.ErrScopeTooLong},
		{"far over the limit", func(n int) string { return fillTo(secret, 1<<20) }, idempotency.ErrScopeTooLong},
	}
	reasons := []error{
		idempotency.ErrMissingScope, idempotency.ErrBadScope,
		idempotency.ErrScopeEncoding, idempotency.ErrScopeTooLong,
	}
	for _, ns := range namespaces() {
		for _, p := range tupleParts() {
			for _, c := range cases {
				t.Run(ns+"/"+string(p.name)+"/"+c.name, func(t *testing.T) {
					u := goodTuple(ns)
					*p.field(&u) = c.value(p.limit)
					k, err := u.make()
					if c.want == nil {
						require.NoError(t, err)
						require.Equal(t, u, tupleOf(k), "a component is kept as it is (S03)")
						return
					}
					require.True(t, k.IsZero(), "no key beside an error")
					var scopeErr *idempotency.ScopeError
					require.ErrorAs(t, err, &scopeErr)
					require.Equal(t, p.name, scopeErr.Component)
					for _, reason := range reasons {
						require.Equal(t, errors.Is(c.want, reason), errors.Is(err, reason), "errors.Is %v", reason)
					}
					require.Equal(t, c.want.Error()+": "+string(p.name), err.Error())
					for _, verb := range []string{"%v", "%+v", "%#v", "%q"} {
						require.NotContains(t, fmt.Sprintf(verb, err), secret)
						require.NotContains(t, fmt.Sprintf(verb, *scopeErr), secret)
					}
				})
			}
		}
	}
}

func tupleOf(k idempotency.ScopedKey) tuple {
	return tuple{k.Version(), k.Tenant(), k.Principal(), k.Route(), k.Namespace(), k.Key()}
}

// S02, S03: the texts are the ones the specification fixes.
func TestS02S03ErrorTexts(t *testing.T) {
	require.EqualError(t, idempotency.ErrMissingScope, "idempotency: missing scope component")
	require.EqualError(t, idempotency.ErrBadScope, "idempotency: scope component contains separator")
	_, err := idempotency.ClientKey(idempotency.Scope{}, "")
	require.ErrorIs(t, err, idempotency.ErrMissingScope, "everything is missing: whichever is named")
}

// S02, S03: with several unusable components, one of them is reported.
func TestS02S03SeveralFaults(t *testing.T) {
	values := map[string]error{
		"": idempotency.ErrMissingScope, "\x00": idempotency.ErrBadScope,
		"\xff": idempotency.ErrScopeEncoding, fillTo("x", 513): idempotency.ErrScopeTooLong,
	}
	for _, ns := range namespaces() {
		for _, p := range tupleParts() {
			for _, q := range tupleParts() {
				for v, vErr := range values {
					for w, wErr := range values {
						if p.name == q.name {
							continue
						}
						u := goodTuple(ns)
						*p.field(&u), *q.field(&u) = v, w
						k, err := u.make()
						require.True(t, k.IsZero())
						var scopeErr *idempotency.ScopeError
						require.ErrorAs(t, err, &scopeErr)
						want := vErr
						if scopeErr.Component != p.name {
							require.Equal(t, q.name, scopeErr.Component, "names a component that is fine")
							want = wErr
						}
						require.ErrorIs(t, err, want)
					}
				}
			}
		}
	}
}

// S03: nothing is stripped, trimmed, folded or normalised: each spelling is a
// key of its own, in every component.
func TestS03NothingIsNormalised(t *testing.T) {
	spellings := []string{
		"caf\u00e9", "cafe\u0301", // NFC, NFD
		"caf\u00e9 ", " caf\u00e9", "caf\u00e9\t", "caf\u00e9\n", "caf\u00e9\u00a0", "\ufeffcaf\u00e9",
		"CAF\u00c9", "Caf\u00e9", "cafe", "caf%C3%A9", "caf%c3%a9", `caf\u00e9`,
		"\u212b", "\u00c5", "A\u030a", // Ångström sign, Å, A with ring
		"ﬁ", "fi", "１", "1", "01", "i", "ı", "İ", "ß", "ss", "ẞ",
		"a/b", "a//b", "a/./b", "a/b/", "a\x1eb", "a\x1e", "\x1eb", "\u200b", "\ufffd",
		"u:", "s:", "u:a", "v1", "v1 ",
	}
	seen := map[idempotency.ScopedKey]string{}
	flat := map[string]string{}
	n := 0
	for _, ns := range namespaces() {
		for _, p := range tupleParts() {
			for _, s := range spellings {
				u := goodTuple(ns)
				if *p.field(&u) == s {
					continue // the tuple without a change, once for each component
				}
				*p.field(&u) = s
				k, err := u.make()
				require.NoError(t, err)
				require.Equal(t, u, tupleOf(k))
				where := fmt.Sprintf("%s %s %q", ns, p.name, s)
				require.Empty(t, seen[k], "%s equals another", where)
				require.Empty(t, flat[k.Flat()], "%s: flat form of another", where)
				seen[k], flat[k.Flat()] = where, where
				n++
			}
		}
	}
	require.Len(t, seen, n)
}

// S01: the zero value is no key; no store may accept it.
func TestS01ZeroKey(t *testing.T) {
	var zero idempotency.ScopedKey
	require.True(t, zero.IsZero())
	require.Equal(t, tuple{}, tupleOf(zero))
	require.Equal(t, "idempotency-key:none", zero.String())
	k, err := goodTuple("u:").make()
	require.NoError(t, err)
	require.False(t, k.IsZero())

	owner := uuid.MustParse("8e03978e-40d5-43e8-bc93-6894a57f9324")
	claim := idempotency.Claim{Key: k, Owner: owner, Lease: time.Second, TTL: time.Hour}
	require.NoError(t, claim.Validate())
	claim.Key = zero
	require.ErrorIs(t, claim.Validate(), idempotency.ErrInvalidClaim)
	lease := idempotency.Lease{Keys: []idempotency.ScopedKey{k}, Owner: owner}
	require.NoError(t, lease.Validate())
	lease.Keys = append(lease.Keys, zero)
	require.ErrorIs(t, lease.Validate(), idempotency.ErrInvalidClaim)
}

// S01: two keys are equal, also as map keys, exactly when their tuples are.
func TestS01Comparable(t *testing.T) {
	a, err := goodTuple("u:").make()
	require.NoError(t, err)
	again := tuple{
		strings.Clone("v1"), strings.Clone("acme"), strings.Clone("alice"),
		strings.Clone("charge"), "u:", strings.Clone("k-1"),
	}
	b, err := again.make()
	require.NoError(t, err)
	require.True(t, a == b) //nolint:testifylint // comparability is what is tested
	require.Len(t, map[idempotency.ScopedKey]bool{a: true, b: true}, 1)
	for _, p := range tupleParts() {
		u := goodTuple("u:")
		*p.field(&u) += "x"
		c, err := u.make()
		require.NoError(t, err)
		require.False(t, a == c, "differs in %s", p.name) //nolint:testifylint // comparability is what is tested
	}
}

// S01: outside of scoped there is no way to a ScopedKey with something in it:
// no exported field, no decoder, and no literal in the package's own files.
func TestS01OnlyScopedMakesOne(t *testing.T) {
	typ := reflect.TypeFor[idempotency.ScopedKey]()
	for i := range typ.NumField() {
		require.False(t, typ.Field(i).IsExported(), typ.Field(i).Name)
	}
	var k any = new(idempotency.ScopedKey)
	for _, decodes := range []bool{
		implements[encoding.TextUnmarshaler](k), implements[encoding.BinaryUnmarshaler](k), implements[json.Unmarshaler](k),
		implements[fmt.Scanner](k), implements[interface{ GobDecode([]byte) error }](k), implements[interface{ Scan(any) error }](k),
	} {
		require.False(t, decodes)
	}
	_ = decodeJSON(`{"version":"v1","tenant":"t","Tenant":"t","key":"k"}`, k)
	require.Equal(t, new(idempotency.ScopedKey), k)

	files, err := os.ReadDir(".")
	require.NoError(t, err)
	made := 0
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, f.Name(), nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			fn, _ := decl.(*ast.FuncDecl)
			inScoped := fn != nil && fn.Recv == nil && fn.Name.Name == "scoped"
			ast.Inspect(decl, func(n ast.Node) bool {
				lit, ok := n.(*ast.CompositeLit)
				if !ok || len(lit.Elts) == 0 {
					return true
				}
				if id, ok := lit.Type.(*ast.Ident); ok && id.Name == "ScopedKey" {
					require.True(t, inScoped, "%s makes a ScopedKey", fset.Position(lit.Pos()))
					made++
				}
				return true
			})
		}
	}
	require.Equal(t, 1, made, "literals of a ScopedKey in scoped")
}

func decodeJSON(text string, v any) error { return json.Unmarshal([]byte(text), v) }

func implements[T any](v any) bool {
	_, ok := v.(T)
	return ok
}

// loudTuple has parts that cannot be in an output by chance.
func loudTuple(namespace string) tuple {
	return tuple{"vers10n-marker", "t3nant-marker", "pr1ncipal-marker", "r0ute-marker", namespace, "k3y-marker"}
}

// requireHidden fails if out shows a part of k, plain or in hex, and unless it
// shows its digest.
func requireHidden(t *testing.T, k idempotency.ScopedKey, out string) {
	t.Helper()
	requireNoParts(t, out)
	require.Contains(t, out, k.String())
}

func requireNoParts(t *testing.T, out string) {
	t.Helper()
	u := loudTuple("")
	for _, p := range tupleParts() {
		v := *p.field(&u)
		require.NotContains(t, out, v, p.name)
		require.NotContains(t, strings.ToLower(out), hex.EncodeToString([]byte(v)), p.name)
		require.NotContains(t, out, strings.Trim(fmt.Sprintf("%d", []byte(v)), "[]"), p.name)
	}
}

// S01, S46: formatting shows a digest, never a part.
func TestS01FormattingShowsDigest(t *testing.T) {
	type holder struct {
		Name  string
		Key   idempotency.ScopedKey
		Inner struct {
			Keys map[idempotency.ScopedKey]idempotency.ScopedKey
		}
		Any any
	}
	for _, ns := range namespaces() {
		k, err := loudTuple(ns).make()
		require.NoError(t, err)
		require.Regexp(t, `^idempotency-key:[0-9a-f]{16}$`, k.String())
		h := holder{Name: "h", Key: k, Any: k}
		h.Inner.Keys = map[idempotency.ScopedKey]idempotency.ScopedKey{k: k}
		claim := idempotency.Claim{Key: k, Owner: uuid.New(), Lease: time.Second, TTL: time.Minute}
		lease := idempotency.Lease{Keys: []idempotency.ScopedKey{k}, Owner: uuid.New()}
		values := []struct {
			name  string
			value any
		}{
			{"key", k},
			{"pointer", &k},
			{"slice", []idempotency.ScopedKey{k}},
			{"array", [1]idempotency.ScopedKey{k}},
			{"map", map[idempotency.ScopedKey]idempotency.ScopedKey{k: k}},
			{"Claim", claim},
			{"pointer to Claim", &claim},
			{"Lease", lease},
			{"pointer to Lease", &lease},
			{"holder", h},
			{"pointer to holder", &h},
		}
		for _, v := range values {
			for _, verb := range "vsqdxXtboeEfFgGcUO" {
				for _, flags := range []string{"", "+", "#", "-", " ", "0", "40", "1.1", "+#"} {
					format := "%" + flags + string(verb)
					t.Run(ns+"/"+v.name+"/"+format, func(t *testing.T) {
						requireHidden(t, k, fmt.Sprintf(format, v.value))
					})
				}
			}
			requireHidden(t, k, fmt.Sprint(v.value))
			for _, oneVerb := range []string{"%d", "%s"} { // fmt prints what has no verb, too
				requireHidden(t, k, fmt.Sprintf(oneVerb, 1, v.value))
			}
		}
		requireHidden(t, k, fmt.Errorf("claim of %v", k).Error())
	}
}

// S01, S46: neither handler of slog shows a part.
func TestS01SlogShowsDigest(t *testing.T) {
	handlers := []struct {
		name string
		make func(*bytes.Buffer) slog.Handler
	}{
		{"text", func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) }},
		{"json", func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) }},
	}
	for _, h := range handlers {
		for _, ns := range namespaces() {
			k, err := loudTuple(ns).make()
			require.NoError(t, err)
			claim := idempotency.Claim{Key: k, Owner: uuid.New(), Lease: time.Second, TTL: time.Minute}
			lease := idempotency.Lease{Keys: []idempotency.ScopedKey{k}, Owner: uuid.New()}
			for _, v := range []struct {
				name  string
				value any
			}{
				{"key", k},
				{"pointer", &k},
				{"slice", []idempotency.ScopedKey{k}},
				{"map", map[idempotency.ScopedKey]int{k: 1}},
				{"Claim", claim},
				{"pointer to Claim", &claim},
				{"Lease", lease},
				{"error", fmt.Errorf("claim of %s", k)},
			} {
				t.Run(h.name+"/"+ns+"/"+v.name, func(t *testing.T) {
					var b bytes.Buffer
					log := slog.New(h.make(&b))
					log.InfoContext(t.Context(), "m", "value", v.value)
					requireHidden(t, k, b.String())
					b.Reset()
					log.With("value", v.value).WithGroup("g").WarnContext(t.Context(), "m", slog.Group("h", "value", v.value))
					requireHidden(t, k, b.String())
				})
			}
		}
	}
}

// S01, S46: so do encoders.
func TestS01EncodersShowDigest(t *testing.T) {
	for _, ns := range namespaces() {
		k, err := loudTuple(ns).make()
		require.NoError(t, err)
		for _, v := range []struct {
			name  string
			value any
		}{
			{"key", k},
			{"pointer", &k},
			{"slice", []idempotency.ScopedKey{k}},
			{"map key", map[idempotency.ScopedKey]int{k: 1}},
			{"map value", map[string]idempotency.ScopedKey{"k": k}},
			{"Claim", idempotency.Claim{Key: k}},
			{"Lease", idempotency.Lease{Keys: []idempotency.ScopedKey{k}}},
		} {
			t.Run(ns+"/"+v.name, func(t *testing.T) {
				b, err := json.Marshal(v.value)
				require.NoError(t, err)
				requireHidden(t, k, string(b))
			})
		}
		text, err := k.MarshalText()
		require.NoError(t, err)
		require.Equal(t, k.String(), string(text))
	}
}

// S05, S08 and the four accidents: each component alone makes a record of its
// own, and no header value reaches the server's namespace.
func TestS05NamespacesDiffer(t *testing.T) {
	s := goodTuple("").scope()
	for _, key := range []string{"replay:evt_x:", "s:", "u:", "s:replay:evt_x:", "u:replay:evt_x:", "\x1es:\x1ek"} {
		client, err := idempotency.ClientKey(s, key)
		require.NoError(t, err)
		server, err := idempotency.ServerKey(s, key)
		require.NoError(t, err)
		require.NotEqual(t, client, server)
		require.NotEqual(t, client.Flat(), server.Flat())
		require.NotEqual(t, client.String(), server.String())
		require.Equal(t, "u:", client.Namespace())
		require.Equal(t, "s:", server.Namespace())
		require.Equal(t, key, client.Key())
		require.Equal(t, key, server.Key())
	}
	for _, p := range tupleParts() {
		if p.name == idempotency.ComponentKey {
			continue
		}
		for _, v := range []string{"s:", "s:k", "k\x1es:"} {
			u := goodTuple("u:")
			*p.field(&u) = v
			k, err := idempotency.ClientKey(u.scope(), u.key)
			require.NoError(t, err)
			require.Equal(t, "u:", k.Namespace(), "whatever the %s", p.name)
		}
	}
}

// S04, S06: the flat form, spelt out once.
func TestS04FlatForm(t *testing.T) {
	s := idempotency.Scope{Version: "v1", Tenant: "acme", Principal: "alice", Route: "POST /v1/charges"}
	client, err := idempotency.ClientKey(s, "8e03978e-40d5-43e8-bc93-6894a57f9324")
	require.NoError(t, err)
	require.Equal(t, "v1\x00acme\x00alice\x00POST /v1/charges\x00u:\x008e03978e-40d5-43e8-bc93-6894a57f9324", client.Flat())
	server, err := idempotency.ServerKey(s, "replay:evt_x:")
	require.NoError(t, err)
	require.Equal(t, "v1\x00acme\x00alice\x00POST /v1/charges\x00s:\x00replay:evt_x:", server.Flat())
	require.Equal(t, "v1", idempotency.DefaultVersion)

	s.Version = "v2"
	v2, err := idempotency.ClientKey(s, "8e03978e-40d5-43e8-bc93-6894a57f9324")
	require.NoError(t, err)
	require.NotEqual(t, client, v2)
	require.NotEqual(t, client.Flat(), v2.Flat())
}

// A tupleGenerator makes valid tuples that are hard to tell apart once joined.
type tupleGenerator struct{ *rand.Rand }

func newTupleGenerator(seed uint64) tupleGenerator {
	return tupleGenerator{rand.New(rand.NewPCG(seed, 0))}
}

var tupleAtoms = []string{
	"a", "b", "aa", "ab", "v1", "v2", "u:", "s:", "\x1e", "\x1eu:\x1e", "\x1es:\x1e", "\x1f", "\x01", "\x7f", " ", "\t", "\n", "\r\n",
	"/", "//", ":", ",", ";", `\`, `\0`, `\x00`, "%00", "%2500", "\u2400", `"`, "'", "''", "' OR 1=1 --", "é", "e\u0301", "É", "😀", "\ufeff", "\ufffd",
	"\u200b", "POST /v1/charges", "POST ", "GET /", "{id}", "0", "00",
}

func (g tupleGenerator) component() string {
	var b strings.Builder
	for range 1 + g.IntN(3) {
		b.WriteString(tupleAtoms[g.IntN(len(tupleAtoms))])
	}
	return b.String()
}

func (g tupleGenerator) tuple() tuple {
	u := tuple{
		"v1", g.component(), g.component(), g.component(),
		namespaces()[g.IntN(2)], g.component(),
	}
	if g.IntN(4) == 0 {
		for u.version = g.component(); len(u.version) > 32; {
			u.version = g.component()
		}
	}
	return u
}

// neighbour returns a tuple close to u: mostly another one, sometimes u itself.
func (g tupleGenerator) neighbour(u tuple) tuple {
	all := tupleParts()
	i := g.IntN(len(all))
	p, q := all[i].field(&u), all[(i+1)%len(all)].field(&u)
	switch g.IntN(10) {
	case 0: // the last rune of one component moves to the front of the next
		if r, n := utf8.DecodeLastRuneInString(*p); n < len(*p) {
			*p, *q = (*p)[:len(*p)-n], string(r)+*q
		}
	case 1: // and back
		if r, n := utf8.DecodeRuneInString(*q); n < len(*q) {
			*p, *q = *p+string(r), (*q)[n:]
		}
	case 2: // neighbours swapped
		*p, *q = *q, *p
	case 3: // one the prefix of the other
		if _, n := utf8.DecodeLastRuneInString(*p); n < len(*p) {
			*p = (*p)[:len(*p)-n]
		}
	case 4: // something that a separator could be taken for, and what follows it
		*p = *p + "\x1e" + *q
	case 5:
		*p += tupleAtoms[g.IntN(len(tupleAtoms))]
	case 6: // the other namespace, alone or moved into the key
		was := u.namespace
		if u.namespace = idempotency.NamespaceClient; was == u.namespace {
			u.namespace = idempotency.NamespaceServer
		}
		if g.IntN(2) == 0 {
			u.key = was + u.key
		}
	case 7: // the route's end and the namespace in the key
		u.route, u.key = u.route+u.namespace, u.namespace+u.key
	case 8:
		*p = g.component()
	case 9: // equal, in other memory
		*p = strings.Clone(*p)
	}
	if len(u.version) > 32 {
		u.version = "v1"
	}
	return u
}

// S04: among all tuples of a generator, and so in all pairs of them, two flat
// forms, keys or digests are equal only if the tuples are; and the flat form
// splits at U+0000 into exactly the six parts.
func TestS04FlatIsInjective(t *testing.T) {
	g := newTupleGenerator(4)
	byFlat := make(map[string]tuple)
	byDigest := make(map[string]tuple)
	const pairs = 100_000
	equal := 0
	check := func(u tuple) idempotency.ScopedKey {
		k, err := u.make()
		if err != nil {
			require.NoError(t, err, "%q", u)
		}
		flat := k.Flat()
		if s := strings.Split(flat, "\x00"); len(s) != 6 || (tuple{s[0], s[1], s[2], s[3], s[4], s[5]}) != u {
			require.Fail(t, "the flat form does not split into the tuple", "%q: %q", u, flat)
		}
		if other, ok := byFlat[flat]; ok && other != u {
			require.Fail(t, "two tuples with one flat form", "%q and %q", u, other)
		}
		byFlat[flat] = u
		digest := k.String()
		if other, ok := byDigest[digest]; ok && other != u {
			require.Fail(t, "two tuples with one digest", "%q and %q", u, other)
		}
		byDigest[digest] = u
		return k
	}
	for range pairs {
		u := g.tuple()
		w := g.neighbour(u)
		a, b := check(u), check(w)
		same := u == w
		if same {
			equal++
		}
		if (a == b) != same || (a.Flat() == b.Flat()) != same {
			require.Fail(t, "keys are equal if and only if their tuples are", "%q and %q", u, w)
		}
	}
	require.Less(t, equal, pairs/4, "most pairs differ")
	require.Greater(t, len(byFlat), pairs, "most tuples differ")
	require.Len(t, byDigest, len(byFlat))
}

// componentFaults lists all that is wrong with a component by S02 and S03, without the
// package's help: rune by rune.
func componentFaults(s string, limit int) []error {
	var found []error
	if s == "" {
		found = append(found, idempotency.ErrMissingScope)
	}
	if len(s) > limit {
		found = append(found, idempotency.ErrScopeTooLong)
	}
	separator, encoding := false, false
	for i, r := range s {
		separator = separator || r == 0
		encoding = encoding || r == utf8.RuneError && !strings.HasPrefix(s[i:], "\ufffd")
	}
	if separator {
		found = append(found, idempotency.ErrBadScope)
	}
	if encoding {
		found = append(found, idempotency.ErrScopeEncoding)
	}
	return found
}

// S01 to S05: the constructors accept exactly what has no faults, name a
// component and a fault that it has, and keep what they accept; two flat forms are
// equal if and only if the tuples are.
func FuzzScoped(f *testing.F) {
	add := func(u, w tuple) {
		f.Add(u.version, u.tenant, u.principal, u.route, u.namespace == "s:", u.key,
			w.version, w.tenant, w.principal, w.route, w.namespace == "s:", w.key)
	}
	g := newTupleGenerator(1)
	for range 50 {
		u := g.tuple()
		add(u, g.neighbour(u))
	}
	for _, p := range tupleParts() {
		for _, v := range []string{
			"", "\x00", "a\x00b", "\xff", "\xc0\x80", "\ufffd", "\xff\x00",
			fillTo("😀", p.limit), fillTo("😀", p.limit+1), fillTo("x", p.limit+1),
		} {
			u, w := goodTuple("u:"), goodTuple("s:")
			*p.field(&w) = v
			add(u, w)
		}
	}
	add(tuple{"v1", "a\x00b", "c", "r", "u:", "k"}, tuple{"v1", "a", "b\x00c", "r", "u:", "k"})
	f.Fuzz(func(t *testing.T, v1, t1, p1, r1 string, s1 bool, k1, v2, t2, p2, r2 string, s2 bool, k2 string) {
		ns := func(server bool) string {
			if server {
				return "s:"
			}
			return "u:"
		}
		u := tuple{v1, t1, p1, r1, ns(s1), k1}
		w := tuple{v2, t2, p2, r2, ns(s2), k2}
		a, aOK := fuzzOne(t, u)
		b, bOK := fuzzOne(t, w)
		if !aOK || !bOK {
			return
		}
		require.Equal(t, u == w, a.Flat() == b.Flat())
		require.Equal(t, u == w, a == b)
		if u == w {
			require.Equal(t, a.String(), b.String())
		}
	})
}

func fuzzOne(t *testing.T, u tuple) (idempotency.ScopedKey, bool) {
	t.Helper()
	k, err := u.make()
	inner, innerErr := idempotency.Scoped(u.scope(), u.namespace, u.key)
	require.Equal(t, err, innerErr)
	require.Equal(t, k, inner)
	wrong := map[idempotency.Component][]error{}
	for _, p := range tupleParts() {
		if found := componentFaults(*p.field(&u), p.limit); len(found) > 0 {
			wrong[p.name] = found
		}
	}
	if len(wrong) == 0 {
		require.NoError(t, err)
		require.False(t, k.IsZero())
		require.Equal(t, u, tupleOf(k))
		require.Equal(t, []string{u.version, u.tenant, u.principal, u.route, u.namespace, u.key}, strings.Split(k.Flat(), "\x00"))
		return k, true
	}
	require.True(t, k.IsZero())
	var scopeErr *idempotency.ScopeError
	require.ErrorAs(t, err, &scopeErr)
	require.Contains(t, wrong[scopeErr.Component], scopeErr.Err, "a fault that this component has")
	return k, false
}
