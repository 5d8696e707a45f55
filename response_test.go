package idempotency_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

func allBytes() string {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return string(b)
}

func manyFields(n int) http.Header {
	h := make(http.Header, n)
	for i := range n {
		h[fmt.Sprintf("X-Field-%d", i)] = []string{strconv.Itoa(i), "a, b", ""}
	}
	return h
}

func bigBody() []byte {
	g := rand.New(rand.NewPCG(1, 1))
	b := make([]byte, 1<<20)
	for i := range b {
		b[i] = byte(g.Uint32())
	}
	return b
}

// asDecoded is r as it comes back: no empty maps, slices or bodies.
func asDecoded(r idempotency.Response) idempotency.Response {
	block := func(h http.Header) http.Header {
		if len(h) == 0 {
			return nil
		}
		n := make(http.Header, len(h))
		for name, values := range h {
			n[name] = nil
			if len(values) > 0 {
				n[name] = values
			}
		}
		return n
	}
	r.Header, r.AddedHeader, r.Trailer = block(r.Header), block(r.AddedHeader), block(r.Trailer)
	if len(r.Body) == 0 {
		r.Body = nil
	}
	return r
}

type namedResponse struct {
	name     string
	response idempotency.Response
}

func codecResponses() []namedResponse {
	return []namedResponse{
		{"status alone", idempotency.Response{Status: 200}},
		{"lowest status", idempotency.Response{Status: 100}},
		{"highest status", idempotency.Response{Status: 999}},
		{"empty parts", idempotency.Response{
			Status: 204, Header: http.Header{}, AddedHeader: http.Header{}, Trailer: http.Header{}, Body: []byte{},
		}},
		{"payment", idempotency.Response{
			Status:      201,
			Header:      http.Header{"Content-Type": {"application/json"}, "Location": {"/v1/charges/ch_1"}},
			AddedHeader: http.Header{"Vary": {"Accept", "Origin, Accept-Encoding"}},
			Trailer:     http.Header{"X-Checksum": {"abc"}},
			Body:        []byte(`{"id":"ch_1", "amount":1.0}` + "\n"),
		}},
		{"not replayable", idempotency.Response{Status: 200, NotReplayable: true}},
		{"all byte values", idempotency.Response{
			Status: 200, Header: http.Header{allBytes(): {allBytes(), ""}, "": {"\x00"}},
			AddedHeader: http.Header{allBytes(): {allBytes()}}, Trailer: http.Header{"\xff\xfe": {"\xc0\x80"}}, Body: []byte(allBytes()),
		}},
		{"NUL", idempotency.Response{Status: 200, Header: http.Header{"\x00": {"\x00", "\x00\x00"}}, Body: []byte{0}}},
		{"invalid UTF-8", idempotency.Response{Status: 200, Header: http.Header{"X": {"\xed\xa0\x80"}}, Body: []byte("\xff\xfe\x80")}},
		{"deleted fields", idempotency.Response{Status: 200, Header: http.Header{"Date": nil, "Content-Type": nil, "Etag": {}}}},
		{"empty value is not none", idempotency.Response{Status: 200, Header: http.Header{"X": {""}, "Y": {"", ""}}}},
		{"names as given", idempotency.Response{Status: 200, Header: http.Header{"etag": {"1"}, "Etag": {"2"}, "ETag": {"3"}}}},
		{"order of values", idempotency.Response{Status: 200, Header: http.Header{"Set-Cookie": {"b", "a", "b", "a, c", ""}}}},
		{"header alone", idempotency.Response{Status: 200, Header: http.Header{"X": {"1"}}}},
		{"added header alone", idempotency.Response{Status: 200, AddedHeader: http.Header{"X": {"1"}}}},
		{"trailer alone", idempotency.Response{Status: 200, Trailer: http.Header{"X": {"1"}}}},
		{"body that looks encoded", idempotency.Response{Status: 200, Body: []byte("\x01\x00\x00\xc8\x00\x00\x00\x00")}},
		{"200 fields", idempotency.Response{
			Status: 200, Header: manyFields(200), AddedHeader: manyFields(200), Trailer: manyFields(200),
		}},
		{"1 MiB", idempotency.Response{Status: 200, Header: http.Header{"X": {"1"}}, Body: bigBody()}},
		{"long value", idempotency.Response{Status: 200, Header: http.Header{"X": {strings.Repeat("x", 1<<20)}}}},
		{"most fields", idempotency.Response{Status: 200, Header: manyFields(idempotency.MaxResponseFields)}},
		{"most values", idempotency.Response{Status: 200, Header: http.Header{"X": make([]string, idempotency.MaxFieldValues)}}},
	}
}

