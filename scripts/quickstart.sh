#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: scripts/quickstart.sh [FLAGS OF miles-disagg train]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/venv.sh
model=.cache/quickstart-model
if [ ! -f "$model/config.json" ]; then
    echo "making the model in $model (about half a minute, once)" >&2
    .venv/bin/python scripts/make_quickstart_model.py --output "$model"
fi
exec .venv/bin/python train_async.py --config configs/quickstart.yaml "$@"
