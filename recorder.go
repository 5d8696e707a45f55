package idempotency

import (
	"bufio"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

var errHandlerReturned = errors.New("idempotency: write after the handler returned")

// A recorder is the http.ResponseWriter that a guarded handler writes to. It
// holds the answer back until its outcome is stored (S22), or, once the handler
// flushes or exceeds the limit, passes it on while it still records (S23).
//
// The handler gets a header map of its own, so that until the answer is sent the
// inner writer's map holds what outer middlewares put there and nothing else.
//
// It has no Unwrap: a way around it to the inner writer would send the header
// before the handler's status. What is honest is offered here (S31).
type recorder struct {
	inner   http.ResponseWriter
	limit   int64 // bytes of body that are recorded
	cookies bool  // whether Set-Cookie is recorded
	head    bool  // the request is a HEAD: its answer has no body
	hold    bool  // nothing may be sent before the answer is released: no streaming

	// mu orders the handler with goroutines of its own that outlive it. inform,
	// place, freeze, exceed, send, seal and short expect it to be held.
	mu       sync.Mutex
	header   http.Header // the handler's
	status   int         // 0: no header written
	frozen   http.Header // the header as it was when the status was written
	own      http.Header // of frozen: the fields that the handler set or deleted
	added    http.Header // of frozen: the values that it appended to outer ones
	outside  http.Header // what outer middlewares made of 1xx headers; nil values: deleted
	trailer  http.Header // the trailers, once it has returned
	declared int64       // the Content-Length that the handler declared, or -1
	written  int64       // bytes of body the handler wrote, refused ones too
	body     []byte      // the recorded body
	overflow bool        // the body exceeded the limit
	sent     bool        // status and header are with the inner writer: streaming
	finished bool        // the handler has returned
	refused  error       // what the handler did that hold forbids; or nil
}

// headerHint is room for the fields of a usual response.
const headerHint = 8

func newRecorder(w http.ResponseWriter, method string, limit int64, cookies bool) *recorder {
	header := make(http.Header, headerHint)
	copyFields(header, w.Header())
	return &recorder{inner: w, limit: limit, cookies: cookies, head: method == http.MethodHead, header: header}
}

// Header returns the handler's header map; after the handler has returned, one
// that nobody reads.
func (rec *recorder) Header() http.Header {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.finished {
		return make(http.Header)
	}
	return rec.header
}

// WriteHeader passes an informational status on at once; the first other one
// fixes status and header. Later calls change nothing.
func (rec *recorder) WriteHeader(status int) {
	if status < minStatus || status > maxStatus {
		// As net/http does, in the handler's own frame.
		panic("invalid WriteHeader code " + strconv.Itoa(status))
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	switch {
	case rec.finished || rec.status != 0:
	case status < http.StatusOK && status != http.StatusSwitchingProtocols:
		rec.inform(status)
	default:
		rec.freeze(status)
	}
}

// inform sends a 1xx response with the header as it is, which is not recorded (S31).
// What an outer middleware makes of that header, such as an encoding it decides on,
// it expects to find in the final one.
func (rec *recorder) inform(status int) {
	inner := rec.inner.Header()
	outer := maps.Clone(inner)
	rec.place(rec.header)
	rec.inner.WriteHeader(status)
	for name, values := range inner {
		if !slices.Equal(values, rec.header[name]) {
			rec.setOutside(name, values)
		}
	}
	for name := range rec.header {
		if _, kept := inner[name]; !kept {
			rec.setOutside(name, nil)
		}
	}
	replaceFields(inner, outer)
}

func (rec *recorder) setOutside(name string, values []string) {
	if rec.outside == nil {
		rec.outside = make(http.Header)
	}
	rec.outside[name] = values
}

// place makes the inner writer's header equal to fields, but for what outer
// middlewares have made of it since.
func (rec *recorder) place(fields http.Header) {
	header := rec.inner.Header()
	replaceFields(header, fields)
	for name, values := range rec.outside {
		if len(values) == 0 {
			delete(header, name)
		} else {
			header[name] = slices.Clone(values)
		}
	}
}

func (rec *recorder) freeze(status int) {
	rec.status = status
	rec.frozen = rec.header.Clone()
	rec.declared = -1
	if v := rec.frozen.Get("Content-Length"); v != "" {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil && n >= 0 {
			rec.declared = n
		} else {
			delete(rec.frozen, "Content-Length") // net/http drops it, too
		}
	}
}

// Write records p, and holds it back unless the answer is being streamed.
func (rec *recorder) Write(p []byte) (int, error) { return recordBody(rec, p) }

// WriteString is Write without a copy.
func (rec *recorder) WriteString(s string) (int, error) { return recordBody(rec, s) }

func recordBody[T []byte | string](rec *recorder, p T) (int, error) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.finished {
		return 0, errHandlerReturned
	}
	if rec.status == 0 {
		rec.freeze(http.StatusOK)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if !bodyAllowed(rec.status) {
		return 0, http.ErrBodyNotAllowed
	}
	rec.written += int64(len(p))
	if rec.declared >= 0 && rec.written > rec.declared {
		return 0, http.ErrContentLength
	}
	if rec.written <= rec.limit {
		rec.body = append(rec.body, p...)
		if !rec.sent {
			return len(p), nil
		}
		return rec.inner.Write([]byte(p))
	}
	return rec.exceed([]byte(p))
}

// exceed gives up recording the body: what was held back goes out, p and all
// that follows passes through.
func (rec *recorder) exceed(p []byte) (int, error) {
	if rec.hold {
		return 0, rec.refuse(errTooLargeForTransaction)
	}
	rec.overflow = true
	err := rec.send()
	rec.body = nil
	if err != nil {
		return 0, err
	}
	return rec.inner.Write(p)
}

// refuse remembers why the answer must not be given.
func (rec *recorder) refuse(err error) error {
	rec.refused = err
	return err
}

// send passes status, header and what was recorded so far to the inner writer,
// once.
func (rec *recorder) send() error {
	if rec.sent {
		return nil
	}
	rec.seal()
	rec.sent = true
	header := rec.inner.Header()
	encoded := encodedOutside(header, rec.own) || encodedOutside(rec.outside, rec.own)
	rec.place(rec.frozen)
	if rec.finished {
		if !encoded {
			setContentLength(header, rec.status, len(rec.body), rec.trailer)
		}
		addUndeclaredTrailers(header, rec.frozen, rec.trailer)
	}
	rec.inner.WriteHeader(rec.status)
	if len(rec.body) == 0 {
		return nil
	}
	_, err := rec.inner.Write(rec.body)
	return err
}

// seal settles, while the inner writer still has the outer header alone, what the
// header is and which part of it is the handler's.
func (rec *recorder) seal() {
	if rec.own != nil {
		return
	}
	if !rec.overflow { // else no replay has to look the same
		rec.fixContentType()
	}
	rec.fixMarks()
	rec.own, rec.added = ownFields(rec.frozen, rec.inner.Header(), rec.cookies)
}

// fixContentType makes the content type that net/http is about to choose part of
// the header, so that a replay, which writes the body in one piece, has the same.
func (rec *recorder) fixContentType() {
	_, set := rec.frozen["Content-Type"]
	if set || rec.frozen.Get("Content-Encoding") != "" || rec.frozen.Get("Transfer-Encoding") != "" || !bodyAllowed(rec.status) {
		return
	}
	if len(rec.body) > 0 {
		rec.frozen["Content-Type"] = []string{http.DetectContentType(rec.body)}
	} else if !rec.finished {
		rec.frozen["Content-Type"] = nil // flushed before the first byte: none
	}
}

// fixMarks leaves the marks of a guard as they are outside: this answer is neither
// replayed nor unguarded, whatever the handler has copied from elsewhere.
func (rec *recorder) fixMarks() {
	outer := rec.inner.Header()
	for _, name := range [...]string{HeaderReplayed, HeaderDeduplicated} {
		if values, ok := outer[name]; ok {
			rec.frozen[name] = values
		} else {
			delete(rec.frozen, name)
		}
	}
}

// FlushError sends what was written so far; from here on the answer is streamed.
// Where the inner writer cannot flush, that is [http.ErrNotSupported], as it would
// be without a guard, and the answer stays held back. [http.ResponseController]
// calls it.
func (rec *recorder) FlushError() error {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.finished {
		return errHandlerReturned
	}
	if !canFlush(rec.inner) {
		return http.ErrNotSupported
	}
	if rec.hold {
		return rec.refuse(errFlushInTransaction)
	}
	if rec.status == 0 {
		rec.freeze(http.StatusOK)
	}
	if err := rec.send(); err != nil {
		return err
	}
	return http.NewResponseController(rec.inner).Flush()
}

// Flush is FlushError for handlers that look for it by a type assertion.
func (rec *recorder) Flush() { _ = rec.FlushError() }

// canFlush reports whether [http.ResponseController] would find a way to flush w.
func canFlush(w http.ResponseWriter) bool {
	for {
		switch t := w.(type) {
		case *recorder: // of a guard around this one
			w = t.inner
		case interface{ FlushError() error }, interface{ Flush() }:
			return true
		case interface{ Unwrap() http.ResponseWriter }:
			w = t.Unwrap()
		default:
			return false
		}
	}
}

// Hijack refuses: what is written to a connection cannot be recorded (S31).
func (rec *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, http.ErrNotSupported
}

// SetReadDeadline passes through.
func (rec *recorder) SetReadDeadline(t time.Time) error {
	return http.NewResponseController(rec.inner).SetReadDeadline(t)
}

// SetWriteDeadline passes through.
func (rec *recorder) SetWriteDeadline(t time.Time) error {
	return http.NewResponseController(rec.inner).SetWriteDeadline(t)
}

// EnableFullDuplex passes through.
func (rec *recorder) EnableFullDuplex() error {
	return http.NewResponseController(rec.inner).EnableFullDuplex()
}

// untouched reports whether the handler has written nothing so far.
func (rec *recorder) untouched() bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.status == 0
}

// finish ends the recording: whatever goroutines of the handler still write is
// refused. It returns what is to be stored, and whether a part of the answer is
// with the client already.
func (rec *recorder) finish() (resp Response, streamed bool) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.status == 0 {
		rec.freeze(http.StatusOK)
	}
	rec.finished = true
	rec.seal()
	rec.trailer = handlerTrailers(rec.frozen, rec.header)
	if rec.overflow || rec.short() {
		return Response{Status: rec.status, NotReplayable: true}, rec.sent
	}
	return Response{
		Status: rec.status, Header: rec.own, AddedHeader: rec.added, Trailer: storableTrailers(rec.trailer, rec.cookies),
		Body: rec.body,
	}, rec.sent
}

