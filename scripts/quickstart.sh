#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: scripts/quickstart.sh [FLAGS OF miles-disagg train]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/venv.sh
exec .venv/bin/python train_async.py --config configs/quickstart.yaml "$@"
