//go:build unix

package pgtest

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// account is the user that a server runs as. The zero account is that of this
// process.
type account struct {
	name       string
	credential *syscall.Credential
}

// serverAccount returns the zero account, unless this is root's process:
// PostgreSQL refuses to run as root.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return account{}, fmt.Errorf("pgtest: user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return account{}, fmt.Errorf("pgtest: user %s: %w", name, err)
		}
		return account{name, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return account{}, fmt.Errorf("pgtest: PostgreSQL refuses to run as root, and there is no user postgres or nobody; "+
		"run the tests as another user, or set %s", envURL)
}

// own gives the directory to the account.
func (a account) own(dir string) error {
	if a.credential == nil {
		return nil
	}
	return os.Chown(dir, int(a.credential.Uid), int(a.credential.Gid))
}

// attr makes a process run as the account, in a session of its own, so that
// Ctrl-C does not reach it.
func (a account) attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Credential: a.credential}
}
