#!/bin/sh
# Node number $1, from 1: a SuperNode, and a worker that keeps the model and the data in memory.
# WORKER=apart: worker.sh is started separately. WORKER=no: no worker; Flower starts a process for
# each message.
set -eu
cd "$(dirname "$0")"
. ./env.sh
number="$1"
port="${PORT:-$((9093 + number))}" # on this machine only, for the worker
worker="${WORKER:-yes}"
if [ "$worker" = yes ]; then # restarted if killed, until this process ends
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