// short reports whether the body is less than the handler declared: a part, which
// must not look like the whole when it is replayed. What was refused does not
// count.
func (rec *recorder) short() bool {
	return !rec.head && bodyAllowed(rec.status) && int64(len(rec.body)) < rec.declared
}

// close ends the recording of a handler that did not return.
func (rec *recorder) close() {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.finished = true
}

// release sends what finish left held back of the answer.
func (rec *recorder) release() {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	_ = rec.send() // an error means that the client is gone; its outcome is stored
	setTrailers(rec.inner.Header(), rec.frozen, rec.trailer)
}

// replay sends a stored outcome, on top of the header that outer middlewares put
// on this response (S20).
func replay(w http.ResponseWriter, resp Response) {
	header := w.Header()
	encoded := encodedOutside(header, resp.Header)
	copyFields(header, resp.Header)
	for name, values := range resp.AddedHeader {
		header[name] = slices.Concat(header[name], values)
	}
	header[HeaderReplayed] = []string{"true"}
	if !encoded {
		setContentLength(header, resp.Status, len(resp.Body), resp.Trailer)
	}
	addUndeclaredTrailers(header, header, resp.Trailer)
	w.WriteHeader(resp.Status)
	if len(resp.Body) > 0 && bodyAllowed(resp.Status) {
		_, _ = w.Write(resp.Body) // an error means that the client is gone
	}
	setTrailers(header, resp.Header, resp.Trailer)
}

