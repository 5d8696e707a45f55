package idempotency

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// DefaultDocumentationURL is where problems point to unless configured: the
// draft that defines the header.
const DefaultDocumentationURL = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"

// A Code is the stable name of a refusal, by which a client can tell "wait" from
// "never" (S32). It is the fragment of the problem's type.
type Code string

// The codes, with their status.
const (
	// CodeMissingKey (400): the request needs an Idempotency-Key.
	CodeMissingKey Code = "missing-key"
	// CodeInvalidKey (400): the header is there, but not a valid key.
	CodeInvalidKey Code = "invalid-key"
	// CodeBrokenBody (400): the request body broke off or cannot be read.
	CodeBrokenBody Code = "broken-body"
	// CodeNoIdentity (403): the request carries no tenant or no principal.
	CodeNoIdentity Code = "no-identity"
	// CodeReplayRefused (403): the caller may not see the stored outcome any more.
	CodeReplayRefused Code = "replay-refused"
	// CodeInFlight (409): the first request is still running. Wait and retry.
	CodeInFlight Code = "in-flight"
	// CodeOutcomeUnknown (409): the first request broke off, and nobody knows
	// whether it took effect. It will not run again by itself.
	CodeOutcomeUnknown Code = "outcome-unknown"
	// CodeNotReplayable (409): the operation is done, but its answer was too large
	// to be stored, broke off before the length that it declared, or was made for an
	// identity that has succeeded this one.
	CodeNotReplayable Code = "not-replayable"
	// CodeRequestTooLarge (413): the request body is over the limit.
	CodeRequestTooLarge Code = "request-too-large"
	// CodeKeyReused (422): the key belongs to a request with another payload.
	CodeKeyReused Code = "key-reused"
	// CodeBadIdentity (500): the server cannot use the identity or route that it
	// established itself.
	CodeBadIdentity Code = "bad-identity"
	// CodeCommitFailed (500): what the handler did could not be committed, and was
	// undone (S38).
	CodeCommitFailed Code = "commit-failed"
	// CodeStoreUnavailable (503): the store cannot be reached; nothing was done.
	CodeStoreUnavailable Code = "store-unavailable"
	// CodeRetry (503): the request could not be carried through. Retry.
	CodeRetry Code = "retry"
)

// A Problem is a refusal as RFC 9457 shapes it. It never holds another request's
// data, an identity or an internal error (S33).
type Problem struct {
	// Type is the documentation URL with the code as its fragment.
	Type string `json:"type"`
	// Title is the same for all problems of one code.
	Title string `json:"title"`
	// Status is the HTTP status code.
	Status int `json:"status"`
	// Detail says what to do about this one.
	Detail string `json:"detail"`
	// Code is the stable name to branch on.
	Code Code `json:"code"`
	// OriginalStatus is the status of the outcome that cannot be replayed, for
	// CodeNotReplayable; otherwise 0.
	OriginalStatus int `json:"original_status,omitempty"`
	// RetryAfter is how long to wait before a retry, in whole seconds; 0 says that
	// there is nothing to wait for. It is sent as a header.
	RetryAfter time.Duration `json:"-"`
}

// A ProblemRenderer writes a problem in the application's own shape (S34). The
// headers Retry-After, Link, Content-Language and Cache-Control are already set
// and may be changed; Content-Type, status and body are the renderer's.
type ProblemRenderer func(http.ResponseWriter, *http.Request, Problem)

