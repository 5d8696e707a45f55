package storetest

import (
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// S27: an operation that must not run twice waits for its operator.
func holdNotTakenOver(h *harness) {
	c := holding(h.newClaim("held"))
	h.claim(claimWins, c, claimed(c, 1))
	h.claim(claimReturns, again(c), inProgress(c, 1, lease))
	h.extend(extendMoves, c, 2*lease, nil)
	for _, d := range []time.Duration{3 * lease, ttl, 100 * ttl} { // S29: it never expires
		h.Advance(d)
		plain := again(c)
		plain.Hold = false
		h.claim(holdMarks, again(c), abandoned(c, 1))
		h.claim(holdMarks, plain, abandoned(c, 1))
		h.claim(holdMarks, other(plain), abandoned(c, 1))
	}

	zero := holding(h.newClaim("held, ended at once"))
	h.claim(claimWins, zero, claimed(zero, 1))
	h.extend(extendZero, zero, 0, nil)
	plain := again(zero)
	plain.Hold = false
	h.claim(holdMarks, plain, abandoned(zero, 1))
	h.extend(extendLost, plain, lease, idempotency.ErrLeaseLost)
}

// S27: what is abandoned under hold is told to an operator, and nothing takes that
// back.
func holdIsNotRenewed(h *harness) {
	zero, over := holding(h.newClaim("ended at once")), holding(h.newClaim("ran out"))
	h.claim(claimWins, zero, claimed(zero, 1))
	h.claim(claimWins, over, claimed(over, 1))
	h.extend(extendZero, zero, 0, nil)
	h.Advance(2 * lease)
	for _, c := range []idempotency.Claim{zero, over} {
		h.extend(extendHeld, c, lease, idempotency.ErrLeaseLost)
		h.claim(extendHeld, again(c), abandoned(c, 1))
		h.extend(extendZero, c, 0, nil)
		h.claim(extendHeld, again(c), abandoned(c, 1))
	}
	h.complete(completeLost, over, response("late"), nil)
	h.extend(extendLost, over, 0, idempotency.ErrLeaseLost)
}

// S27.
func holdTakesNothingOver(h *harness) {
	c := h.newClaim("abandoned")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * lease)
	h.claim(holdAbstains, holding(again(c)), abandoned(c, 1))
	next := again(c)
	h.claim(claimWins, next, claimed(next, 2)) // nor did that mark it

	// Released and expired records are no abandoned ones.
	h.release(releaseGivesUp, next, nil)
	held := holding(again(c))
	h.claim(claimWins, held, claimed(held, 3))
	h.Advance(2 * lease)
	h.claim(holdMarks, again(c), abandoned(held, 3))

	gone := h.newClaim("expired")
	h.claim(claimWins, gone, claimed(gone, 1))
	h.Advance(ttl + lease)
	gone = holding(other(gone))
	h.claim(expiredIsNone, gone, claimed(gone, 1))
}

// S27: the owner that comes back late still has the answer.
func holdSettledLate(h *harness) {
	done, free := holding(h.newClaim("completed")), holding(h.newClaim("released"))
	h.claim(claimWins, done, claimed(done, 1))
	h.claim(claimWins, free, claimed(free, 1))
	h.Advance(ttl / 2)
	h.claim(holdMarks, again(done), abandoned(done, 1))
	h.claim(holdMarks, again(free), abandoned(free, 1))
	h.complete(completeLost, done, response("late"), nil)
	h.release(releaseLost, free, nil)
	h.claim(completeStores, again(done), completed(done, 1, response("late")))
	h.claim(releaseKeeps, other(free), released(free, 1))
	h.claim(releaseKeeps, again(free), claimed(free, 2))

	// Past its TTL, too: a held record is still there.
	past := holding(h.newClaim("past the TTL"))
	h.claim(claimWins, past, claimed(past, 1))
	h.Advance(2 * ttl)
	h.claim(holdMarks, again(past), abandoned(past, 1))
	h.complete(completeLost, past, response("late"), nil)
}

