package idempotency

// What the tests in package idempotency_test need of the inside.
var Scoped = scoped

// Limits of an encoded Response.
const (
	MaxResponseFields = maxResponseFields
	MaxFieldValues    = maxFieldValues
	MaxResponseBody   = maxResponseBody
)
