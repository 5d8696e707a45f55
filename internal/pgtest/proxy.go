package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Codes that stand where a startup message has its protocol version.
const (
	cancelRequest = 80877102
	sslRequest    = 80877103
	gssEncRequest = 80877104
)

// A Proxy stands between a test and a PostgreSQL server, understands where each
// message of the protocol begins, and loses connections or holds answers back when
// told to. It speaks no TLS to either side, and cannot cut a COPY. It is safe for
// concurrent use.
type Proxy struct {
	url             string
	listener        net.Listener
	network, server string // where the server listens
	roundTrips      atomic.Int64
	cuts            atomic.Int64
	running         sync.WaitGroup

	mu     sync.Mutex
	trap   *trap // nil if none is armed
	refuse bool
	links  map[*link]struct{}
}

// trap waits for a frontend message that contains match.
type trap struct {
	match []byte
	after bool  // cut after the server has answered, not before it sees the message
	hold  *hold // cut nothing, but hold the answer back; or nil
}

// hold is an answer that is held back.
type hold struct {
	at       int64         // the number of the ReadyForQuery that ends it, as of link.cutAt
	arrived  chan struct{} // closed when it is complete
	released chan struct{} // closed when the client may have it
}

// link is one client's connection and the one to the server that belongs to it.
type link struct {
	client, server net.Conn
	// cutAt is the number of the ReadyForQuery that ends the answer to drop,
	// counting from 1 after the startup. Zero if none is to be dropped.
	cutAt  atomic.Int64
	hold   atomic.Pointer[hold] // nil if no answer is to be held back
	closed func()               // ends done
	done   <-chan struct{}      // of a context that ends with the link
}

// NewProxy starts a proxy, for the time of the test, in front of the server that
// the connection URL leads to.
func NewProxy(tb testing.TB, databaseURL string) *Proxy {
	tb.Helper()
	p, err := newProxy(tb.Context(), databaseURL)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	p.running.Go(func() { p.accept(ctx) })
	tb.Cleanup(func() {
		cancel()
		p.Refuse(true)
		_ = p.listener.Close()
		p.running.Wait()
	})
	return p
}

func newProxy(ctx context.Context, databaseURL string) (*Proxy, error) {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("pgtest: proxy: %w", err)
	}
	u, err := url.Parse(databaseURL)
	if err != nil {
		return nil, errors.New("pgtest: proxy: not a postgres:// URL")
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("pgtest: proxy: %w", err)
	}
	u.Host = listener.Addr().String()
	setQuery(u, map[string]string{"sslmode": "disable"}, "host", "hostaddr", "port")
	p := &Proxy{url: u.String(), listener: listener, links: make(map[*link]struct{})}
	p.network, p.server = pgconn.NetworkAddress(config.Host, config.Port)
	return p, nil
}

// URL returns the connection URL that leads through p to the same database.
func (p *Proxy) URL() string { return p.url }

// RoundTrips returns how many times the server has reported to be ready for the
// next query, not counting the end of a connection's startup. A simple query, a
// prepare, and a pipeline of any length up to its Sync are one each.
func (p *Proxy) RoundTrips() int64 { return p.roundTrips.Load() }

// CutAfterSending arms a trap for the next message of any client that contains
// match, instead of the trap that is armed, if any. Its round trip reaches the
// server to the end, and is answered, thus committed unless in a transaction
// block. The client gets no part of the answer, but a closed connection.
//
// Only a Query or Parse message contains the SQL text. With prepared statements,
// that is the round trip that prepares it; the one that runs it contains only
// the parameters' values, in their wire format.
func (p *Proxy) CutAfterSending(match string) { p.arm(&trap{match: []byte(match), after: true}) }

// CutBeforeSending is like [Proxy.CutAfterSending], but the server does not get
// the message: its connection is closed too.
func (p *Proxy) CutBeforeSending(match string) { p.arm(&trap{match: []byte(match)}) }

// HoldAnswer arms a trap like [Proxy.CutAfterSending], but what it does to the
// connection is only to hold the answer's end back, without which the client does
// not know that the round trip is over, until release is called. By the time that
// held is closed, the server has finished it.
func (p *Proxy) HoldAnswer(match string) (held <-chan struct{}, release func()) {
	h := &hold{arrived: make(chan struct{}), released: make(chan struct{})}
	p.arm(&trap{match: []byte(match), hold: h})
	return h.arrived, sync.OnceFunc(func() { close(h.released) })
}

// Cuts returns how many traps have closed a connection.
func (p *Proxy) Cuts() int { return int(p.cuts.Load()) }

// Refuse sets whether connections are refused. When it becomes true, those that
// are open are closed; while it is true, new ones are closed at once.
func (p *Proxy) Refuse(refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = refuse
	if refuse {
		for l := range p.links {
			l.close()
		}
	}
}

func (p *Proxy) arm(t *trap) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trap = t
}

// spring returns the armed trap if the message is the one it waits for, and
// disarms it.
func (p *Proxy) spring(message []byte) *trap {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.trap
	if t == nil || !bytes.Contains(message, t.match) {
		return nil
	}
	p.trap = nil
	return t
}

