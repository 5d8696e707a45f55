package main

import (
	"slices"
	"time"
)

// A sample is one measurement of one arm.
type sample struct {
	operations int
	elapsed    time.Duration
	p50, p99   time.Duration
	cost       cost // of all operations
}

func (s sample) perSecond() float64 { return float64(s.operations) / s.elapsed.Seconds() }

// each returns what one operation has of a sum.
func (s sample) each(sum float64) float64 { return sum / float64(s.operations) }

// A spread is the median of some rounds, and how far they reach.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func spreadOf(values []float64) spread {
	sorted := slices.Sorted(slices.Values(values))
	return spread{Median: median(sorted), Min: sorted[0], Max: sorted[len(sorted)-1]}
}

// median returns the median of values in ascending order.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// percentile returns the value that a share of all, in ascending order, do not exceed.
func percentile(sorted []time.Duration, share float64) time.Duration {
	return sorted[max(0, min(len(sorted)-1, int(share*float64(len(sorted)))))]
}

// over returns the spread of f over some rounds.
func over(samples []sample, f func(sample) float64) spread {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = f(s)
	}
	return spreadOf(values)
}

// ratio returns the spread of f in samples as a multiple of that in the samples of
// the same rounds of another arm.
func ratio(samples, base []sample, f func(sample) float64) spread {
	values := make([]float64, len(samples))
	for i := range samples {
		values[i] = f(samples[i]) / f(base[i])
	}
	return spreadOf(values)
}
