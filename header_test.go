package idempotency_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

// A keyVector is one case of the HTTP working group's structured field tests,
// reduced to what it means for a field that must be a String.
type keyVector struct {
	File string   `json:"file"`
	Name string   `json:"name"`
	Raw  []string `json:"raw"`
	OK   bool     `json:"ok"`
	Want string   `json:"want"`
}

// acceptable says what S11 and S12 make of the vector: a String is a key if it
// came in one line, is not empty and not too long.
func (v keyVector) acceptable() bool {
	return v.OK && len(v.Raw) == 1 && v.Want != "" && len(v.Want) <= idempotency.MaxKeyLen
}

const (
	keyVectorCount    = 840
	keyVectorAccepted = 99
)

func keyVectors(t *testing.T) []keyVector {
	t.Helper()
	b, err := os.ReadFile("testdata/structured-field-tests/idempotency-key-derived.json")
	require.NoError(t, err)
	var vectors []keyVector
	require.NoError(t, json.Unmarshal(b, &vectors))
	require.Len(t, vectors, keyVectorCount)
	return vectors
}

func keyHeader(lines ...string) http.Header {
	return http.Header{idempotency.HeaderKey: lines}
}

// S11, S12: all vectors of the working group.
func TestS11Vectors(t *testing.T) {
	accepted := 0
	for i, v := range keyVectors(t) {
		t.Run(fmt.Sprintf("%03d/%s/%s", i, v.File, v.Name), func(t *testing.T) {
			key, present, err := idempotency.ClientKeyFromHeader(keyHeader(v.Raw...), false)
			require.True(t, present)
			if !v.acceptable() {
				require.Error(t, err, "%q", v.Raw)
				require.Empty(t, key)
				return
			}
			require.NoError(t, err, "%q", v.Raw)
			require.Equal(t, v.Want, key)
			accepted++
		})
	}
	require.Equal(t, keyVectorAccepted, accepted)
}

// The checker of the fuzz test agrees with the vectors, too; else it proves
// nothing.
func TestCheckerVectors(t *testing.T) {
	for _, v := range keyVectors(t) {
		if len(v.Raw) != 1 {
			continue
		}
		value, ok, unpadded := checkKeyLine(v.Raw[0])
		require.Equal(t, v.OK, ok, "%s: %q", v.Name, v.Raw)
		require.Equal(t, v.Want, value)
		require.False(t, unpadded)
	}
}

