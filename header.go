package idempotency

import (
	"errors"
	"net/http"
	"strings"

	"github.com/dunglas/httpsfv"
)

const (
	// HeaderKey is the request header that carries the client's key: an RFC 9651
	// Item whose value is a String, quotes included (S11).
	HeaderKey = "Idempotency-Key"
	// HeaderReplayed is "true" on a response that was stored before, and absent on
	// all others (S20).
	HeaderReplayed = "Idempotency-Replayed"
	// HeaderDeduplicated is "false" on the response of a handler that ran unguarded
	// although the request was to be guarded, and absent on all others (S09, S30).
	HeaderDeduplicated = "Idempotency-Deduplicated"
)

// What a client can do wrong in the header. The texts go to the client.
var (
	errKeyLines  = errors.New("the request has more than one Idempotency-Key field line")
	errKeyFormat = errors.New(`the value is not a structured field String (RFC 9651), such as "8e03978e-40d5-43e8-bc93-6894a57f9324" with its quotes`)
	errKeyEmpty  = errors.New("the key is empty")
	errKeyLong   = errors.New("the key is longer than 255 bytes")
)

// clientKey returns the key in h and whether the field is there at all. A field
// that is there but empty is invalid, not missing (S11, S12). With bare, keys
// without quotes are accepted too (S14).
func clientKey(h http.Header, bare bool) (key string, present bool, err error) {
	lines := h.Values(HeaderKey)
	switch len(lines) {
	case 0:
		return "", false, nil
	case 1:
	default:
		// RFC 9651 would join the lines with a comma, which can make one valid String
		// out of two halves.
		return "", true, errKeyLines
	}
	if bare && isBareKey(lines[0]) {
		key = lines[0]
	} else if key, err = quotedKey(lines[0]); err != nil {
		return "", true, err
	}
	switch {
	case key == "":
		return "", true, errKeyEmpty
	case len(key) > MaxKeyLen:
		return "", true, errKeyLong
	}
	return key, true, nil
}

func quotedKey(line string) (string, error) {
	item, err := httpsfv.UnmarshalItem([]string{line})
	if err != nil {
		return "", errKeyFormat
	}
	key, ok := item.Value.(string)
	if !ok {
		return "", errKeyFormat
	}
	return key, nil
}

// isBareKey reports whether s can stand for a key without quotes: one or more
// visible ASCII characters other than `"`, `\`, `,` and `;` (S14).
func isBareKey(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' || strings.IndexByte(`"\,;`, s[i]) >= 0 {
			return false
		}
	}
	return s != ""
}
