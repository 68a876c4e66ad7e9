#!/bin/sh
# The worker of node number $1, on the same machine as its SuperNode.
set -eu
cd "$(dirname "$0")"
. ./env.sh
number="$1"
shift
exec mixfl flower worker "127.0.0.1:${PORT:-$((9093 + number))}" \
    --secret "keys/node-$number.secret" "$@"