func encodeResponse(t *testing.T, r idempotency.Response) []byte {
	t.Helper()
	b, err := r.MarshalBinary()
	require.NoError(t, err)
	return b
}

// S20: what is stored comes back byte for byte.
func TestS20ResponseRoundTrip(t *testing.T) {
	for _, tt := range codecResponses() {
		t.Run(tt.name, func(t *testing.T) {
			b := encodeResponse(t, tt.response)
			var got idempotency.Response
			require.NoError(t, got.UnmarshalBinary(b))
			require.Equal(t, asDecoded(tt.response), got)
			require.Equal(t, b, encodeResponse(t, got), "encoded again")

			// A receiver that held something else keeps nothing of it.
			full := idempotency.Response{
				Status: 500, Header: http.Header{"Old": {"1"}}, AddedHeader: http.Header{"Old": {"1"}},
				Trailer: http.Header{"Old": {"1"}}, Body: []byte("old"), NotReplayable: true,
			}
			require.NoError(t, full.UnmarshalBinary(b))
			require.Equal(t, got, full)
		})
	}
}

// S20: a decoded response shares no memory with the bytes it came from, nor the
// bytes with the response they are of.
func TestS20ResponseIsCopied(t *testing.T) {
	r := idempotency.Response{
		Status: 200, Header: http.Header{"Name": {"value"}}, AddedHeader: http.Header{"Name": {"value"}},
		Trailer: http.Header{"Name": {"value"}}, Body: []byte("body"),
	}
	b := encodeResponse(t, r)
	want := bytes.Clone(b)
	var got idempotency.Response
	require.NoError(t, got.UnmarshalBinary(b))
	clear(b)
	require.Equal(t, r, got)
	b = encodeResponse(t, got)
	clear(got.Body)
	require.Equal(t, want, b)
}

// S20: equal responses have equal bytes, whatever the order their maps were
// filled in; responses that differ have different ones.
func TestS20ResponseEncodingIsCanonical(t *testing.T) {
	names := slices.Collect(func(yield func(string) bool) {
		for name := range manyFields(200) {
			if !yield(name) {
				return
			}
		}
	})
	g := rand.New(rand.NewPCG(2, 2))
	var want []byte
	for range 50 {
		g.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		r := idempotency.Response{Status: 200, Header: http.Header{}, AddedHeader: http.Header{}, Trailer: http.Header{}}
		for _, name := range names {
			r.Header[name] = []string{name}
			r.AddedHeader[name] = []string{name, name}
			r.Trailer[name] = nil
		}
		b := encodeResponse(t, r)
		if want == nil {
			want = b
		}
		require.True(t, bytes.Equal(want, b))
	}
	require.Equal(t,
		encodeResponse(t, idempotency.Response{Status: 200}),
		encodeResponse(t, idempotency.Response{Status: 200, Header: http.Header{}, AddedHeader: http.Header{}, Trailer: http.Header{}, Body: []byte{}}))
	require.Equal(t,
		encodeResponse(t, idempotency.Response{Status: 200, Header: http.Header{"X": nil}}),
		encodeResponse(t, idempotency.Response{Status: 200, Header: http.Header{"X": {}}}))

	seen := map[string]string{}
	for _, r := range codecResponses() {
		if r.name == "empty parts" {
			r.response.Status = 299 // else it could only be compared with itself
		}
		b := string(encodeResponse(t, r.response))
		require.Empty(t, seen[b], "%s is encoded as another", r.name)
		seen[b] = r.name
	}
	for _, near := range [][2]idempotency.Response{
		{{Status: 200, Header: http.Header{"A": {"bc"}}}, {Status: 200, Header: http.Header{"Ab": {"c"}}}},
		{{Status: 200, Header: http.Header{"A": {"b", "c"}}}, {Status: 200, Header: http.Header{"A": {"bc"}}}},
		{{Status: 200, Header: http.Header{"A": {"b", "c"}}}, {Status: 200, Header: http.Header{"A": {"c", "b"}}}},
		{{Status: 200, Header: http.Header{"A": {"b, c"}}}, {Status: 200, Header: http.Header{"A": {"b", "c"}}}},
		{{Status: 200, Header: http.Header{"A": {""}}}, {Status: 200, Header: http.Header{"A": nil}}},
		{{Status: 200, Header: http.Header{"A": nil}}, {Status: 200}},
		{{Status: 200, Header: http.Header{"A": {"b"}}}, {Status: 200, AddedHeader: http.Header{"A": {"b"}}}},
		{{Status: 200, AddedHeader: http.Header{"A": {"b"}}}, {Status: 200, Trailer: http.Header{"A": {"b"}}}},
		{{Status: 200, NotReplayable: true}, {Status: 200}},
		{{Status: 200, Body: []byte{0}}, {Status: 200}},
	} {
		require.NotEqual(t, encodeResponse(t, near[0]), encodeResponse(t, near[1]), "%+v", near)
	}
}