// S11, S12: what the vectors leave out.
func TestS11OwnVectors(t *testing.T) {
	k255 := strings.Repeat("k", 255)
	escaped255 := strings.Repeat(`\"`, 255)
	uuid := "8e03978e-40d5-43e8-bc93-6894a57f9324"
	tests := []struct {
		name  string
		lines []string
		want  string
		err   error // nil: accepted
	}{
		{"UUID", []string{`"` + uuid + `"`}, uuid, nil},
		{"UUID without quotes", []string{uuid}, "", idempotency.ErrKeyFormat},
		{"single quotes", []string{"'" + uuid + "'"}, "", idempotency.ErrKeyFormat},

		{"parameters", []string{`"k";a=1;b`}, "k", nil},
		{"parameter of every kind", []string{`"k";a=1;b=-1.5;c="s\"";d=tok/en:x;e=*;f=:aGk=:;g=?0;h=@-1;i=%"f%c3%bc"`}, "k", nil},
		{"parameter twice", []string{`"k";a=1;a="2"`}, "k", nil},
		{"spaces before a parameter's name", []string{`"k";   a`}, "k", nil},
		{"parameter names", []string{`"k";*;*a;a_-.*9;a0`}, "k", nil},
		{"parameter and trailing spaces", []string{`"k";a  `}, "k", nil},
		{"empty byte sequence", []string{`"k";a=::`}, "k", nil},
		{"byte sequence with pad bits set", []string{`"k";a=:iZ==:`}, "k", nil},
		{"largest numbers", []string{`"k";a=999999999999999;b=-999999999999.999;c=000000000000001;d=@999999999999999`}, "k", nil},
		{"empty parameter", []string{`"k";`}, "", idempotency.ErrKeyFormat},
		{"empty parameter, space", []string{`"k"; `}, "", idempotency.ErrKeyFormat},
		{"two semicolons", []string{`"k";;a`}, "", idempotency.ErrKeyFormat},
		{"space before a semicolon", []string{`"k" ;a`}, "", idempotency.ErrKeyFormat},
		{"HTAB before a parameter's name", []string{"\"k\";\ta"}, "", idempotency.ErrKeyFormat},
		{"capital in a parameter's name", []string{`"k";aB`}, "", idempotency.ErrKeyFormat},
		{"capital as a parameter's name", []string{`"k";A`}, "", idempotency.ErrKeyFormat},
		{"digit as a parameter's name", []string{`"k";1`}, "", idempotency.ErrKeyFormat},
		{"quoted parameter name", []string{`"k";"a"=1`}, "", idempotency.ErrKeyFormat},
		{"parameter without a value", []string{`"k";a=`}, "", idempotency.ErrKeyFormat},
		{"space before a parameter's value", []string{`"k";a= 1`}, "", idempotency.ErrKeyFormat},
		{"space behind a parameter's name", []string{`"k";a =1`}, "", idempotency.ErrKeyFormat},
		{"inner list as a parameter", []string{`"k";a=(1 2)`}, "", idempotency.ErrKeyFormat},
		{"integer of 16 digits", []string{`"k";a=1000000000000000`}, "", idempotency.ErrKeyFormat},
		{"decimal of 13 digits", []string{`"k";a=1000000000000.1`}, "", idempotency.ErrKeyFormat},
		{"decimal without a fraction", []string{`"k";a=1.`}, "", idempotency.ErrKeyFormat},
		{"decimal with a fraction of four", []string{`"k";a=1.2345`}, "", idempotency.ErrKeyFormat},
		{"decimal without a whole", []string{`"k";a=.5`}, "", idempotency.ErrKeyFormat},
		{"two fractions", []string{`"k";a=1.2.3`}, "", idempotency.ErrKeyFormat},
		{"minus alone", []string{`"k";a=-`}, "", idempotency.ErrKeyFormat},
		{"plus", []string{`"k";a=+1`}, "", idempotency.ErrKeyFormat},
		{"date with a fraction", []string{`"k";a=@1.5`}, "", idempotency.ErrKeyFormat},
		{"date alone", []string{`"k";a=@`}, "", idempotency.ErrKeyFormat},
		{"boolean 2", []string{`"k";a=?2`}, "", idempotency.ErrKeyFormat},
		{"boolean word", []string{`"k";a=?1b`}, "", idempotency.ErrKeyFormat},
		{"unclosed string", []string{`"k";a="b`}, "", idempotency.ErrKeyFormat},
		{"unclosed byte sequence", []string{`"k";a=:aGk=`}, "", idempotency.ErrKeyFormat},
		{"half a byte", []string{`"k";a=:a:`}, "", idempotency.ErrKeyFormat},
		{"padding in the middle", []string{`"k";a=:aG=k:`}, "", idempotency.ErrKeyFormat},
		{"half the padding", []string{`"k";a=:aGVsbA=:`}, "", idempotency.ErrKeyFormat},
		{"URL-safe base64", []string{`"k";a=:-_-_:`}, "", idempotency.ErrKeyFormat},
		{"display string with capital hex", []string{`"k";a=%"%C3%BC"`}, "", idempotency.ErrKeyFormat},
		{"display string, bad UTF-8", []string{`"k";a=%"%c3"`}, "", idempotency.ErrKeyFormat},
		{"display string, half an escape", []string{`"k";a=%"%c`}, "", idempotency.ErrKeyFormat},
		{"display string, not ASCII", []string{`"k";a=%"ü"`}, "", idempotency.ErrKeyFormat},
		{"second item as a parameter's rest", []string{`"k";a=1 2`}, "", idempotency.ErrKeyFormat},

		// RFC 9651, section 4.2.7, has it that a parser SHOULD NOT fail when padding
		// is absent. httpsfv does; see FuzzClientKey.
		{"byte sequence without padding", []string{`"k";a=:aGk:`}, "", idempotency.ErrKeyFormat},

		{"leading spaces", []string{`   "k"`}, "k", nil},
		{"trailing spaces", []string{`"k"   `}, "k", nil},
		{"spaces inside are the key's", []string{`"  k  "`}, "  k  ", nil},
		{"one space is a key", []string{`" "`}, " ", nil},
		{"HTAB before", []string{"\t\"k\""}, "", idempotency.ErrKeyFormat},
		{"HTAB behind", []string{"\"k\"\t"}, "", idempotency.ErrKeyFormat},
		{"HTAB inside", []string{"\"a\tb\""}, "", idempotency.ErrKeyFormat},
		{"HTAB alone", []string{"\t"}, "", idempotency.ErrKeyFormat},
		{"obs-fold, as net/http unfolds it", []string{`"foo bar"`}, "foo bar", nil},
		{"obs-fold, not unfolded", []string{"\"foo\r\n bar\""}, "", idempotency.ErrKeyFormat},
		{"line feed", []string{"\"foo\nbar\""}, "", idempotency.ErrKeyFormat},
		{"NUL", []string{"\"a\x00b\""}, "", idempotency.ErrKeyFormat},
		{"DEL", []string{"\"a\x7fb\""}, "", idempotency.ErrKeyFormat},
		{"U+001E", []string{"\"a\x1eb\""}, "", idempotency.ErrKeyFormat},
		{"UTF-8", []string{`"schlüssel"`}, "", idempotency.ErrKeyFormat},
		{"ISO 8859-1", []string{"\"schl\xfcssel\""}, "", idempotency.ErrKeyFormat},
		{"0x80", []string{"\"\x80\""}, "", idempotency.ErrKeyFormat},
		{"byte order mark", []string{"\ufeff\"k\""}, "", idempotency.ErrKeyFormat},
		{"no-break space before", []string{"\u00a0\"k\""}, "", idempotency.ErrKeyFormat},
		{"0xFF behind", []string{"\"k\"\xff"}, "", idempotency.ErrKeyFormat},
		{"curly quotes", []string{"“k”"}, "", idempotency.ErrKeyFormat},

		{"escaped quote", []string{`"a\"b"`}, `a"b`, nil},
		{"escaped backslash", []string{`"a\\b"`}, `a\b`, nil},
		{"escaped backslash at the end", []string{`"a\\"`}, `a\`, nil},
		{"escapes only", []string{`"\"\\\""`}, `"\"`, nil},
		{"escape of a letter", []string{`"a\nb"`}, "", idempotency.ErrKeyFormat},
		{"escape of a code point", []string{`"\u0061"`}, "", idempotency.ErrKeyFormat},
		{"escape at the end", []string{`"a\`}, "", idempotency.ErrKeyFormat},
		{"closing quote escaped", []string{`"a\"`}, "", idempotency.ErrKeyFormat},
		{"percent is itself", []string{`"%41%22%00"`}, "%41%22%00", nil},
		{"poisoned delivery", []string{`"replay:evt_x:"`}, "replay:evt_x:", nil},
		{"server namespace is only text", []string{`"s:k"`}, "s:k", nil},

		{"empty string", []string{`""`}, "", idempotency.ErrKeyEmpty},
		{"empty string with a parameter", []string{`"";a`}, "", idempotency.ErrKeyEmpty},
		{"255 bytes", []string{`"` + k255 + `"`}, k255, nil},
		{"256 bytes", []string{`"` + k255 + `k"`}, "", idempotency.ErrKeyLong},
		{"255 bytes when unescaped", []string{`"` + escaped255 + `"`}, strings.Repeat(`"`, 255), nil},
		{"256 bytes when unescaped", []string{`"` + escaped255 + `\\"`}, "", idempotency.ErrKeyLong},
		{"long parameter", []string{`"k";a="` + strings.Repeat("x", 1<<16) + `"`}, "k", nil},

		{"empty field value", []string{""}, "", idempotency.ErrKeyFormat},
		{"space alone", []string{" "}, "", idempotency.ErrKeyFormat},
		{"quote alone", []string{`"`}, "", idempotency.ErrKeyFormat},
		{"text behind", []string{`"k"x`}, "", idempotency.ErrKeyFormat},
		{"string behind", []string{`"k" "l"`}, "", idempotency.ErrKeyFormat},
		{"string directly behind", []string{`"k""l"`}, "", idempotency.ErrKeyFormat},
		{"list", []string{`"k", "l"`}, "", idempotency.ErrKeyFormat},
		{"trailing comma", []string{`"k",`}, "", idempotency.ErrKeyFormat},
		{"inner list", []string{`("k")`}, "", idempotency.ErrKeyFormat},
		{"dictionary", []string{`a="k"`}, "", idempotency.ErrKeyFormat},
		{"token", []string{`k`}, "", idempotency.ErrKeyFormat},
		{"integer", []string{`42`}, "", idempotency.ErrKeyFormat},
		{"decimal", []string{`4.2`}, "", idempotency.ErrKeyFormat},
		{"byte sequence", []string{`:aGk=:`}, "", idempotency.ErrKeyFormat},
		{"boolean", []string{`?1`}, "", idempotency.ErrKeyFormat},
		{"date", []string{`@1659578233`}, "", idempotency.ErrKeyFormat},
		{"display string", []string{`%"k"`}, "", idempotency.ErrKeyFormat},

		{"two lines that join to one string", []string{`"foo`, `bar"`}, "", idempotency.ErrKeyLines},
		{"two lines with one key", []string{`"k"`, `"k"`}, "", idempotency.ErrKeyLines},
		{"two lines, the second empty", []string{`"k"`, ``}, "", idempotency.ErrKeyLines},
		{"two lines, the first empty", []string{``, `"k"`}, "", idempotency.ErrKeyLines},
		{"two empty lines", []string{``, ``}, "", idempotency.ErrKeyLines},
		{"two lines, parameter in the second", []string{`"k"`, `;a`}, "", idempotency.ErrKeyLines},
		{"three lines", []string{`"a`, `b`, `c"`}, "", idempotency.ErrKeyLines},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			key, present, err := idempotency.ClientKeyFromHeader(keyHeader(tt.lines...), false)
			require.True(t, present, "a field that is there is not missing")
			require.ErrorIs(t, err, tt.err)
			require.Equal(t, tt.want, key)
			if tt.err != nil && tt.err != idempotency.ErrKeyEmpty { //nolint:errorlint // the table holds the sentinel itself
				_, _, err := idempotency.ClientKeyFromHeader(keyHeader(tt.lines...), true)
				if len(tt.lines) > 1 || !checkBareKey(tt.lines[0]) {
					require.ErrorIs(t, err, tt.err, "the switch of S14 opens nothing else")
				}
			}
		})
	}
}

// S11: a missing field is told apart from one that is there and empty, which
// Header.Get cannot do; its name is case-insensitive and no other counts.
func TestS11MissingIsNotEmpty(t *testing.T) {
	for _, bare := range []bool{false, true} {
		for _, h := range []http.Header{
			nil,
			{},
			{idempotency.HeaderKey: nil},
			{idempotency.HeaderKey: {}},
			{"X-Idempotency-Key": {`"k"`}, "Idempotency-Keys": {`"k"`}, "Idempotency_key": {`"k"`}},
		} {
			key, present, err := idempotency.ClientKeyFromHeader(h, bare)
			require.NoError(t, err)
			require.False(t, present)
			require.Empty(t, key)
		}
		_, present, err := idempotency.ClientKeyFromHeader(keyHeader(""), bare)
		require.True(t, present)
		require.Error(t, err)
	}
	h := http.Header{}
	h.Set("iDEMPOTENCY-kEY", `"k"`)
	key, present, err := idempotency.ClientKeyFromHeader(h, false)
	require.NoError(t, err)
	require.True(t, present)
	require.Equal(t, "k", key)
}

// S33: what the client is told never repeats what it sent, which can be long.
func TestS33HeaderErrorsEchoNothing(t *testing.T) {
	for _, line := range []string{`"marker`, `marker"`, `"marker" "marker"`, `"` + strings.Repeat("marker", 100) + `"`} {
		_, _, err := idempotency.ClientKeyFromHeader(keyHeader(line), false)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "marker")
	}
}

