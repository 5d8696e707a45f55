package storetest

import (
	"errors"
	"sync/atomic"

	"github.com/keytuple/idempotency"
)

// sweepable makes one record of each kind that is not expired, and returns a
// check that they still are what they were.
func (h *harness) sweepable(name string) (check func()) {
	h.t.Helper()
	kind := func(kind string) idempotency.Claim {
		h.t.Helper()
		c := h.newClaim(name + " " + kind)
		c.Lease, c.TTL = 1000*ttl, 1000*ttl
		return c
	}
	live, gone, done, free := kind("live"), kind("abandoned"), kind("completed"), kind("released")
	outlasting, held := kind("outlasting"), holding(kind("held"))
	outlasting.TTL, held.TTL = ttl, ttl
	for _, c := range []idempotency.Claim{live, outlasting, held, gone, done, free} {
		h.claim(claimWins, c, claimed(c, 1))
	}
	h.extend(extendZero, gone, 0, nil)
	h.extend(extendZero, held, 0, nil)
	h.complete(completeStores, done, response("done"), nil)
	h.release(releaseGivesUp, free, nil)
	return func() {
		h.t.Helper()
		h.claim(sweepSpares, other(live), inProgress(live, 1, live.Lease))
		h.claim(sweepSpares, other(outlasting), inProgress(outlasting, 1, outlasting.Lease))
		h.claim(sweepSpares, other(held), abandoned(held, 1))
		h.claim(sweepSpares, other(gone), abandoned(gone, 1))
		h.claim(sweepSpares, other(done), completed(done, 1, response("done")))
		h.claim(sweepSpares, other(free), released(free, 1))
	}
}

// S29.
func sweepOnlyExpired(h *harness) {
	d := h.deleter()
	h.sweep(d, sweepCounts, 100, 0)
	check := h.sweepable("kept")
	h.sweep(d, sweepSpares, 100, 0)
	check()
	gone := h.expired([]string{"expired completed", "expired released", "expired abandoned"})
	h.sweep(d, sweepSpares, 100, len(gone))
	h.sweep(d, sweepCounts, 100, 0)
	check()
	for _, c := range gone {
		c = other(c)
		h.claim(expiredIsNone, c, claimed(c, 1))
	}

	// What was held expires once it is settled.
	held := holding(h.newClaim("held"))
	h.claim(claimWins, held, claimed(held, 1))
	h.Advance(2 * ttl)
	h.sweep(d, sweepSpares, 100, len(gone)) // claimed again above
	h.release(releaseLost, held, nil)
	h.sweep(d, expiry, 100, 1)
	check()
}

// S29: batches are bounded.
func sweepLimit(h *harness) {
	d := h.deleter()
	check := h.sweepable("kept")
	h.expired(names()[:7])
	h.sweep(d, sweepCounts, 0, 0)
	h.sweep(d, sweepCounts, 3, 3)
	h.sweep(d, sweepCounts, 1, 1)
	h.sweep(d, sweepCounts, 3, 3)
	h.sweep(d, sweepCounts, 3, 0)
	check()
}

// S27: the owner of a record that was deleted holds nothing.
func sweepOwner(h *harness) {
	d := h.deleter()
	c := h.newClaim("deleted")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(ttl + lease)
	h.sweep(d, sweepCounts, 100, 1)
	h.complete(completeLost, c, response("late"), idempotency.ErrLeaseLost)
	h.release(releaseLost, c, idempotency.ErrLeaseLost)
	h.extend(extendLost, c, lease, idempotency.ErrLeaseLost)
	next := other(c)
	h.claim(completeLost, next, claimed(next, 1))
	h.complete(completeLost, c, response("late"), idempotency.ErrLeaseLost)
	h.claim(completeLost, again(next), inProgress(next, 1, lease))
}

// S29: a sweep takes no record from the claim that just won it.
func sweepAgainstClaims(h *harness) {
	d := h.deleter()
	check := h.sweepable("kept")
	for i, name := range names() {
		gone := h.newClaim(name + " abandoned")
		gone.TTL = 10 * ttl
		h.claim(claimWins, gone, claimed(gone, 1))
		old := h.newClaim(name + " expired")
		h.claim(claimWins, old, claimed(old, 1))
		switch i % 3 {
		case 0:
			h.complete(completeStores, old, response("old"), nil)
		case 1:
			h.release(releaseGivesUp, old, nil)
		}
		h.Advance(ttl + lease)

		var swept atomic.Int64
		errs := make([]error, 2)
		sweeper := func(i int) func() {
			return func() {
				var n int
				n, errs[i] = d.DeleteExpired(h.t.Context(), 10)
				swept.Add(int64(n))
			}
		}
		h.oneWinner(sweepSpares, old, 1, i%2 == 1, sweeper(0), sweeper(1))
		h.oneWinner(sweepSpares, gone, 2, false, sweeper(0), sweeper(1))
		if err := errors.Join(errs...); err != nil || swept.Load() > 1 {
			h.fail(sweepCounts, "DeleteExpired against claims\n got: %d, error %v\nwant: at most 1", swept.Load(), err)
		}
		h.Advance(10 * ttl)
		h.sweep(d, sweepCounts, 10, 2)
	}
	check()
}
