#!/bin/sh
# Starts the server's part of each run, beside the SuperLink, as a process that ends with it.
set -eu
cd "$(dirname "$0")"
. ./env.sh
exec mixfl flower superexec --runtime-api-address "$SUPERLINK" --root-certificates keys/ca.crt \
    --superexec-auth-secret-file keys/server.secret
