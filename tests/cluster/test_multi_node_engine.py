"""A managed engine larger than a node: one process on each of its nodes, placed, restarted and ended together."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.sglang_node import as_python, starts
from tests.rollout.test_processes import alive, value

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_ranks_land_on_their_nodes_and_come_back_together(tiny_checkpoint: Path, tmp_path: Path):
    flags = [
        *("--hf-checkpoint", str(tiny_checkpoint), "--task", "addition", "--num-rollout", "1", "--run-id", "run"),
        *("--run-dir", str(tmp_path / "run"), "--trainer-device", "cpu", "--rollout-engine", "sglang"),
        *("--sglang-python", str(as_python(tmp_path)), "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4"),
        *("--num-gpus-per-node", "2", "--update-weight-transfer-mode", "broadcast", "--rollout-cpus-per-engine", "1"),
    ]
    command = [sys.executable, "-m", "tests.cluster.multi_node", str(tmp_path), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["nodes"])) == 2, "both processes are on one node"
    assert found["ranks"] == 4, "ranks of an update group are the engine's GPUs, on all nodes"
    first = sorted(found["started"], key=lambda row: row["rank"])
    assert [value(row, "--node-rank") for row in first] == ["0", "1"]
    assert {value(row, "--tp-size") for row in first} == {"4"}
    assert [len(row["gpus"].split(",")) for row in first] == [2, 2]
    assert first[0]["argv"][-6:-4] == ["--nnodes", "2"]
    assert len({value(row, "--dist-init-addr") for row in first}) == 1
    assert found["restarts"] == 1, "a dead rank restarts the whole engine, in place"
    assert sorted(row["rank"] for row in found["again"]) == [0, 0, 1, 1]
    assert any("died" in line for line in found["said"]), "a lost node's actor has the engine placed anew"
    deadline = time.monotonic() + 30
    while any(alive(row["pid"]) for row in starts(tmp_path)):
        assert time.monotonic() < deadline, "processes were left running"
        time.sleep(0.2)
