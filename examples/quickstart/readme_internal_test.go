package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The program in the README is this one, so that it compiles, and starts where a
// reader sees it without scrolling.
func TestReadmeShowsThisProgram(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(readme), "```go\n")
	require.True(t, found)
	shown, _, _ := strings.Cut(rest, "```")
	program, err := os.ReadFile("main.go")
	require.NoError(t, err)
	require.Equal(t, string(program), shown)
	require.LessOrEqual(t, strings.Count(before, "\n")+2, 25, "line of the program's start")
	require.LessOrEqual(t, strings.Count(string(readme), "\n"), 150, "lines of the README")
}
