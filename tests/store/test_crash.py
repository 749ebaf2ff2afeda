"""Processes that are really killed, and processes that really race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_disagg.store.local import LocalStore

ROOT = Path(__file__).resolve().parents[2]


def crash_test(rounds: int, seed: int) -> dict:
    result = subprocess.run(
        [sys.executable, "scripts/crash_test.py", "--rounds", str(rounds), "--seed", str(seed), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60 + 3 * rounds, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stderr[-3000:]
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["torn"] == found["unhealed"] == 0, result.stderr[-3000:]
    return found


def test_what_a_killed_process_leaves_is_old_or_new_and_one_retry_heals() -> None:
    found = crash_test(rounds=15, seed=11)
    assert sum(n for outcome, n in found["outcomes"].items() if "killed" in outcome) >= 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hundreds_of_kills_tear_nothing() -> None:
    crash_test(rounds=300, seed=int.from_bytes(os.urandom(3)))


COUNT = """
import sys, uuid
from pathlib import Path
from miles_disagg.store.base import CasConflict
from miles_disagg.store.local import LocalStore
store, done = LocalStore(Path(sys.argv[1])), 0
while done < 40:
    seen = store.read("n")
    try:
        store.compare_and_swap("n", seen.token, b"%d %s" % (int(seen.data.split()[0]) + 1, uuid.uuid4().hex.encode()))
        done += 1
    except CasConflict:
        pass
"""


def test_compare_and_swap_is_exact_between_processes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("n", b"0 start")
    processes = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)], cwd=ROOT) for _ in range(4)]
    assert [p.wait(120) for p in processes] == [0] * 4
    assert store.get("n").split()[0] == b"160"