// S14: all bytes, alone and inside a key: with the switch off none is accepted
// without quotes, with the switch on exactly the visible ASCII characters other
// than `"`, `\`, `,` and `;` are.
func TestS14BareKeyAlphabet(t *testing.T) {
	const allowed = `!#$%&'()*+-./0123456789:<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_` + "`" + `abcdefghijklmnopqrstuvwxyz{|}~`
	accepted := 0
	for i := range 256 {
		b := string([]byte{byte(i)})
		ok := strings.Contains(allowed, b)
		for _, line := range []string{b, "a" + b, b + "a", "a" + b + "a"} {
			_, present, err := idempotency.ClientKeyFromHeader(keyHeader(line), false)
			require.True(t, present)
			require.Error(t, err, "off: %q", line)

			key, present, err := idempotency.ClientKeyFromHeader(keyHeader(line), true)
			require.True(t, present)
			if !ok {
				require.Error(t, err, "on: %q", line)
				require.Empty(t, key)
				continue
			}
			require.NoError(t, err, "on: %q", line)
			require.Equal(t, line, key)

			// The same key with its quotes.
			for _, bare := range []bool{false, true} {
				quoted, _, err := idempotency.ClientKeyFromHeader(keyHeader(`"`+line+`"`), bare)
				require.NoError(t, err)
				require.Equal(t, key, quoted)
			}
		}
		if ok {
			accepted++
		}
	}
	require.Equal(t, 94-4, accepted)
}

