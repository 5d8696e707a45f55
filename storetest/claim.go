package storetest

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/keytuple/idempotency"
)

// S19: the first claim wins, and the next one is told that it runs.
func claimFresh(h *harness) {
	c := h.newClaim("fresh")
	h.claim(claimWins, c, claimed(c, 1))
	h.claim(claimReturns, again(c), inProgress(c, 1, lease))
	h.complete(completeStores, c, response("fresh"), nil)
	h.claim(claimReturns, again(c), completed(c, 1, response("fresh")))
}

// S18: a mismatch changes nothing, in whatever state it finds the record.
func claimOtherFingerprint(h *harness) {
	// All durations of the mismatch are longer, so that any that is stored shows.
	mismatch := func(c idempotency.Claim) idempotency.Claim {
		c = other(c)
		c.Lease, c.TTL = 10*lease, 10*ttl
		return c
	}
	live, done, free, gone := h.newClaim("live"), h.newClaim("completed"), h.newClaim("released"), h.newClaim("abandoned")
	for _, c := range []idempotency.Claim{live, done, free, gone} {
		h.claim(claimWins, c, claimed(c, 1))
	}
	h.complete(completeStores, done, response("done"), nil)
	h.release(releaseGivesUp, free, nil)
	h.extend(extendZero, gone, 0, nil)

	for range 2 { // as often as it is sent
		h.claim(claimLoses, mismatch(live), inProgress(live, 1, lease))
		h.claim(claimLoses, mismatch(done), completed(done, 1, response("done")))
		h.claim(claimLoses, mismatch(free), released(free, 1))
		h.claim(claimLoses, mismatch(gone), abandoned(gone, 1))
	}

	h.complete(claimLoses, live, response("live"), nil)
	h.claim(claimLoses, again(live), completed(live, 1, response("live")))
	h.claim(claimLoses, again(free), claimed(free, 2))
	h.claim(claimLoses, again(gone), claimed(gone, 2))

	h.Advance(ttl + lease)
	for _, c := range []idempotency.Claim{live, done} {
		c = other(c)
		h.claim(claimLoses, c, claimed(c, 1))
	}
}

// S18, S21: neither does a claim that comes too early.
func claimLosing(h *harness) {
	c := h.newClaim("losing")
	h.claim(claimWins, c, claimed(c, 1))
	h.Advance(lease / 2)
	late := again(c)
	late.Lease, late.TTL = 10*lease, 10*ttl
	h.claim(claimLoses, late, inProgress(c, 1, lease/2))
	h.claim(claimLoses, again(c), inProgress(c, 1, lease/2))
	h.complete(completeLost, late, response("late"), idempotency.ErrLeaseLost)
	h.complete(completeStores, c, response("c"), nil)
	h.claim(claimLoses, again(late), completed(c, 1, response("c")))
	h.Advance(ttl)
	c = other(c)
	h.claim(claimLoses, c, claimed(c, 1))
}

// S16: every bit of a fingerprint counts, the scheme's among them.
func claimFingerprints(h *harness) {
	var zero, full idempotency.Fingerprint
	for i := range full {
		full[i] = 0xff
	}
	for _, f := range []idempotency.Fingerprint{zero, full, fingerprint('%'), fingerprint('\'')} {
		c := h.newClaim(uuid.NewString())
		c.Fingerprint = f
		h.claim(claimWins, c, claimed(c, 1))
		h.claim(fingerprintKept, again(c), inProgress(c, 1, lease))
		h.release(releaseGivesUp, c, nil)
		for _, i := range []int{0, 1, len(f) / 2, len(f) - 1} {
			near := again(c)
			near.Fingerprint[i] ^= 1
			h.claim(claimLoses, near, released(c, 1))
		}
		h.claim(fingerprintKept, again(c), claimed(c, 2))
	}
}

