"""Placement on several nodes with several GPUs each, on a Ray whose nodes and GPUs are pretended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    *("--hf-checkpoint", "/nowhere", "--task", "addition", "--num-rollout", "1", "--run-id", "run"),
    *("--trainer-device", "cuda", "--actor-node-resource", "trainer", "--rollout-node-resource", "rollout"),
)


def place(trainer_nodes: int, rollout_nodes: int, *flags: str) -> dict:
    command = [sys.executable, "-m", "tests.cluster.fake_nodes", str(trainer_nodes), str(rollout_nodes), *RUN, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_trainer_and_engines_land_on_their_nodes_and_fill_them():
    found = place(
        *(2, 2, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4"),
        *("--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"),
    )
    assert found["error"] is None
    assert sorted(found["placed"]["run-trainer"]) == ["trainer-0", "trainer-1"]
    engines = [nodes for name, nodes in found["placed"].items() if "engine" in name]
    assert len(engines) == 4
    assert all(len(nodes) == 1 for nodes in engines), "an engine of two GPUs stays on one node"
    assert sorted(nodes[0] for nodes in engines) == ["rollout-0", "rollout-0", "rollout-1", "rollout-1"]
    assert found["free"] == 0


@pytest.mark.slow
def test_an_engine_larger_than_a_node_takes_bundles_of_several():
    found = place(
        *(1, 2, "--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4", "--rollout-engine", "sglang"),
        *("--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8"),
    )
    assert sorted(found["placed"]["run-engine-0"]) == ["rollout-0", "rollout-1"]


@pytest.mark.long
def test_what_cannot_be_placed_says_what_was_wanted_and_what_there_is():
    found = place(
        1, 1, "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"
    )
    assert len(found["placed"]) == 3, "the trainer and the two engines that fit"
    for part in ("run-engine-2", "'GPU': 2.0", "GPU 0 of 8", "--rollout-num-gpus"):
        assert part in found["error"]
