package idempotency

import (
	"crypto/sha256"

	"github.com/google/uuid"
)

// downstreamScheme names how downstream keys are derived. With another one, a retry
// of an operation from before would be a new one to the services that it calls.
const downstreamScheme = "idempotency downstream key 1"

// downstreamKey derives a key for one call of an operation (S45).
func downstreamKey(origin KeyDigest, fp Fingerprint, name string) uuid.UUID {
	var derived []byte
	for _, part := range [...]string{downstreamScheme, string(origin[:]), string(fp[:]), name} {
		derived = appendPart(derived, part)
	}
	sum := sha256.Sum256(derived)
	id := uuid.UUID(sum[:16])
	id[6] = id[6]&0x0f | 0x80 // version 8
	id[8] = id[8]&0x3f | 0x80 // variant of RFC 9562
	return id
}
