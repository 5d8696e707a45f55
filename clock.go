package idempotency

import "time"

// now is the process's clock. It measures how long things took here and when a
// lease must be renewed. It is not compared to a stored time, which only the
// store's clock may be (S28); of a MemoryStore, this is the clock.
func now() time.Time {
	return time.Now() //nolint:forbidigo // the one place where the process's own clock is read
}
