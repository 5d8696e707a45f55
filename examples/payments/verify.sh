#!/usr/bin/env bash
# Asks the payments example with curl and checks its answers.
#
#   verify.sh                    builds and starts it on a free port, on the database
#                                that DATABASE_URL names, or else in memory
#   verify.sh http://host:port   asks one that is already running
#
# Prints a line for each check and ends with "N passed, N failed". The exit status
# is 0 only if nothing failed.
set -euo pipefail
unset CDPATH
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

tmp=$(mktemp -d)
server=
cleanup() {
	if [[ $server ]]; then
		kill -KILL "$server" 2>/dev/null || true
		wait "$server" 2>/dev/null || true
	fi
	rm -rf -- "$tmp"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

curl=(curl -q --silent --show-error --max-time 20)

build() { (cd -- "$here" && go build -buildvcs=false -o "$tmp/payments" .); }

start() {
	: >"$tmp/out"
	"$tmp/payments" -addr 127.0.0.1:0 -delay 400ms >"$tmp/out" 2>"$tmp/log" &
	server=$!
	local i
	for ((i = 0; i < 200; i++)); do
		base=$(sed -n 's/^listening on //p' "$tmp/out")
		if [[ $base ]]; then return; fi
		kill -0 "$server" 2>/dev/null || break
		sleep 0.05
	done
	echo "the server did not start:" >&2
	cat -- "$tmp/log" >&2
	exit 1
}

# stop ends the server as an operator would and succeeds if it exits with 0.
stop() {
	local pid=$server i
	kill -TERM "$pid"
	for ((i = 0; i < 200; i++)); do
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.05
	done
	if ((i == 200)); then kill -KILL "$pid"; fi
	server=
	wait "$pid"
}

if (($# > 0)); then
	base=${1%/}
else
	build
	start
	curl+=(--noproxy '*')
fi

passed=0 failed=0
# check NAME COMMAND... counts whether the command succeeds.
check() {
	local name=$1
	shift
	if "$@"; then
		echo "ok    $name"
		passed=$((passed + 1))
	else
		echo "FAIL  $name"
		failed=$((failed + 1))
	fi
}

amount=1000
# post NAME TOKEN PATH [KEY] keeps the answer to a request in the files NAME.status,
# NAME.headers and NAME.body. KEY is the field's value as it is sent.
post() {
	local name=$1 token=$2 path=$3
	local args=(-H "Authorization: Bearer $token" -H 'Content-Type: application/json')
	if (($# > 3)); then args+=(-H "Idempotency-Key: $4"); fi
	"${curl[@]}" -o "$tmp/$name.body" -D "$tmp/$name.headers" -w '%{http_code}' "${args[@]}" \
		--data "{\"amount\":$amount,\"currency\":\"EUR\"}" "$base$path" >"$tmp/$name.status" || true
	# A request that got no answer fails its checks rather than this script.
	touch -- "$tmp/$name.body" "$tmp/$name.headers"
}

status() { cat -- "$tmp/$1.status"; }
header() { tr -d '\r' <"$tmp/$1.headers" | sed -n "s/^$2: //Ip"; }
id() { sed -n 's/.*"id":"\([^"]*\)".*/\1/p' "$tmp/$1.body"; }

# is GOT WANT
is() {
	[[ $1 == "$2" ]] || { echo "      got \"$1\", want \"$2\""; return 1; }
}
# created NAME PREFIX: a new payment, not a replay.
created() {
	is "$(status "$1")" 201 && [[ $(id "$1") == "$2"?* ]] && is "$(header "$1" Idempotency-Replayed)" ''
}
# differ NAME NAME: two payments.
differ() { [[ $(id "$1") && $(id "$2") && $(id "$1") != "$(id "$2")" ]]; }
# replayed FIRST RETRY: the same answer again, marked.
replayed() {
	is "$(status "$2")" "$(status "$1")" &&
		is "$(header "$2" Content-Type)" "$(header "$1" Content-Type)" &&
		is "$(header "$2" Location)" "$(header "$1" Location)" &&
		cmp -- "$tmp/$1.body" "$tmp/$2.body" &&
		is "$(header "$2" Idempotency-Replayed)" true
}
# problem NAME STATUS CODE: a refusal by the middleware.
problem() {
	is "$(status "$1")" "$2" &&
		is "$(header "$1" Content-Type)" application/problem+json &&
		grep -Eq "\"code\": ?\"$3\"" "$tmp/$1.body" &&
		header "$1" Link | grep -Eq '^<[^>]+>;.*rel="describedby"'
}

uuid() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n' | sed 's/\(.\{8\}\)\(....\)\(....\)\(....\)/\1-\2-\3-\4-/'; }
key="\"$(uuid)\""

post a token-a /v1/charges "$key"
post b token-b /v1/charges "$key"
check 'tenant A charges: 201, first time' created a ch_
check 'tenant B charges with the same key: 201, first time' created b ch_
check 'the two tenants have two charges' differ a b

post refund token-a /v1/refunds "$key"
check 'tenant A refunds with the key of its charge: 201, first time' created refund re_

post retry token-a /v1/charges "$key"
check 'retry of the charge: same status, headers and bytes, marked as replayed' replayed a retry
post retry token-a /v1/refunds "$key"
check 'retry of the refund: same status, headers and bytes, marked as replayed' replayed refund retry

amount=2000
post reused token-a /v1/charges "$key"
check 'same key, other amount: 422 problem key-reused' problem reused 422 key-reused
amount=1000
post retry token-a /v1/charges "$key"
check 'after that the retry of the charge is still replayed' replayed a retry

post missing token-a /v1/charges
check 'no key: 400 problem missing-key with a documentation link' problem missing 400 missing-key
post unquoted token-a /v1/charges "$(uuid)"
check 'unquoted key: 400 problem invalid-key with a documentation link' problem unquoted 400 invalid-key
post anonymous token-x /v1/charges "$key"
check 'unknown token: 401' is "$(status anonymous)" 401

# Two at once. On a busy machine the second may come too late to meet the first;
# then it is replayed, and another pair is sent.
for try in 1 2 3 4 5; do
	key="\"$(uuid)\""
	post one token-a /v1/charges "$key" &
	first=$!
	post two token-a /v1/charges "$key"
	wait "$first"
	winner=one loser=two
	if [[ $(status one) == 409 ]]; then winner=two loser=one; fi
	if [[ $(status "$loser") == 409 ]]; then break; fi
	check "two at once, try $try: the second came late and is replayed" is \
		"$(id one) $(header one Idempotency-Replayed)$(header two Idempotency-Replayed)" "$(id two) true"
done
check 'two at once: one gets 201' created "$winner" ch_
check 'two at once: the other gets 409 problem in-flight' problem "$loser" 409 in-flight
retry_after() { [[ $(header "$1" Retry-After) =~ ^[1-9][0-9]*$ ]]; }
check 'two at once: the 409 has a Retry-After in seconds' retry_after "$loser"
post retry token-a /v1/charges "$key"
check 'two at once: the one that got 409 asks again and gets the answer' replayed "$winner" retry

if [[ $server ]]; then
	check 'SIGTERM: the server stops with exit status 0' stop
	if [[ ${DATABASE_URL:-} ]]; then
		start
		post retry token-a /v1/charges "$key"
		check 'after a restart the retry is still replayed' replayed "$winner" retry
		check 'the server that was started again stops, too' stop
	fi
fi

echo "$passed passed, $failed failed"
((failed == 0))