// RenderProblem is the default [ProblemRenderer]: application/problem+json.
func RenderProblem(w http.ResponseWriter, _ *http.Request, p Problem) {
	body, err := json.Marshal(p)
	if err != nil { // cannot be: strings and numbers only
		http.Error(w, p.Title, p.Status)
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	if !encodedOutside(w.Header(), nil) {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // an error means that the client is gone
}

// How long a client is told to wait before it tries again.
const (
	retryAfterInFlight = time.Second
	retryAfterFault    = 2 * time.Second
)

// problem returns the fixed parts of a refusal.
func (c Code) problem() Problem {
	switch c {
	case CodeMissingKey:
		return Problem{
			Status: http.StatusBadRequest, Title: "Idempotency-Key is missing",
			Detail: "This operation requires an Idempotency-Key header, so that it can be retried safely.",
		}
	case CodeInvalidKey:
		return Problem{
			Status: http.StatusBadRequest, Title: "Idempotency-Key is invalid",
		}
	case CodeBrokenBody:
		return Problem{
			Status: http.StatusBadRequest, Title: "Request body is broken",
			Detail: "The request body could not be read to its end. Nothing was done; send the request again.",
		}
	case CodeNoIdentity:
		return Problem{
			Status: http.StatusForbidden, Title: "Caller is not identified",
			Detail: "An Idempotency-Key is valid only for an identified caller.",
		}
	case CodeReplayRefused:
		return Problem{
			Status: http.StatusForbidden, Title: "Replay is refused",
			Detail: "This request was carried out before, but its answer is no longer available to this caller.",
		}
	case CodeInFlight:
		return Problem{
			Status: http.StatusConflict, Title: "Request is in progress", RetryAfter: retryAfterInFlight,
			Detail: "A request with this Idempotency-Key is still being processed. Retry later for its outcome.",
		}
	case CodeOutcomeUnknown:
		return Problem{
			Status: http.StatusConflict, Title: "Outcome is unknown",
			Detail: "A request with this Idempotency-Key broke off, and whether it took effect is not known. It is not run again until this is resolved.",
		}
	case CodeNotReplayable:
		return Problem{
			Status: http.StatusConflict, Title: "Outcome cannot be replayed",
			Detail: "The request with this Idempotency-Key is done, but its answer was too large to be kept, broke off, or was made for another identity.",
		}
	case CodeRequestTooLarge:
		return Problem{
			Status: http.StatusRequestEntityTooLarge, Title: "Request body is too large",
			Detail: "The request body is larger than this operation accepts.",
		}
	case CodeKeyReused:
		return Problem{
			Status: http.StatusUnprocessableEntity, Title: "Idempotency-Key is already used",
			Detail: "This Idempotency-Key was used for a request with another payload. Use a new key for a new request.",
		}
	case CodeBadIdentity:
		return Problem{
			Status: http.StatusInternalServerError, Title: "Caller cannot be scoped",
			Detail: "The server could not assign this request to a caller and operation. Nothing was done.",
		}
	case CodeCommitFailed:
		return Problem{
			Status: http.StatusInternalServerError, Title: "Operation was not committed",
			Detail: "The operation could not be committed. Nothing was done, and nothing is remembered of it.",
		}
	case CodeStoreUnavailable:
		return Problem{
			Status: http.StatusServiceUnavailable, Title: "Idempotency store is unavailable", RetryAfter: retryAfterFault,
			Detail: "The request was not carried out, since it could not be protected against being carried out twice. Retry later.",
		}
	case CodeRetry:
		return Problem{
			Status: http.StatusServiceUnavailable, Title: "Request was not carried through", RetryAfter: retryAfterInFlight,
			Detail: "The request could not be carried through this time. Retry with the same Idempotency-Key.",
		}
	}
	return Problem{Status: http.StatusInternalServerError, Title: "Internal error"}
}

// writeProblem renders p, completed by the fixed parts of its code: detail and
// retry time may be given.
func (m *Middleware) writeProblem(w http.ResponseWriter, r *http.Request, p Problem) {
	fixed := p.Code.problem()
	p.Type = m.cfg.DocumentationURL + "#" + string(p.Code)
	p.Title, p.Status = fixed.Title, fixed.Status
	if p.Detail == "" {
		p.Detail = fixed.Detail
	}
	if p.RetryAfter == 0 {
		p.RetryAfter = fixed.RetryAfter
	}
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Language", "en")
	h.Add("Link", "<"+m.cfg.DocumentationURL+`>; rel="describedby"; type="text/html"`)
	if p.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(max(1, int(p.RetryAfter.Seconds()))))
	}
	m.cfg.RenderProblem(w, r, p)
}
