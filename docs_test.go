package idempotency_test

import (
	"os"
	"regexp"
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
