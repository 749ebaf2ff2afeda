#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: scripts/quickstart.sh [FLAGS OF miles-disagg train]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/venv.sh
# Made once, about half a minute; the same place as in configs/quickstart.yaml.
.venv/bin/python scripts/make_quickstart_model.py --output "$HOME/.cache/miles_disagg/quickstart-model"
exec .venv/bin/python train_async.py --config configs/quickstart.yaml "$@"