// The form is stored for as long as records live, so it is spelt out once.
func TestResponseEncodingIsStable(t *testing.T) {
	b := encodeResponse(t, idempotency.Response{
		Status: 201, Header: http.Header{"B": {"x", ""}, "A": nil}, AddedHeader: http.Header{"V": {"o"}},
		Trailer: http.Header{"T": {"z"}}, Body: []byte("{}"), NotReplayable: true,
	})
	want := "\x01\x01\x00\xc9" +
		"\x00\x00\x00\x02" + "\x00\x00\x00\x01A\x00\x00\x00\x00" + "\x00\x00\x00\x01B\x00\x00\x00\x02\x00\x00\x00\x01x\x00\x00\x00\x00" +
		"\x00\x00\x00\x01" + "\x00\x00\x00\x01V\x00\x00\x00\x01\x00\x00\x00\x01o" +
		"\x00\x00\x00\x01" + "\x00\x00\x00\x01T\x00\x00\x00\x01\x00\x00\x00\x01z" +
		"\x00\x00\x00\x02{}"
	require.Equal(t, want, string(b))
}

func TestResponseEncodeLimits(t *testing.T) {
	over := idempotency.MaxResponseFields + 1
	for _, tt := range []struct {
		name     string
		response idempotency.Response
	}{
		{"zero value", idempotency.Response{}},
		{"negative status", idempotency.Response{Status: -1}},
		{"status 99", idempotency.Response{Status: 99}},
		{"status 1000", idempotency.Response{Status: 1000}},
		{"status that is 200 in 16 bits", idempotency.Response{Status: 200 + 1<<16}},
		{"fields", idempotency.Response{Status: 200, Header: manyFields(over)}},
		{"added fields", idempotency.Response{Status: 200, AddedHeader: manyFields(over)}},
		{"trailer fields", idempotency.Response{Status: 200, Trailer: manyFields(over)}},
		{"values", idempotency.Response{Status: 200, Header: http.Header{"X": make([]string, idempotency.MaxFieldValues+1)}}},
		{"added values", idempotency.Response{Status: 200, AddedHeader: http.Header{"X": make([]string, idempotency.MaxFieldValues+1)}}},
		{"trailer values", idempotency.Response{Status: 200, Trailer: http.Header{"X": make([]string, idempotency.MaxFieldValues+1)}}},
		{"body", idempotency.Response{Status: 200, Body: make([]byte, idempotency.MaxResponseBody+1)}}, // never touched
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, err := tt.response.MarshalBinary()
			require.ErrorIs(t, err, idempotency.ErrBadResponse)
			require.Nil(t, b)
		})
	}
}

