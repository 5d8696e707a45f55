package idempotency

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"sync"
)

// A FingerprintFunc returns the bytes that tell the payload of one request from
// that of another, in place of method, target, content headers and body (S16):
// selected fields, say, or the parts of a multipart body whose boundary differs
// on each try. The bytes may have any length; the library digests them, with the
// configured secret where there is one. Two requests that the function maps to
// the same bytes are the same request: let it delimit what it joins.
//
// body is the whole request body, from its first byte; so is the body of r, which
// is there for r.FormValue and its like. The function must be deterministic, safe
// for concurrent use, and must not keep r or body. An error means that the body
// cannot be read as a request to this operation: the client gets 400 broken-body,
// and nothing is claimed.
type FingerprintFunc func(r *http.Request, body io.Reader) ([]byte, error)

// Schemes of a Fingerprint: its first byte. A scheme's number and meaning never
// change, since stored records name it.
const (
	schemeRequest     = 1 // SHA-256 over the request
	schemeRequestHMAC = 2 // HMAC-SHA-256 over the request
	schemeCustom      = 3 // SHA-256 over what a FingerprintFunc returned
	schemeCustomHMAC  = 4 // HMAC-SHA-256 over what a FingerprintFunc returned
)

// A fingerprinter makes and compares fingerprints.
type fingerprinter struct {
	custom FingerprintFunc // or nil
	plain  *digesters
	keyed  *digesters // HMAC with the secret, which it alone holds, so that none prints it; or nil
}

func newFingerprinter(custom FingerprintFunc, secret []byte) fingerprinter {
	f := fingerprinter{custom: custom, plain: newDigesters(sha256.New)}
	if secret != nil {
		f.keyed = newDigesters(func() hash.Hash { return hmac.New(sha256.New, secret) })
	}
	return f
}

// Digesters are kept for the next request: to make one costs more than most
// digests do.
type digesters struct{ pool sync.Pool }

// A digester is a hash, and room for what it is given and what it returns.
type digester struct {
	hash hash.Hash
	buf  []byte
}

// digesterRoom is what a digester has room for when it is kept.
const digesterRoom = 512

func newDigesters(newHash func() hash.Hash) *digesters {
	return &digesters{pool: sync.Pool{New: func() any {
		return &digester{hash: newHash(), buf: make([]byte, 0, digesterRoom)}
	}}}
}

func (ds *digesters) take() *digester {
	d, _ := ds.pool.Get().(*digester)
	d.hash.Reset()
	return d
}

func (ds *digesters) keep(d *digester) {
	if cap(d.buf) > digesterRoom {
		d.buf = make([]byte, 0, digesterRoom)
	}
	ds.pool.Put(d)
}

// scheme is the one that new records get.
func (f *fingerprinter) scheme() byte {
	switch {
	case f.custom != nil && f.keyed != nil:
		return schemeCustomHMAC
	case f.custom != nil:
		return schemeCustom
	case f.keyed != nil:
		return schemeRequestHMAC
	}
	return schemeRequest
}

// knows reports whether f can still make fingerprints of a scheme: one that a
// record made under an earlier configuration names.
func (f *fingerprinter) knows(scheme byte) bool {
	switch scheme {
	case schemeRequest:
		return true
	case schemeRequestHMAC:
		return f.keyed != nil
	case schemeCustom:
		return f.custom != nil
	case schemeCustomHMAC:
		return f.custom != nil && f.keyed != nil
	}
	return false
}

// others returns the fingerprints of r by all schemes that f knows, but for the one
// that new records get.
func (f *fingerprinter) others(r *http.Request, body spool) ([]Fingerprint, error) {
	var prints []Fingerprint
	for scheme := byte(schemeRequest); scheme <= schemeCustomHMAC; scheme++ {
		if scheme == f.scheme() || !f.knows(scheme) {
			continue
		}
		fp, err := f.sum(scheme, r, body)
		if err != nil {
			return nil, err
		}
		prints = append(prints, fp)
	}
	return prints, nil
}

// sum returns the fingerprint of r by a scheme that f knows.
func (f *fingerprinter) sum(scheme byte, r *http.Request, body spool) (Fingerprint, error) {
	from := f.plain
	if scheme == schemeRequestHMAC || scheme == schemeCustomHMAC {
		from = f.keyed
	}
	d := from.take()
	defer from.keep(d)
	d.buf = append(d.buf[:0], scheme)
	if scheme == schemeCustom || scheme == schemeCustomHMAC {
		fields, err := f.ask(r, body)
		if err != nil {
			return Fingerprint{}, fmt.Errorf("%w: fingerprint function: %w", errBrokenBody, err)
		}
		d.hash.Write(d.buf)
		d.hash.Write(fields)
	} else {
		d.buf = appendRequest(d.buf, r, body.size)
		d.hash.Write(d.buf)
		if err := body.writeTo(d.hash); err != nil {
			return Fingerprint{}, err
		}
	}
	d.buf = d.hash.Sum(d.buf[:0])
	fp := Fingerprint{scheme}
	copy(fp[1:], d.buf)
	return fp, nil
}

// ask calls the custom function. Its request is a copy with a body of its own: what
// it reads of that, or parses, is not missing where the handler looks for it.
func (f *fingerprinter) ask(r *http.Request, body spool) ([]byte, error) {
	own := withBody(r.Context(), r, body)
	defer removeForm(r, own)
	return f.custom(own, body.reader())
}

// equal reports whether the request behind own, r and body is the one behind
// record, judged by the scheme that record names, and returns the request's
// fingerprint by that scheme. The comparison takes constant time.
func (f *fingerprinter) equal(record, own Fingerprint, r *http.Request, body spool) (bool, Fingerprint, error) {
	if scheme := record[0]; scheme != own[0] {
		if !f.knows(scheme) {
			return false, own, nil
		}
		var err error
		if own, err = f.sum(scheme, r, body); err != nil {
			return false, own, err
		}
	}
	return subtle.ConstantTimeCompare(record[:], own[:]) == 1, own, nil
}

// appendRequest appends what a retry must repeat byte for byte (S16), up to the
// bytes of the body: each part behind its length, so that no two requests run
// together to the same bytes.
func appendRequest(b []byte, r *http.Request, bodySize int64) []byte {
	b = appendPart(b, r.Method)
	b = appendPart(b, requestTarget(r))
	for _, name := range [...]string{"Content-Type", "Content-Encoding"} {
		values := r.Header[name]
		b = binary.BigEndian.AppendUint64(b, uint64(len(values)))
		for _, v := range values {
			b = appendPart(b, v)
		}
	}
	return binary.BigEndian.AppendUint64(b, uint64(bodySize)) //nolint:gosec // a size is never negative
}

// appendPart appends a part behind its length, so that no two lists of parts run
// together to the same bytes.
func appendPart(b []byte, part string) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(len(part)))
	return append(b, part...)
}

// requestTarget is the target as received: escaped path and raw query. A request
// that never was on a wire has none; its URL stands in.
func requestTarget(r *http.Request) string {
	if r.RequestURI != "" {
		return r.RequestURI
	}
	return r.URL.RequestURI()
}

// What can go wrong between the first byte of a request body and its fingerprint.
var (
	// errBrokenBody: the client's fault, or its connection's.
	errBrokenBody = errors.New("idempotency: broken request body")
	// errSpool: the server cannot keep the body.
	errSpool = errors.New("idempotency: spool request body")
)

func isBodyFault(err error) bool { return errors.Is(err, errBrokenBody) || errors.Is(err, errSpool) }
