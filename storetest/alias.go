package storetest

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/keytuple/idempotency"
)

// aliases skips the test if the store cannot claim several names at once.
func (h *harness) aliases() {
	h.t.Helper()
	s, ok := h.Store.(idempotency.AliasStore)
	if !ok {
		h.t.Skip("the store is no AliasStore")
	}
	if err := s.CheckAliases(); err != nil {
		h.t.Skip(err)
	}
}

// newSet returns a claim of a key with that name, and of the same key under other
// scopes: renamed "-1", "-2", … or merged "+1", "+2", …
func (h *harness) newSet(name string, aliases ...string) idempotency.Claim {
	h.t.Helper()
	c := h.newClaim(name)
	for _, a := range aliases {
		alias := idempotency.Alias{Key: h.newName(name, a), Kind: idempotency.AliasRenamed}
		if a[0] == '+' {
			alias.Kind = idempotency.AliasMerged
		}
		c.Aliases = append(c.Aliases, alias)
	}
	return c
}

func (h *harness) newName(name, alias string) idempotency.ScopedKey {
	h.t.Helper()
	s := scope()
	if alias != "" {
		s.Tenant = alias
	}
	return h.key(s, name)
}

// plain returns a claim of one of c's names alone, with its fingerprint: i is 0 for the
// primary name, and 1, 2, … for its aliases.
func plain(c idempotency.Claim, i int) idempotency.Claim {
	c.Key = namesOf(c)[i]
	c.Aliases = nil
	return again(c)
}

func namesOf(c idempotency.Claim) []idempotency.ScopedKey {
	names := []idempotency.ScopedKey{c.Key}
	for _, a := range c.Aliases {
		names = append(names, a.Key)
	}
	return names
}

// won is what the winner of c is told that has taken these of its names.
func won(c idempotency.Claim, attempt int, taken ...int) idempotency.Record {
	names := namesOf(c)
	r := claimed(c, attempt)
	for _, i := range taken {
		r.Keys = append(r.Keys, names[i])
	}
	r.Origin = names[slices.Max(taken)].Digest()
	return r
}

// claimAll makes the claim c, which has aliases, and expects that record.
func (h *harness) claimAll(sentence string, c idempotency.Claim, want idempotency.Record) {
	h.t.Helper()
	got, err := h.Store.Claim(h.t.Context(), c)
	h.judge(sentence, c, got, err, want)
	if got.State != idempotency.StateClaimed {
		return
	}
	if !equalSets(got.Keys, want.Keys) {
		h.fail(aliasTakes, "Claim of %q took %v\nwant: %v", c.Key.Key(), tenants(got.Keys), tenants(want.Keys))
	}
	if got.Origin != want.Origin {
		h.fail(recordOrigin, "Claim of %q\n got: origin %x\nwant: origin %x", c.Key.Key(), got.Origin[:4], want.Origin[:4])
	}
}

func equalSets(a, b []idempotency.ScopedKey) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(k idempotency.ScopedKey) bool { return !slices.Contains(b, k) })
}

// tenants tells the names of a set apart.
func tenants(keys []idempotency.ScopedKey) []string {
	var t []string
	for _, k := range keys {
		t = append(t, k.Tenant())
	}
	return t
}

// leaseOfAll returns what the winner of c holds that has taken all of its names.
func leaseOfAll(c idempotency.Claim) idempotency.Lease {
	l := leaseOf(c)
	l.Keys = namesOf(c)
	return l
}

// S43: all names are taken at once, and each is met by those who know only that one.
func aliasFresh(h *harness) {
	h.aliases()
	c := h.newSet("fresh", "-1", "+2")
	h.claimAll(aliasTakes, c, won(c, 1, 0, 1, 2))
	for i := range namesOf(c) {
		h.claim(aliasTakes, plain(c, i), inProgress(c, 1, lease))
		h.claim(aliasTakes, other(plain(c, i)), inProgress(c, 1, lease))
	}
	h.claimAll(aliasDecides, again(c), inProgress(c, 1, lease))
	h.expect(completeStores, "Complete", h.Store.Complete(h.t.Context(), leaseOfAll(c), response("done")), nil)
	h.expect(completeRepeated, "Complete", h.Store.Complete(h.t.Context(), leaseOfAll(c), response("again")), nil)
	for i := range namesOf(c) {
		h.claim(completeStores, plain(c, i), completed(c, 1, response("done")))
	}
	h.claimAll(aliasDecides, again(c), completed(c, 1, response("done")))
}

