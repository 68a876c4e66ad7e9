# Addresses and folders. The scripts here read this file. Before using `flwr`, run: . ./env.sh
umask 077 # only the owner can read new files
export SUPERLINK="${SUPERLINK:-127.0.0.1:8000}" # as nodes, superexec and `flwr` reach it
export FLWR_HOME="${FLWR_HOME:-$PWD/.flwr}"     # Flower's own files, in this folder
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml.$$" <<EOF
[superlink]
default = "deployment"

[superlink.deployment]
address = "$SUPERLINK"
root-certificates = "$PWD/keys/ca.crt"
EOF
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml" # in one step, because others read it
