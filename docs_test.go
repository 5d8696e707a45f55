package idempotency_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// S32: each code has its anchor in the page that API owners publish, since a
// problem's type leads there.
func TestS32EachCodeIsDocumented(t *testing.T) {
	source, err := os.ReadFile("problem.go")
	require.NoError(t, err)
	page, err := os.ReadFile("docs/for-your-api-docs.md")
	require.NoError(t, err)
	codes := regexp.MustCompile(`Code\w+ Code = "([a-z-]+)"`).FindAllSubmatch(source, -1)
	require.Len(t, codes, 14)
	for _, code := range codes {
		require.Contains(t, string(page), `<a id="`+string(code[1])+`"></a>`)
	}
}

// Each test that a page rests on is there, under the name that is given.
func TestPagesNameTests(t *testing.T) {
	sources := testSources(t)
	for _, name := range []string{"docs/guarantees.md", "docs/scope-changes.md"} {
		page, err := os.ReadFile(name)
		require.NoError(t, err)
		requireTests(t, string(page), sources)
	}
}

func requireTests(t *testing.T, page string, sources []string) {
	t.Helper()
	names := regexp.MustCompile("`(Test[A-Z]\\w+)(?:/([^`]+))?`").FindAllStringSubmatch(page, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		test, subtest := name[1], strings.ReplaceAll(name[2], "_", " ")
		found := slices.ContainsFunc(sources, func(source string) bool {
			return strings.Contains(source, "\nfunc "+test+"(t *testing.T)") &&
				(subtest == "" || strings.Contains(source, strconv.Quote(subtest)))
		})
		require.True(t, found, name[0])
	}
}

// testSources returns the contents of the test files of this package and the examples.
func testSources(t *testing.T) []string {
	t.Helper()
	var sources []string
	for _, pattern := range []string{"*_test.go", "examples/*/*_test.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			sources = append(sources, string(source))
		}
	}
	return sources
}
