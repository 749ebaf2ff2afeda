#!/usr/bin/env bash
# Makes the environment if need be and runs pytest: scripts/test.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/venv.sh dev,tasks
exec .venv/bin/python -m pytest "$@"
