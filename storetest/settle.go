package storetest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

const releaseLost = releaseErrors + " " + completeLost

// S20, S23, S35: what was stored comes back.
func completeReplays(h *harness) {
	everyByte := make([]byte, 256)
	for i := range everyByte {
		everyByte[i] = byte(i)
	}
	responses := map[string]idempotency.Response{
		"every byte":    {Status: 200, Body: everyByte},
		"NUL":           {Status: 200, Body: []byte("\x00a\x00\x00b\x00")},
		"invalid UTF-8": {Status: 200, Body: []byte("a\xff\xfe\xc0\x80b\xed\xa0\x80")},
		"JSON":          {Status: 200, Body: []byte(`{"b": 1.0,  "a":1e2, "a":"\u0000"}` + "\r\n")},
		"spaces":        {Status: 200, Body: []byte("  \t\r\n")},
		"empty body":    {Status: 200, Body: []byte{}},
		"nothing":       {Status: 204},
		"headers": {
			Status: 201,
			Header: http.Header{
				"Content-Type": {"application/json; charset=utf-8"},
				"Warning":      {`199 a "x, y"`, `199 b "z"`, `199 a "x, y"`},
				"Vary":         {"Accept, Accept-Language", "Origin"},
				"X-Deleted":    nil,
				"X-Empty":      {""},
				"X-Empties":    {"", "", "a", ""},
				"X-Spaces":     {" a ", "\tb"},
				"X-Bytes":      {"caf\xe9", "\x01\x7f\xff", `"'\%_`},
				"x-lower":      {"not canonical"},
				"X-Lower":      {"canonical"},
				"X-Ünïcode":    {"é", "e\u0301"},
			},
			Body: []byte("ok"),
		},
		"added headers": {
			Status:      200,
			Header:      http.Header{"A": {"set"}},
			AddedHeader: http.Header{"A": {"added"}, "Vary": {"Accept", "Accept"}},
		},
		"trailers": {
			Status:  200,
			Header:  http.Header{"Trailer": {"Digest"}},
			Trailer: http.Header{"Digest": {"sha-256=x, y", "z"}, "X-Deleted": {}},
			Body:    []byte("body"),
		},
		"only deleted headers": {Status: 200, Header: http.Header{"Content-Type": {}, "Date": nil}},
		"not replayable":       {Status: 201, NotReplayable: true},
	}
	for status := 200; status <= 599; status++ {
		switch status % 100 {
		case 0, 1, 4, 22, 50, 99:
			responses[fmt.Sprintf("status %d", status)] = idempotency.Response{Status: status, Body: []byte("s")}
		}
	}
	for name, want := range responses {
		c := h.newClaim(name)
		given := clone(want)
		h.claim(claimWins, c, claimed(c, 1))
		h.complete(completeStores, c, given, nil)
		h.claim(byteForByte, again(c), completed(c, 1, want))
		h.claim(byteForByte, other(c), completed(c, 1, want))
		if diff := compare(given, want); diff != "" {
			h.fail(notModified, "the response given to Complete: %s", diff)
		}
	}
	h.Advance(ttl / 2)
	for name, want := range responses {
		c := h.newClaim(name)
		h.claim(byteForByte, c, completed(c, 1, want))
	}
}

// S20: bodies are not cut.
func completeReplaysLarge(h *harness) {
	body := make([]byte, 1<<20)
	x := uint32(1)
	for i := range body { // incompressible, the same on every run
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		body[i] = byte(x >> 24)
	}
	c := h.newClaim("large")
	want := idempotency.Response{Status: 200, Header: http.Header{"X-Long": {strings.Repeat("v", 64<<10)}}, Body: body}
	h.claim(claimWins, c, claimed(c, 1))
	h.complete(completeStores, c, clone(want), nil)
	h.claim(byteForByte, again(c), completed(c, 1, want))
}

// S27: repeating one's own completion is success, whatever it carries.
func completeTwice(h *harness) {
	c := h.newClaim("twice")
	h.claim(claimWins, c, claimed(c, 1))
	h.complete(completeStores, c, response("first"), nil)
	h.complete(completeRepeated, c, response("first"), nil)
	h.complete(completeRepeated, c, response("second"), nil)
	h.claim(completeRepeated, again(c), completed(c, 1, response("first")))
	h.Advance(2 * lease)
	h.complete(completeRepeated, c, response("third"), nil)
	h.claim(completeRepeated, again(c), completed(c, 1, response("first")))
	h.complete(completeLost, again(c), response("fourth"), idempotency.ErrLeaseLost)
	h.claim(completeLost, again(c), completed(c, 1, response("first")))
}

