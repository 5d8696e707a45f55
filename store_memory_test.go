package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
)

const (
	memoryLease = time.Minute
	memoryTTL   = time.Hour
)

// A memoryClock moves by advance only.
type memoryClock struct{ offset atomic.Int64 }

func (c *memoryClock) now() time.Time { return time.Unix(0, c.offset.Load()) }

func (c *memoryClock) advance(d time.Duration) { c.offset.Add(int64(d)) }

// newMemoryStore returns a store with that bound, and its clock.
func newMemoryStore(maxBytes int64) (*idempotency.MemoryStore, *memoryClock) {
	clock := new(memoryClock)
	return idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{MaxBytes: maxBytes, Now: clock.now}), clock
}

func memoryClaim(tb testing.TB, key string) idempotency.Claim {
	tb.Helper()
	scope := idempotency.Scope{Version: "v1", Tenant: "acme", Principal: "alice", Route: "charge"}
	k, err := idempotency.ClientKey(scope, key)
	require.NoError(tb, err)
	return idempotency.Claim{Key: k, Owner: uuid.New(), Lease: memoryLease, TTL: memoryTTL}
}

func memoryLeaseOf(c idempotency.Claim) idempotency.Lease {
	return idempotency.Lease{Keys: []idempotency.ScopedKey{c.Key}, Owner: c.Owner, Duration: c.Lease}
}

// claimState makes the claim, which must not fail, and returns how its record stands.
func claimState(t *testing.T, s *idempotency.MemoryStore, c idempotency.Claim) idempotency.State {
	t.Helper()
	r, err := s.Claim(t.Context(), c)
	require.NoError(t, err)
	return r.State
}

// fill claims new keys until the store is full, and returns the claims.
func fill(t *testing.T, s *idempotency.MemoryStore, prefix string) []idempotency.Claim {
	t.Helper()
	var claims []idempotency.Claim
	for {
		require.Less(t, len(claims), 10_000, "no bound")
		c := memoryClaim(t, fmt.Sprintf("%s %06d", prefix, len(claims)))
		r, err := s.Claim(t.Context(), c)
		if err != nil {
			require.ErrorIs(t, err, idempotency.ErrStoreFull)
			return claims
		}
		require.Equal(t, idempotency.StateClaimed, r.State)
		claims = append(claims, c)
	}
}

// S29: a record that is not expired is never removed to make room.
func TestMemoryStoreFull(t *testing.T) {
	t.Parallel()
	s, clock := newMemoryStore(64 << 10)
	claims := fill(t, s, "live")
	require.Greater(t, len(claims), 50)
	require.Less(t, len(claims), 200)
	require.Equal(t, len(claims), s.Len())

	// What is there can still be judged, settled and claimed again.
	done, free, gone := claims[0], claims[1], claims[2]
	outcome := idempotency.Response{Status: http.StatusOK, Body: make([]byte, 1<<20)}
	require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(done), outcome))
	require.NoError(t, s.Release(t.Context(), memoryLeaseOf(free)))
	end := memoryLeaseOf(gone)
	end.Duration = 0
	require.NoError(t, s.Extend(t.Context(), end))
	require.Equal(t, idempotency.StateCompleted, claimState(t, s, memoryClaim(t, done.Key.Key())))
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, free.Key.Key())))
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, gone.Key.Key())))

	_, err := s.Claim(t.Context(), memoryClaim(t, "one more"))
	require.ErrorIs(t, err, idempotency.ErrStoreFull)
	require.Equal(t, len(claims), s.Len())
	for _, c := range claims[3:] {
		require.Equal(t, idempotency.StateInProgress, claimState(t, s, memoryClaim(t, c.Key.Key())))
		require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(c), outcome), "beyond the bound")
	}

	clock.advance(memoryTTL)
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, "one more")))
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, claims[3].Key.Key())), "an expired key")
}

