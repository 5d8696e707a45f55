package idempotency

import (
	"crypto/subtle"
	"slices"
)

// MaxAliases is how many aliases a [Claim] may have.
const MaxAliases = 16

// An Alias is another name of an operation: a tuple that it may be recorded under,
// because its scope was another one once (S43), or the identity behind it (S44).
type Alias struct {
	// Key is the other name.
	Key ScopedKey
	// Kind says what a record means that stands there with another fingerprint.
	Kind AliasKind
}

// An AliasKind says how an alias has become a name of an operation. The zero value is
// none.
type AliasKind int

const (
	// AliasRenamed is the same key space under an older name: what stands there with
	// another fingerprint has used up the key, as it would under the primary name.
	AliasRenamed AliasKind = iota + 1
	// AliasMerged is the key space of another identity: what stands there with another
	// fingerprint is some other operation's, and is left alone. Whoever still has that
	// identity finds an operation there that was claimed with it, but not its answer.
	AliasMerged
)

// String returns the kind's name.
func (k AliasKind) String() string {
	switch k {
	case AliasRenamed:
		return "renamed"
	case AliasMerged:
		return "merged"
	}
	return "unknown"
}

func (k AliasKind) isKnown() bool { return k == AliasRenamed || k == AliasMerged }

// An AliasStore is a [Store] that claims all names of an operation in one atomic step:
// Claim.Key, which is the primary one, and those of Claim.Aliases.
//
// An expired record is as good as none. So is, but its name is not free, a record under
// an alias that was last claimed as an alias of a name that is none of this claim's, unless
// a record of the same operation under the primary name was, too. The other records decide
// together:
//
//   - Those with a fingerprint of this claim stand for the operation. If one of them is
//     completed, or else in progress, or else abandoned and not to be taken over by this
//     claim, it is returned, and nothing is changed.
//   - If none stands for the operation, a record under the primary name, or under an
//     alias that is not merged, is returned, and nothing is changed.
//   - Otherwise the claim wins. It takes all names that are free and all whose records
//     stand for the operation, as attempt 1, or one more than the greatest attempt of
//     those records. Fingerprint and Origin are theirs, those of the last name if they
//     differ; where there are none, the claim's and the last name that it takes.
//
// Where several decide alike, the one of the first name is returned.
//
// A store remembers with the record of each alias the primary name that it was last
// claimed with, and with each record the origin; a digest is enough. A claim that has the
// alias as its primary name makes it forget the former. It locks names in one order, so
// that no two claims wait for each other.
type AliasStore interface {
	Store

	// CheckAliases returns why this store cannot do it as it was made, as a
	// [*ConfigError]; nil if it can. [New] asks it.
	CheckAliases() error
}

// validateAliases returns an error that wraps ErrInvalidClaim if there are too many
// aliases, or one of them is no other name.
func (c Claim) validateAliases() error {
	if len(c.Aliases) > MaxAliases {
		return invalidClaim("too many aliases")
	}
	for i, a := range c.Aliases {
		switch {
		case a.Key.IsZero():
			return invalidClaim("alias with a zero key")
		case !a.Kind.isKnown():
			return invalidClaim("alias of no kind")
		case a.Key == c.Key:
			return invalidClaim("alias is the primary name")
		}
		for _, b := range c.Aliases[:i] {
			if a.Key == b.Key {
				return invalidClaim("alias is there twice")
			}
		}
	}
	return nil
}

// names returns all names of the operation, the primary one first.
func (c Claim) names() []ScopedKey {
	names := make([]ScopedKey, 0, 1+len(c.Aliases))
	names = append(names, c.Key)
	for _, a := range c.Aliases {
		names = append(names, a.Key)
	}
	return names
}

// withheld returns those of the names that the claim has taken under which the outcome is
// not to be seen: the merged ones, unless the operation stands under no other.
func (c Claim) withheld(taken []ScopedKey) []ScopedKey {
	var merged []ScopedKey
	for i, name := range c.names() {
		if c.isMerged(i) && slices.Contains(taken, name) {
			merged = append(merged, name)
		}
	}
	if len(merged) == len(taken) {
		return nil
	}
	return merged
}