// settle brings the record of a claim that has won into a state. A claim is abandoned
// by the end of its lease, which is that of all claims before.
func (h *harness) settle(c idempotency.Claim, state idempotency.State) {
	h.t.Helper()
	switch state {
	case idempotency.StateCompleted:
		h.complete(completeStores, c, response(c.Key.Tenant()), nil)
	case idempotency.StateReleased:
		h.release(releaseGivesUp, c, nil)
	case idempotency.StateAbandoned:
		h.extend(extendZero, c, 0, nil)
	case idempotency.StateClaimed, idempotency.StateInProgress:
	}
}

// stand makes a record under one of c's names alone, and returns what claims meet there.
func (h *harness) stand(c idempotency.Claim, i int, state idempotency.State) idempotency.Record {
	h.t.Helper()
	one := plain(c, i)
	h.claim(claimWins, one, claimed(one, 1))
	h.settle(one, state)
	r := idempotency.Record{State: state, Fingerprint: c.Fingerprint, Attempt: 1}
	switch state {
	case idempotency.StateCompleted:
		r.Response = response(one.Key.Tenant())
	case idempotency.StateInProgress:
		r.LeaseLeft = lease
	case idempotency.StateClaimed, idempotency.StateReleased, idempotency.StateAbandoned:
	}
	return r
}

// held is like stand, for an abandoned record that is held.
func (h *harness) held(c idempotency.Claim, i int) idempotency.Record {
	h.t.Helper()
	one := holding(plain(c, i))
	h.claim(claimWins, one, claimed(one, 1))
	h.settle(one, idempotency.StateAbandoned)
	return abandoned(one, 1)
}

// S43, S44: a record under any of the names stands for the operation: where the claim
// may not take it over, nothing is changed under the others.
func aliasStands(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{idempotency.StateCompleted, idempotency.StateInProgress} {
		for i := range 3 {
			c := h.newSet(fmt.Sprintf("%v %d", state, i), "-1", "+2")
			want := h.stand(c, i, state)
			h.claimAll(aliasDecides, c, want)
			for j := range 3 {
				if j != i {
					free := plain(c, j)
					h.claim(aliasDecides, free, claimed(free, 1))
				}
			}
		}
	}
}

// S43, S44: what may be taken over is, with all names that are free.
func aliasTakeOver(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{idempotency.StateReleased, idempotency.StateAbandoned} {
		for i := range 3 {
			c := h.newSet(fmt.Sprintf("%v %d", state, i), "-1", "+2")
			h.stand(c, i, state)
			want := won(c, 2, 0, 1, 2)
			want.Origin = namesOf(c)[i].Digest()
			h.claimAll(aliasTakes, c, want)
			for j := range 3 {
				h.claim(aliasTakes, plain(c, j), inProgress(c, 2, lease))
			}
		}
	}
}

// S44: of several records of one operation, the one that is the furthest counts.
func aliasRanks(h *harness) {
	h.aliases()
	const stale, held = idempotency.StateReleased, idempotency.State(0)
	order := []idempotency.State{stale, held, idempotency.StateInProgress, idempotency.StateCompleted}
	for low, less := range order {
		for high := low + 1; high < len(order); high++ {
			for _, first := range []int{0, 1} {
				c := h.newSet(fmt.Sprintf("%d %d %d", low, high, first), "+1", "-2")
				stand := func(i int, state idempotency.State) idempotency.Record {
					if state == held {
						return h.held(c, i)
					}
					return h.stand(c, i, state)
				}
				stand(first, less)
				h.claimAll(aliasDecides, c, stand(1-first, order[high]))
			}
		}
	}
}

// S44: of records that count alike, that of the first name is returned.
func aliasFirst(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{idempotency.StateCompleted, idempotency.StateInProgress} {
		c := h.newSet(fmt.Sprintf("first %v", state), "-1", "+2", "+3")
		h.stand(c, 3, state)
		stale := plain(c, 2)
		h.claim(claimWins, stale, claimed(stale, 1))
		h.settle(stale, idempotency.StateReleased)
		second := again(stale) // told from the others by its attempt
		h.claim(claimWins, second, claimed(second, 2))
		h.settle(second, state)
		want := h.stand(c, 1, state)
		h.claimAll(aliasFirstName, c, want) // of attempt 1
	}
}