// S24, S27: attempts are counted over releases and take-overs alike.
func claimAttempts(h *harness) {
	c := h.newClaim("attempts")
	for attempt := 1; attempt <= 6; attempt++ {
		c = again(c)
		h.claim(recordAttempt, c, claimed(c, attempt))
		h.claim(recordAttempt, again(c), inProgress(c, attempt, lease))
		switch attempt % 3 {
		case 0:
			h.release(releaseGivesUp, c, nil)
			h.claim(recordAttempt, other(c), released(c, attempt))
		case 1:
			h.Advance(lease + time.Second)
			h.claim(recordAttempt, other(c), abandoned(c, attempt))
		case 2:
			h.extend(extendZero, c, 0, nil)
			h.claim(recordAttempt, other(c), abandoned(c, attempt))
		}
	}
	c = again(c)
	h.claim(recordAttempt, c, claimed(c, 7))
	h.complete(completeStores, c, response("seven"), nil)
	h.claim(recordAttempt, again(c), completed(c, 7, response("seven")))
}

// S21, S28: the lease that is left is what the store's clock has left of it.
func claimLeaseLeft(h *harness) {
	c := h.newClaim("lease")
	h.claim(claimWins, c, claimed(c, 1))
	left := lease
	for range 5 {
		got, err := h.Store.Claim(h.t.Context(), again(c))
		h.judge(recordLeaseLeft, c, got, err, inProgress(c, 1, left))
		if got.LeaseLeft < left-lease/2 {
			h.fail(recordLeaseLeft, "LeaseLeft\n got: %v\nwant: about %v", got.LeaseLeft, left)
		}
		h.Advance(10 * time.Second)
		left -= 10 * time.Second
	}
	h.Advance(left + time.Second)
	h.claim(leaseHolds, other(c), abandoned(c, 1))
}

// S01, S27: what no store may accept leaves nothing behind.
func claimInvalid(h *harness) {
	for _, tt := range []struct {
		name  string
		spoil func(c *idempotency.Claim)
	}{
		{"zero key", func(c *idempotency.Claim) { c.Key = idempotency.ScopedKey{} }},
		{"no owner", func(c *idempotency.Claim) { c.Owner = uuid.Nil }},
		{"zero lease", func(c *idempotency.Claim) { c.Lease = 0 }},
		{"negative lease", func(c *idempotency.Claim) { c.Lease = -lease }},
		{"zero TTL", func(c *idempotency.Claim) { c.TTL = 0 }},
		{"negative TTL", func(c *idempotency.Claim) { c.TTL = -ttl }},
	} {
		c := h.newClaim(tt.name)
		bad := c
		tt.spoil(&bad)
		if _, err := h.Store.Claim(h.t.Context(), bad); !errors.Is(err, idempotency.ErrInvalidClaim) {
			h.fail(refused, "Claim with %s\n got: error %v\nwant: error %v", tt.name, err, idempotency.ErrInvalidClaim)
		}
		c = other(c)
		h.claim(refused, c, claimed(c, 1))
	}
}

// S26: a claim whose caller has left may or may not have taken the key. Its
// owner can be released, and from then on does no harm.
func claimCancelled(h *harness) {
	ctx, cancel := context.WithCancel(h.t.Context())
	cancel()
	for _, name := range []string{"one", "two", "three"} {
		dead := h.newClaim(name)
		if r, err := h.Store.Claim(ctx, dead); err == nil {
			h.judge(claimWins, dead, r, nil, claimed(dead, 1))
		}
		if err := h.Store.Release(h.t.Context(), leaseOf(dead)); err != nil && !errors.Is(err, idempotency.ErrLeaseLost) {
			h.fail(ownerDead, "Release of the dead owner\n got: error %v\nwant: none or %v", err, idempotency.ErrLeaseLost)
		}
		next := again(dead)
		r, err := h.Store.Claim(h.t.Context(), next)
		h.judge(ownerDead, next, r, err, claimed(next, max(1, min(r.Attempt, 2))))
		h.release(releaseLost, dead, idempotency.ErrLeaseLost)
		h.claim(ownerDead, again(dead), inProgress(next, r.Attempt, lease))
		h.complete(completeStores, next, response(name), nil)
		h.claim(ownerDead, again(dead), completed(next, r.Attempt, response(name)))
	}
}

