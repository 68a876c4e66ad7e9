#!/bin/sh
# Runs next to the SuperLink and starts the server of each run. The server ends when superexec does.
set -eu
cd "$(dirname "$0")"
. ./env.sh
exec mixfl flower superexec --runtime-api-address "$SUPERLINK" --root-certificates keys/ca.crt \
    --superexec-auth-secret-file keys/server.secret