// S44: of several released or abandoned records of one operation, all are taken over.
func aliasTakesAll(h *harness) {
	h.aliases()
	c := h.newSet("all", "-1", "+2", "+3")
	h.stand(c, 1, idempotency.StateReleased)
	second := plain(c, 1)
	h.claim(claimWins, second, claimed(second, 2))
	h.settle(second, idempotency.StateReleased)
	h.stand(c, 2, idempotency.StateAbandoned)
	want := won(c, 3, 0, 1, 2, 3)
	want.Origin = namesOf(c)[2].Digest()
	h.claimAll(aliasTakes, c, want)
}

// S18, S43, S44: another payload's record is a mismatch under the primary name and a
// renamed alias, and nothing to this operation under a merged one.
func aliasMismatch(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{
		idempotency.StateCompleted, idempotency.StateInProgress, idempotency.StateReleased, idempotency.StateAbandoned,
	} {
		for i := range 2 {
			c := h.newSet(fmt.Sprintf("%v %d", state, i), "-1", "+2")
			want := h.stand(c, i, state)
			next := other(c)
			h.claimAll(aliasMismatches, next, want)
			for j := range 3 {
				if j != i {
					free := plain(next, j)
					h.claim(aliasMismatches, free, claimed(free, 1))
				}
			}
		}
		c := h.newSet(fmt.Sprintf("%v merged", state), "-1", "+2")
		want := h.stand(c, 2, state)
		next := other(c)
		h.claimAll(aliasTakes, next, won(next, 1, 0, 1))
		h.claim(aliasMismatches, other(plain(c, 2)), want)
	}
}

// S44: a match beats a mismatch, wherever the two are.
func aliasMatchBeatsMismatch(h *harness) {
	h.aliases()
	for match := range 3 {
		for mismatch := range 3 {
			if match == mismatch {
				continue
			}
			c := h.newSet(fmt.Sprintf("done %d %d", match, mismatch), "-1", "+2")
			h.stand(other(c), mismatch, idempotency.StateCompleted)
			h.claimAll(aliasDecides, c, h.stand(c, match, idempotency.StateCompleted))

			c = h.newSet(fmt.Sprintf("stale %d %d", match, mismatch), "-1", "+2")
			kept := h.stand(other(c), mismatch, idempotency.StateReleased)
			h.stand(c, match, idempotency.StateReleased)
			want := won(c, 2, match, 3-match-mismatch)
			want.Origin = namesOf(c)[match].Digest()
			h.claimAll(aliasTakes, c, want)
			h.claim(aliasTakes, plain(c, mismatch), kept)
		}
	}
}

// S43: a record under an alias that was claimed with another primary name is none of
// this operation's, whatever its payload; one under the primary name always is.
func aliasOfAnother(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{
		idempotency.StateCompleted, idempotency.StateInProgress, idempotency.StateReleased, idempotency.StateAbandoned,
	} {
		for _, payload := range []func(idempotency.Claim) idempotency.Claim{again, other} {
			first := h.newSet(fmt.Sprintf("%v %p", state, payload), "-1")
			h.claimAll(aliasTakes, first, won(first, 1, 0, 1))
			l := leaseOfAll(first)
			switch state {
			case idempotency.StateCompleted:
				h.expect(completeStores, "Complete", h.Store.Complete(h.t.Context(), l, response("first's")), nil)
			case idempotency.StateReleased:
				h.expect(releaseGivesUp, "Release", h.Store.Release(h.t.Context(), l), nil)
			case idempotency.StateAbandoned:
				l.Duration = 0
				h.expect(extendZero, "Extend", h.Store.Extend(h.t.Context(), l), nil)
			case idempotency.StateClaimed, idempotency.StateInProgress:
			}
			second := payload(first)
			s := scope()
			s.Principal = "second"
			second.Key = h.key(s, first.Key.Key())
			want := won(second, 1, 0)
			h.claimAll(aliasLeaves, second, want)

			old := plain(first, 1) // the alias is the primary name of an older process
			got, err := h.Store.Claim(h.t.Context(), other(old))
			if err != nil || got.State == idempotency.StateClaimed || got.Fingerprint != first.Fingerprint {
				h.fail(aliasLeaves, "Claim of the alias alone\n got: %s, error %v\nwant: the first operation's", describe(got), err)
			}
		}
	}
}

