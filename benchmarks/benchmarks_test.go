package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/keytuple/idempotency/internal/pgtest"
)

// Every case is measured, and what it costs is what the rules say (S36).
func TestMeasure(t *testing.T) {
	p := plan{rounds: 3, slice: 20 * time.Millisecond, cells: slices.DeleteFunc(allCells(), func(c cell) bool {
		return c.Bytes != small || c.Clients != 1
	})}
	require.Len(t, p.cells, 10)
	r, err := p.measure(t.Context(), pgtest.Database(t), io.Discard)
	require.NoError(t, err)
	require.Len(t, r.Lines, 20)
	require.NotEmpty(t, r.Machine.PostgreSQL)
	for _, l := range r.Lines {
		roundTrips, commits := 1.0, 0.0
		switch {
		case l.Arm == armBare:
			roundTrips = 0
		case l.Case == caseAlias && l.Arm == armLibrary:
			roundTrips, commits = 3, 2
		case l.Case == caseFirst, l.Case == caseAlias:
			roundTrips, commits = 2, 2
		case l.Case == caseTransaction && l.Arm == armLibrary:
			roundTrips, commits = 3, 1
		case l.Case == caseTransaction:
			roundTrips, commits = 3, 3
		}
		// A pool asks a connection that was idle for a second whether it is alive.
		require.InDelta(t, roundTrips, l.RoundTrips, 0.2, "%s %s", l.cell, l.Arm)
		if commits > 0 {
			require.InDelta(t, commits, l.Commits, 0.05, "%s %s", l.cell, l.Arm)
			require.Positive(t, l.WAL)
		}
		require.Positive(t, l.PerSecond)
		require.LessOrEqual(t, l.P50, l.P99)
		require.Equal(t, l.Arm == armFloor, l.Best, "%s %s", l.cell, l.Arm)
		require.Equal(t, l.Arm == armLibrary, l.Ratio == nil && l.P99Ratio == nil)
	}
}

// Clients that meet records share batches, but never one record.
func TestMeasureWithManyClients(t *testing.T) {
	p := plan{rounds: 3, slice: 50 * time.Millisecond, cells: []cell{{levelStore, caseReplay, small, 64}}}
	r, err := p.measure(t.Context(), pgtest.Database(t), io.Discard)
	require.NoError(t, err)
	require.Len(t, r.Lines, 5)
	require.Less(t, r.Lines[0].RoundTrips, 0.5)
	require.Zero(t, r.Lines[0].Commits)
	for n := range 100 {
		seen := make(map[int]bool)
		for client := range 64 {
			seen[recordOf(p.cells[0], client, n)] = true
		}
		require.Len(t, seen, 64)
	}
}

func TestMeasureWithoutServer(t *testing.T) {
	_, err := plan{}.measure(t.Context(), "postgres://postgres@/postgres?host="+t.TempDir(), io.Discard)
	require.Error(t, err)
}

func TestDriveReportsAFailure(t *testing.T) {
	failure := errors.New("failure")
	var calls atomic.Int64
	a := arm{kind: armFloor, do: func(ctx context.Context, client, _ int) error {
		calls.Add(1)
		if client == 1 {
			return failure
		}
		<-ctx.Done()
		return ctx.Err()
	}}
	_, err := drive(t.Context(), a, 3, now().Add(time.Hour))
	require.ErrorIs(t, err, failure)
	require.EqualValues(t, 3, calls.Load())
}

func TestDriveDoesOneEachAtLeast(t *testing.T) {
	latencies, err := drive(t.Context(), arm{do: func(context.Context, int, int) error { return nil }}, 3, now().Add(-time.Hour))
	require.NoError(t, err)
	require.Len(t, latencies, 3)
}

func TestStats(t *testing.T) {
	require.Equal(t, spread{Median: 2, Min: 1, Max: 9}, spreadOf([]float64{9, 1, 2}))
	require.Equal(t, spread{Median: 2.5, Min: 1, Max: 9}, spreadOf([]float64{9, 1, 2, 3}))

	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	require.EqualValues(t, 51, percentile(hundred, 0.50))
	require.EqualValues(t, 100, percentile(hundred, 0.99))
	require.EqualValues(t, 1, percentile(hundred[:1], 0.99))

	// Each round's ratio, not that of the medians.
	of := func(perSecond ...int) (samples []sample) {
		for _, n := range perSecond {
			samples = append(samples, sample{operations: n, elapsed: time.Second})
		}
		return samples
	}
	require.Equal(t, spread{Median: 2, Min: 0.5, Max: 4}, ratio(of(20, 100, 400), of(10, 200, 100), sample.perSecond))
}

