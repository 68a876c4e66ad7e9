#!/bin/sh
# Keys and certificates in keys/: for three nodes, and the hosts by which they reach the server.
#   ./keys.sh [HOST...]
set -eu
cd "$(dirname "$0")"
mixfl flower keys keys --nodes "${NODES:-3}" $(for host in "$@"; do echo "--host $host"; done)