// S45: whatever names a later attempt is claimed by, its origin is that of the first.
func aliasOrigin(h *harness) {
	h.aliases()
	first := h.newSet("origin", "-1")
	h.claimAll(aliasTakes, first, won(first, 1, 0, 1))
	h.expect(releaseGivesUp, "Release", h.Store.Release(h.t.Context(), leaseOfAll(first)), nil)
	origin := first.Aliases[0].Key.Digest()

	for i, taker := range []idempotency.Claim{plain(first, 1), plain(first, 0)} {
		got, err := h.Store.Claim(h.t.Context(), taker)
		h.judge(claimWins, taker, got, err, claimed(taker, 2))
		if got.Origin == (idempotency.KeyDigest{}) {
			got.Origin = taker.Key.Digest()
		}
		if got.Origin != origin {
			h.fail(recordOrigin, "take-over of name %d\n got: origin %x\nwant: origin %x", i, got.Origin[:4], origin[:4])
		}
		h.release(releaseGivesUp, taker, nil)
	}
	next := again(first) // its own record, beside another alias than before
	next.Aliases = h.newSet("origin", "-2").Aliases
	want := won(next, 3, 0, 1)
	want.Origin = origin
	h.claimAll(recordOrigin, next, want)
}

// S43: a record belongs to the primary name that it was last claimed with. A claim to
// which that is an alias may have it; one that has the record's name as its primary one
// makes it everybody's.
func aliasBelongs(h *harness) {
	h.aliases()
	for _, state := range []idempotency.State{idempotency.StateCompleted, idempotency.StateReleased} {
		first := h.newSet(fmt.Sprintf("chain %v", state), "-1")
		h.claimAll(aliasTakes, first, won(first, 1, 0, 1))
		l := leaseOfAll(first)
		if state == idempotency.StateCompleted {
			h.expect(completeStores, "Complete", h.Store.Complete(h.t.Context(), l, response("done")), nil)
		} else {
			h.expect(releaseGivesUp, "Release", h.Store.Release(h.t.Context(), l), nil)
		}
		next := again(first) // of a scope that came after
		next.Key = h.newName(first.Key.Key(), "new")
		next.Aliases = []idempotency.Alias{{Key: first.Key, Kind: idempotency.AliasRenamed}, first.Aliases[0]}
		if state == idempotency.StateCompleted {
			h.claimAll(aliasDecides, next, completed(first, 1, response("done")))
		} else {
			h.claimAll(aliasTakes, next, won(next, 2, 0, 1, 2))
		}
	}
	first := h.newSet("rolled back", "-1", "-2")
	h.claimAll(aliasTakes, first, won(first, 1, 0, 1, 2))
	h.expect(releaseGivesUp, "Release", h.Store.Release(h.t.Context(), leaseOfAll(first)), nil)
	before := again(first) // of the scope that came before
	before.Key, before.Aliases = first.Aliases[0].Key, first.Aliases[1:]
	h.claimAll(aliasLeaves, before, won(before, 2, 0, 1))

	for _, by := range []func(c idempotency.Claim) idempotency.Claim{
		func(c idempotency.Claim) idempotency.Claim { return plain(c, 1) },
		func(c idempotency.Claim) idempotency.Claim {
			c = plain(c, 1)
			c.Aliases = []idempotency.Alias{{Key: h.newName(c.Key.Key(), "older"), Kind: idempotency.AliasRenamed}}
			return c
		},
	} {
		first := h.newSet(fmt.Sprintf("everybody's %p", by), "-1")
		h.claimAll(aliasTakes, first, won(first, 1, 0, 1))
		h.expect(releaseGivesUp, "Release", h.Store.Release(h.t.Context(), leaseOfAll(first)), nil)
		second := again(first)
		s := scope()
		s.Principal = "second"
		second.Key = h.key(s, first.Key.Key())

		old := by(first)
		got, err := h.Store.Claim(h.t.Context(), old)
		h.judge(aliasForgets, old, got, err, claimed(old, 2))
		h.claimAll(aliasForgets, second, inProgress(old, 2, lease))
	}
}

// S29: an expired record is as good as none, under each name, and forgets what it was.
func aliasExpired(h *harness) {
	h.aliases()
	first := h.newSet("expired", "-1")
	h.claimAll(aliasTakes, first, won(first, 1, 0, 1))
	h.expect(completeStores, "Complete", h.Store.Complete(h.t.Context(), leaseOfAll(first), response("old")), nil)
	h.Advance(ttl + lease)

	old := other(plain(first, 1)) // by itself: it is nobody's alias any more
	h.claim(expiredIsNone, old, claimed(old, 1))
	h.complete(completeStores, old, response("new"), nil)
	anew := plain(first, 0)
	got, err := h.Store.Claim(h.t.Context(), anew)
	h.judge(expiredIsNone, anew, got, err, claimed(anew, 1))
	if got.Origin != (idempotency.KeyDigest{}) && got.Origin != anew.Key.Digest() {
		h.fail(expiredIsNone, "Claim of %q: origin %x, which is that of the expired record", anew.Key.Key(), got.Origin[:4])
	}
	h.complete(completeStores, anew, response("new"), nil)

	second := again(first)
	s := scope()
	s.Principal = "second"
	second.Key, second.Fingerprint = h.key(s, first.Key.Key()), old.Fingerprint
	h.claimAll(aliasDecides, second, completed(old, 1, response("new")))

	h.Advance(ttl + lease)
	third := other(first)
	h.claimAll(expiredIsNone, third, won(third, 1, 0, 1))
}

