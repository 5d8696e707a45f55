// Command benchmarks measures the package against what it would cost to do without
// it, on a PostgreSQL of its own with default durability:
//
//	go run ./benchmarks [-quick] [-json FILE] [-plot DIR] [-run REGEXP] [-cpuprofile FILE]
//
// At the level of the store, a first request (claim and completion) is compared with
// a plain INSERT and UPDATE by primary key, and one that meets a record (replay, 409,
// 422) with a SELECT by primary key, on pools of several sizes: the floors. At the
// level of HTTP, a handler behind the middleware is compared with the same handler
// bare. What is compared takes turns within each round, and a ratio is one of two
// neighbours; the table has medians of all rounds.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/keytuple/idempotency/internal/pgtest"
)

func main() {
	//nolint:forbidigo // main has no context to derive from
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		os.Exit(1)
	}
}

// options are what the command line says.
type options struct {
	plan       plan
	jsonFile   string
	plotDir    string
	cpuProfile string
}

// minRounds is how many rounds a median is made of, at least.
const minRounds = 7

func parseOptions(args []string, usage io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("benchmarks", flag.ContinueOnError)
	flags.SetOutput(usage)
	quick := flags.Bool("quick", false, "the cases with a goal only, for a short time each: less than a minute in all")
	only := flags.String("run", "", "measure only the cases whose name, such as store/first/200B/64, matches this `regexp`")
	rounds := flags.Int("rounds", minRounds, "how often each case is measured")
	slice := flags.Duration("time", 400*time.Millisecond, "how long each measurement takes")
	flags.StringVar(&o.jsonFile, "json", "", "write the report as JSON to this `file`, too")
	flags.StringVar(&o.plotDir, "plot", "", "draw throughput.svg and p99.svg in this `directory`")
	flags.StringVar(&o.cpuProfile, "cpuprofile", "", "write a CPU profile to this `file`; its label \"arm\" tells library, floor and bare apart")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	pattern, err := regexp.Compile(*only)
	switch {
	case err != nil:
		return options{}, fmt.Errorf("-run: %w", err)
	case flags.NArg() > 0:
		return options{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case *rounds < minRounds:
		return options{}, fmt.Errorf("-rounds: at least %d, for a median that says something", minRounds)
	case *slice <= 0:
		return options{}, errors.New("-time: must be positive")
	}
	o.plan = plan{cells: allCells(), rounds: *rounds, slice: *slice}
	if *quick {
		o.plan.cells, o.plan.slice = quickCells(), quickSlice
	}
	o.plan.cells = matching(o.plan.cells, pattern)
	if len(o.plan.cells) == 0 {
		return options{}, fmt.Errorf("-run: no case matches %q", *only)
	}
	return o, nil
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o, err := parseOptions(args, os.Stderr)
	if err != nil {
		return err
	}
	databaseURL, remove, err := pgtest.Serve(ctx, serverSettings...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()

	stopProfile, err := startProfile(o.cpuProfile)
	if err != nil {
		return err
	}
	report, err := o.plan.measure(ctx, databaseURL, os.Stderr)
	if err = errors.Join(err, stopProfile()); err != nil {
		return err
	}
	return o.write(report, out)
}

// write writes the report wherever it is wanted.
func (o options) write(r report, out io.Writer) error {
	err := r.print(out)
	if o.jsonFile != "" {
		err = errors.Join(err, r.writeJSON(o.jsonFile))
	}
	if o.plotDir != "" {
		err = errors.Join(err, r.plot(o.plotDir))
	}
	return err
}

func startProfile(file string) (stop func() error, err error) {
	if file == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(file) //nolint:gosec // the file that the user named
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}