// S24.
func holdReleased(h *harness) {
	c := holding(h.newClaim("released"))
	h.claim(claimWins, c, claimed(c, 1))
	h.release(releaseGivesUp, c, nil)
	h.claim(releaseKeeps, other(c), released(c, 1))
	next := again(c)
	h.claim(claimWins, next, claimed(next, 2))
	h.release(releaseGivesUp, next, nil)
	plain := again(c)
	plain.Hold = false
	h.claim(claimWins, plain, claimed(plain, 3))
}

// S18: only a claim that wins marks a record, or takes the mark away.
func holdOfWinner(h *harness) {
	c := h.newClaim("plain")
	h.claim(claimWins, c, claimed(c, 1))
	h.claim(claimLoses, holding(again(c)), inProgress(c, 1, lease))
	h.claim(claimLoses, holding(other(c)), inProgress(c, 1, lease))
	h.Advance(2 * lease)
	h.claim(claimLoses, again(c), claimed(c, 2))

	held := holding(h.newClaim("held"))
	plain := held
	plain.Hold = false
	h.claim(claimWins, held, claimed(held, 1))
	h.claim(claimLoses, again(plain), inProgress(held, 1, lease))
	h.extend(extendZero, held, 0, nil)
	h.claim(holdMarks, again(plain), abandoned(held, 1))
	h.release(releaseGivesUp, held, nil)
	plain = again(plain)
	h.claim(claimWins, plain, claimed(plain, 2))
	h.Advance(2 * lease)
	h.claim(claimWins, again(plain), claimed(plain, 3))
}

// S29: only what is in progress is held.
func holdSettledExpires(h *harness) {
	done, free := holding(h.newClaim("completed")), holding(h.newClaim("released"))
	h.claim(claimWins, done, claimed(done, 1))
	h.claim(claimWins, free, claimed(free, 1))
	h.complete(completeStores, done, response("done"), nil)
	h.release(releaseGivesUp, free, nil)
	h.Advance(ttl - lease)
	h.claim(ttlCounts, other(done), completed(done, 1, response("done")))
	h.claim(ttlCounts, other(free), released(free, 1))
	h.Advance(2 * lease)
	done, free = other(done), other(free)
	h.claim(expiry, done, claimed(done, 1))
	h.claim(expiry, free, claimed(free, 1))
}

// S29: completion does not prolong the TTL.
func expiryCompleted(h *harness) {
	c := h.newClaim("completed")
	c.Lease = ttl
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(ttl / 2)
	done := response("done")
	done.AddedHeader = http.Header{"Vary": {"Origin"}}
	done.Trailer = http.Header{"Digest": {"x"}}
	h.complete(completeStores, c, done, nil)
	h.Advance(ttl/2 - lease)
	h.claim(ttlCounts, again(c), completed(c, 1, done))
	h.Advance(2 * lease)

	// Nothing of the old record is left in the new one.
	c = other(c)
	h.claim(ttlCounts, c, claimed(c, 1))
	h.claim(expiredIsNone, again(c), inProgress(c, 1, c.Lease))
	h.release(releaseGivesUp, c, nil)
	h.claim(expiredIsNone, other(c), released(c, 1))
	c = again(c)
	h.claim(expiredIsNone, c, claimed(c, 2))
	h.complete(completeStores, c, idempotency.Response{Status: http.StatusNoContent}, nil)
	h.claim(expiredIsNone, again(c), completed(c, 2, idempotency.Response{Status: http.StatusNoContent}))
}

// S24, S29: nor does a release.
func expiryReleased(h *harness) {
	c := h.newClaim("released")
	c.Lease = ttl
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(ttl / 2)
	h.release(releaseGivesUp, c, nil)
	h.Advance(ttl/2 - lease)
	h.claim(releaseKeeps, other(c), released(c, 1))
	h.Advance(2 * lease)
	c = other(c)
	h.claim(releaseKeeps, c, claimed(c, 1))
}

