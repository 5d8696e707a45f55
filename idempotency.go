// Package idempotency is a net/http middleware for the Idempotency-Key header
// (draft-ietf-httpapi-idempotency-key-header): a request that must not happen
// twice, such as a charge, can be sent again by a client that got no answer. The
// retry gets the stored answer, byte for byte, and the handler does not run.
//
// What a client sends in the header is not what its operation is stored under.
// The stored key is a tuple, a [ScopedKey]: scope version, tenant, principal,
// route, namespace and key. One customer's key therefore never finds another's
// answer, a refund is never taken for the duplicate of a charge, and no header
// reaches the keys that a server mints itself.
//
// A request goes one way:
//
//	header → scope → fingerprint → claim → run → record → settle → answer
//
// [New] makes a [Middleware] from a [Store] and a [Config]; [Middleware.Handler]
// guards a handler. A handler that wants to know more about the operation it
// runs for asks [FromContext].
//
// # What is guaranteed, and what is not
//
// While a record lives (24 hours by default) its operation is executed by one
// handler at a time, and an answer that a client has seen is the answer that
// every retry gets. A handler's process can still die between its effect and the
// storing of its outcome. The lease then runs out and the next retry runs again,
// as attempt 2, which the handler can see; or, with [Config].HoldAbandoned, it
// does not, and a person has to look. Effects outside the store cannot be undone
// by it.
package idempotency