// S01, S03, S05, S08: keys that differ in anything are different records.
func claimDistinctKeys(h *harness) {
	keys := h.hostileKeys()
	claims := make([]idempotency.Claim, len(keys))
	for i, k := range keys {
		claims[i] = h.newClaim("x")
		claims[i].Key = k
		h.claim(keysEqual, claims[i], claimed(claims[i], 1))
	}
	body := func(k idempotency.ScopedKey) idempotency.Response { return response(k.Namespace() + k.String()) }
	for _, c := range claims {
		h.complete(keysEqual, c, body(c.Key), nil)
	}
	for _, c := range claims {
		h.claim(keysEqual, again(c), completed(c, 1, body(c.Key)))
	}
}

// hostileKeys returns keys that are pairwise different, though a store that
// joins, folds, trims, normalises, escapes or cuts them takes some for equal.
func (h *harness) hostileKeys() []idempotency.ScopedKey {
	h.t.Helper()
	const filler = "x"
	limits := [...]int{
		idempotency.MaxVersionLen, idempotency.MaxTenantLen, idempotency.MaxPrincipalLen,
		idempotency.MaxRouteLen, idempotency.MaxKeyLen,
	}
	type tuple [len(limits)]string
	plain := tuple{filler, filler, filler, filler, filler}
	tuples := []tuple{plain}
	with := func(at int, values ...string) {
		t := plain
		copy(t[at:], values)
		tuples = append(tuples, t)
	}
	values := []string{
		"X", " x", "x ", "x\t", "x\n", "\ufeffx", "x\u200d", "xx",
		"case", "Case", "CASE", "ß", "ẞ", "ss", "i", "I", "İ", "ı", "ﬀ", "ff",
		"é", "e\u0301", "Å", "A\u030a", "\u212b", // NFC, NFD, and a compatibility character
		"\x01", "\x1e", "\x1f", "\x7f", "a\x1eb", "a\x1fb", "a/b", "a:b", "a|b", "a,b", "a b",
		"\U00010000", "\U0010ffff", "\U0001f4b6", "\ufffd",
		"'", "''", `"`, `\`, `\\`, `\0`, `\x00`, `\u0000`, "%", "%%", "%00", "_", "a%", "a_", `a\_`, "ab",
		"'; DROP TABLE idempotency_records; --", "' OR '1'='1", "$1", "{}", "*", "?", "[a]",
		"NULL", "null", `\N`, "0", "00", "1", "01", "1.0", "u:", "s:", "u:x", "s:x", "v1",
	}
	for at, limit := range limits {
		for _, v := range values {
			if len(v) <= limit {
				with(at, v)
			}
		}
		// At the limit, and different in the last byte only.
		long := strings.Repeat("m", limit-1)
		with(at, long)
		with(at, long+"m")
		with(at, long+"n")
		with(at, strings.Repeat("\U0001f4b6", limit/4))
	}
	for at := range len(limits) - 1 {
		with(at, "a", "bc")
		with(at, "ab", "c")
		with(at, "a", "b")
		with(at, "b", "a")
		for _, sep := range []string{"\x1e", "\x1f", "\x01", " ", "/", ":", "|", ",", ".", "-", "_", "\\", "%00", `\x00`} {
			with(at, "a"+sep+"b", "c")
			with(at, "a", "b"+sep+"c")
		}
	}

	var keys []idempotency.ScopedKey
	seen := make(map[tuple]bool)
	for _, t := range tuples {
		if seen[t] {
			continue
		}
		seen[t] = true
		s := idempotency.Scope{Version: t[0], Tenant: t[1], Principal: t[2], Route: t[3]}
		keys = append(keys, h.key(s, t[4]))
		if s != (idempotency.Scope{Version: filler, Tenant: filler, Principal: filler, Route: filler}) {
			continue
		}
		server, err := idempotency.ServerKey(s, t[4])
		if err != nil {
			h.t.Fatalf("storetest: unusable key: %v", err)
		}
		keys = append(keys, server)
	}
	return keys
}
