# Where everything is; the scripts here read it, and before `flwr` you do: . ./env.sh
umask 077 # what is written from here on is for its owner only
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
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml" # whole at any time: others read it
