package storetest

// The sentences of the contract that a failure names, word for word as in the
// doc comments of package idempotency.
const (
	atomicSteps = "Its four methods are atomic steps, safe for concurrent use by any number of processes."
	result      = "What stands under a key is a result; an error means that the store failed or could not be reached."
	expiry      = "A record is expired once its TTL has passed and it is completed, released, or in progress with its " +
		"lease ended; a record that is held (see Claim) does not expire while it is in progress."
	expiredIsNone = "An expired record is as good as none (S29)."

	claimReturns = "Claim takes c.Key for c.Owner if it is free, and returns the record as it then stands."
	claimWins    = "The key is free, and the claim wins, when there is no record or an expired one (attempt 1), or one " +
		"that is released, or abandoned and not held, with the fingerprint of this claim (the record's attempt + 1)."
	claimLoses = "In all other cases nothing is changed."
	oneWins    = "Of any number of concurrent claims one wins."
	ownerDead  = "After an error the owner is dead: it may or may not hold the record."

	completeStores = "Complete stores r as the outcome of the lease's operation and ends the lease."
	completeLost   = "It returns ErrLeaseLost and touches nothing unless every key of the lease is in progress under its " +
		"owner, be the lease's time over or not."
	completeRepeated = "Repeated by the owner that completed, it succeeds and changes nothing."

	releaseGivesUp = "Release gives the keys of the lease up without an outcome."
	releaseKeeps   = "The records stay, released, with fingerprint, attempt and expiry, so that the same request may run " +
		"again and another payload is still refused (S24)."
	releaseErrors = "Errors as for Complete."

	extendMoves = "Extend makes the lease end l.Duration from now."
	extendZero  = "A Duration of zero ends it now: the record is abandoned."
	extendLost  = "It returns ErrLeaseLost and touches nothing unless every key of the lease is in progress under its owner, be the " +
		"lease's time over or not."
	extendHeld = "A held record that is abandoned stays so, whatever renewal was still on its way: for it, a Duration other " +
		"than zero gets ErrLeaseLost."

	aliasLeaves = "An expired record is as good as none. So is, but its name is not free, a record under an alias that was " +
		"last claimed as an alias of a name that is none of this claim's, unless a record of the same operation " +
		"under the primary name was, too."
	aliasForgets = "A claim that has the alias as its primary name makes it forget the former."
	aliasDecides = "Those with a fingerprint of this claim stand for the operation. If one of them is completed, or else in " +
		"progress, or else abandoned and not to be taken over by this claim, it is returned, and nothing is changed."
	aliasMismatches = "If none stands for the operation, a record under the primary name, or under an alias that is not merged, " +
		"is returned, and nothing is changed."
	aliasTakes = "It takes all names that are free and all whose records stand for the operation, as attempt 1, or one more " +
		"than the greatest attempt of those records."
	aliasFirstName    = "Where several decide alike, the one of the first name is returned."
	completeWithholds = "Under those of its keys that are to be withheld, only the status is stored, not replayable."
	recordOrigin      = "Every later attempt gets the same, whatever names it is claimed by: downstream keys are derived from it (S45)."

	sweepCounts = "DeleteExpired deletes at most limit expired records and returns how many."
	sweepSpares = "It never deletes one that is not expired, and never blocks a claim for longer than one such batch takes (S29)."

	leaseHolds   = "Lease is how long the claim holds without being extended."
	ttlCounts    = "TTL is how long the record is kept, counted from this claim."
	holdMarks    = "Hold marks the record: if it is abandoned, no claim takes it over."
	holdAbstains = "A claim with Hold takes no abandoned record over, marked or not."
	refused      = "ErrInvalidClaim reports a Claim or Lease that no store may accept: a zero key, no owner, or a duration out of range."

	recordFingerprint = "Fingerprint the record is bound to; one of the claim's own if State is StateClaimed."
	recordAttempt     = "Attempt counts the claims that won since the record was made: 1, 2, …"
	recordLeaseLeft   = "LeaseLeft is how long the lease of a record in progress still holds."
	recordResponse    = "Response is the outcome of a completed record."
	fingerprintKept   = "Stores keep it as it is."

	byteForByte = "A Store keeps it byte for byte; Response.MarshalBinary is one way to."
	notModified = "Once handed over, neither side modifies what its slices and maps point at."
	keysEqual   = "It is comparable: two keys are equal if and only if all their components are."
)