// requireBadResponse decodes b into a receiver that holds something already.
func requireBadResponse(t *testing.T, b []byte, msg ...any) {
	t.Helper()
	kept := idempotency.Response{
		Status: 418, Header: http.Header{"Kept": {"1"}}, AddedHeader: http.Header{"Kept": {"2"}},
		Trailer: http.Header{"Kept": {"3"}}, Body: []byte("kept"), NotReplayable: true,
	}
	got := idempotency.Response{
		Status: 418, Header: http.Header{"Kept": {"1"}}, AddedHeader: http.Header{"Kept": {"2"}},
		Trailer: http.Header{"Kept": {"3"}}, Body: []byte("kept"), NotReplayable: true,
	}
	before := bytes.Clone(b)
	err := got.UnmarshalBinary(b)
	require.ErrorIs(t, err, idempotency.ErrBadResponse, msg...)
	require.Equal(t, kept, got, msg...)
	require.True(t, bytes.Equal(before, b), msg...)
}

// Every prefix of an encoding is refused, and so is what is longer.
func TestResponseTruncated(t *testing.T) {
	for _, tt := range codecResponses() {
		t.Run(tt.name, func(t *testing.T) {
			b := encodeResponse(t, tt.response)
			for n := range b {
				// Of the large ones the start, the end and a sample of what is between.
				if len(b) > 4096 && n > 256 && n < len(b)-16 && n%(len(b)/64) != 0 {
					continue
				}
				requireBadResponse(t, b[:n], "first %d of %d bytes", n, len(b))
			}
			requireBadResponse(t, append(slices.Clip(b), 0), "a byte more")
			requireBadResponse(t, append(slices.Clip(b), b...), "twice")
		})
	}
	requireBadResponse(t, nil)
}

// craft builds encodings by hand: integers are 32-bit lengths, strings are bytes.
func craft(prefix string, parts ...any) []byte {
	b := []byte(prefix)
	for _, p := range parts {
		switch p := p.(type) {
		case int:
			b = binary.BigEndian.AppendUint32(b, uint32(p))
		case uint32: // more than an int holds where that has 32 bits
			b = binary.BigEndian.AppendUint32(b, p)
		case string:
			b = append(b, p...)
		}
	}
	return b
}

const craftPrefix = "\x01\x00\x00\xc8" // format 1, no flags, status 200

func TestResponseDecodeRefuses(t *testing.T) {
	require.NoError(t, new(idempotency.Response).UnmarshalBinary(craft(craftPrefix, 0, 0, 0, 0)), "what the cases are made from")
	var fields strings.Builder // in order, without values
	for i := range idempotency.MaxResponseFields + 1 {
		fields.Write(craft("", 2, string([]byte{byte(i >> 8), byte(i)}), 0))
	}
	for _, tt := range []struct {
		name string
		data []byte
	}{
		{"format 0", craft("\x00\x00\x00\xc8", 0, 0, 0, 0)},
		{"format 2", craft("\x02\x00\x00\xc8", 0, 0, 0, 0)},
		{"format 255", craft("\xff\x00\x00\xc8", 0, 0, 0, 0)},
		{"flag 2", craft("\x01\x02\x00\xc8", 0, 0, 0, 0)},
		{"flag 2 beside a known one", craft("\x01\x03\x00\xc8", 0, 0, 0, 0)},
		{"flag 128", craft("\x01\x80\x00\xc8", 0, 0, 0, 0)},
		{"status 0", craft("\x01\x00\x00\x00", 0, 0, 0, 0)},
		{"status 99", craft("\x01\x00\x00\x63", 0, 0, 0, 0)},
		{"status 1000", craft("\x01\x00\x03\xe8", 0, 0, 0, 0)},
		{"status 65535", craft("\x01\x00\xff\xff", 0, 0, 0, 0)},
		{"fields out of order", craft(craftPrefix, 2, 1, "B", 0, 1, "A", 0, 0, 0, 0)},
		{"fields out of order by length", craft(craftPrefix, 2, 2, "Aa", 0, 1, "A", 0, 0, 0, 0)},
		{"one field twice", craft(craftPrefix, 2, 1, "A", 0, 1, "A", 0, 0, 0, 0)},
		{"the empty name twice", craft(craftPrefix, 2, 0, 0, 0, 0, 0, 0, 0)},
		{"the empty name second", craft(craftPrefix, 2, 1, "A", 0, 0, 0, 0, 0, 0)},
		{"third field out of order", craft(craftPrefix, 3, 1, "A", 0, 1, "C", 0, 1, "B", 0, 0, 0, 0)},
		{"added fields out of order", craft(craftPrefix, 0, 2, 1, "B", 0, 1, "A", 0, 0, 0)},
		{"trailers out of order", craft(craftPrefix, 0, 0, 2, 1, "B", 0, 1, "A", 0, 0)},
		{"more fields than there are", craft(craftPrefix, 2, 1, "A", 0, 0, 0, 0)},
		{"fewer fields than there are", craft(craftPrefix, 0, 1, "A", 0, 0, 0, 0)},
		{"more values than there are", craft(craftPrefix, 1, 1, "A", 2, 1, "v", 0, 0, 0)},
		{"name over the end", craft(craftPrefix, 1, 100, "A", 0, 0, 0, 0)},
		{"value over the end", craft(craftPrefix, 1, 1, "A", 1, 100, "v", 0, 0, 0)},
		{"body over the end", craft(craftPrefix, 0, 0, 0, 3, "ab")},
		{"body shorter than what is there", craft(craftPrefix, 0, 0, 0, 1, "ab")},
		{"trailing zero", craft(craftPrefix, 0, 0, 0, 0, "\x00")},
		{"fields over their limit", craft(craftPrefix, idempotency.MaxResponseFields+1, fields.String(), 0, 0, 0)},
		{"values over their limit", craft(craftPrefix, 1, 1, "A", idempotency.MaxFieldValues+1,
			strings.Repeat("\x00\x00\x00\x00", idempotency.MaxFieldValues+1), 0, 0, 0)},
	} {
		t.Run(tt.name, func(t *testing.T) { requireBadResponse(t, tt.data) })
	}
}

