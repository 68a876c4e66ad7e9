#!/bin/sh
# Node number $1, from 1: a SuperNode, and a worker that keeps its model and data in memory.
set -eu
cd "$(dirname "$0")"
. ./env.sh
port="${PORT:-$((9093 + $1))}" # on this machine only, for the worker
mixfl flower worker "127.0.0.1:$port" --secret "keys/node-$1.secret" --parent-pid $$ &
exec flower-supernode --superlink "$SUPERLINK" --root-certificates keys/ca.crt \
    --auth-supernode-private-key "keys/node-$1" \
    --node-config "partition-id=$(($1 - 1)) num-partitions=${NODES:-3}" \
    --isolation process --port "$port" --superexec-auth-secret-file "keys/node-$1.secret"
