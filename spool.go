package idempotency

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
)

// A spool holds a whole request body, so that it can be hashed before the
// handler reads the very same bytes (S17): in memory up to a threshold, above it
// in a temporary file.
type spool struct {
	mem  []byte   // the body, if there is no file
	file *os.File // the body, if it was over the threshold
	size int64
}

// spoolBody reads the body of r. The error is a [*http.MaxBytesError] for a body
// over limit, and wraps errBrokenBody or errSpool otherwise; nothing is left
// behind then.
func spoolBody(w http.ResponseWriter, r *http.Request, limit, threshold int64) (spool, error) {
	if r.Body == nil || r.Body == http.NoBody {
		if isBodyGone(r, 0) {
			return spool{}, errBodyGone
		}
		return spool{}, nil
	}
	if r.ContentLength > limit {
		return spool{}, &http.MaxBytesError{Limit: limit}
	}
	mem, more, err := readUpTo(r.Body, min(threshold, limit), r.ContentLength)
	switch {
	case err != nil:
		return spool{}, err
	case int64(len(mem)) > limit:
		return spool{}, &http.MaxBytesError{Limit: limit}
	case more:
		s, err := spoolFile(mem, http.MaxBytesReader(w, r.Body, limit-int64(len(mem))))
		if err == nil && isBodyGone(r, s.size) {
			s.close()
			return spool{}, errBodyGone
		}
		return s, err
	case isBodyGone(r, int64(len(mem))):
		return spool{}, errBodyGone
	}
	return spool{mem: mem, size: int64(len(mem))}, nil
}

// isBodyGone reports whether more was sent than the size bytes that could be read:
// by the announced length, or since a form was parsed from what is not there. A
// body that the client broke off is none of it: reading that fails.
func isBodyGone(r *http.Request, size int64) bool {
	if size < r.ContentLength {
		return true
	}
	return size == 0 && r.ContentLength != 0 && (r.PostForm != nil || r.MultipartForm != nil)
}

// errBodyGone refuses a body that somebody in front has used up, or a part of it.
// Where its rest is the same, or nothing, all payloads would look the same, and
// one would be answered for another.
var errBodyGone = fmt.Errorf("%w: it was read before it got here", errSpool)

// readUpTo reads from body until its end, or until it has more than limit bytes.
// expected is the announced length, negative if unknown.
func readUpTo(body io.Reader, limit, expected int64) (mem []byte, more bool, err error) {
	if expected < 0 {
		expected = bytes.MinRead
	}
	// Room for the read that meets the end, but no more than bytes that are here can
	// vouch for: anybody can announce any length.
	mem = make([]byte, 0, min(expected, limit, defaultSpoolThreshold)+1)
	for int64(len(mem)) <= limit {
		if len(mem) == cap(mem) {
			mem = append(mem, 0)[:len(mem)]
		}
		n, err := body.Read(mem[len(mem):cap(mem)])
		mem = mem[:len(mem)+n]
		if err == io.EOF { // a reader ends with the very io.EOF; one that wraps it tells of a fault
			return mem, int64(len(mem)) > limit, nil
		}
		if err != nil {
			return nil, false, bodyError(err)
		}
	}
	return mem, true, nil
}

// spoolFile moves the bytes read so far, and the rest of body, to a file.
func spoolFile(head []byte, body io.Reader) (s spool, err error) {
	file, err := os.CreateTemp("", "idempotency-*")
	if err != nil {
		return spool{}, fmt.Errorf("%w: %w", errSpool, err)
	}
	s.file = file
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	// Where the system lets an open file lose its name, not even a killed process
	// leaves it behind. Elsewhere close removes it.
	_ = os.Remove(file.Name())
	if _, err = (spoolWriter{file}).Write(head); err != nil {
		return s, err
	}
	n, err := io.Copy(spoolWriter{file}, body)
	if err != nil {
		return s, bodyError(err)
	}
	s.size = int64(len(head)) + n
	return s, nil
}

// A spoolWriter tells the faults of writing from those of reading.
type spoolWriter struct{ w io.Writer }

// Write marks its error as one of the spool.
func (s spoolWriter) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		err = fmt.Errorf("%w: %w", errSpool, err)
	}
	return n, err
}

func bodyError(err error) error {
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) || errors.Is(err, errSpool) {
		return err
	}
	return fmt.Errorf("%w: %w", errBrokenBody, err)
}

// reader returns the body from its first byte.
func (s spool) reader() io.ReadCloser {
	if s.size == 0 {
		return http.NoBody
	}
	r := &spoolReader{}
	if s.file != nil {
		r.file = io.NewSectionReader(s.file, 0, s.size)
	} else {
		r.memory.Reset(s.mem)
	}
	return r
}

func (s spool) writeTo(w io.Writer) error {
	if s.file == nil {
		_, err := w.Write(s.mem)
		return err
	}
	if _, err := io.Copy(w, io.NewSectionReader(s.file, 0, s.size)); err != nil {
		return fmt.Errorf("%w: %w", errSpool, err)
	}
	return nil
}

// close removes the file, if there is one. The body cannot be read afterwards.
func (s spool) close() {
	if s.file == nil {
		return
	}
	_ = s.file.Close()
	_ = os.Remove(s.file.Name()) // the name is gone already on most systems
}

// A spoolReader is a request body as a server hands it to a handler: it may be
// closed by another goroutine than the one that reads.
type spoolReader struct {
	memory bytes.Reader      // the body, if there is no file
	file   *io.SectionReader // or nil
	closed atomic.Bool
}

// Read reads the body, until it is closed.
func (s *spoolReader) Read(p []byte) (int, error) {
	switch {
	case s.closed.Load():
		return 0, http.ErrBodyReadAfterClose
	case s.file != nil:
		return s.file.Read(p)
	}
	return s.memory.Read(p)
}

// Close ends reading; it never fails.
func (s *spoolReader) Close() error {
	s.closed.Store(true)
	return nil
}
