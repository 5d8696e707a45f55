package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"
)

// A report is all that was measured.
type report struct {
	Machine machine `json:"machine"`
	Rounds  int     `json:"rounds"`
	Slice   string  `json:"slice"` // the time of one measurement
	Lines   []line  `json:"lines"`
}

// A machine is what it was measured on.
type machine struct {
	System     string `json:"system"`
	CPUs       int    `json:"cpus"`
	Go         string `json:"go"`
	PostgreSQL string `json:"postgresql"`
}

// A line is the median of one arm's samples. What is measured by operation is
// divided by their number.
type line struct {
	cell

	Arm  string `json:"arm"`
	Pool int    `json:"pool,omitempty"` // connections
	Best bool   `json:"best,omitempty"` // of the cell's floors

	PerSecond  float64 `json:"operationsPerSecond"`
	P50        float64 `json:"p50Microseconds"`
	P99        float64 `json:"p99Microseconds"`
	RoundTrips float64 `json:"roundTrips"`
	Commits    float64 `json:"commits"`
	WAL        float64 `json:"walBytes"`
	CPU        float64 `json:"clientCPUMicroseconds"`

	// The library's throughput and p99 as a multiple of this line's, round by round.
	Ratio    *spread `json:"libraryRatio,omitempty"`
	P99Ratio *spread `json:"libraryP99Ratio,omitempty"`
}

func (l line) name() string {
	name := l.Arm
	if l.Pool > 0 {
		name += fmt.Sprintf(", pool %d", l.Pool)
	}
	if l.Best {
		name += " *"
	}
	return name
}

// linesOf returns the lines of a cell, the library's first.
func linesOf(c cell, arms []arm, samples [][]sample) []line {
	var lines []line
	library := samples[0]
	best, fastest := -1, 0.0
	for i, a := range arms {
		l := newLine(samples[i])
		l.cell, l.Arm, l.Pool = c, a.kind, a.pool
		if a.kind != armLibrary {
			throughput, p99 := ratio(library, samples[i], sample.perSecond), ratio(library, samples[i], p99Of)
			l.Ratio, l.P99Ratio = &throughput, &p99
		}
		if a.kind == armFloor && l.PerSecond > fastest {
			best, fastest = i, l.PerSecond
		}
		lines = append(lines, l)
	}
	if best >= 0 {
		lines[best].Best = true
	}
	return lines
}

func newLine(samples []sample) line {
	median := func(f func(sample) float64) float64 { return over(samples, f).Median }
	return line{
		PerSecond:  median(sample.perSecond),
		P50:        median(func(s sample) float64 { return microseconds(s.p50) }),
		P99:        median(p99Of),
		RoundTrips: median(func(s sample) float64 { return s.each(float64(s.cost.roundTrips)) }),
		Commits:    median(func(s sample) float64 { return s.each(float64(s.cost.commits)) }),
		WAL:        median(func(s sample) float64 { return s.each(float64(s.cost.wal)) }),
		CPU:        median(func(s sample) float64 { return s.each(microseconds(s.cost.cpu)) }),
	}
}

func p99Of(s sample) float64 { return microseconds(s.p99) }

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// print writes the table, and how the goals were met.
func (r report) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s, %d CPUs, %s, PostgreSQL %s; medians of %d rounds of %s\n\n",
		r.Machine.System, r.Machine.CPUs, r.Machine.Go, r.Machine.PostgreSQL, r.Rounds, r.Slice)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	// The error of a tabwriter is that of Flush.
	_, _ = fmt.Fprintln(t, "\tarm\tops/s\tlibrary is\t(min–max)\tp50 ms\tp99 ms\tlibrary's is\tround trips\tcommits\tWAL bytes\tclient CPU µs\t")
	for _, l := range r.Lines {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%.0f\t%s\t%.2f\t%.2f\t%s\t%.2f\t%.2f\t%.0f\t%.0f\t\n", l.cell, l.name(), l.PerSecond,
			l.Ratio.columns(), l.P50/1000, l.P99/1000, l.P99Ratio.times(), l.RoundTrips, l.Commits, l.WAL, l.CPU)
	}
	_, _ = fmt.Fprintln(t)
	for _, g := range goals {
		if base, ok := g.base(r.Lines); ok {
			_, _ = fmt.Fprintln(t, g.verdict(base))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprint(w, "\n* the best floor. Per operation: round trips, commits (of transactions that wrote), WAL, and CPU of this process,\n"+
		"which at the level of HTTP is client, server and handler in one.\n")
	return err
}

// columns returns a ratio and how far it reaches, as two columns.
func (s *spread) columns() string {
	if s == nil {
		return "\t"
	}
	return fmt.Sprintf("%.2f ×\t(%.2f–%.2f)", s.Median, s.Min, s.Max)
}

func (s *spread) times() string {
	if s == nil {
		return ""
	}
	return fmt.Sprintf("%.2f ×", s.Median)
}

// verdict says how the goal was met, as columns.
func (g goal) verdict(base line) string {
	what, sign, s := "throughput", "≥", base.Ratio
	if g.p99 {
		what, sign, s = "p99", "≤", base.P99Ratio
	}
	verdict := "missed"
	if g.met(s.Median) {
		verdict = "met"
	}
	return fmt.Sprintf("%s\tgoal: %s %s %.2f × floor on %s\t%s\t%s\t", g.cell, what, sign, g.ratio, g.against, verdict, s.columns())
}

func (r report) writeJSON(file string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644) //nolint:gosec // a report, for everybody to read
}