// S29.
func expiryAbandoned(h *harness) {
	c := h.newClaim("abandoned")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(ttl - lease)
	h.claim(ttlCounts, other(c), abandoned(c, 1))
	h.Advance(2 * lease)
	next := other(c)
	h.claim(expiredIsNone, next, claimed(next, 1))

	same := h.newClaim("same payload")
	h.claim(claimWins, same, claimed(same, 1))
	h.Advance(ttl + lease)
	same = again(same)
	h.claim(expiredIsNone, same, claimed(same, 1)) // a new record, not a second attempt
	h.release(releaseGivesUp, same, nil)
	h.claim(releaseKeeps, other(same), released(same, 1))
}

// S29: a handler that outlasts the TTL keeps its key.
func expiryLiveLease(h *harness) {
	c := h.newClaim("live")
	c.Lease = 3 * ttl
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * ttl)
	h.claim(expiry, again(c), inProgress(c, 1, ttl))
	h.claim(expiry, other(c), inProgress(c, 1, ttl))
	h.extend(expiry, c, 2*ttl, nil)
	h.Advance(2*ttl - lease)
	h.claim(expiry, other(c), inProgress(c, 1, lease))
	h.Advance(2 * lease)
	c = other(c)
	h.claim(expiry, c, claimed(c, 1))
}

// S29: what such a handler stores is expired from the start.
func expiryCompletedLate(h *harness) {
	done, free := h.newClaim("completed"), h.newClaim("released")
	done.Lease, free.Lease = 3*ttl, 3*ttl
	h.claim(claimWins, done, claimed(done, 1))
	h.claim(claimWins, free, claimed(free, 1))
	h.Advance(2 * ttl)
	h.complete(completeLost, done, response("late"), nil)
	h.release(releaseLost, free, nil)
	done, free = other(done), other(free)
	h.claim(expiry, done, claimed(done, 1))
	h.claim(expiry, free, claimed(free, 1))
}

// S29: an expired record may be gone or may still be there; its owner may fail
// or succeed accordingly. Either way the key is then what it was told.
func expiryOwner(h *harness) {
	for _, tt := range []struct {
		name string
		call func(l idempotency.Lease) error
	}{
		{"complete", func(l idempotency.Lease) error { return h.Store.Complete(h.t.Context(), l, response("late")) }},
		{"release", func(l idempotency.Lease) error { return h.Store.Release(h.t.Context(), l) }},
		{"extend", func(l idempotency.Lease) error { return h.Store.Extend(h.t.Context(), l) }},
	} {
		c := h.newClaim(tt.name)
		h.claim(claimWins, c, claimed(c, 1))
		h.Advance(ttl + lease)
		err := tt.call(leaseOf(c))
		if err != nil && !errors.Is(err, idempotency.ErrLeaseLost) {
			h.fail(completeLost, "%s of an expired record\n got: error %v\nwant: none or %v", tt.name, err, idempotency.ErrLeaseLost)
		}
		next := other(c)
		if tt.name == "extend" && err == nil {
			h.claim(extendMoves, next, inProgress(c, 1, lease))
			continue
		}
		h.claim(expiredIsNone, next, claimed(next, 1))
		h.complete(completeStores, next, response("next"), nil)
		h.claim(completeStores, again(next), completed(next, 1, response("next")))
	}
}

