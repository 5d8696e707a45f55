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
