#!/bin/sh
# Starts the server's part of each run, beside the SuperLink: a process of its own, so that a run
# outlives the SuperLink's end and goes on when it is back.
set -eu
cd "$(dirname "$0")"
. ./env.sh
exec flower-superexec --runtime-api-address "$SUPERLINK" --root-certificates keys/ca.crt \
    --superexec-auth-secret-file keys/server.secret