// S27: the lease's time is over, but nobody took over.
func completeLate(h *harness) {
	c := h.newClaim("late")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * lease)
	h.claim(claimReturns, other(c), abandoned(c, 1))
	h.complete(completeLost, c, response("late"), nil)
	h.claim(completeStores, again(c), completed(c, 1, response("late")))
	h.claim(completeStores, other(c), completed(c, 1, response("late")))
}

// S27.
func completeAfterRelease(h *harness) {
	c := h.newClaim("complete after release")
	h.claim(claimWins, c, claimed(c, 1))
	h.release(releaseGivesUp, c, nil)
	h.complete(completeLost, c, response("late"), idempotency.ErrLeaseLost)
	h.claim(completeLost, other(c), released(c, 1))
	h.claim(completeLost, again(c), claimed(c, 2))
}

func completeAfterLoss(h *harness) {
	h.lost(completeLost, func(c idempotency.Claim) {
		h.t.Helper()
		h.complete(completeLost, c, response("late"), idempotency.ErrLeaseLost)
	})
}

// S26, S30: a call whose caller has left is done wholly or not at all, and can
// be made again.
func completeCancelled(h *harness) {
	c := h.newClaim("cancelled")
	h.claim(claimWins, c, claimed(c, 1))
	err := h.Store.Complete(h.cancelled(), leaseOf(c), response("outcome"))
	h.either(atomicSteps, c, err, inProgress(c, 1, lease), completed(c, 1, response("outcome")))
	h.complete(completeRepeated, c, response("outcome"), nil)
	h.claim(completeStores, again(c), completed(c, 1, response("outcome")))
}

// S18, S24: a released record is still bound to its payload.
func releaseKeepsBinding(h *harness) {
	c := h.newClaim("binding")
	h.claim(claimWins, c, claimed(c, 1))
	h.release(releaseGivesUp, c, nil)
	for range 2 {
		h.claim(releaseKeeps, other(c), released(c, 1))
	}
	c = again(c)
	h.claim(releaseKeeps, c, claimed(c, 2))
	h.claim(releaseKeeps, again(c), inProgress(c, 2, lease))
	h.claim(releaseKeeps, other(c), inProgress(c, 2, lease))
	h.release(releaseGivesUp, c, nil)
	h.Advance(2 * lease)
	h.claim(releaseKeeps, other(c), released(c, 2))
	c = again(c)
	h.claim(releaseKeeps, c, claimed(c, 3))
	h.complete(completeStores, c, response("third"), nil)
	h.claim(releaseKeeps, again(c), completed(c, 3, response("third")))
}

// S27: repeating one's own release is success.
func releaseTwice(h *harness) {
	c := h.newClaim("twice")
	h.claim(claimWins, c, claimed(c, 1))
	h.release(releaseGivesUp, c, nil)
	h.release(releaseLost, c, nil)
	h.claim(releaseLost, other(c), released(c, 1))
	next := again(c)
	h.claim(releaseKeeps, next, claimed(next, 2))
	h.release(releaseLost, c, idempotency.ErrLeaseLost)
	h.claim(releaseLost, again(c), inProgress(next, 2, lease))
}

// S27.
func releaseLate(h *harness) {
	c := h.newClaim("late")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * lease)
	h.release(releaseLost, c, nil)
	h.claim(releaseKeeps, other(c), released(c, 1))
	h.claim(releaseKeeps, again(c), claimed(c, 2))
}

// S27: an outcome is not taken back.
func releaseAfterComplete(h *harness) {
	c := h.newClaim("release after complete")
	h.claim(claimWins, c, claimed(c, 1))
	h.complete(completeStores, c, response("kept"), nil)
	h.release(releaseLost, c, idempotency.ErrLeaseLost)
	h.claim(releaseLost, again(c), completed(c, 1, response("kept")))
}

func releaseAfterLoss(h *harness) {
	h.lost(releaseLost, func(c idempotency.Claim) {
		h.t.Helper()
		h.release(releaseLost, c, idempotency.ErrLeaseLost)
	})
}

// S26, S30.
func releaseCancelled(h *harness) {
	c := h.newClaim("cancelled")
	h.claim(claimWins, c, claimed(c, 1))
	err := h.Store.Release(h.cancelled(), leaseOf(c))
	h.either(atomicSteps, c, err, inProgress(c, 1, lease), released(c, 1))
	h.release(releaseLost, c, nil)
	h.claim(releaseKeeps, again(c), claimed(c, 2))
}

