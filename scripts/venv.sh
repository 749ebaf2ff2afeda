#!/usr/bin/env bash
# Makes .venv with this project and the given extras ("", "dev,tasks"), once for each state of pyproject.toml.
# PYTHON=... picks the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-}"

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or 3.12 is needed (looked for: ${PYTHON:-python3 python3.12 python3.11}); install one, or set PYTHON" >&2
    exit 1
}

wanted="$(cksum <pyproject.toml) [$extras]"
stamp=".venv/.installed-${extras//,/-}"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python="$(find_python)"
if [ ! -x .venv/bin/python ]; then
    echo "making .venv with $("$python" --version)" >&2
    "$python" -m venv .venv || {
        echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
fi
echo "installing into .venv (a few minutes the first time)" >&2
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
# First, and by this exact version: what depends on torch would otherwise choose a CUDA build of several GB.
.venv/bin/python -c 'import torch' 2>/dev/null || pip install torch==2.13.0
pip install -e ".${extras:+[$extras]}"
echo "$wanted" >"$stamp"
