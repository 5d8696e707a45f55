package main

import (
	"context"
	"fmt"
	"io"
	"runtime/pprof"
	"slices"
	"sync"
	"time"
)

// A plan is what to measure, and for how long.
type plan struct {
	cells  []cell
	rounds int
	slice  time.Duration // of one measurement
}

// An arm is one of the ways to do the same thing that are compared.
type arm struct {
	kind string // one of the kinds below
	pool int    // connections; 0 for none
	// savepoints is how many an operation writes behind: each has a transaction ID, as
	// what is committed has, but no commit.
	savepoints int64
	// do does one operation, the nth of a client, and checks its outcome.
	do func(ctx context.Context, client, n int) error
}

// The kinds of arms.
const (
	armLibrary = "library"
	armFloor   = "floor" // plain SQL
	armBare    = "bare"  // the handler without the middleware
)

// measure measures all cells, and says on progress where it is.
func (p plan) measure(ctx context.Context, databaseURL string, progress io.Writer) (report, error) {
	site, err := newSite(ctx, databaseURL)
	if err != nil {
		return report{}, err
	}
	defer site.close(ctx)
	r := report{Rounds: p.rounds, Slice: p.slice.String(), Machine: site.machine}
	for i, c := range p.cells {
		_, _ = fmt.Fprintf(progress, "%d/%d %s\n", i+1, len(p.cells), c)
		arms, err := site.arms(ctx, c)
		if err != nil {
			return report{}, fmt.Errorf("%s: %w", c, err)
		}
		samples, err := p.measureCell(ctx, site.meter, c, arms)
		if err != nil {
			return report{}, fmt.Errorf("%s: %w", c, err)
		}
		r.Lines = append(r.Lines, linesOf(c, arms, samples)...)
	}
	return r, nil
}

// measureCell returns the samples of each arm, a round each. In each round, another
// one is first.
func (p plan) measureCell(ctx context.Context, m meter, c cell, arms []arm) ([][]sample, error) {
	for _, a := range arms { // prepares statements
		if _, err := measure(ctx, m, a, c.Clients, p.slice/4); err != nil {
			return nil, fmt.Errorf("%s: %w", a.kind, err)
		}
	}
	samples := make([][]sample, len(arms))
	for round := range p.rounds {
		for i := range arms {
			i = (i + round) % len(arms)
			s, err := measure(ctx, m, arms[i], c.Clients, p.slice)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", arms[i].kind, err)
			}
			samples[i] = append(samples[i], s)
		}
	}
	return samples, nil
}

// measure lets a number of clients do operations for a while, one after the other
// each.
func measure(ctx context.Context, m meter, a arm, clients int, slice time.Duration) (sample, error) {
	before, err := m.read(ctx)
	if err != nil {
		return sample{}, err
	}
	start := now()
	latencies, err := drive(ctx, a, clients, start.Add(slice))
	elapsed := now().Sub(start)
	if err != nil {
		return sample{}, err
	}
	after, err := m.read(ctx)
	if err != nil {
		return sample{}, err
	}
	slices.Sort(latencies)
	spent := after.minus(before)
	spent.commits -= a.savepoints * int64(len(latencies))
	return sample{
		operations: len(latencies),
		elapsed:    elapsed,
		p50:        percentile(latencies, 0.50),
		p99:        percentile(latencies, 0.99),
		cost:       spent,
	}, nil
}

// drive returns how long each operation took that began before the end. Each client
// does one at least.
func drive(ctx context.Context, a arm, clients int, end time.Time) ([]time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	each := make([][]time.Duration, clients)
	var running sync.WaitGroup
	labels := pprof.Labels("arm", a.kind)
	for client := range clients {
		running.Go(func() {
			pprof.Do(ctx, labels, func(ctx context.Context) {
				for n, began := 0, now(); n == 0 || began.Before(end); n++ {
					if err := a.do(ctx, client, n); err != nil {
						cancel(err)
						return
					}
					ended := now()
					each[client] = append(each[client], ended.Sub(began))
					began = ended
				}
			})
		})
	}
	running.Wait()
	return slices.Concat(each...), context.Cause(ctx)
}

// now is the time by which things are measured.
func now() time.Time {
	return time.Now() //nolint:forbidigo // a benchmark measures the time that passes
}
