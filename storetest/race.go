package storetest

import (
	"fmt"

	"github.com/keytuple/idempotency"
)

const (
	racers = 12 // claims of one key at once
	rounds = 20 // keys of one race
)

// names returns the names of the keys of a race.
func names() []string {
	n := make([]string, rounds)
	for i := range n {
		n[i] = fmt.Sprintf("round %d", i)
	}
	return n
}

// oneWinner makes claims like c at once, and expects that one wins with that
// attempt, that all others are told so, and that the winner's outcome is kept.
// Every second claim has another fingerprint if mixed. The others run meanwhile.
func (h *harness) oneWinner(sentence string, c idempotency.Claim, attempt int, mixed bool, others ...func()) {
	h.t.Helper()
	claims := make([]idempotency.Claim, racers)
	records := make([]idempotency.Record, racers)
	errs := make([]error, racers)
	for i := range claims {
		claims[i] = again(c)
		if mixed && i%2 == 1 {
			claims[i] = other(c)
		}
	}
	race(racers+len(others), func(i int) {
		if i < racers {
			records[i], errs[i] = h.Store.Claim(h.t.Context(), claims[i])
		} else {
			others[i-racers]()
		}
	})

	winner, won := idempotency.Claim{}, 0
	for i, r := range records {
		if errs[i] == nil && r.State == idempotency.StateClaimed {
			winner = claims[i]
			won++
		}
	}
	if won != 1 {
		h.fail(sentence, "%d claims of %q at once\n got: %d winners, errors %v\nwant: 1 winner", racers, c.Key.Key(), won, errs)
	}
	for i, r := range records {
		want := inProgress(winner, attempt, winner.Lease)
		if claims[i].Owner == winner.Owner {
			want = claimed(winner, attempt)
		}
		h.judge(sentence, claims[i], r, errs[i], want)
	}
	for _, l := range claims {
		if l.Owner != winner.Owner {
			h.complete(completeLost, l, response("loser"), idempotency.ErrLeaseLost)
		}
	}
	h.complete(sentence, winner, response("winner"), nil)
	h.claim(sentence, again(winner), completed(winner, attempt, response("winner")))
}

// S19, S36.
func raceFresh(h *harness) {
	for i, name := range names() {
		h.oneWinner(oneWins, h.newClaim(name), 1, i%2 == 1)
	}
}

// S24.
func raceReleased(h *harness) {
	for _, name := range names() {
		c := h.newClaim(name)
		h.claim(claimWins, c, claimed(c, 1))
		h.release(releaseGivesUp, c, nil)
		h.oneWinner(oneWins, c, 2, false)
	}
}

// S27: exactly one takes over.
func raceAbandoned(h *harness) {
	var claims []idempotency.Claim
	for _, name := range names() {
		c := h.newClaim(name)
		h.claim(claimWins, c, claimed(c, 1))
		claims = append(claims, c)
	}
	h.Advance(2 * lease)
	for _, c := range claims {
		h.oneWinner(oneWins, c, 2, false)
	}
}

// S29.
func raceExpired(h *harness) {
	claims := h.expired(names())
	for i, c := range claims {
		h.oneWinner(oneWins, c, 1, i%2 == 1)
	}
}

// expired returns the claims of records that are expired: completed, released
// and abandoned in turn.
func (h *harness) expired(names []string) []idempotency.Claim {
	h.t.Helper()
	claims := make([]idempotency.Claim, len(names))
	for i, name := range names {
		c := h.newClaim(name)
		h.claim(claimWins, c, claimed(c, 1))
		switch i % 3 {
		case 0:
			h.complete(completeStores, c, response("old"), nil)
		case 1:
			h.release(releaseGivesUp, c, nil)
		}
		claims[i] = c
	}
	h.Advance(ttl + lease)
	return claims
}

// S27: nobody takes over.
func raceHeld(h *harness) {
	c := holding(h.newClaim("held"))
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(2 * ttl)
	plain := c
	plain.Hold = false
	records := make([]idempotency.Record, racers)
	errs := make([]error, racers)
	race(racers, func(i int) { records[i], errs[i] = h.Store.Claim(h.t.Context(), again(plain)) })
	for i := range racers {
		h.judge(holdMarks, c, records[i], errs[i], abandoned(c, 1))
	}
	h.release(releaseLost, c, nil)
}