// S14: the switch adds the bare form and changes nothing else.
func TestS14BareKeys(t *testing.T) {
	uuid := "8e03978e-40d5-43e8-bc93-6894a57f9324"
	tests := []struct {
		name    string
		lines   []string
		want    string // with the switch on; "": refused
		wantOff string // with the switch off
	}{
		{"UUID", []string{uuid}, uuid, ""},
		{"quoted UUID", []string{`"` + uuid + `"`}, uuid, uuid},
		{"quoted with parameters", []string{`"k";a=1;b`}, "k", "k"},
		{"quoted with escapes", []string{`"a\"\\b"`}, `a"\b`, `a"\b`},
		{"quoted with spaces around", []string{` "k" `}, "k", "k"},
		{"quoted with comma inside", []string{`"a, b; c"`}, "a, b; c", "a, b; c"},
		{"integer", []string{"42"}, "42", ""},
		{"byte sequence is only text", []string{":aGk=:"}, ":aGk=:", ""},
		{"boolean is only text", []string{"?1"}, "?1", ""},
		{"server namespace is only text", []string{"s:k"}, "s:k", ""},
		{"single quotes are part of it", []string{"'k'"}, "'k'", ""},
		{"255 bytes", []string{strings.Repeat("k", 255)}, strings.Repeat("k", 255), ""},
		{"256 bytes", []string{strings.Repeat("k", 256)}, "", ""},
		{"empty", []string{""}, "", ""},
		{"empty string", []string{`""`}, "", ""},
		{"space inside", []string{"a b"}, "", ""},
		{"space before", []string{" a"}, "", ""},
		{"space behind", []string{"a "}, "", ""},
		{"comma", []string{"a,b"}, "", ""},
		{"semicolon", []string{"a;b"}, "", ""},
		{"parameter", []string{"a;b=1"}, "", ""},
		{"unclosed quote", []string{`"a`}, "", ""},
		{"quote behind", []string{`a"`}, "", ""},
		{"quote inside", []string{`a"b`}, "", ""},
		{"backslash", []string{`a\b`}, "", ""},
		{"display string", []string{`%"k"`}, "", ""},
		{"HTAB", []string{"a\tb"}, "", ""},
		{"DEL", []string{"a\x7f"}, "", ""},
		{"not ASCII", []string{"schlüssel"}, "", ""},
		{"two lines", []string{"a", "a"}, "", ""},
		{"two lines, one quoted", []string{"a", `"a"`}, "", ""},
		{"two halves", []string{`"foo`, `bar"`}, "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for bare, want := range map[bool]string{true: tt.want, false: tt.wantOff} {
				key, present, err := idempotency.ClientKeyFromHeader(keyHeader(tt.lines...), bare)
				require.True(t, present)
				require.Equal(t, want, key, "bare %t", bare)
				require.Equal(t, want == "", err != nil, "bare %t: %v", bare, err)
			}
		})
	}
	_, _, err := idempotency.ClientKeyFromHeader(keyHeader(strings.Repeat("k", 256)), true)
	require.ErrorIs(t, err, idempotency.ErrKeyLong)
}

