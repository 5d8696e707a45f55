package idempotency

// What the tests in package idempotency_test need of the inside.
var (
	ClientKeyFromHeader = clientKey
	Scoped              = scoped

	ErrKeyLines  = errKeyLines
	ErrKeyFormat = errKeyFormat
	ErrKeyEmpty  = errKeyEmpty
	ErrKeyLong   = errKeyLong
)

// Limits of an encoded Response.
const (
	MaxResponseFields = maxResponseFields
	MaxFieldValues    = maxFieldValues
	MaxResponseBody   = maxResponseBody
)

// WatchedKeys returns how many records the retries of m wait for.
func WatchedKeys(m *Middleware) int {
	m.exec.watches.mu.Lock()
	defer m.exec.watches.mu.Unlock()
	return len(m.exec.watches.byKey)
}

// Unsettled returns how much m still has to tell its store in the background.
func Unsettled(m *Middleware) int {
	m.exec.background.mu.Lock()
	defer m.exec.background.mu.Unlock()
	return len(m.exec.background.tasks)
}
