//go:build !unix

package pgtest

import (
	"fmt"
	"runtime"
	"syscall"
)

// account is the user that a server runs as.
type account struct{ name string }

// serverAccount fails: the watchdog needs a Unix shell, and PostgreSQL refuses to
// run as an administrator.
func serverAccount() (account, error) {
	return account{}, fmt.Errorf("%w: starting a server is not supported on %s", errNoBinaries, runtime.GOOS)
}

func (account) own(string) error { return nil }

func (account) attr() *syscall.SysProcAttr { return nil }