// S16, S43: records are compared by the scheme that they name.
func aliasSchemes(h *harness) {
	h.aliases()
	scheme := func(n byte) idempotency.Fingerprint {
		fp := fingerprint('s')
		fp[0] = n
		return fp
	}
	for i := range 2 {
		c := h.newSet(fmt.Sprintf("scheme %d", i), "-1")
		c.Fingerprint = scheme(7)
		old := c
		old.Fingerprint = scheme(8)
		stood := h.stand(old, i, idempotency.StateCompleted)
		h.claimAll(aliasMismatches, c, stood)
		c.OtherFingerprints = []idempotency.Fingerprint{scheme(9), scheme(8)}
		h.claimAll(aliasDecides, again(c), stood)

		c = h.newSet(fmt.Sprintf("stale scheme %d", i), "-1")
		c.Fingerprint, c.OtherFingerprints = scheme(7), []idempotency.Fingerprint{scheme(8)}
		old = c
		old.Fingerprint = scheme(8)
		h.stand(old, i, idempotency.StateReleased)
		want := won(old, 2, 0, 1)
		want.Origin = namesOf(c)[i].Digest()
		h.claimAll(aliasTakes, c, want)
		for j := range 2 { // all records of one operation are bound alike
			h.claim(aliasTakes, plain(old, j), inProgress(old, 2, lease))
		}
	}
}

// S27: a held record is not taken over under any name, nor by a claim that holds.
func aliasHeld(h *harness) {
	h.aliases()
	for i := range 2 {
		c := h.newSet(fmt.Sprintf("held %d", i), "-1")
		want := h.held(c, i)
		h.claimAll(holdMarks, c, want)

		c = h.newSet(fmt.Sprintf("abandoned %d", i), "-1")
		want = h.stand(c, i, idempotency.StateAbandoned)
		h.claimAll(holdAbstains, holding(c), want)
		h.stand(h.newSet(fmt.Sprintf("abandoned %d", i), "-1"), 1-i, idempotency.StateCompleted) // free as before
	}
	c := holding(h.newSet("marked", "-1"))
	h.claimAll(aliasTakes, c, won(c, 1, 0, 1))
	l := leaseOfAll(c)
	l.Duration = 0
	h.expect(extendZero, "Extend", h.Store.Extend(h.t.Context(), l), nil)
	h.Advance(2 * ttl)
	for i := range 2 {
		one := plain(c, i)
		one.Hold = false
		h.claim(holdMarks, one, abandoned(c, 1))
	}
}

// S43: what is no set of names is refused.
func aliasInvalid(h *harness) {
	h.aliases()
	good := h.newSet("invalid", "-1", "+2")
	for name, spoil := range map[string]func(c *idempotency.Claim){
		"zero key": func(c *idempotency.Claim) { c.Aliases[1].Key = idempotency.ScopedKey{} },
		"no kind":  func(c *idempotency.Claim) { c.Aliases[1].Kind = 0 },
		"unknown":  func(c *idempotency.Claim) { c.Aliases[1].Kind = 3 },
		"primary":  func(c *idempotency.Claim) { c.Aliases[1].Key = c.Key },
		"twice":    func(c *idempotency.Claim) { c.Aliases[1].Key = c.Aliases[0].Key },
		"too many": func(c *idempotency.Claim) {
			*c = h.newSet("invalid")
			for i := range idempotency.MaxAliases + 1 {
				c.Aliases = append(c.Aliases, idempotency.Alias{Key: h.newName("invalid", strconv.Itoa(i)), Kind: idempotency.AliasMerged})
			}
		},
	} {
		c := good
		c.Aliases = slices.Clone(good.Aliases)
		spoil(&c)
		_, err := h.Store.Claim(h.t.Context(), c)
		h.expect(refused, "Claim with aliases: "+name, err, idempotency.ErrInvalidClaim)
	}
	h.claimAll(aliasTakes, good, won(good, 1, 0, 1, 2))
}

