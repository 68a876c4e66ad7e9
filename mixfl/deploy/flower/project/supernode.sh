#!/bin/sh
# Node number $1, from 1: a SuperNode, and a worker that keeps its model and data in memory.
# WORKER=apart: worker.sh is started by someone else. WORKER=no: Flower's own way, a process per
# message.
set -eu
cd "$(dirname "$0")"
. ./env.sh
number="$1"
port="${PORT:-$((9093 + number))}" # on this machine only, for the worker
worker="${WORKER:-yes}"
if [ "$worker" = yes ]; then # until this process ends, another whenever one is killed
    until ./worker.sh "$number" --until $$ || ! kill -0 $$ 2> /dev/null; do sleep 1; done &
fi
if [ "$worker" = no ]; then
    set -- --isolation subprocess
else
    set -- --isolation process --superexec-auth-secret-file "keys/node-$number.secret"
fi
exec flower-supernode --superlink "$SUPERLINK" --root-certificates keys/ca.crt \
    --auth-supernode-private-key "keys/node-$number" \
    --node-config "partition-id=$((number - 1)) num-partitions=${NODES:-3}" --port "$port" "$@"
