package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

const (
	// The durations of all claims, unless a test says otherwise.
	lease = time.Minute
	ttl   = time.Hour

	// slack is how much too long a LeaseLeft may be: a store may round it, or have
	// read its clock a little earlier than for the claim that it met.
	slack = time.Second
)

// A harness makes the calls of one subtest and judges their results. All its
// methods take the sentence of the contract that they hold the store to.
type harness struct {
	t *testing.T
	Subject
}

// fail ends the test.
func (h *harness) fail(sentence, format string, args ...any) {
	h.t.Helper()
	h.t.Fatalf("the contract says: %s\n%s", sentence, fmt.Sprintf(format, args...))
}

// deleter returns the store as an ExpiredDeleter, or skips the test.
func (h *harness) deleter() idempotency.ExpiredDeleter {
	h.t.Helper()
	d, ok := h.Store.(idempotency.ExpiredDeleter)
	if !ok {
		h.t.Skip("the store is no ExpiredDeleter")
	}
	return d
}

// scope is the one of every key whose scope does not matter.
func scope() idempotency.Scope {
	return idempotency.Scope{Version: idempotency.DefaultVersion, Tenant: "tenant", Principal: "principal", Route: "route"}
}

func (h *harness) key(s idempotency.Scope, key string) idempotency.ScopedKey {
	h.t.Helper()
	k, err := idempotency.ClientKey(s, key)
	if err != nil {
		h.t.Fatalf("storetest: unusable key: %v", err)
	}
	return k
}

// fingerprint returns one that is all b after the scheme.
func fingerprint(b byte) idempotency.Fingerprint {
	var f idempotency.Fingerprint
	for i := range f {
		f[i] = b
	}
	f[0] = 1
	return f
}

// newClaim returns a claim of a key with that name.
func (h *harness) newClaim(name string) idempotency.Claim {
	h.t.Helper()
	return idempotency.Claim{
		Key:         h.key(scope(), name),
		Fingerprint: fingerprint('a'),
		Owner:       uuid.New(),
		Lease:       lease,
		TTL:         ttl,
	}
}

// again returns the claim that the same request makes when it is sent again.
func again(c idempotency.Claim) idempotency.Claim {
	c.Owner = uuid.New()
	return c
}

// other returns the claim of another payload under the same key.
func other(c idempotency.Claim) idempotency.Claim {
	c = again(c)
	c.Fingerprint[len(c.Fingerprint)-1] ^= 1
	return c
}

// holding returns c with Hold.
func holding(c idempotency.Claim) idempotency.Claim {
	c.Hold = true
	return c
}

// leaseOf returns what the winner of c holds.
func leaseOf(c idempotency.Claim) idempotency.Lease {
	return idempotency.Lease{Keys: []idempotency.ScopedKey{c.Key}, Owner: c.Owner, Duration: c.Lease}
}

// response returns an outcome that is told from others by its body.
func response(body string) idempotency.Response {
	return idempotency.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"text/plain"}},
		Body:   []byte(body),
	}
}

// What a claim is to return. The winner of c is told its own fingerprint.
func claimed(c idempotency.Claim, attempt int) idempotency.Record {
	return idempotency.Record{State: idempotency.StateClaimed, Fingerprint: c.Fingerprint, Attempt: attempt}
}

// inProgress is what others are told while c holds, for at most left more.
func inProgress(c idempotency.Claim, attempt int, left time.Duration) idempotency.Record {
	return idempotency.Record{
		State: idempotency.StateInProgress, Fingerprint: c.Fingerprint, Attempt: attempt, LeaseLeft: left,
	}
}

func completed(c idempotency.Claim, attempt int, r idempotency.Response) idempotency.Record {
	return idempotency.Record{
		State: idempotency.StateCompleted, Fingerprint: c.Fingerprint, Attempt: attempt, Response: r,
	}
}

func released(c idempotency.Claim, attempt int) idempotency.Record {
	return idempotency.Record{State: idempotency.StateReleased, Fingerprint: c.Fingerprint, Attempt: attempt}
}

func abandoned(c idempotency.Claim, attempt int) idempotency.Record {
	return idempotency.Record{State: idempotency.StateAbandoned, Fingerprint: c.Fingerprint, Attempt: attempt}
}

// claim makes the claim c and expects that record. want.LeaseLeft is the most
// that may be left.
func (h *harness) claim(sentence string, c idempotency.Claim, want idempotency.Record) {
	h.t.Helper()
	got, err := h.Store.Claim(h.t.Context(), c)
	h.judge(sentence, c, got, err, want)
}

