#!/usr/bin/env bash
# Trains: ./run_train.sh [--table.key=value ...]. See README.md and ./run_train.sh --help.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$ROOT/tools/environment.sh"
export CONFIG_FILE="${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m titanlite.launch "$@"
