package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/go-analyze/charts"
)

// A curve is one line in a picture.
type curve struct {
	name string
	of   func(line) bool
}

var curves = []curve{
	{fmt.Sprintf("idempotency (%d connections)", libraryPool), func(l line) bool { return l.Arm == armLibrary }},
	{"plain INSERT + UPDATE, best pool", func(l line) bool { return l.Best }},
	{"plain INSERT + UPDATE, a connection per client, at most 64", func(l line) bool {
		return l.Arm == armFloor && l.Pool == max(libraryPool, min(l.Clients, 64))
	}},
}

// plot draws the throughput and the p99 of first requests over the number of
// clients, as throughput.svg and p99.svg.
func (r report) plot(dir string) error {
	var lines []line
	for _, l := range r.Lines {
		if l.Level == levelStore && l.Case == caseFirst && l.Bytes == small {
			lines = append(lines, l)
		}
	}
	if len(lines) == 0 {
		return fmt.Errorf("-plot: %s/%s/%s was not measured", levelStore, caseFirst, size(small))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // pictures, for everybody to see
		return err
	}
	for _, p := range []struct {
		file, title string
		value       func(line) float64
	}{
		{"throughput.svg", "First requests per second, by number of concurrent clients", func(l line) float64 { return l.PerSecond }},
		{"p99.svg", "p99 latency of a first request in ms, by number of concurrent clients", func(l line) float64 { return l.P99 / 1000 }},
	} {
		picture, err := draw(p.title, lines, p.value)
		if err != nil {
			return fmt.Errorf("-plot: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, p.file), picture, 0o644); err != nil { //nolint:gosec // as above
			return err
		}
	}
	return nil
}

// draw returns a picture of a value, as SVG.
func draw(title string, lines []line, value func(line) float64) ([]byte, error) {
	clients := clientsOf(lines)
	values := make([][]float64, len(curves))
	names := make([]string, len(curves))
	for i, c := range curves {
		names[i] = c.name
		values[i] = make([]float64, len(clients))
		for j, n := range clients {
			values[i][j] = charts.GetNullValue()
			for _, l := range lines {
				if l.Clients == n && c.of(l) {
					values[i][j] = value(l)
				}
			}
		}
	}
	opt := charts.NewLineChartOptionWithData(values)
	opt.Title = charts.TitleOption{Text: title, FontStyle: charts.FontStyle{FontSize: 14}}
	opt.Legend = charts.LegendOption{
		SeriesNames: names, Vertical: charts.Ptr(true), Offset: charts.OffsetStr{Left: "60", Top: "30"}, Align: charts.AlignLeft,
	}
	for _, n := range clients {
		opt.XAxis.Labels = append(opt.XAxis.Labels, strconv.Itoa(n))
	}
	opt.YAxis = []charts.YAxisOption{{Min: charts.Ptr(0.0)}}
	opt.ValueFormatter = func(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }
	painter := charts.NewPainter(charts.PainterOptions{
		OutputFormat: charts.ChartOutputSVG, Width: 800, Height: 400, Theme: charts.GetTheme(charts.ThemeLight),
	})
	if err := painter.LineChart(opt); err != nil {
		return nil, err
	}
	return painter.Bytes()
}

func clientsOf(lines []line) []int {
	var clients []int
	for _, l := range lines {
		clients = append(clients, l.Clients)
	}
	slices.Sort(clients)
	return slices.Compact(clients)
}