// S27: leases are renewed.
func extendMovesEnd(h *harness) {
	c := h.newClaim("extend")
	h.claim(claimWins, c, claimed(c, 1))
	for range 3 {
		h.Advance(lease * 3 / 4)
		h.extend(extendMoves, c, lease, nil)
		h.claim(extendMoves, again(c), inProgress(c, 1, lease))
	}
	h.Advance(lease * 3 / 4)
	h.claim(extendMoves, again(c), inProgress(c, 1, lease/4))
	h.extend(extendMoves, c, 10*lease, nil)
	h.Advance(9 * lease)
	h.claim(extendMoves, again(c), inProgress(c, 1, lease))
	h.extend(extendMoves, c, 30*time.Second, nil) // nearer, too
	h.claim(extendMoves, again(c), inProgress(c, 1, 30*time.Second))
	h.Advance(31 * time.Second)
	h.claim(extendMoves, other(c), abandoned(c, 1))
	h.claim(claimWins, again(c), claimed(c, 2))
}

func extendZeroAbandons(h *harness) {
	c := h.newClaim("zero")
	h.claim(claimWins, c, claimed(c, 1))
	h.extend(extendZero, c, 0, nil)
	h.claim(extendZero, other(c), abandoned(c, 1))
	next := again(c)
	h.claim(extendZero, next, claimed(next, 2))
	h.extend(extendLost, c, lease, idempotency.ErrLeaseLost)
	h.complete(completeStores, next, response("next"), nil)
	h.claim(completeStores, again(c), completed(next, 2, response("next")))
}

// S27: a lease that nobody took can be had again.
func extendLate(h *harness) {
	c := h.newClaim("late")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * lease)
	h.claim(claimReturns, other(c), abandoned(c, 1))
	h.extend(extendLost, c, lease, nil)
	h.claim(extendMoves, again(c), inProgress(c, 1, lease))
	h.complete(completeStores, c, response("late"), nil)
	h.claim(completeStores, again(c), completed(c, 1, response("late")))
}

func extendAfterSettling(h *harness) {
	done, free := h.newClaim("completed"), h.newClaim("released")
	h.claim(claimWins, done, claimed(done, 1))
	h.claim(claimWins, free, claimed(free, 1))
	h.complete(completeStores, done, response("done"), nil)
	h.release(releaseGivesUp, free, nil)
	for _, d := range []time.Duration{lease, 0, 10 * ttl} {
		h.extend(extendLost, done, d, idempotency.ErrLeaseLost)
		h.extend(extendLost, free, d, idempotency.ErrLeaseLost)
	}
	h.claim(extendLost, again(done), completed(done, 1, response("done")))
	h.claim(extendLost, other(free), released(free, 1))
	h.claim(extendLost, again(free), claimed(free, 2))
}

func extendAfterLoss(h *harness) {
	h.lost(extendLost, func(c idempotency.Claim) {
		h.t.Helper()
		h.extend(extendLost, c, 10*lease, idempotency.ErrLeaseLost)
		h.extend(extendLost, c, 0, idempotency.ErrLeaseLost)
	})
}

// S26.
func extendCancelled(h *harness) {
	c := h.newClaim("cancelled")
	h.claim(claimWins, c, claimed(c, 1))
	l := leaseOf(c)
	l.Duration = 10 * lease
	err := h.Store.Extend(h.cancelled(), l)
	got, claimErr := h.Store.Claim(h.t.Context(), other(c))
	h.judge(atomicSteps, c, got, claimErr, inProgress(c, 1, l.Duration))
	if moved := got.LeaseLeft > lease; err == nil && !moved {
		h.fail(extendMoves, "Extend by %v without an error\n got: lease left %v", l.Duration, got.LeaseLeft)
	}
	h.extend(extendMoves, c, l.Duration, nil)
	h.Advance(9 * lease)
	h.claim(extendMoves, again(c), inProgress(c, 1, lease))
}

