package main

import (
	"fmt"
	"regexp"
	"slices"
	"time"
)

// The levels and cases that are measured.
const (
	levelStore = "store"
	levelHTTP  = "http"

	caseFirst    = "first"
	caseReplay   = "replay"
	caseInFlight = "409"
	caseReused   = "422"
	// caseTransaction is a first request whose handler writes a row, too.
	caseTransaction = "transaction"
	// caseAlias is a first request whose operation has one other name.
	caseAlias = "alias"
)

const (
	small = 200      // bytes
	large = 16 << 10 // bytes
)

// libraryPool is how many connections the library has: four for each of the
// database's cores on a machine of two.
const libraryPool = 8

// floorPools are the pools of which the best is the fair floor.
var floorPools = []int{4, 8, 16, 64}

// A cell is what is measured in one go: a case with one size of body and one number
// of concurrent clients.
type cell struct {
	Level   string `json:"level"`
	Case    string `json:"case"`
	Bytes   int    `json:"bytes"` // of the stored body; at the level of HTTP, of the request's, too
	Clients int    `json:"clients"`
}

func (c cell) String() string {
	return fmt.Sprintf("%s/%s/%s/%d", c.Level, c.Case, size(c.Bytes), c.Clients)
}

func size(bytes int) string {
	if bytes%1024 == 0 {
		return fmt.Sprintf("%dKB", bytes/1024)
	}
	return fmt.Sprintf("%dB", bytes)
}

// pools returns the pools on which the cell's floor is worth measuring: the
// library's, and those without connections that no client would use.
func (c cell) pools() []int {
	return slices.DeleteFunc(slices.Clone(floorPools), func(n int) bool { return n > c.Clients && n != libraryPool })
}

func allCells() []cell {
	var cells []cell
	for _, level := range []string{levelStore, levelHTTP} {
		for _, name := range []string{caseFirst, caseReplay, caseInFlight, caseReused, caseTransaction, caseAlias} {
			if (name == caseTransaction || name == caseAlias) && level != levelStore {
				continue
			}
			for _, bytes := range []int{small, large} {
				for _, clients := range []int{1, 8, 64, 256} {
					cells = append(cells, cell{level, name, bytes, clients})
				}
			}
		}
	}
	return cells
}

// quickSlice leaves a minute for all of the quick cells.
const quickSlice = 80 * time.Millisecond

// quickCells are those with a goal, and HTTP at one load.
func quickCells() []cell {
	return slices.DeleteFunc(allCells(), func(c cell) bool {
		hasGoal := slices.ContainsFunc(goals, func(g goal) bool { return g.cell == c })
		return !hasGoal && (c.Level != levelHTTP || c.Bytes != small || c.Clients != 64)
	})
}

func matching(cells []cell, pattern *regexp.Regexp) []cell {
	return slices.DeleteFunc(cells, func(c cell) bool { return !pattern.MatchString(c.String()) })
}
