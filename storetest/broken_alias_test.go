package storetest_test

import (
	"context"
	"slices"
	"sync"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/storetest"
)

// A brokenAliasStore keeps the contract, except for its fault, which is one in how it
// deals with several names.
type brokenAliasStore struct {
	*idempotency.MemoryStore
	fault string

	mu     sync.Mutex
	schema map[idempotency.ScopedKey]idempotency.ScopedKey // primary names by alias
}

// aliasFaults are the faults of a brokenAliasStore, and the sentence that each breaks.
var aliasFaults = map[string]string{
	"aliases are ignored":           "It takes all names that are free",
	"last alias is ignored":         "It takes all names that are free",
	"names one by one":              "it is returned, and nothing is changed",
	"renamed is merged":             "If none stands for the operation, a record under the primary name",
	"merged is renamed":             "It takes all names that are free",
	"one scheme":                    "It takes all names that are free",
	"primary name is forgotten":     "a record under an alias that was last claimed as an alias of a name",
	"taken names are not told":      "It takes all names that are free",
	"origin is the primary name":    "Every later attempt gets the same, whatever names it is claimed by",
	"origin is not told":            "Every later attempt gets the same, whatever names it is claimed by",
	"aliases are not validated":     "ErrInvalidClaim reports a Claim or Lease that no store may accept",
	"only the primary name settles": "Complete stores r as the outcome",
	"nothing is withheld":           "A Store keeps it byte for byte",
	"all is withheld":               "A Store keeps it byte for byte",
}

func newBrokenAliasStore(fault string, clock *clock) *brokenAliasStore {
	return &brokenAliasStore{
		MemoryStore: idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{Now: clock.Now}), fault: fault,
		schema: make(map[idempotency.ScopedKey]idempotency.ScopedKey),
	}
}

func (s *brokenAliasStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	c.Aliases = slices.Clone(c.Aliases)
	switch s.fault {
	case "aliases are ignored":
		c.Aliases = nil
	case "last alias is ignored":
		c.Aliases = c.Aliases[:max(0, len(c.Aliases)-1)]
	case "names one by one":
		return s.claimOneByOne(ctx, c)
	case "renamed is merged":
		become(c.Aliases, idempotency.AliasMerged)
	case "merged is renamed":
		become(c.Aliases, idempotency.AliasRenamed)
	case "one scheme":
		c.OtherFingerprints = nil
	case "primary name is forgotten":
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(c.Aliases) == 1 {
			if first, ok := s.schema[c.Aliases[0].Key]; ok {
				c.Key = first
			}
			s.schema[c.Aliases[0].Key] = c.Key
		}
	case "aliases are not validated":
		if c.Validate() != nil {
			c.Aliases = nil
		}
	}
	rec, err := s.MemoryStore.Claim(ctx, c)
	switch {
	case s.fault == "taken names are not told" && len(rec.Keys) > 1:
		rec.Keys = rec.Keys[:1]
	case s.fault == "origin is the primary name" && len(rec.Keys) > 0:
		rec.Origin = c.Key.Digest()
	case s.fault == "origin is not told":
		rec.Origin = idempotency.KeyDigest{}
	}
	return rec, err
}

// become makes the aliases known to be of that kind.
func become(aliases []idempotency.Alias, kind idempotency.AliasKind) {
	for i := range aliases {
		if k := aliases[i].Kind; k == idempotency.AliasMerged || k == idempotency.AliasRenamed {
			aliases[i].Kind = kind
		}
	}
}

func (s *brokenAliasStore) claimOneByOne(ctx context.Context, c idempotency.Claim) (idempotency.Record, error) {
	if err := c.Validate(); err != nil {
		return idempotency.Record{}, err
	}
	one := c
	one.Aliases = nil
	won, err := s.MemoryStore.Claim(ctx, one)
	for _, a := range c.Aliases {
		if err != nil || won.State != idempotency.StateClaimed {
			return won, err
		}
		one.Key = a.Key
		if rec, aliasErr := s.MemoryStore.Claim(ctx, one); aliasErr != nil || rec.State != idempotency.StateClaimed {
			return rec, aliasErr
		}
		won.Keys = append(won.Keys, a.Key)
	}
	if len(c.Aliases) > 0 {
		won.Keys = append(won.Keys, c.Key)
		won.Origin = c.Aliases[len(c.Aliases)-1].Key.Digest()
	}
	return won, err
}

func (s *brokenAliasStore) Complete(ctx context.Context, l idempotency.Lease, r idempotency.Response) error {
	return s.MemoryStore.Complete(ctx, s.settled(l), r)
}

func (s *brokenAliasStore) settled(l idempotency.Lease) idempotency.Lease {
	switch {
	case s.fault == "only the primary name settles" && len(l.Keys) > 1:
		l.Keys, l.Withhold = l.Keys[:1], nil
	case s.fault == "nothing is withheld":
		l.Withhold = nil
	case s.fault == "all is withheld" && len(l.Withhold) > 0:
		l.Withhold = l.Keys
	}
	return l
}

// newFaultyStore returns a store with the fault of that name.
func newFaultyStore(fault string, clock *clock) storetest.Subject {
	if _, ok := aliasFaults[fault]; ok {
		return storetest.Subject{Store: newBrokenAliasStore(fault, clock), Advance: clock.Advance}
	}
	return storetest.Subject{Store: newBrokenStore(fault, clock), Advance: clock.Advance}
}