// allocatedBytes returns how many bytes f allocates, at the least of some runs: the
// rest is what runs beside it.
func allocatedBytes(f func()) uint64 {
	least := ^uint64(0)
	var before, after runtime.MemStats
	for range 3 {
		runtime.ReadMemStats(&before)
		f()
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	return least
}

// allocates reports whether f allocates more than budget bytes. It is cheaper
// and less exact than allocatedBytes: up to 64 KiB may go unseen or be another's.
func allocates(f func(), budget uint64) bool {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	for range 3 {
		metrics.Read(sample)
		before := sample[0].Value.Uint64()
		f()
		metrics.Read(sample)
		if sample[0].Value.Uint64()-before <= budget+1<<16 {
			return false
		}
	}
	return true
}

// decodeBudget is what decoding n bytes may allocate, whatever they claim to
// hold: the costliest are fields without values, a map entry for 9 bytes.
func decodeBudget(n int) uint64 { return 4096 + 20*uint64(n) }

// Lengths that claim more than is there allocate nothing for it, at each place
// where there is a length.
func TestResponseDecodeBoundsMemory(t *testing.T) {
	for _, claim := range []uint32{
		1, 2, 255, 1 << 8, 1 << 16, idempotency.MaxFieldValues, idempotency.MaxFieldValues + 1,
		idempotency.MaxResponseBody, idempotency.MaxResponseBody + 1, 1<<31 - 1, 1 << 31, 1<<31 + 1, 1<<32 - 8, 1<<32 - 1,
	} {
		for _, tt := range []struct {
			name string
			data []byte
		}{
			{"fields", craft(craftPrefix, claim)},
			{"fields, some there", craft(craftPrefix, claim, 1, "A", 0)},
			{"added fields", craft(craftPrefix, 0, claim)},
			{"trailers", craft(craftPrefix, 0, 0, claim)},
			{"name", craft(craftPrefix, 1, claim, 0)},
			{"values", craft(craftPrefix, 1, 1, "A", claim)},
			{"values, some there", craft(craftPrefix, 1, 1, "A", claim, 0)},
			{"value", craft(craftPrefix, 1, 1, "A", 1, claim)},
			{"body", craft(craftPrefix, 0, 0, 0, claim)},
		} {
			t.Run(fmt.Sprintf("%s/%d", tt.name, claim), func(t *testing.T) {
				requireBadResponse(t, tt.data)
				require.Less(t, allocatedBytes(func() { _ = new(idempotency.Response).UnmarshalBinary(tt.data) }), decodeBudget(len(tt.data)))
			})
		}
	}
	// With as many bytes behind as items are claimed, but not enough for them all.
	for _, tt := range []struct {
		name   string
		prefix []byte
		budget uint64 // for a byte
	}{
		{"fields", craft(craftPrefix, idempotency.MaxResponseFields), 14},
		{"values", craft(craftPrefix, 1, 1, "A", idempotency.MaxFieldValues), 5},
	} {
		for n := 1; n <= 1<<13; n *= 2 {
			data := append(slices.Clip(tt.prefix), bytes.Repeat([]byte{0xff}, n)...)
			requireBadResponse(t, data, tt.name)
			require.Less(t, allocatedBytes(func() { _ = new(idempotency.Response).UnmarshalBinary(data) }),
				1024+tt.budget*uint64(len(data)), "%s and %d bytes", tt.name, n)
		}
	}
	// The costliest that is really there.
	costly := idempotency.Response{Status: 200, Header: http.Header{}}
	for i := range idempotency.MaxResponseFields {
		costly.Header[string([]byte{byte(i >> 8), byte(i)})] = nil
	}
	for _, r := range append(codecResponses(), namedResponse{"short names", costly}) {
		b := encodeResponse(t, r.response)
		require.Less(t, allocatedBytes(func() { _ = new(idempotency.Response).UnmarshalBinary(b) }), decodeBudget(len(b)), r.name)
		require.Less(t, allocatedBytes(func() { _, _ = r.response.MarshalBinary() }), decodeBudget(len(b)), r.name)
	}
}

// Any single bit of a stored response that is not part of a name, a value or the
// body is either refused or changes what is read: none is ignored.
func TestResponseBitFlips(t *testing.T) {
	for _, tt := range codecResponses() {
		b := encodeResponse(t, tt.response)
		if len(b) > 2000 {
			continue
		}
		for i := range b {
			for bit := range 8 {
				flipped := bytes.Clone(b)
				flipped[i] ^= 1 << bit
				var got idempotency.Response
				if err := got.UnmarshalBinary(flipped); err != nil {
					require.ErrorIs(t, err, idempotency.ErrBadResponse)
					continue
				}
				require.True(t, bytes.Equal(flipped, encodeResponse(t, got)), "%s: byte %d, bit %d", tt.name, i, bit)
			}
		}
	}
}

// Whatever bytes are stored: decoding never panics and allocates in proportion;
// and what it accepts is the one encoding of that response.
func FuzzResponseDecode(f *testing.F) {
	for _, r := range codecResponses() {
		b, err := r.response.MarshalBinary()
		if err != nil {
			f.Fatal(err)
		}
		if len(b) < 1<<12 {
			f.Add(b)
			f.Add(b[:len(b)/2])
		}
	}
	f.Add(craft(craftPrefix, 2, 1, "B", 0, 1, "A", 0, 0, 0, 0))
	f.Add(craft(craftPrefix, 2, 1, "A", 0, 1, "A", 0, 0, 0, 0))
	f.Add(craft(craftPrefix, 0, 0, 0, uint32(1<<31)))
	f.Add(craft(craftPrefix, 1, 1, "A", uint32(1<<32-1)))
	f.Add(craft(craftPrefix, 3, 0, 0, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		untouched := bytes.Clone(data)
		got := idempotency.Response{Status: 418}
		var err error
		require.False(t, allocates(func() {
			got = idempotency.Response{Status: 418}
			err = got.UnmarshalBinary(data)
		}, decodeBudget(len(data))), "memory out of proportion")
		require.True(t, bytes.Equal(untouched, data))
		if err != nil {
			require.ErrorIs(t, err, idempotency.ErrBadResponse)
			require.Equal(t, idempotency.Response{Status: 418}, got)
			return
		}
		b, err := got.MarshalBinary()
		require.NoError(t, err)
		require.True(t, bytes.Equal(data, b), "encodes to\n%x, not\n%x", b, data)
		require.Equal(t, got, asDecoded(got))
	})
}
