#!/usr/bin/env bash
# Lint, format, types and layers. `scripts/lint.sh --fix` repairs what can be repaired first.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/venv.sh dev,tasks
bin=.venv/bin
if [ "${1:-}" = "--fix" ]; then
    $bin/ruff check --fix .
    $bin/ruff format .
fi
$bin/ruff check .
$bin/ruff format --check .
$bin/pyright
$bin/lint-imports