// isMerged reports whether the i-th name is a merged alias.
func (c Claim) isMerged(i int) bool { return i > 0 && c.Aliases[i-1].Kind == AliasMerged }

// aliasOf is what the record of the i-th name, if the claim takes it, remembers as its
// primary name.
func (c Claim) aliasOf(i int) KeyDigest {
	if i == 0 {
		return KeyDigest{}
	}
	return c.Key.Digest()
}

// matches reports whether fp is a fingerprint of the claim's payload.
func (c Claim) matches(fp Fingerprint) bool {
	same := subtle.ConstantTimeCompare(c.Fingerprint[:], fp[:])
	for _, other := range c.OtherFingerprints {
		same |= subtle.ConstantTimeCompare(other[:], fp[:])
	}
	return same == 1
}

// A standing is what a store has found under one of a claim's names. The zero value
// stands for no record, or an expired one.
type standing struct {
	record  Record // as it stands towards a claim that does not win
	held    bool
	aliasOf KeyDigest // the primary name that it was last claimed with; zero: this one
	origin  KeyDigest // zero: this name
}

// A claimPlan is what an [AliasStore] is to do about a claim.
type claimPlan struct {
	taken  []int  // the claim's names that it takes; none: it does not win
	record Record // what the claim returns
	stands bool   // the record has a fingerprint of the claim
}

// How much the record of an operation counts, beside others of the same one.
const (
	rankNone = iota
	rankStale
	rankAbandoned // not to be taken over
	rankInProgress
	rankCompleted
)

func (c Claim) rank(s standing) int {
	switch s.record.State {
	case StateCompleted:
		return rankCompleted
	case StateInProgress:
		return rankInProgress
	case StateAbandoned:
		if s.held || c.Hold {
			return rankAbandoned
		}
	case StateReleased, StateClaimed:
	}
	return rankStale
}

// plan decides what becomes of a claim that has met this under each of its names.
func (c Claim) plan(met []standing) claimPlan {
	names := c.names()
	digests := make([]KeyDigest, len(names))
	for i, name := range names {
		digests[i] = name.Digest()
	}
	own := append([]KeyDigest{{}}, digests...) // whose aliases are this operation's
	if c.matches(met[0].record.Fingerprint) {
		own = append(own, met[0].aliasOf)
	}
	win := claimPlan{record: Record{State: StateClaimed, Fingerprint: c.Fingerprint, Attempt: 1}}
	best, bestRank, mismatch := -1, rankNone, -1
	for i, s := range met {
		switch {
		case s.record.State == 0:
			win.taken = append(win.taken, i)
		case i > 0 && !slices.Contains(own, s.aliasOf): // another operation's
		case !c.matches(s.record.Fingerprint):
			if mismatch < 0 && !c.isMerged(i) {
				mismatch = i
			}
		default:
			win.taken = append(win.taken, i)
			win.record.Fingerprint, win.record.Origin = s.record.Fingerprint, s.originOf(digests[i])
			win.record.Attempt = max(win.record.Attempt, s.record.Attempt+1)
			win.stands = true
			if rank := c.rank(s); rank > bestRank {
				best, bestRank = i, rank
			}
		}
	}
	switch {
	case bestRank > rankStale:
		return claimPlan{record: met[best].record, stands: true}
	case !win.stands && mismatch >= 0:
		return claimPlan{record: met[mismatch].record}
	}
	for _, i := range win.taken {
		win.record.Keys = append(win.record.Keys, names[i])
		if !win.stands {
			win.record.Origin = digests[i]
		}
	}
	return win
}

// originOf returns the origin of a record that stands under the name of that digest.
func (s standing) originOf(name KeyDigest) KeyDigest {
	if s.origin == (KeyDigest{}) {
		return name
	}
	return s.origin
}
