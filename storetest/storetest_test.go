package storetest_test

import (
	"cmp"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency"
	"github.com/keytuple/idempotency/storetest"
)

// A clock moves by Advance, and by tick whenever it is read.
type clock struct {
	tick time.Duration
	mu   sync.Mutex
	now  time.Time
}

func newClock() *clock { return &clock{now: time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(c.tick)
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func TestMemoryStore(t *testing.T) {
	for _, tick := range []time.Duration{0, time.Millisecond} {
		t.Run("tick "+tick.String(), func(t *testing.T) {
			storetest.Run(t, func(*testing.T) storetest.Subject {
				clock := newClock()
				clock.tick = tick
				store := idempotency.NewMemoryStoreWith(idempotency.MemoryConfig{Now: clock.Now})
				return storetest.Subject{Store: store, Advance: clock.Advance}
			})
		})
	}
}

// faultVariable names the fault of the store that this process is to test.
const faultVariable = "STORETEST_FAULT"

// TestBrokenStores runs the suite on stores with one fault each, in a process of
// its own since it must fail there, and looks for the sentence that it broke.
func TestBrokenStores(t *testing.T) {
	if fault, ok := os.LookupEnv(faultVariable); ok {
		storetest.Run(t, func(*testing.T) storetest.Subject {
			return newFaultyStore(fault, newClock())
		})
		return
	}

	const noFault = ""
	type broken struct{ fault, sentence string }
	all := []broken{
		{noFault, ""},
		{"every claim wins", "In all other cases nothing is changed."},
		{"claim is not atomic", "Of any number of concurrent claims one wins."},
		{"live lease is stolen", "returns the record as it then stands"},
		{"take-over by any fingerprint", "In all other cases nothing is changed."},
		{"expired record is taken over", "Attempt counts the claims that won since the record was made"},
		{"attempts are not counted", "Attempt counts the claims that won since the record was made"},
		{"take-over keeps the TTL", "TTL is how long the record is kept, counted from this claim."},
		{"taken key is an error", "What stands under a key is a result"},
		{"losing claim moves the lease", "LeaseLeft is how long the lease of a record in progress still holds."},
		{"lease left is the whole lease", "LeaseLeft is how long the lease of a record in progress still holds."},
		{"mismatch renews the TTL", "In all other cases nothing is changed."},
		{"mismatch rebinds the record", "Fingerprint the record is bound to"},
		{"scheme of the fingerprint is lost", "Fingerprint the record is bound to"},
		{"claim is not validated", "ErrInvalidClaim reports a Claim or Lease that no store may accept"},
		{"lease is not validated", "ErrInvalidClaim reports a Claim or Lease that no store may accept"},
		{"cancelled claim keeps the key", "After an error the owner is dead: it may or may not hold the record."},

		{"key joined by U+001E", "two keys are equal if and only if all their components are"},
		{"key without namespace", "two keys are equal if and only if all their components are"},
		{"key without tenant", "two keys are equal if and only if all their components are"},
		{"key folded", "two keys are equal if and only if all their components are"},
		{"key trimmed", "two keys are equal if and only if all their components are"},
		{"key cut", "two keys are equal if and only if all their components are"},

		{"body ends at NUL", "A Store keeps it byte for byte"},
		{"body becomes UTF-8", "A Store keeps it byte for byte"},
		{"body ends at 64 KiB", "A Store keeps it byte for byte"},
		{"values joined by commas", "A Store keeps it byte for byte"},
		{"names without values are lost", "A Store keeps it byte for byte"},
		{"names made canonical", "A Store keeps it byte for byte"},
		{"added headers are lost", "A Store keeps it byte for byte"},
		{"trailers are lost", "A Store keeps it byte for byte"},
		{"not replayable is lost", "A Store keeps it byte for byte"},
		{"given response is modified", "neither side modifies what its slices and maps point at"},

		{"complete ignores the owner", "unless every key of the lease is in progress under its owner, be the lease's time over or not"},
		{"late complete is refused", "unless every key of the lease is in progress under its owner, be the lease's time over or not"},
		{"completion after release", "unless every key of the lease is in progress under its owner, be the lease's time over or not"},
		{"keys of a lease one by one", "unless every key of the lease is in progress under its owner, be the lease's time over or not"},
		{"repeated call is lost", "Repeated by the owner that completed, it succeeds and changes nothing."},
		{"repeated completion overwrites", "A Store keeps it byte for byte"},
		{"completion counts as an attempt", "Attempt counts the claims that won since the record was made"},
		{"completion renews the TTL", "TTL is how long the record is kept, counted from this claim."},
		{"cancelled call is half done", "A Store keeps it byte for byte"},

		{"release ignores the owner", "Errors as for Complete."},
		{"late release is refused", "Errors as for Complete."},
		{"release after completion", "Errors as for Complete."},
		{"release deletes the record", "The records stay, released, with fingerprint, attempt and expiry"},
		{"release resets the attempt", "Attempt counts the claims that won since the record was made"},
		{"release renews the TTL", "The records stay, released, with fingerprint, attempt and expiry"},
		{"release forgets the fingerprint", "Fingerprint the record is bound to"},

		{"extend ignores the owner", "It returns ErrLeaseLost and touches nothing unless every key of the lease is in progress under its owner, be the lease's time over or not."},
		{"late extend is refused", "It returns ErrLeaseLost and touches nothing unless every key of the lease is in progress under its owner, be the lease's time over or not."},
		{"extension revives", "It returns ErrLeaseLost and touches nothing unless every key of the lease is in progress under its owner, be the lease's time over or not."},
		{"extension adds to the lease", "LeaseLeft is how long the lease of a record in progress still holds."},
		{"extension never shortens", "LeaseLeft is how long the lease of a record in progress still holds."},
		{"extension by zero does nothing", "A Duration of zero ends it now: the record is abandoned."},

		{"extension revives a held record", "A held record that is abandoned stays so, whatever renewal was still on its way"},

		{"hold is ignored", "Hold marks the record: if it is abandoned, no claim takes it over."},
		{"claim with Hold takes over", "A claim with Hold takes no abandoned record over, marked or not."},
		{"losing claim marks the record", "In all other cases nothing is changed."},
		{"held record expires in progress", "Hold marks the record: if it is abandoned, no claim takes it over."},
		{"held record never expires", "A record is expired once its TTL has passed and it is completed"},
		{"live lease expires", "A record is expired once its TTL has passed and it is completed"},

		{"sweep deletes live leases", "It never deletes one that is not expired"},
		{"sweep deletes held records", "It never deletes one that is not expired"},
		{"sweep deletes released records", "It never deletes one that is not expired"},
		{"sweep is not atomic", "It never deletes one that is not expired"},
		{"sweep ignores the limit", "DeleteExpired deletes at most limit expired records and returns how many."},
		{"sweep counts wrongly", "DeleteExpired deletes at most limit expired records and returns how many."},
	}
	for fault, sentence := range aliasFaults {
		all = append(all, broken{fault, sentence})
	}
	for _, tt := range all {
		name := cmp.Or(tt.fault, "no fault")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			executable, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.CommandContext(t.Context(), executable, "-test.run=^TestBrokenStores$")
			cmd.Env = append(os.Environ(), faultVariable+"="+tt.fault, "GORACE=atexit_sleep_ms=0")
			output, err := cmd.CombinedOutput()
			if tt.fault == noFault {
				require.NoError(t, err, "%s", output)
				return
			}
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "the suite did not notice")
			require.Contains(t, string(output), "--- FAIL: TestBrokenStores/")
			require.Contains(t, string(output), "the contract says:")
			require.Contains(t, string(output), tt.sentence)
		})
	}
}