// keyLine returns a field line close to a String with parameters: half of them
// are as the grammar has it, the others have a fault or two.
func keyLine(g *rand.Rand) string {
	pick := func(of ...string) string { return of[g.IntN(len(of))] }
	number := func(digits int) string {
		return strconv.FormatInt(g.Int64N(1_000_000_000_000_000), 10)[:1] + strings.Repeat("9", g.IntN(digits))
	}
	var b strings.Builder
	b.WriteString(pick("", "", "", " ", "   "))
	b.WriteString(pick(`"k"`, `""`, `"a\"b\\c"`, `"a;b=1, c"`, `"`+strings.Repeat("k", 250+g.IntN(10))+`"`, `k`, `:aGk=:`))
	for range g.IntN(4) {
		b.WriteString(pick(";", ";", "; ", ";   ") + pick("a", "*", "b-_.*9", "*a", "zz0"))
		switch g.IntN(9) {
		case 0:
			b.WriteString("=" + pick("", "-") + number(17))
		case 1:
			b.WriteString("=" + pick("", "-") + number(14) + "." + number(5))
		case 2:
			b.WriteString(pick(`="s"`, `=""`, `="\"\\"`, `="a,b;c"`))
		case 3:
			b.WriteString(pick("=t", "=*", "=A/b:c", "=t!#$%&'*+-.^_`|~"))
		case 4:
			b.WriteString("=:" + base64.StdEncoding.EncodeToString([]byte("hello, you")[:g.IntN(10)]) + ":")
		case 5:
			b.WriteString(pick("=?0", "=?1", "=?2", "=?"))
		case 6:
			b.WriteString("=@" + pick("", "-") + number(17) + pick("", "", ".5"))
		case 7:
			b.WriteString(`=%"` + pick("", "f", "%c3%bc", "%C3%BC", "%c3", "%e2%82%ac", "%ed%a0%80", "%f0%9f%98%80", "%00", "%2", "~ ") + `"`)
		}
	}
	b.WriteString(pick("", "", "", " ", "   "))
	line := b.String()
	for range max(0, g.IntN(4)-1) {
		i := g.IntN(len(line) + 1)
		switch g.IntN(4) {
		case 0:
			line = line[:i] // cut off
		case 1:
			line = line[:i] + pick(`"`, `\`, ";", "=", ":", ",", " ", "\t", ".", "-", "@", "?", "%", "0", "A", "a", "é", "\x7f", "\x00") + line[i:]
		case 2:
			line = line[:i] + line[min(len(line), i+1):]
		case 3:
			if i < len(line) {
				line = line[:i] + string([]byte{line[i] ^ byte(1<<g.IntN(8))}) + line[i+1:]
			}
		}
	}
	return line
}

// S11, S12, S14: the parser against the checker on lines that are nearly right.
func TestS11NearlyRight(t *testing.T) {
	g := rand.New(rand.NewPCG(11, 0))
	const lines = 50_000
	accepted := 0
	for range lines {
		line := keyLine(g)
		compareWithChecker(t, line)
		if _, ok, _ := checkKeyLine(line); ok {
			accepted++
		}
	}
	require.Greater(t, accepted, lines/5)
	require.Less(t, accepted, lines*4/5)
}

// S11, S12, S14: the parser against the checker, which knows RFC 9651 by itself.
//
// They may differ on one point only: httpsfv refuses byte sequences without "="
// padding, where RFC 9651 says a parser SHOULD NOT fail (section 4.2.7). It can
// be met in a parameter, and costs such a client a 400.
func FuzzClientKey(f *testing.F) {
	for _, line := range []string{
		`"k"`, `"k";a=1;b`, `"a\"b\\c"`, ` "k" `, `k`, ``, `""`, `"k";a="x";b=tok;c=:aGk=:;d=?1;e=@1;f=%"%c3%bc";g=-1.5`,
		`"k";a=:aGk:`, `"k";a=:iZ==:`, `"k";a=:a:`, `"k";a=:aGVsbA=:`, `"k";a=999999999999999;b=1000000000000000`,
		`"k";a=999999999999.999`, `"k";a=1.2345`, `"k";a=1.`, `"k";a=@1.0`, `"k";a=@-0`, `"k";a=--1`, `"k";*=*`, `"k";  a;b;a=2`,
		`"k" ;a`, `"k";a =1`, "\"k\"\t", "\"a\tb\"", `"k";a=%"%00%7f~"`, `"k";a=%"%ed%a0%80"`, `"k";a=%"%C3"`, `"k";a=?2`, `"k";A`,
		`"k", "l"`, `("k")`, `"` + strings.Repeat("k", 255) + `"`, `"` + strings.Repeat(`\\`, 256) + `"`, strings.Repeat("k", 256),
		"\"\x7f\"", "\"\x80\"", `"k";a=tok/en:!#$%&'*+-.^_` + "`" + `|~`, `"k";a=a"`, `"k";a=(1)`, `"k";a=` + strconv.Quote("é"), `a,b`, `a;b`, `"a`,
	} {
		f.Add(line)
	}
	g := rand.New(rand.NewPCG(12, 0))
	for range 100 {
		f.Add(keyLine(g))
	}
	f.Fuzz(compareWithChecker)
}

// compareWithChecker fails unless clientKey makes of line what the checker does,
// with the switch of S14 off and on.
func compareWithChecker(t *testing.T, line string) {
	t.Helper()
	value, isString, mayRefuse := checkKeyLine(line)
	quotedOK := isString && value != "" && len(value) <= 255
	bareOK := checkBareKey(line) && len(line) <= 255
	if bareOK && isString {
		require.Fail(t, "no line is both", "%q", line)
	}
	for _, bare := range []bool{false, true} {
		want, ok := value, quotedOK
		if bare && bareOK {
			want, ok = line, true
		}
		if !ok {
			want = ""
		}
		key, present, err := idempotency.ClientKeyFromHeader(keyHeader(line), bare)
		switch {
		case quotedOK && mayRefuse && errors.Is(err, idempotency.ErrKeyFormat) && key == "":
		case !present || key != want || (err == nil) != ok:
			require.Fail(t, "not as RFC 9651 has it", "%q, bare %t: %q, %t, %v; want %q", line, bare, key, present, err, want)
		case ok:
			_, err = idempotency.ClientKey(goodTuple("").scope(), key)
			require.NoError(t, err, "whatever the header accepts fits the tuple")
		}
	}
	if _, present, err := idempotency.ClientKeyFromHeader(keyHeader(line, line), true); !present || !errors.Is(err, idempotency.ErrKeyLines) {
		require.Fail(t, "two lines", "%q: %t, %v", line, present, err)
	}
}
