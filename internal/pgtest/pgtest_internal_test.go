package pgtest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNoServerSkipsOrFails(t *testing.T) {
	for _, tc := range []struct {
		name, ci string
		want     string
	}{
		{"on a developer's machine", "", "skip"},
		{"in CI", "true", "fatal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("CI", tc.ci)
			_, err := firstWithServer([]string{t.TempDir()})
			require.ErrorIs(t, err, errNoBinaries)
			tb := &recordingTB{TB: t}
			unavailable(tb, err)
			require.Equal(t, tc.want, tb.ended[0])
			require.Contains(t, tb.ended[1], "install PostgreSQL")
		})
	}
}

// recordingTB records what ended the test first, and lets it go on.
type recordingTB struct {
	testing.TB

	ended []string
}

func (tb *recordingTB) Skip(args ...any) { tb.ended = append(tb.ended, "skip", fmt.Sprint(args...)) }

func (tb *recordingTB) Fatal(args ...any) { tb.ended = append(tb.ended, "fatal", fmt.Sprint(args...)) }

func TestFirstWithServer(t *testing.T) {
	client, server := t.TempDir(), t.TempDir()
	for _, path := range []string{
		filepath.Join(client, "postgres"), // without initdb
		filepath.Join(server, "postgres"),
		filepath.Join(server, "initdb"),
	} {
		require.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	dir, err := firstWithServer([]string{"/none", client, server})
	require.NoError(t, err)
	require.Equal(t, server, dir)
}

func TestHighestFirst(t *testing.T) {
	require.Equal(t,
		[]string{"/pg/16/bin", "/pg/10/bin", "/pg/9.6/bin", "/pg/9.5/bin"},
		highestFirst([]string{"/pg/9.5/bin", "/pg/10/bin", "/pg/9.6/bin", "/pg/16/bin"}))
}

func TestCreateDatabaseTakesURLsOnly(t *testing.T) {
	for _, base := range []string{"host=/tmp password=hush", "postgres://u:hush@h:port/", "mysql://u:hush@h/"} {
		_, err := createDatabase(t.Context(), base)
		require.ErrorContains(t, err, envURL)
		require.NotContains(t, err.Error(), "hush")
	}
}

func TestServerThatDoesNotStart(t *testing.T) {
	t.Parallel()
	if _, err := binDir(t.Context()); err != nil {
		unavailable(t, err)
	}
	_, err := startServer(t.Context(), "shared_buffers=nonsense")
	require.ErrorContains(t, err, `invalid value for parameter "shared_buffers"`)
}