// S43: where there is room for no other record, none of several names is taken.
func TestMemoryStoreFullForAliases(t *testing.T) {
	s, clock := newMemoryStore(2000)
	claims := fill(t, s, "x")
	records := s.Len()
	set := memoryClaim(t, "k")
	set.Aliases = []idempotency.Alias{
		{Key: claims[0].Key, Kind: idempotency.AliasRenamed}, {Key: memoryClaim(t, "l").Key, Kind: idempotency.AliasRenamed},
	}
	set.Fingerprint[1] ^= 1
	rec, err := s.Claim(t.Context(), set)
	require.NoError(t, err)
	require.Equal(t, idempotency.StateInProgress, rec.State, "what needs no room is answered")
	set.Aliases[0].Kind = idempotency.AliasMerged
	_, err = s.Claim(t.Context(), set)
	require.ErrorIs(t, err, idempotency.ErrStoreFull)
	require.Equal(t, records, s.Len(), "all names or none")

	clock.advance(2 * time.Hour) // the expired one is removed to make room, and taken anew
	rec, err = s.Claim(t.Context(), set)
	require.NoError(t, err)
	require.Equal(t, idempotency.StateClaimed, rec.State)
	require.Len(t, rec.Keys, 3)
	require.NoError(t, s.Complete(t.Context(), idempotency.Lease{Keys: rec.Keys, Owner: set.Owner, Duration: set.Lease}, idempotency.Response{}))
}

func TestMemoryStoreEvictsOnlyExpired(t *testing.T) {
	t.Parallel()
	s, clock := newMemoryStore(64 << 10)
	held := memoryClaim(t, "held")
	held.Hold = true
	outlasting := memoryClaim(t, "outlasting its TTL")
	outlasting.Lease = 10 * memoryTTL
	kept := memoryClaim(t, "kept longer")
	kept.TTL = 10 * memoryTTL
	for _, c := range []idempotency.Claim{held, outlasting, kept} {
		require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
	}
	old := fill(t, s, "old")
	for i, c := range old { // completed, released and abandoned
		switch i % 3 {
		case 0:
			require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(c), idempotency.Response{Status: http.StatusOK}))
		case 1:
			require.NoError(t, s.Release(t.Context(), memoryLeaseOf(c)))
		}
	}

	clock.advance(memoryTTL)
	require.Len(t, fill(t, s, "new"), len(old))
	require.Equal(t, len(old)+3, s.Len())
	for c, want := range map[string]idempotency.State{
		held.Key.Key():       idempotency.StateAbandoned,
		outlasting.Key.Key(): idempotency.StateInProgress,
	} {
		require.Equal(t, want, claimState(t, s, memoryClaim(t, c)), c)
	}
	require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(kept), idempotency.Response{Status: http.StatusOK}))
	require.Equal(t, idempotency.StateCompleted, claimState(t, s, memoryClaim(t, kept.Key.Key())))

	// An operator settles what was held: it can expire now, and has.
	require.NoError(t, s.Release(t.Context(), memoryLeaseOf(held)))
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, "in its place")))
	require.Equal(t, len(old)+3, s.Len())
}

// S29: records expire one by one, however their leases were moved about. What
// was removed is accounted for: the store takes as much as when it was new.
func TestMemoryStoreAccounting(t *testing.T) {
	t.Parallel()
	s, clock := newMemoryStore(64 << 10)
	outcome := idempotency.Response{
		Status: http.StatusOK, Header: http.Header{"A": {"b", "c"}}, Trailer: http.Header{"D": nil}, Body: []byte("body"),
	}
	const steps = 20 // of a TTL each
	capacity := 0
	for round := range 4 {
		claims := fill(t, s, "round")
		if round == 0 {
			capacity = len(claims)
		}
		require.Len(t, claims, capacity)
		expiring := make([]int, steps) // at the end of each step
		for i, c := range claims {
			l := memoryLeaseOf(c)
			step := 0
			if i%2 == 0 {
				step = i * 7 % steps
				l.Duration = time.Duration(step)*memoryTTL + memoryLease
				require.NoError(t, s.Extend(t.Context(), l))
			}
			if i%3 == 0 {
				require.NoError(t, s.Release(t.Context(), l))
				c = memoryClaim(t, c.Key.Key())
				c.Hold = i%9 == 0
				require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
				l, step = memoryLeaseOf(c), 0
			}
			if i%5 == 0 || c.Hold {
				require.NoError(t, s.Complete(t.Context(), l, outcome))
				require.NoError(t, s.Complete(t.Context(), l, outcome))
				step = 0
			}
			expiring[step]++
		}
		for step, want := range expiring {
			clock.advance(memoryTTL)
			n, err := s.DeleteExpired(t.Context(), capacity)
			require.NoError(t, err)
			require.Equal(t, want, n, "step %d", step)
		}
		require.Zero(t, s.Len())
	}
}

