# Needs Go, git, make, bash and curl. `make help` lists the targets.

SHELL := /bin/sh

TIMEOUT   ?= 10m
FUZZTIME  ?= 30s
COUNT     ?= 20
LINT_VERSION := v2.15.0

# Binaries are not stamped with the commit: git refuses to read a clone that
# belongs to another user, and the go command then refuses to build.
export GOFLAGS := $(strip $(shell go env GOFLAGS) -buildvcs=false)
export GOWORK  := $(CURDIR)/go.work

# Every module of go.work, as a path relative to it. A new one is added there only.
MODULES  := $(shell go work edit -json go.work | sed -n 's/.*"DiskPath": "\(.*\)".*/\1/p')
PACKAGES := $(MODULES:%=%/...)

# The race detector needs cgo, and that a C compiler.
RACE := $(shell test "$$(go env CGO_ENABLED)" = 1 && set -- $$(go env CC) && command -v "$$1" >/dev/null && echo -race)

# One binary for each version of the linter and of Go: the linter must be built
# by a Go at least as new as the one it reads the standard library of.
LINT := .bin/golangci-lint-$(LINT_VERSION)-$(shell go env GOVERSION)

.PHONY: help postgres test test-32bit lint fuzz bench tidy-check verify torture

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1	\2/p' Makefile | expand -t 12

postgres: # what the tests need to start one, or the URL of one
	@bash .ci/postgres

test: postgres ## all tests of every module, with the race detector, on a real Postgres (TIMEOUT=10m)
	@test -n '$(RACE)' || echo 'no cgo or no C compiler: the race detector is off'
	go test $(RACE) -timeout $(TIMEOUT) $(PACKAGES)

lint: $(LINT) ## golangci-lint in every module
	@rc=0; for m in $(MODULES); do \
		echo "golangci-lint $$m"; \
		(cd "$$m" && "$(CURDIR)/$(LINT)" run --config "$(CURDIR)/.golangci.yml" --timeout $(TIMEOUT) ./...) || rc=1; \
	done; exit $$rc

$(LINT):
	GOBIN="$(CURDIR)/.bin" go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@mv .bin/golangci-lint '$@'

test-32bit: postgres ## the root module's tests for a 32-bit machine; only built where this one cannot run them
	@set -e; d=$$(mktemp -d); trap 'rm -rf "$$d"' EXIT; export CGO_ENABLED=0 GOARCH=386; \
	printf 'package main\n\nfunc main() {}\n' >"$$d/main.go"; \
	go build -o "$$d/probe" "$$d/main.go"; \
	if "$$d/probe" 2>/dev/null; then go test -timeout $(TIMEOUT) ./...; \
	else echo 'this machine runs no 386 programs: built and vetted only'; go vet ./...; fi

fuzz: ## every fuzz target of every package, one at a time (FUZZTIME=30s)
	@set -e; for p in $$(go list $(PACKAGES)); do \
		targets=$$(go test -timeout $(TIMEOUT) -list '^Fuzz' "$$p"); \
		for f in $$(printf '%s\n' "$$targets" | sed -n '/^Fuzz/p'); do \
			echo "fuzz $$p $$f"; \
			go test -timeout $(TIMEOUT) -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) "$$p"; \
		done; \
	done

bench: postgres ## what the package costs, in memory and on Postgres against plain SQL (ARGS="-quick -json FILE")
	go test -timeout $(TIMEOUT) -run '^$$' -bench . -benchmem .
	go run ./benchmarks $(ARGS)

tidy-check: ## go.mod and go.sum are tidy everywhere, go.work is in sync
	@rc=0; for m in $(MODULES); do \
		echo "go mod tidy -diff $$m"; \
		(cd "$$m" && go mod tidy -diff) || rc=1; \
	done; exit $$rc
	@bash .ci/work-sync $(MODULES)

verify: postgres ## starts the payments example, in memory and on Postgres, and checks its answers with curl
	@env -u DATABASE_URL bash examples/payments/verify.sh
	@go run ./internal/pgtest/with bash examples/payments/verify.sh

torture: postgres ## the root package and storetest tests, repeated (COUNT=20)
	go test $(RACE) -timeout 3h -count $(COUNT) . ./storetest/...
