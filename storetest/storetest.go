// Package storetest is the contract of [idempotency.Store] as a test. Whoever
// writes a store runs it in a test of their own:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) storetest.Subject {
//			clock := newFakeClock()
//			return storetest.Subject{Store: mystore.New(clock.Now), Advance: clock.Advance}
//		})
//	}
//
// Each failure prints the sentence of the contract that was broken. A store that
// is an [idempotency.ExpiredDeleter] or [idempotency.AliasStore] is tested as one, too.
//
// The suite never sleeps. It does not prove that a store keeps its records
// through a crash, and it can show a race only if one happens: run it with the
// race detector, and more than once.
package storetest

import (
	"testing"
	"time"

	"github.com/keytuple/idempotency"
)

// A Subject is a store to be tested, without any records.
type Subject struct {
	// Store under test.
	Store idempotency.Store
	// Advance moves the store's clock forward by d or, which is the same to a
	// store, all its stored times back by d. It is required. It is called only
	// while no method of the store is running.
	Advance func(d time.Duration)
}

// Run tests the stores that newSubject returns, one for each subtest, whose t it
// is given: for cleaning up, for skipping.
func Run(t *testing.T, newSubject func(t *testing.T) Subject) {
	t.Helper()
	for _, tt := range []struct {
		name string
		test func(h *harness)
	}{
		{"Claim/Fresh", claimFresh},
		{"Claim/OtherFingerprintChangesNothing", claimOtherFingerprint},
		{"Claim/LosingChangesNothing", claimLosing},
		{"Claim/FingerprintsAreKept", claimFingerprints},
		{"Claim/AttemptsAreCounted", claimAttempts},
		{"Claim/LeaseLeftShrinks", claimLeaseLeft},
		{"Claim/InvalidIsRefused", claimInvalid},
		{"Claim/Cancelled", claimCancelled},
		{"Claim/KeysAreDistinct", claimDistinctKeys},

		{"Complete/ReplaysEveryByte", completeReplays},
		{"Complete/ReplaysOneMebibyte", completeReplaysLarge},
		{"Complete/Twice", completeTwice},
		{"Complete/LateIsAccepted", completeLate},
		{"Complete/AfterReleaseIsLost", completeAfterRelease},
		{"Complete/LostTouchesNothing", completeAfterLoss},
		{"Complete/Cancelled", completeCancelled},

		{"Release/KeepsTheBinding", releaseKeepsBinding},
		{"Release/Twice", releaseTwice},
		{"Release/LateIsAccepted", releaseLate},
		{"Release/AfterCompleteIsLost", releaseAfterComplete},
		{"Release/LostTouchesNothing", releaseAfterLoss},
		{"Release/Cancelled", releaseCancelled},

		{"Extend/MovesTheEnd", extendMovesEnd},
		{"Extend/ZeroAbandons", extendZeroAbandons},
		{"Extend/LateIsAccepted", extendLate},
		{"Extend/AfterCompleteOrReleaseIsLost", extendAfterSettling},
		{"Extend/LostTouchesNothing", extendAfterLoss},
		{"Extend/Cancelled", extendCancelled},

		{"TakeOver/OfAbandoned", takeOverAbandoned},
		{"TakeOver/StartsANewTTL", takeOverTTL},

		{"Hold/IsNotTakenOver", holdNotTakenOver},
		{"Hold/TakesNoAbandonedOver", holdTakesNothingOver},
		{"Hold/IsNotRenewed", holdIsNotRenewed},
		{"Hold/OwnerSettlesLate", holdSettledLate},
		{"Hold/ReleasedIsFree", holdReleased},
		{"Hold/BelongsToTheWinningClaim", holdOfWinner},
		{"Hold/SettledExpires", holdSettledExpires},

		{"Expiry/OfCompleted", expiryCompleted},
		{"Expiry/OfReleased", expiryReleased},
		{"Expiry/OfAbandoned", expiryAbandoned},
		{"Expiry/LiveLeaseKeepsItsKey", expiryLiveLease},
		{"Expiry/CompletedAfterTTL", expiryCompletedLate},
		{"Expiry/OwnerOfExpired", expiryOwner},

		{"Lease/SeveralKeysAllOrNothing", leaseSeveralKeys},
		{"Lease/InvalidIsRefused", leaseInvalid},

		{"Race/ForFresh", raceFresh},
		{"Race/ForReleased", raceReleased},
		{"Race/ForAbandoned", raceAbandoned},
		{"Race/ForExpired", raceExpired},
		{"Race/ForHeld", raceHeld},
		{"Race/OwnerAgainstTakeOver", raceOwnerTakeOver},
		{"Race/CompleteAgainstRelease", raceCompleteRelease},
		{"Race/Replays", raceReplays},

		{"Aliases/AllNamesAtOnce", aliasFresh},
		{"Aliases/ARecordStandsForAll", aliasStands},
		{"Aliases/TakeOver", aliasTakeOver},
		{"Aliases/FurthestCounts", aliasRanks},
		{"Aliases/FirstNameOfSeveral", aliasFirst},
		{"Aliases/AllStaleAreTakenOver", aliasTakesAll},
		{"Aliases/OtherFingerprint", aliasMismatch},
		{"Aliases/MatchBeatsMismatch", aliasMatchBeatsMismatch},
		{"Aliases/OfAnotherPrimaryName", aliasOfAnother},
		{"Aliases/Origin", aliasOrigin},
		{"Aliases/BelongToAPrimaryName", aliasBelongs},
		{"Aliases/Expired", aliasExpired},
		{"Aliases/FingerprintSchemes", aliasSchemes},
		{"Aliases/Held", aliasHeld},
		{"Aliases/InvalidIsRefused", aliasInvalid},
		{"Aliases/Race", aliasRace},
		{"Aliases/SettledAllOrNothing", aliasSettleAll},
		{"Aliases/Withheld", aliasWithheld},

		{"DeleteExpired/OnlyExpired", sweepOnlyExpired},
		{"DeleteExpired/Limit", sweepLimit},
		{"DeleteExpired/OwnerOfDeleted", sweepOwner},
		{"DeleteExpired/AgainstClaims", sweepAgainstClaims},
	} {
		t.Run(tt.name, func(t *testing.T) {
			subject := newSubject(t)
			if subject.Store == nil || subject.Advance == nil {
				t.Fatal("storetest: a Subject needs a Store and Advance")
			}
			tt.test(&harness{t: t, Subject: subject})
		})
	}
}