func (p *Proxy) accept(ctx context.Context) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(ctx, client) })
	}
}

// serve returns when the connection is over.
func (p *Proxy) serve(ctx context.Context, client net.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	l := &link{client: client, closed: cancel, done: ctx.Done()}
	defer l.close()
	server, err := new(net.Dialer).DialContext(ctx, p.network, p.server)
	if err != nil {
		return
	}
	l.server = server
	if !p.add(l) {
		return
	}
	defer p.remove(l)

	// Either direction ends the other.
	var toClient sync.WaitGroup
	defer toClient.Wait()
	toClient.Go(func() {
		defer l.close()
		p.copyToClient(l)
	})
	if cut := p.copyToServer(l); !cut {
		l.close()
	}
}

// add reports whether l may live.
func (p *Proxy) add(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuse {
		return false
	}
	p.links[l] = struct{}{}
	return true
}

func (p *Proxy) remove(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

func (l *link) close() {
	l.closed()
	_ = l.client.Close()
	if l.server != nil {
		_ = l.server.Close()
	}
}

// copyToServer copies the client's messages to the server, until the connection
// ends or a trap springs. It reports whether the rest, the server's answer and
// the end of the connection, is left to copyToClient.
func (p *Proxy) copyToServer(l *link) (cut bool) {
	r, w := bufio.NewReader(l.client), bufio.NewWriter(l.server)
	startup, err := readStartup(r, l.client)
	if err != nil {
		return false
	}
	if _, err := l.server.Write(startup); err != nil {
		return false
	}
	if code(startup) == cancelRequest {
		_, _ = io.Copy(io.Discard, r) // the server hangs up first
		return false
	}
	for syncs := int64(0); ; {
		message, err := readMessage(r)
		if err != nil {
			return false
		}
		switch t := p.spring(message); {
		case t == nil:
		case t.hold != nil:
			t.hold.at = syncs + 1
			l.hold.Store(t.hold)
		case !t.after:
			_ = w.Flush() // what came before is sent
			p.cuts.Add(1)
			return false
		default:
			l.cutAt.Store(syncs + 1)
		}
		_, _ = w.Write(message) // the error is that of Flush
		switch message[0] {
		case 'Q', 'S', 'F': // Query, Sync, FunctionCall: answered by ReadyForQuery
			syncs++
		}
		cut := l.cutAt.Load() == syncs && syncs > 0
		if cut || r.Buffered() == 0 {
			if err := w.Flush(); err != nil {
				return false
			}
		}
		if cut {
			return true
		}
	}
}

// copyToClient copies the server's messages to the client until the connection
// ends, or the answer to drop is complete.
func (p *Proxy) copyToClient(l *link) {
	r, w := bufio.NewReader(l.server), bufio.NewWriter(l.client)
	for ready := int64(-1); ; { // the first ends the startup
		message, err := readMessage(r)
		cutAt := l.cutAt.Load()
		if err != nil {
			if cutAt > 0 { // there is no answer
				p.cuts.Add(1)
			}
			return
		}
		drop := cutAt > 0 && ready+1 >= cutAt
		if message[0] == 'Z' {
			if ready++; ready > 0 {
				p.roundTrips.Add(1)
			}
			if drop {
				p.cuts.Add(1)
				return
			}
			if h := l.hold.Load(); h != nil && ready == h.at && !h.wait(l) {
				return
			}
		}
		if !drop {
			_, _ = w.Write(message) // the error is that of Flush
		}
		if r.Buffered() == 0 {
			if err := w.Flush(); err != nil {
				return
			}
		}
	}
}

// wait reports whether the client may have the answer, and still is there.
func (h *hold) wait(l *link) bool {
	close(h.arrived)
	select {
	case <-h.released:
		return true
	case <-l.done:
		return false
	}
}

// readStartup returns the message that a connection begins with. It turns offers
// of encryption down.
func readStartup(r io.Reader, client io.Writer) ([]byte, error) {
	for {
		startup, err := readSized(r, nil)
		if err != nil {
			return nil, err
		}
		switch {
		case len(startup) < 8:
			return nil, io.ErrUnexpectedEOF
		case code(startup) != sslRequest && code(startup) != gssEncRequest:
			return startup, nil
		}
		if _, err := client.Write([]byte{'N'}); err != nil {
			return nil, err
		}
	}
}

// code returns the protocol version of a startup message, or the code of a
// request that stands in its place.
func code(startup []byte) uint32 { return binary.BigEndian.Uint32(startup[4:]) }

// readMessage returns the next message: a byte for its type, and the rest as of
// readSized.
func readMessage(r *bufio.Reader) ([]byte, error) {
	kind, err := r.ReadByte()
	if err != nil {
		return nil, err
	}
	return readSized(r, []byte{kind})
}

// readSized appends to prefix a length, which counts itself, and what it counts.
func readSized(r io.Reader, prefix []byte) ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	if n < 4 || n > 1<<30 {
		return nil, fmt.Errorf("pgtest: message of %d bytes", n)
	}
	message := make([]byte, len(prefix)+int(n))
	copy(message, prefix)
	copy(message[len(prefix):], length[:])
	_, err := io.ReadFull(r, message[len(prefix)+4:])
	return message, err
}