func TestCells(t *testing.T) {
	// Four cases at both levels and the transaction at the store's, by sizes and clients.
	require.Len(t, allCells(), (2*4+2)*2*4)
	for _, g := range goals {
		require.Contains(t, allCells(), g.cell)
		require.Contains(t, quickCells(), g.cell)
	}
	names := matching(allCells(), regexp.MustCompile(`store/first/16KB`))
	require.Equal(t, "store/first/16KB/1", names[0].String())
	require.Equal(t, []int{8}, cell{Clients: 1}.pools())
	require.Equal(t, []int{4, 8}, cell{Clients: 8}.pools())
	require.Equal(t, []int{4, 8, 16, 64}, cell{Clients: 256}.pools())
	for _, bytes := range []int{small, large} {
		require.Len(t, body(bytes), bytes)
		require.True(t, json.Valid(body(bytes)))
	}
}

func TestOptions(t *testing.T) {
	for want, args := range map[string][]string{
		"-run: ":                     {"-run", "("},
		"no case matches":            {"-run", "nothing"},
		"unexpected argument":        {"more"},
		"-rounds: at least":          {"-rounds", "6"},
		"-time: ":                    {"-time", "0s"},
		"flag provided but not defi": {"-unknown"},
	} {
		_, err := parseOptions(args, io.Discard)
		require.ErrorContains(t, err, want)
	}
	o, err := parseOptions([]string{"-quick", "-json", "f", "-plot", "d"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, plan{cells: quickCells(), rounds: minRounds, slice: quickSlice}, o.plan)
	require.Equal(t, "f", o.jsonFile)
	require.Equal(t, "d", o.plotDir)
	require.ErrorContains(t, run(t.Context(), []string{"-time", "x"}, io.Discard), "invalid value")
}

// aReport has one cell with a goal, which the library reaches, and whose limit on
// p99 it does not.
func aReport() report {
	c := cell{levelStore, caseFirst, small, 64}
	samples := func(perSecond int, p99 time.Duration) []sample {
		return []sample{{
			operations: perSecond, elapsed: time.Second, p50: p99 / 2, p99: p99,
			cost: cost{roundTrips: int64(perSecond) * 2, commits: int64(perSecond), wal: int64(perSecond) * 1000, cpu: time.Second},
		}}
	}
	arms := []arm{{kind: armLibrary, pool: 8}, {kind: armFloor, pool: 4}, {kind: armFloor, pool: 64}}
	return report{Rounds: 1, Slice: "1s", Lines: linesOf(c, arms, [][]sample{
		samples(8000, 6*time.Millisecond), samples(2000, 10*time.Millisecond), samples(1000, 20*time.Millisecond),
	})}
}

func TestReport(t *testing.T) {
	r := aReport()
	require.Equal(t, []string{"library, pool 8", "floor, pool 4 *", "floor, pool 64"},
		[]string{r.Lines[0].name(), r.Lines[1].name(), r.Lines[2].name()})
	var out bytes.Buffer
	require.NoError(t, r.print(&out))
	for _, row := range []string{
		`store/first/200B/64 +library, pool 8 +8000 +3\.00 +6\.00 +2\.00 +1\.00 +1000 +125\n`,
		`store/first/200B/64 +floor, pool 4 \* +2000 +4\.00 × +\(4\.00–4\.00\) +5\.00 +10\.00 +0\.60 × +2\.00`,
		`goal: throughput ≥ 3\.50 × floor on the best pool +met +4\.00 ×`,
		`goal: throughput ≥ 6\.00 × floor on a pool of 64 +met +8\.00 ×`,
		`goal: p99 ≤ 0\.50 × floor on the best pool +missed +0\.60 ×`,
	} {
		require.Regexp(t, row, out.String())
	}
	require.NotContains(t, out.String(), "the same pool", "what was not measured")
	require.Error(t, r.print(failingWriter{}))
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	o := options{jsonFile: filepath.Join(dir, "report.json"), plotDir: filepath.Join(dir, "pictures")}
	require.NoError(t, o.write(aReport(), io.Discard))

	text, err := os.ReadFile(o.jsonFile)
	require.NoError(t, err)
	var r report
	require.NoError(t, json.Unmarshal(text, &r))
	require.Equal(t, aReport(), r)

	for _, file := range []string{"throughput.svg", "p99.svg"} {
		picture, err := os.ReadFile(filepath.Join(o.plotDir, file))
		require.NoError(t, err)
		require.Contains(t, string(picture), "<svg")
		for _, c := range curves {
			require.Contains(t, string(picture), c.name)
		}
	}
}

func TestFilesThatCannotBe(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing", "file")
	require.Error(t, options{jsonFile: missing}.write(aReport(), io.Discard))
	_, err := startProfile(missing)
	require.Error(t, err)
	require.ErrorContains(t, report{}.plot(t.TempDir()), "store/first/200B was not measured")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.Error(t, aReport().plot(file))
}

func TestProfile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cpu")
	stop, err := startProfile(file)
	require.NoError(t, err)
	_, err = startProfile(filepath.Join(t.TempDir(), "second"))
	require.Error(t, err, "one at a time")
	require.NoError(t, stop())
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Positive(t, info.Size())
}