// Claims of new keys remove what is expired, without a sweep.
func TestMemoryStoreShrinks(t *testing.T) {
	t.Parallel()
	s, clock := newMemoryStore(0)
	for i := range 1000 {
		require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, "old "+strconv.Itoa(i))))
	}
	clock.advance(memoryTTL)
	require.Equal(t, 1000, s.Len())
	for i := range 1000 {
		before := s.Len()
		require.Equal(t, idempotency.StateClaimed, claimState(t, s, memoryClaim(t, "new "+strconv.Itoa(i))))
		require.LessOrEqual(t, before-s.Len(), 4, "a claim removes a few")
	}
	require.Equal(t, 1000, s.Len())
}

// The bound counts all that a record keeps.
func TestMemoryStoreCounts(t *testing.T) {
	t.Parallel()
	const bound = 64 << 10
	big := strings.Repeat("x", bound)
	for name, outcome := range map[string]idempotency.Response{
		"body":           {Status: http.StatusOK, Body: []byte(big)},
		"body's backing": {Status: http.StatusOK, Body: make([]byte, 1, bound)},
		"header":         {Status: http.StatusOK, Header: http.Header{"A": {"b", big}}},
		"name":           {Status: http.StatusOK, AddedHeader: http.Header{big: nil}},
		"trailer":        {Status: http.StatusOK, Trailer: http.Header{"A": {big}}},
		"values":         {Status: http.StatusOK, Header: http.Header{"A": make([]string, bound/16)}},
	} {
		s, _ := newMemoryStore(bound)
		c := memoryClaim(t, "key")
		require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
		require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(c), outcome))
		require.Empty(t, fill(t, s, "more"), name)
	}

	short, _ := newMemoryStore(bound)
	long, _ := newMemoryStore(bound)
	require.Greater(t, len(fill(t, short, "short")), len(fill(t, long, strings.Repeat("long", 60))))
}

func TestMemoryStoreDefaults(t *testing.T) {
	t.Parallel()
	for _, maxBytes := range []int64{0, -1} {
		s := idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{MaxBytes: maxBytes})
		big := memoryClaim(t, "big")
		require.Equal(t, idempotency.StateClaimed, claimState(t, s, big))
		outcome := idempotency.Response{Status: http.StatusOK, Body: make([]byte, idempotency.DefaultMemoryBytes-8<<10)}
		require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(big), outcome))
		require.NotEmpty(t, fill(t, s, "small"))
	}

	s := idempotency.NewMemoryStore()
	c := memoryClaim(t, "clock")
	c.Lease = time.Nanosecond
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
	require.Eventually(t, func() bool {
		r, err := s.Claim(t.Context(), memoryClaim(t, "clock"))
		return err == nil && r.State == idempotency.StateClaimed && r.Attempt == 2
	}, time.Minute, time.Millisecond)
}

func TestMemoryStoreContextDone(t *testing.T) {
	t.Parallel()
	s, clock := newMemoryStore(0)
	c := memoryClaim(t, "key")
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
	clock.advance(memoryTTL)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	_, err := s.Claim(ctx, memoryClaim(t, "key"))
	_, sweepErr := s.DeleteExpired(ctx, 1)
	for _, err := range []error{
		err,
		sweepErr,
		s.Complete(ctx, memoryLeaseOf(c), idempotency.Response{Status: http.StatusOK}),
		s.Release(ctx, memoryLeaseOf(c)),
		s.Extend(ctx, memoryLeaseOf(c)),
	} {
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "idempotency: ")
	}
	require.Equal(t, 1, s.Len())
	n, err := s.DeleteExpired(t.Context(), -1)
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = s.DeleteExpired(t.Context(), 2)
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

