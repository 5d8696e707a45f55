package idempotency

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// ErrBadResponse reports bytes that are not an encoded [Response], or a Response
// that cannot be encoded.
var ErrBadResponse = errors.New("idempotency: malformed stored response")

// Limits of an encoded Response. All lengths are checked against what is left of
// the input before anything is allocated.
const (
	maxResponseFields = 4096    // names in one header block
	maxFieldValues    = 4096    // values of one name
	maxResponseBody   = 1 << 30 // bytes
)

const (
	responseFormat        = 1 // first byte
	fieldsFormat          = 1 // first byte of header blocks alone
	flagNotReplayable     = 1 << 0
	responsePrefixLen     = 1 + 1 + 2 // format, flags, status
	lengthLen             = 4
	minStatus, maxStatus  = 100, 999
	responseHeaderBlocks  = 3 // Header, AddedHeader, Trailer
	minEncodedFieldLength = 2 * lengthLen
)

// MarshalBinary returns r in a versioned binary form, the same bytes for equal
// responses. Bodies, names and values may hold any bytes. The error wraps
// [ErrBadResponse].
func (r Response) MarshalBinary() ([]byte, error) {
	if r.Status < minStatus || r.Status > maxStatus {
		return nil, badResponse("status out of range")
	}
	if len(r.Body) > maxResponseBody {
		return nil, badResponse("body over limit")
	}
	var flags byte
	if r.NotReplayable {
		flags |= flagNotReplayable
	}
	b := make([]byte, 0, responsePrefixLen+(responseHeaderBlocks+1)*lengthLen+encodedSize(r.Header)+
		encodedSize(r.AddedHeader)+encodedSize(r.Trailer)+len(r.Body))
	b = append(b, responseFormat, flags)
	b = binary.BigEndian.AppendUint16(b, uint16(r.Status))
	for _, h := range []http.Header{r.Header, r.AddedHeader, r.Trailer} {
		var err error
		if b, err = appendFields(b, h); err != nil {
			return nil, err
		}
	}
	b = appendLength(b, len(r.Body))
	return append(b, r.Body...), nil
}

// UnmarshalBinary sets r to the response encoded in data, which it copies.
// Header blocks without fields become nil maps, an empty body a nil slice. The
// error wraps [ErrBadResponse]; r is unchanged then. Memory use is bounded by
// the length of data, whatever it claims to hold.
func (r *Response) UnmarshalBinary(data []byte) error {
	if len(data) < responsePrefixLen {
		return badResponse("truncated")
	}
	if data[0] != responseFormat {
		return badResponse("unknown format")
	}
	if data[1]&^flagNotReplayable != 0 {
		return badResponse("unknown flags")
	}
	dec := Response{
		NotReplayable: data[1]&flagNotReplayable != 0,
		Status:        int(binary.BigEndian.Uint16(data[2:])),
	}
	if dec.Status < minStatus || dec.Status > maxStatus {
		return badResponse("status out of range")
	}
	d := responseDecoder{rest: data[responsePrefixLen:]}
	dec.Header = d.fields()
	dec.AddedHeader = d.fields()
	dec.Trailer = d.fields()
	if body := d.bytes(maxResponseBody); len(body) > 0 {
		dec.Body = slices.Clone(body)
	}
	if d.err != nil {
		return d.err
	}
	if len(d.rest) != 0 {
		return badResponse("trailing bytes")
	}
	*r = dec
	return nil
}

// encodeFields returns header blocks in a versioned binary form, nil if all are
// empty, for a store that keeps them beside status and body. The error wraps
// ErrBadResponse.
func encodeFields(blocks ...http.Header) ([]byte, error) {
	size, empty := 1, true
	for _, h := range blocks {
		size += lengthLen + encodedSize(h)
		empty = empty && len(h) == 0
	}
	if empty {
		return nil, nil
	}
	b := append(make([]byte, 0, size), fieldsFormat)
	for _, h := range blocks {
		var err error
		if b, err = appendFields(b, h); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// decodeFields sets blocks to what encodeFields was given as many of. Those
// without fields become nil.
func decodeFields(data []byte, blocks ...*http.Header) error {
	if data == nil {
		return nil
	}
	if len(data) == 0 || data[0] != fieldsFormat {
		return badResponse("unknown format of fields")
	}
	d := responseDecoder{rest: data[1:]}
	for _, h := range blocks {
		*h = d.fields()
	}
	if d.err == nil && len(d.rest) != 0 {
		d.fail("trailing bytes")
	}
	return d.err
}

func encodedSize(h http.Header) int {
	n := 0
	for name, values := range h {
		n += minEncodedFieldLength + len(name)
		for _, v := range values {
			n += lengthLen + len(v)
		}
	}
	return n
}

// appendFields writes the fields in the order of their names.
func appendFields(b []byte, h http.Header) ([]byte, error) {
	if len(h) > maxResponseFields {
		return nil, badResponse("too many fields")
	}
	b = appendLength(b, len(h))
	for _, name := range slices.Sorted(maps.Keys(h)) {
		values := h[name]
		if len(values) > maxFieldValues {
			return nil, badResponse("too many values")
		}
		b = appendLength(b, len(name))
		b = append(b, name...)
		b = appendLength(b, len(values))
		for _, v := range values {
			b = appendLength(b, len(v))
			b = append(b, v...)
		}
	}
	return b, nil
}

func appendLength(b []byte, n int) []byte {
	return binary.BigEndian.AppendUint32(b, uint32(n)) //nolint:gosec // bounded by the limits above, or by what a server can receive
}

// A responseDecoder reads lengths and bytes from the front of rest until the
// first error.
type responseDecoder struct {
	rest []byte
	err  error
}

func (d *responseDecoder) fields() http.Header {
	n := d.length(maxResponseFields, minEncodedFieldLength)
	if n == 0 {
		return nil
	}
	h := make(http.Header, n)
	last := ""
	for i := range n {
		name := string(d.bytes(len(d.rest)))
		if i > 0 && name <= last {
			d.fail("fields out of order")
		}
		if d.err != nil {
			return nil
		}
		h[name] = d.values()
		last = name
	}
	return h
}

func (d *responseDecoder) values() []string {
	n := d.length(maxFieldValues, lengthLen)
	if n == 0 {
		return nil
	}
	values := make([]string, n)
	for i := range values {
		values[i] = string(d.bytes(len(d.rest)))
	}
	return values
}

// bytes returns the next length-prefixed bytes, still part of the input.
func (d *responseDecoder) bytes(limit int) []byte {
	n := d.length(limit, 1)
	if d.err != nil {
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

// length returns the next count, which must be at most limit and leave room for
// that many items of at least size bytes.
func (d *responseDecoder) length(limit, size int) int {
	if d.err != nil {
		return 0
	}
	if len(d.rest) < lengthLen {
		d.fail("truncated")
		return 0
	}
	n := int(binary.BigEndian.Uint32(d.rest))
	d.rest = d.rest[lengthLen:]
	if n < 0 || n > limit || n > len(d.rest)/size { // below 0 only where an int has 32 bits
		d.fail("length out of range")
		return 0
	}
	return n
}

func (d *responseDecoder) fail(reason string) {
	if d.err == nil {
		d.err = badResponse(reason)
	}
}

func badResponse(reason string) error { return fmt.Errorf("%w: %s", ErrBadResponse, reason) }