// ownFields returns what of a header the handler itself put there: the fields it
// set (or deleted, then without values), and the values it appended to what
// outer middlewares had set. What belongs to them, to the connection or to one
// exchange alone is left out (S20). The result may be header itself.
func ownFields(header, outer http.Header, cookies bool) (set, added http.Header) {
	perHop := connectionFields(header)
	if len(outer) == 0 && len(perHop) == 0 && allStorable(header, cookies) {
		return header, nil
	}
	set = make(http.Header, len(header))
	for name, values := range header {
		if !storable(name, cookies) || slices.Contains(perHop, name) {
			continue
		}
		switch base, had := outer[name]; {
		case had && slices.Equal(values, base):
		case len(base) > 0 && len(values) > len(base) && slices.Equal(values[:len(base)], base):
			if added == nil {
				added = make(http.Header)
			}
			added[name] = values[len(base):]
		default:
			set[name] = values
		}
	}
	for name := range outer {
		if _, kept := header[name]; !kept && storable(name, cookies) {
			set[name] = nil
		}
	}
	return set, added
}

func allStorable(header http.Header, cookies bool) bool {
	for name := range header {
		if !storable(name, cookies) {
			return false
		}
	}
	return true
}

// storableTrailers returns the trailer fields that are part of an outcome. The
// result may be trailers itself.
func storableTrailers(trailers http.Header, cookies bool) http.Header {
	if allStorable(trailers, cookies) {
		return trailers
	}
	stored := maps.Clone(trailers)
	maps.DeleteFunc(stored, func(name string, _ []string) bool { return !storable(name, cookies) })
	if len(stored) == 0 {
		return nil
	}
	return stored
}

