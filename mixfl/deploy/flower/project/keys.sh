#!/bin/sh
# Makes keys and certificates in keys/, for three nodes. HOST is the server's name or address.
#   ./keys.sh [HOST...]
set -eu
cd "$(dirname "$0")"
count=$#
while [ "$count" -gt 0 ]; do # each HOST becomes --host HOST
    set -- "$@" --host "$1"
    shift
    count=$((count - 1))
done
exec mixfl flower keys keys --nodes "${NODES:-3}" "$@"