// S27: of an owner that comes back late and the claim that takes over, one is
// first, and the other one learns it.
func raceOwnerTakeOver(h *harness) {
	for _, tt := range []struct {
		name string
		call func(c idempotency.Claim) error
		then func(c idempotency.Claim) idempotency.Record // the claim's result if the call was first
	}{
		{
			"complete",
			func(c idempotency.Claim) error { return h.Store.Complete(h.t.Context(), leaseOf(c), response("late")) },
			func(c idempotency.Claim) idempotency.Record { return completed(c, 1, response("late")) },
		},
		{
			"release",
			func(c idempotency.Claim) error { return h.Store.Release(h.t.Context(), leaseOf(c)) },
			func(c idempotency.Claim) idempotency.Record { return claimed(c, 2) },
		},
		{
			"extend",
			func(c idempotency.Claim) error { return h.Store.Extend(h.t.Context(), leaseOf(c)) },
			func(c idempotency.Claim) idempotency.Record { return inProgress(c, 1, lease) },
		},
	} {
		var claims []idempotency.Claim
		for _, name := range names() {
			c := h.newClaim(tt.name + " " + name)
			h.claim(claimWins, c, claimed(c, 1))
			claims = append(claims, c)
		}
		h.Advance(2 * lease)
		for _, c := range claims {
			next := again(c)
			var r idempotency.Record
			var claimErr, callErr error
			race(2, func(i int) {
				if i == 0 {
					r, claimErr = h.Store.Claim(h.t.Context(), next)
				} else {
					callErr = tt.call(c)
				}
			})
			if callErr == nil {
				h.judge(atomicSteps, next, r, claimErr, tt.then(c))
			} else {
				h.expect(completeLost, tt.name+" against a take-over", callErr, idempotency.ErrLeaseLost)
				h.judge(atomicSteps, next, r, claimErr, claimed(next, 2))
			}
			if r.State == idempotency.StateClaimed {
				h.complete(atomicSteps, next, response("next"), nil)
				h.claim(atomicSteps, again(c), completed(next, 2, response("next")))
			}
		}
	}
}

// S27: an operation has one end, even if its owner asks for two.
func raceCompleteRelease(h *harness) {
	for _, name := range names() {
		c := h.newClaim(name)
		h.claim(claimWins, c, claimed(c, 1))
		errs := make([]error, 4)
		race(len(errs), func(i int) {
			if i%2 == 0 {
				errs[i] = h.Store.Complete(h.t.Context(), leaseOf(c), response("outcome"))
			} else {
				errs[i] = h.Store.Release(h.t.Context(), leaseOf(c))
			}
		})
		var completeWant, releaseWant error
		want := completed(c, 1, response("outcome"))
		if errs[0] == nil {
			releaseWant = idempotency.ErrLeaseLost
		} else {
			completeWant, want = idempotency.ErrLeaseLost, released(c, 1)
		}
		for i, err := range errs {
			if i%2 == 0 {
				h.expect(atomicSteps, "Complete against Release", err, completeWant)
			} else {
				h.expect(atomicSteps, "Release against Complete", err, releaseWant)
			}
		}
		h.claim(atomicSteps, other(c), want)
	}
}

// S20: replays do not disturb one another.
func raceReplays(h *harness) {
	c := h.newClaim("replays")
	want := response("replayed")
	want.Header["Vary"] = []string{"Accept, Origin", "Cookie"}
	want.Trailer = map[string][]string{"Digest": {"x"}}
	h.claim(claimWins, c, claimed(c, 1))
	h.complete(completeStores, c, clone(want), nil)
	diffs := make([]string, racers)
	race(racers, func(i int) {
		for range rounds {
			r, err := h.Store.Claim(h.t.Context(), again(c))
			if err != nil || r.State != idempotency.StateCompleted {
				diffs[i] = fmt.Sprintf("%s, error %v", describe(r), err)
				return
			}
			if diffs[i] = compare(r.Response, want); diffs[i] != "" {
				return
			}
		}
	})
	for _, diff := range diffs {
		if diff != "" {
			h.fail(byteForByte, "concurrent replays: %s", diff)
		}
	}
}