// A lease names all the keys of its operation. There is one, until operations
// have aliases; two claims of one owner make what theirs will be.
func leaseSeveralKeys(h *harness) {
	pair := func(name string) (a, b idempotency.Claim, both idempotency.Lease) {
		h.t.Helper()
		a = h.newClaim(name + ", first")
		b = h.newClaim(name + ", second")
		b.Owner = a.Owner
		h.claim(claimWins, a, claimed(a, 1))
		h.claim(claimWins, b, claimed(b, 1))
		return a, b, idempotency.Lease{Keys: []idempotency.ScopedKey{a.Key, b.Key}, Owner: a.Owner, Duration: lease}
	}
	ctx := h.t.Context()

	a, b, both := pair("completed")
	h.expect(completeStores, "Complete", h.Store.Complete(ctx, both, response("both")), nil)
	h.expect(completeRepeated, "Complete", h.Store.Complete(ctx, both, response("again")), nil)
	h.expect(releaseLost, "Release", h.Store.Release(ctx, both), idempotency.ErrLeaseLost)
	h.claim(completeStores, again(a), completed(a, 1, response("both")))
	h.claim(completeStores, again(b), completed(b, 1, response("both")))

	a, b, both = pair("released")
	h.expect(releaseGivesUp, "Release", h.Store.Release(ctx, both), nil)
	h.expect(releaseLost, "Release", h.Store.Release(ctx, both), nil)
	h.expect(completeLost, "Complete", h.Store.Complete(ctx, both, response("late")), idempotency.ErrLeaseLost)
	h.claim(releaseGivesUp, other(a), released(a, 1))
	h.claim(releaseGivesUp, other(b), released(b, 1))

	a, b, both = pair("extended")
	both.Duration = 10 * lease
	h.expect(extendMoves, "Extend", h.Store.Extend(ctx, both), nil)
	h.Advance(9 * lease)
	h.claim(extendMoves, again(a), inProgress(a, 1, lease))
	h.claim(extendMoves, again(b), inProgress(b, 1, lease))

	// One key is lost, wherever it stands in the lease: nothing happens to the other.
	for _, order := range []string{"lost last", "lost first"} {
		keep, lose, both := pair(order)
		stranger := h.newClaim(order + ", never claimed")
		h.extend(extendZero, lose, 0, nil)
		next := again(lose)
		h.claim(claimWins, next, claimed(next, 2))
		for _, lost := range []idempotency.ScopedKey{lose.Key, stranger.Key} {
			both.Keys = []idempotency.ScopedKey{keep.Key, lost}
			if order == "lost first" {
				both.Keys = []idempotency.ScopedKey{lost, keep.Key}
			}
			both.Duration = 10 * lease
			h.expect(completeLost, "Complete", h.Store.Complete(ctx, both, response("half")), idempotency.ErrLeaseLost)
			h.claim(completeLost, again(keep), inProgress(keep, 1, lease))
			h.expect(releaseLost, "Release", h.Store.Release(ctx, both), idempotency.ErrLeaseLost)
			h.claim(releaseLost, again(keep), inProgress(keep, 1, lease))
			h.expect(extendLost, "Extend", h.Store.Extend(ctx, both), idempotency.ErrLeaseLost)
			h.claim(extendLost, again(keep), inProgress(keep, 1, lease))
			h.claim(completeLost, again(lose), inProgress(next, 2, lease))
		}
		h.claim(completeLost, stranger, claimed(stranger, 1))
		h.complete(completeStores, keep, response("keep"), nil)
		h.complete(completeStores, next, response("next"), nil)
		h.claim(completeStores, again(keep), completed(keep, 1, response("keep")))
		h.claim(completeStores, again(lose), completed(next, 2, response("next")))
	}
}

// S01, S27.
func leaseInvalid(h *harness) {
	c := h.newClaim("lease")
	h.claim(claimWins, c, claimed(c, 1))
	ctx := h.t.Context()
	for _, tt := range []struct {
		name  string
		spoil func(l *idempotency.Lease)
	}{
		{"no keys", func(l *idempotency.Lease) { l.Keys = nil }},
		{"empty keys", func(l *idempotency.Lease) { l.Keys = []idempotency.ScopedKey{} }},
		{"zero key", func(l *idempotency.Lease) { l.Keys = []idempotency.ScopedKey{{}} }},
		{"zero key among others", func(l *idempotency.Lease) { l.Keys = append(l.Keys, idempotency.ScopedKey{}) }},
		{"no owner", func(l *idempotency.Lease) { l.Owner = uuid.Nil }},
		{"negative duration", func(l *idempotency.Lease) { l.Duration = -1 }},
	} {
		l := leaseOf(c)
		tt.spoil(&l)
		for call, err := range map[string]error{
			"Complete": h.Store.Complete(ctx, l, response("invalid")),
			"Release":  h.Store.Release(ctx, l),
			"Extend":   h.Store.Extend(ctx, l),
		} {
			if !errors.Is(err, idempotency.ErrInvalidClaim) {
				h.fail(refused, "%s with %s\n got: error %v\nwant: error %v", call, tt.name, err, idempotency.ErrInvalidClaim)
			}
		}
		h.claim(refused, again(c), inProgress(c, 1, lease))
	}
}