// storable reports whether a header or trailer field is part of an outcome.
func storable(name string, cookies bool) bool {
	switch canonical := http.CanonicalHeaderKey(name); canonical {
	case "Date", "Content-Length", "Www-Authenticate", "Proxy-Authenticate", HeaderReplayed, HeaderDeduplicated,
		"Connection", "Keep-Alive", "Proxy-Connection", "Te", "Transfer-Encoding", "Upgrade":
		return false
	case "Set-Cookie":
		return cookies
	default:
		return !strings.HasPrefix(name, http.TrailerPrefix)
	}
}

// connectionFields returns the names of the fields that are for this connection
// only (RFC 9110, section 7.6.1).
func connectionFields(header http.Header) []string { return fieldNames(header["Connection"]) }

// declaredTrailers returns the names in the Trailer field that net/http lets be
// trailers.
func declaredTrailers(header http.Header) []string {
	return slices.DeleteFunc(fieldNames(header["Trailer"]), func(name string) bool {
		return name == "Transfer-Encoding" || name == "Content-Length" || name == "Trailer"
	})
}

func fieldNames(lists []string) []string {
	var names []string
	for _, list := range lists {
		for name := range strings.SplitSeq(list, ",") {
			if name = textproto.TrimString(name); name != "" {
				names = append(names, http.CanonicalHeaderKey(name))
			}
		}
	}
	return names
}

// handlerTrailers returns the trailer fields that the handler set in its header
// map: those that it declared, and those that it named with [http.TrailerPrefix].
func handlerTrailers(frozen, header http.Header) http.Header {
	var trailers http.Header
	set := func(name string, values []string) {
		if trailers == nil {
			trailers = make(http.Header)
		}
		trailers[name] = slices.Clone(values)
	}
	for _, name := range declaredTrailers(frozen) {
		if values, ok := header[name]; ok {
			set(name, values)
		}
	}
	for name, values := range header {
		if bare, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			set(http.CanonicalHeaderKey(bare), values)
		}
	}
	return trailers
}

// addUndeclaredTrailers puts the trailers that declaring does not name into a
// header that is about to be sent, in the form that makes net/http leave room
// for them.
func addUndeclaredTrailers(header, declaring, trailers http.Header) {
	if len(trailers) == 0 {
		return
	}
	declared := declaredTrailers(declaring)
	for name, values := range trailers {
		if !slices.Contains(declared, name) {
			header[http.TrailerPrefix+name] = values
		}
	}
}

// setTrailers sets all trailers, once header is sent.
func setTrailers(header, declaring, trailers http.Header) {
	addUndeclaredTrailers(header, declaring, trailers)
	for _, name := range declaredTrailers(declaring) {
		if values, ok := trailers[name]; ok {
			header[name] = values
		}
	}
}

// serverBuffer is what net/http's servers hold of a body before they send the
// header: they give a body that fits in its length by themselves.
const serverBuffer = 2048

// setContentLength gives a body that is known as a whole its length, unless the
// handler or the server does, or the message will end in another way.
func setContentLength(header http.Header, status, length int, trailers http.Header) {
	_, set := header["Content-Length"]
	if set || length <= serverBuffer || len(trailers) > 0 || !bodyAllowed(status) ||
		header.Get("Transfer-Encoding") != "" || header.Get("Trailer") != "" {
		return
	}
	header["Content-Length"] = []string{strconv.Itoa(length)}
}

// encodedOutside reports whether an outer middleware encodes the body, whose length
// is not the one on the wire then: the outer header names an encoding, and own, the
// handler's fields, has no other in its place.
func encodedOutside(outer, own http.Header) bool {
	return len(outer["Content-Encoding"]) > 0 && len(own["Content-Encoding"]) == 0
}

// bodyAllowed reports whether a response of this status has a body (RFC 9110,
// section 6.4.1).
func bodyAllowed(status int) bool {
	return status >= http.StatusOK && status != http.StatusNoContent && status != http.StatusNotModified
}

// replaceFields makes header equal to fields.
func replaceFields(header, fields http.Header) {
	clear(header)
	copyFields(header, fields)
}

// copyFields sets fields in header. The values are copied, since outer
// middlewares may edit them in place, and stored ones must stay as they are.
func copyFields(header, fields http.Header) {
	n := 0
	for _, values := range fields {
		n += len(values)
	}
	copies := make([]string, 0, n)
	for name, values := range fields {
		if len(values) == 0 {
			header[name] = nil
			continue
		}
		start := len(copies)
		copies = append(copies, values...)
		header[name] = copies[start:len(copies):len(copies)]
	}
}
