package main

// A goal is a ratio that the library is to reach.
type goal struct {
	cell    cell
	against string  // which floor
	p99     bool    // it is about the latency p99, and a limit from above
	ratio   float64 // library / floor
}

// Floors that a goal may be measured against.
const (
	samePool = "the same pool"
	bestPool = "the best pool"
	pool64   = "a pool of 64"
)

var goals = []goal{
	{cell: cell{levelStore, caseFirst, small, 1}, against: samePool, ratio: 0.95},
	{cell: cell{levelStore, caseFirst, small, 64}, against: bestPool, ratio: 3.5},
	{cell: cell{levelStore, caseFirst, small, 64}, against: pool64, ratio: 6},
	{cell: cell{levelStore, caseFirst, small, 64}, against: bestPool, p99: true, ratio: 0.5},
	{cell: cell{levelStore, caseFirst, small, 256}, against: bestPool, ratio: 5},
	{cell: cell{levelStore, caseFirst, large, 1}, against: samePool, ratio: 0.9},
	{cell: cell{levelStore, caseFirst, large, 64}, against: bestPool, ratio: 1.6},
	{cell: cell{levelStore, caseReplay, small, 1}, against: samePool, ratio: 0.8},
	{cell: cell{levelStore, caseReplay, small, 64}, against: bestPool, ratio: 1},
	{cell: cell{levelStore, caseInFlight, small, 1}, against: samePool, ratio: 0.75},
	{cell: cell{levelStore, caseInFlight, small, 64}, against: bestPool, ratio: 0.7},
	{cell: cell{levelStore, caseTransaction, small, 1}, against: samePool, ratio: 1.6},
	{cell: cell{levelStore, caseTransaction, small, 8}, against: samePool, ratio: 1.4},
}

// met reports whether a ratio reaches the goal.
func (g goal) met(ratio float64) bool {
	if g.p99 {
		return ratio <= g.ratio
	}
	return ratio >= g.ratio
}

// base returns the line of the floor that the goal is about.
func (g goal) base(lines []line) (line, bool) {
	for _, l := range lines {
		if l.cell != g.cell || l.Arm != armFloor {
			continue
		}
		if g.against == samePool && l.Pool == libraryPool || g.against == bestPool && l.Best || g.against == pool64 && l.Pool == 64 {
			return l, true
		}
	}
	return line{}, false
}
