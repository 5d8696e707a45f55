package pgtest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// binDir returns the directory of initdb and postgres, or [errNoBinaries].
// The script .ci/postgres looks in the same places.
func binDir(ctx context.Context) (string, error) {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin", // Debian
		"/usr/pgsql-*/bin",          // the PostgreSQL project's RPMs
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
	} {
		// The only error is that of a malformed pattern.
		matches, _ := filepath.Glob(pattern)
		dirs = append(dirs, highestFirst(matches)...)
	}
	return firstWithServer(dirs)
}

// firstWithServer returns the first of dirs that holds both programs.
func firstWithServer(dirs []string) (string, error) {
	for _, dir := range dirs {
		if isFile(filepath.Join(dir, "postgres")) && isFile(filepath.Join(dir, "initdb")) {
			return filepath.Abs(dir)
		}
	}
	return "", errNoBinaries
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// highestFirst sorts paths that differ in a version number: 15 before 9.6.
func highestFirst(paths []string) []string {
	number := regexp.MustCompile(`\d+`)
	version := func(path string) []int {
		var v []int
		for _, digits := range number.FindAllString(path, -1) {
			n, _ := strconv.Atoi(digits) // too large is the largest
			v = append(v, n)
		}
		return v
	}
	slices.SortFunc(paths, func(a, b string) int { return slices.Compare(version(b), version(a)) })
	return paths
}
