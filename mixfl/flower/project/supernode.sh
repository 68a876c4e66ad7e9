#!/bin/sh
# Node number $1, from 1: a SuperNode, and a worker that keeps its model and data in memory.
set -eu
cd "$(dirname "$0")"
. ./env.sh
number="$1"
port="${PORT:-$((9093 + number))}" # on this machine only, for the worker
if [ "${WORKER:-yes}" = yes ]; then
    mixfl flower worker "127.0.0.1:$port" --secret "keys/node-$number.secret" --with-parent &
    set -- --isolation process --superexec-auth-secret-file "keys/node-$number.secret"
else # Flower's own way, a process per message
    set -- --isolation subprocess
fi
exec flower-supernode --superlink "$SUPERLINK" --root-certificates keys/ca.crt \
    --auth-supernode-private-key "keys/node-$number" \
    --node-config "partition-id=$((number - 1)) num-partitions=${NODES:-3}" --port "$port" "$@"