// S27: a take-over is possible once the lease has ended, for the same payload.
func takeOverAbandoned(h *harness) {
	c := h.newClaim("abandoned")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(lease * 3 / 4)
	h.claim(leaseHolds, again(c), inProgress(c, 1, lease/4))
	h.Advance(lease / 2)
	for range 2 {
		h.claim(claimLoses, other(c), abandoned(c, 1))
	}
	next := again(c)
	h.claim(claimWins, next, claimed(next, 2))
	h.claim(oneWins, again(c), inProgress(next, 2, lease))
	h.Advance(lease * 3 / 4)
	h.claim(leaseHolds, again(c), inProgress(next, 2, lease/4))
	h.complete(completeStores, next, response("next"), nil)
	h.claim(completeStores, again(c), completed(next, 2, response("next")))
}

// S29: the TTL counts from the claim that won last.
func takeOverTTL(h *harness) {
	free, gone := h.newClaim("released"), h.newClaim("abandoned")
	h.claim(claimWins, free, claimed(free, 1))
	h.claim(claimWins, gone, claimed(gone, 1))
	h.release(releaseGivesUp, free, nil)
	h.Advance(ttl / 2)
	free, gone = again(free), again(gone)
	h.claim(claimWins, free, claimed(free, 2))
	h.claim(claimWins, gone, claimed(gone, 2))
	h.complete(completeStores, free, response("free"), nil)
	h.complete(completeStores, gone, response("gone"), nil)
	h.Advance(ttl * 3 / 4)
	h.claim(ttlCounts, other(free), completed(free, 2, response("free")))
	h.claim(ttlCounts, other(gone), completed(gone, 2, response("gone")))
	h.Advance(ttl / 2)
	free, gone = other(free), other(gone)
	h.claim(ttlCounts, free, claimed(free, 1))
	h.claim(ttlCounts, gone, claimed(gone, 1))
}

// lost calls late, which must fail, for leases that are lost in all the ways
// there are, and expects that it touched nothing (S27).
func (h *harness) lost(sentence string, late func(c idempotency.Claim)) {
	h.t.Helper()

	never := h.newClaim("never claimed")
	late(never)
	h.claim(sentence, never, claimed(never, 1))

	// The next owner took over, released in between or not, or came after expiry.
	for _, tt := range []struct {
		name    string
		lose    func(c idempotency.Claim)
		next    func(c idempotency.Claim) idempotency.Claim
		attempt int
	}{
		{"stranger", func(idempotency.Claim) {}, nil, 1},
		{"taken over", func(idempotency.Claim) { h.Advance(2 * lease) }, again, 2},
		{"released", func(c idempotency.Claim) { h.release(releaseGivesUp, c, nil) }, again, 2},
		{"expired", func(idempotency.Claim) { h.Advance(ttl + lease) }, other, 1},
		{
			"completed, expired",
			func(c idempotency.Claim) {
				h.complete(completeStores, c, response("old"), nil)
				h.Advance(ttl + lease)
			},
			other, 1,
		},
	} {
		c := h.newClaim(tt.name)
		h.claim(claimWins, c, claimed(c, 1))
		tt.lose(c)
		next := c
		if tt.next == nil {
			c.Owner = uuid.New() // never held it
		} else {
			next = tt.next(c)
			h.claim(claimWins, next, claimed(next, tt.attempt))
		}

		late(c)
		h.claim(sentence, other(next), inProgress(next, tt.attempt, lease))
		h.extend(sentence, next, lease, nil)
		h.complete(sentence, next, response("next"), nil)
		late(c)
		h.claim(sentence, again(next), completed(next, tt.attempt, response("next")))
	}

	// The next owner gave up, too.
	c := h.newClaim("released again")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * lease)
	next := again(c)
	h.claim(claimWins, next, claimed(next, 2))
	h.release(releaseGivesUp, next, nil)
	late(c)
	h.claim(sentence, other(c), released(next, 2))
	h.claim(sentence, again(c), claimed(c, 3))
}

// cancelled returns a context that is done.
func (h *harness) cancelled() context.Context {
	ctx, cancel := context.WithCancel(h.t.Context())
	cancel()
	return ctx
}

// either expects that the record of c stands as before or as after a call, and
// as after if the call returned no error.
func (h *harness) either(sentence string, c idempotency.Claim, callErr error, before, after idempotency.Record) {
	h.t.Helper()
	if errors.Is(callErr, idempotency.ErrLeaseLost) {
		h.fail(sentence, "a call of the owner with a context that is done\n got: error %v\nwant: none, or the context's", callErr)
	}
	got, err := h.Store.Claim(h.t.Context(), other(c))
	want := after
	if err == nil && callErr != nil && got.State == before.State {
		want = before
	}
	h.judge(sentence, c, got, err, want)
}
