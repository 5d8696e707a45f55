package storetest_test

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestContractIsQuoted holds the sentences that failures print to what the doc
// comments say.
func TestContractIsQuoted(t *testing.T) {
	var text strings.Builder
	files := token.NewFileSet()
	for _, name := range []string{"../store.go", "../alias.go", "../scope.go"} {
		file, err := parser.ParseFile(files, name, nil, parser.ParseComments)
		require.NoError(t, err)
		for _, group := range file.Comments {
			text.WriteString(strings.NewReplacer("[", "", "]", "").Replace(group.Text()))
			text.WriteByte('\n')
		}
	}
	contract := strings.Join(strings.Fields(text.String()), " ")

	file, err := parser.ParseFile(files, "contract.go", nil, 0)
	require.NoError(t, err)
	pkg, err := new(types.Config).Check("storetest", files, []*ast.File{file}, nil)
	require.NoError(t, err)
	require.NotEmpty(t, pkg.Scope().Names())
	for _, name := range pkg.Scope().Names() {
		sentence := constant.StringVal(pkg.Scope().Lookup(name).(*types.Const).Val())
		require.Contains(t, contract, sentence, name)
	}
}
