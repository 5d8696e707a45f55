// Package integration holds the tests of the middleware together with others that
// wrap a ResponseWriter. It is a module of its own, so that they are no
// dependencies of the library.
package integration