// S36, S43: of claims whose names overlap one wins, and names are taken all or none.
func aliasRace(h *harness) {
	h.aliases()
	for round := range rounds {
		set := h.newSet(fmt.Sprintf("round %d", round), "-1", "-2")
		reversed := set
		reversed.Aliases = slices.Clone(set.Aliases)
		slices.Reverse(reversed.Aliases)
		var state idempotency.State
		if round%2 == 1 {
			state = idempotency.StateReleased
			h.stand(set, 1+round%2, state)
		}
		claims := make([]idempotency.Claim, racers)
		records := make([]idempotency.Record, racers)
		errs := make([]error, racers)
		for i := range claims {
			switch i % 3 {
			case 0:
				claims[i] = again(set)
			case 1:
				claims[i] = again(reversed)
			case 2:
				claims[i] = plain(set, 2)
			}
		}
		race(racers, func(i int) { records[i], errs[i] = h.Store.Claim(h.t.Context(), claims[i]) })
		winner := -1
		for i, r := range records {
			if errs[i] != nil {
				h.fail(result, "claims of overlapping names: error %v", errs[i])
			}
			if r.State == idempotency.StateClaimed {
				if winner >= 0 {
					h.fail(oneWins, "claims of overlapping names, round %d: two winners", round)
				}
				winner = i
			}
		}
		if winner < 0 {
			h.fail(oneWins, "claims of overlapping names, round %d: no winner", round)
		}
		l := idempotency.Lease{Keys: namesOf(claims[winner]), Owner: claims[winner].Owner, Duration: lease}
		h.expect(completeStores, "Complete", h.Store.Complete(h.t.Context(), l, response("winner")), nil)
		h.claimAll(aliasDecides, again(set), completed(set, records[winner].Attempt, response("winner")))
	}
}

// S27, S43: a set is settled all or none.
func aliasSettleAll(h *harness) {
	h.aliases()
	c := h.newSet("settled", "-1")
	h.claimAll(aliasTakes, c, won(c, 1, 0, 1))
	h.Advance(2 * lease)
	thief := plain(c, 1)
	h.claim(claimWins, thief, claimed(thief, 2))
	l := leaseOfAll(c)
	h.expect(completeLost, "Complete", h.Store.Complete(h.t.Context(), l, response("late")), idempotency.ErrLeaseLost)
	h.expect(releaseLost, "Release", h.Store.Release(h.t.Context(), l), idempotency.ErrLeaseLost)
	h.expect(extendLost, "Extend", h.Store.Extend(h.t.Context(), l), idempotency.ErrLeaseLost)
	h.claim(completeLost, other(plain(c, 0)), abandoned(c, 1))
	h.claimAll(aliasDecides, again(c), inProgress(c, 2, lease))

	c = h.newSet("extended", "-1")
	h.claimAll(aliasTakes, c, won(c, 1, 0, 1))
	l = leaseOfAll(c)
	l.Duration = 10 * lease
	h.expect(extendMoves, "Extend", h.Store.Extend(h.t.Context(), l), nil)
	h.Advance(5 * lease)
	h.claimAll(extendMoves, again(c), inProgress(c, 1, 5*lease+time.Second))
}

// S44: under a key to be withheld, the answer is not stored.
func aliasWithheld(h *harness) {
	h.aliases()
	c := h.newSet("withheld", "+1", "-2")
	h.claimAll(aliasTakes, c, won(c, 1, 0, 1, 2))
	l := leaseOfAll(c)
	l.Withhold = []idempotency.ScopedKey{c.Aliases[0].Key}
	secret := response("secret")
	secret.Trailer = map[string][]string{"Digest": {"secret"}}
	secret.AddedHeader = map[string][]string{"Vary": {"secret"}}
	for range 2 {
		h.expect(completeWithholds, "Complete", h.Store.Complete(h.t.Context(), l, clone(secret)), nil)
		for i, want := range []idempotency.Response{secret, {Status: secret.Status, NotReplayable: true}, secret} {
			h.claim(completeWithholds, plain(c, i), completed(c, 1, want))
		}
	}
	l.Withhold = []idempotency.ScopedKey{h.newName("withheld", "other")}
	h.expect(refused, "Complete that withholds another key", h.Store.Complete(h.t.Context(), l, secret), idempotency.ErrInvalidClaim)
}
