#!/bin/sh
# The SuperLink, which nodes connect to. Its database has the registered nodes and the runs.
set -eu
cd "$(dirname "$0")"
. ./env.sh
mkdir -p state
exec flower-superlink --host "${BIND:-127.0.0.1}" --port "${SUPERLINK##*:}" \
    --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \
    --enable-supernode-auth --database "$PWD/state/superlink.db" \
    --isolation process --superexec-auth-secret-file keys/server.secret \
    --disable-runtime-dependency-installation