// judge is claim for a result that is there already.
func (h *harness) judge(sentence string, c idempotency.Claim, got idempotency.Record, err error, want idempotency.Record) {
	h.t.Helper()
	if err != nil {
		h.fail(result, "Claim of %q\n got: error %v\nwant: %s", c.Key.Key(), err, describe(want))
	}
	bad := func(sentence string) {
		h.t.Helper()
		h.fail(sentence, "Claim of %q\n got: %s\nwant: %s", c.Key.Key(), describe(got), describe(want))
	}
	if got.State != want.State {
		bad(sentence)
	}
	if got.Fingerprint != want.Fingerprint {
		bad(recordFingerprint)
	}
	if got.Attempt != want.Attempt {
		bad(recordAttempt)
	}
	if got.State != idempotency.StateCompleted {
		if diff := compare(got.Response, idempotency.Response{}); diff != "" {
			h.fail(recordResponse, "Claim of %q is told %v, with a response: %s", c.Key.Key(), got.State, diff)
		}
	}
	switch got.State {
	case idempotency.StateInProgress:
		if got.LeaseLeft <= 0 || got.LeaseLeft > want.LeaseLeft+slack {
			bad(recordLeaseLeft)
		}
	case idempotency.StateCompleted:
		if diff := compare(got.Response, want.Response); diff != "" {
			h.fail(byteForByte, "the response of %q comes back changed: %s", c.Key.Key(), diff)
		}
	case idempotency.StateClaimed, idempotency.StateReleased, idempotency.StateAbandoned:
	}
}

// expect holds the result of a call to want: nil or [idempotency.ErrLeaseLost].
func (h *harness) expect(sentence, call string, err, want error) {
	h.t.Helper()
	if !errors.Is(err, want) {
		h.fail(sentence, "%s\n got: error %v\nwant: error %v", call, err, want)
	}
}

func (h *harness) complete(sentence string, c idempotency.Claim, r idempotency.Response, want error) {
	h.t.Helper()
	h.expect(sentence, "Complete", h.Store.Complete(h.t.Context(), leaseOf(c), r), want)
}

func (h *harness) release(sentence string, c idempotency.Claim, want error) {
	h.t.Helper()
	h.expect(sentence, "Release", h.Store.Release(h.t.Context(), leaseOf(c)), want)
}

func (h *harness) extend(sentence string, c idempotency.Claim, d time.Duration, want error) {
	h.t.Helper()
	l := leaseOf(c)
	l.Duration = d
	h.expect(sentence, "Extend by "+d.String(), h.Store.Extend(h.t.Context(), l), want)
}

// sweep expects that DeleteExpired(limit) deletes want records.
func (h *harness) sweep(d idempotency.ExpiredDeleter, sentence string, limit, want int) {
	h.t.Helper()
	n, err := d.DeleteExpired(h.t.Context(), limit)
	if err != nil || n != want {
		h.fail(sentence, "DeleteExpired with limit %d\n got: %d, error %v\nwant: %d", limit, n, err, want)
	}
}

// race calls f(0) to f(n-1) at once and waits for all.
func race(n int, f func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			f(i)
		})
	}
	close(start)
	wg.Wait()
}

func describe(r idempotency.Record) string {
	s := fmt.Sprintf("%v, fingerprint %x…%x, attempt %d", r.State, r.Fingerprint[:2], r.Fingerprint[len(r.Fingerprint)-1:], r.Attempt)
	switch r.State {
	case idempotency.StateInProgress:
		s += ", lease left " + r.LeaseLeft.String()
	case idempotency.StateCompleted:
		s += fmt.Sprintf(", response %d with %d bytes", r.Response.Status, len(r.Response.Body))
	case idempotency.StateClaimed, idempotency.StateReleased, idempotency.StateAbandoned:
	}
	return s
}

// compare says how got differs from want, or nothing. A nil slice or map is the
// same as an empty one.
func compare(got, want idempotency.Response) string {
	if got.Status != want.Status {
		return fmt.Sprintf("status\n got: %d\nwant: %d", got.Status, want.Status)
	}
	if got.NotReplayable != want.NotReplayable {
		return fmt.Sprintf("NotReplayable\n got: %t\nwant: %t", got.NotReplayable, want.NotReplayable)
	}
	for _, f := range []struct {
		block     string
		got, want http.Header
	}{
		{"Header", got.Header, want.Header},
		{"AddedHeader", got.AddedHeader, want.AddedHeader},
		{"Trailer", got.Trailer, want.Trailer},
	} {
		if !maps.EqualFunc(f.got, f.want, slices.Equal) {
			return fmt.Sprintf("%s\n got: %q\nwant: %q", f.block, f.got, f.want)
		}
	}
	if bytes.Equal(got.Body, want.Body) {
		return ""
	}
	i := 0
	for i < min(len(got.Body), len(want.Body)) && got.Body[i] == want.Body[i] {
		i++
	}
	return fmt.Sprintf("body, from byte %d on\n got: %s\nwant: %s", i, excerpt(got.Body, i), excerpt(want.Body, i))
}

// excerpt shows some bytes of a body from i on.
func excerpt(body []byte, i int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q", body[i:min(i+16, len(body))])
	if len(body) > i+16 {
		b.WriteString("…")
	}
	fmt.Fprintf(&b, " (%d bytes in all)", len(body))
	return b.String()
}

// clone returns a deep copy of r.
func clone(r idempotency.Response) idempotency.Response {
	r.Header = r.Header.Clone()
	r.AddedHeader = r.AddedHeader.Clone()
	r.Trailer = r.Trailer.Clone()
	r.Body = slices.Clone(r.Body)
	return r
}
