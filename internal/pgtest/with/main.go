// Command with runs another command with a PostgreSQL database of its own:
//
//	go run ./internal/pgtest/with COMMAND ARGUMENTS…
//
// The command finds the database's connection URL in the variable DATABASE_URL.
// The exit code is that of the command; "go run" turns all but 0 into 1.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/keytuple/idempotency/internal/pgtest"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: with COMMAND ARGUMENTS…")
		os.Exit(2)
	}
	//nolint:forbidigo // main has no context to derive from
	code, err := pgtest.Run(context.Background(), os.Args[1], os.Args[2:]...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}