func TestMemoryStoreLeaseNamesKeyTwice(t *testing.T) {
	t.Parallel()
	s, _ := newMemoryStore(64 << 10)
	claims := fill(t, s, "key")
	for i, c := range claims {
		l := memoryLeaseOf(c)
		l.Keys = append(l.Keys, c.Key, c.Key)
		require.NoError(t, s.Extend(t.Context(), l))
		if i%2 == 0 {
			require.NoError(t, s.Release(t.Context(), l))
		} else {
			require.NoError(t, s.Complete(t.Context(), l, idempotency.Response{Status: http.StatusOK}))
		}
		require.Equal(t, i%2 == 0, claimState(t, s, memoryClaim(t, c.Key.Key())) == idempotency.StateClaimed)
	}
}

// A replay costs no memory.
func TestMemoryStoreReplayAllocatesNothing(t *testing.T) {
	s, _ := newMemoryStore(0)
	c := memoryClaim(t, "key")
	require.Equal(t, idempotency.StateClaimed, claimState(t, s, c))
	outcome := idempotency.Response{Status: http.StatusOK, Header: http.Header{"A": {"b"}}, Body: []byte("body")}
	require.NoError(t, s.Complete(t.Context(), memoryLeaseOf(c), outcome))
	ctx := t.Context()
	retry := memoryClaim(t, "key")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if r, err := s.Claim(ctx, retry); err != nil || r.State != idempotency.StateCompleted {
			t.Error("no replay")
		}
	}))
}

// S19, S29: whatever many goroutines do to a few keys, no operation has two
// owners, and no lease is lost that has not ended.
func TestMemoryStoreConcurrent(t *testing.T) {
	t.Parallel()
	const workers, steps = 16, 2000
	s, clock := newMemoryStore(0)
	claims := make([]idempotency.Claim, 4)
	for i := range claims {
		claims[i] = memoryClaim(t, strconv.Itoa(i))
		claims[i].Lease, claims[i].TTL = memoryTTL, time.Second
	}
	running := make([]atomic.Int32, len(claims))
	var wins atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for step := range steps {
				clock.advance(memoryTTL / (workers * steps)) // no lease ends, but many TTLs
				i := (w + step) % len(claims)
				c := claims[i]
				c.Owner = uuid.New()
				r, err := s.Claim(t.Context(), c)
				if err == nil && r.State == idempotency.StateClaimed {
					wins.Add(1)
					if running[i].Add(1) != 1 {
						t.Error("two owners at once")
					}
					running[i].Add(-1)
					if step%2 == 0 {
						err = s.Complete(t.Context(), memoryLeaseOf(c), idempotency.Response{Status: http.StatusOK})
					} else {
						err = s.Release(t.Context(), memoryLeaseOf(c))
					}
				}
				if err != nil {
					t.Errorf("the owner's call: %v", err)
				}
				if step%8 == 0 {
					if _, err := s.DeleteExpired(t.Context(), s.Len()); err != nil {
						t.Errorf("DeleteExpired: %v", err)
					}
				}
			}
		})
	}
	wg.Wait()
	require.Greater(t, wins.Load(), int64(len(claims)))
}

func BenchmarkMemoryStore(b *testing.B) {
	outcome := idempotency.Response{Status: http.StatusOK, Body: []byte("body")}
	b.Run("first", func(b *testing.B) {
		s := idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{MaxBytes: 1 << 40})
		b.ReportAllocs()
		n := 0
		for b.Loop() {
			n++
			c := memoryClaim(b, strconv.Itoa(n))
			if _, err := s.Claim(b.Context(), c); err != nil {
				b.Fatal(err)
			}
			if err := s.Complete(b.Context(), memoryLeaseOf(c), outcome); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("replay", func(b *testing.B) {
		s := idempotency.NewMemoryStore()
		c := memoryClaim(b, "key")
		_, err := s.Claim(b.Context(), c)
		require.NoError(b, err)
		require.NoError(b, s.Complete(b.Context(), memoryLeaseOf(c), outcome))
		ctx := b.Context()
		b.ReportAllocs()
		for b.Loop() {
			if _, err := s.Claim(ctx, c); err != nil {
				b.Fatal(err)
			}
		}
	})
}
