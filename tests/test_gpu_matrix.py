"""The matrix of layouts and update modes: what it plans, how it judges, and one cell of it for real."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_matrix.py"


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("gpu_matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_matrix"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_matrix"]


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def options(matrix, tmp_path: Path, **changes):
    fields = {"steps": 30, "strikes": True, "time_model": None, "deadline": 60.0, "extra": ()} | changes
    return matrix.Options(output=tmp_path, **fields)


def test_a_dry_run_lists_every_cell_and_says_what_a_cpu_leaves_out():
    done = run("--dry-run", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 25
    left_out = [line for line in lines if ": not run: " in line]
    assert len(left_out) == 5
    assert all(line.startswith("tp2-1xtp2:") and "an embedded engine has one rank" in line for line in left_out)
    assert all("matrix_cell.py" in line for line in lines if line not in left_out)
    assert "--expert-model-parallel-size 2" in next(line for line in lines if line.startswith("ep2-2xtp1:p2p"))


def test_four_gpus_run_and_time_every_cell_with_flags_that_parse_and_pass_the_checks(matrix, tmp_path):
    from miles_disagg.config.checks import check
    from miles_disagg.config.flags import parse_run
    from miles_disagg.config.machine import Machine

    host = matrix.Host(True, 4, "sglang", sys.executable)
    chosen = options(matrix, tmp_path, time_model="8B")
    rows = list(matrix.runs(matrix.pick([]), host, chosen))
    assert [row["status"] for row in rows] == ["planned"] * 50
    for row in rows:
        flags = matrix.flags(row, host, chosen, tmp_path / "model", tmp_path / "run")
        config = parse_run(flags)
        assert check(config, Machine(cpus=64, gpus=4), {}) == [], flags
    assert config.engines.rollout_num_gpus == 2


def test_a_pattern_that_matches_nothing_is_named_with_what_there_is(matrix):
    assert matrix.pick(["ep2-2xtp1:p2p"]) == ["ep2-2xtp1:p2p"]
    assert len(matrix.pick(["*:p2p"])) == len(matrix.pick(["dp2-2xtp1"])) == 5
    with pytest.raises(SystemExit, match="--only tp4:p2p: layouts are tp2-2xtp1"):
        matrix.pick(["tp4:p2p"])


def test_a_difference_a_crash_and_a_reward_that_does_not_rise_are_failures(matrix, tmp_path):
    chosen = options(matrix, tmp_path)
    good = {"mode": "p2p", "part": "run", "status": "failed", "reason": None, "versions_compared": 31}
    rises = good | {"reward_first": 0.4, "reward_last": 0.6}
    cases = [
        (dict(rises), 0, "passed"),
        (rises | {"error": "AssertionError: 3 tensors differ"}, 1, "failed"),
        (dict(rises), 1, "failed"),
        (rises | {"reward_last": 0.3}, 0, "failed"),
        ({"mode": "p2p", "part": "run", "status": "failed", "reason": None}, 0, "failed"),
        (rises | {"mode": "disk-delta-in-place", "loader": [None, {"in_place": 0, "reloads": 6}]}, 0, "failed"),
        (rises | {"mode": "disk-delta-in-place", "loader": [None, {"in_place": 4, "reloads": 2}]}, 0, "passed"),
    ]
    for row, returncode, status in cases:
        matrix.judge(row, returncode, chosen, ["last line"])
        assert row["status"] == status, row
        assert (row["reason"] is None) == (status == "passed")


def test_a_run_that_passes_its_deadline_is_ended_and_its_log_kept(matrix, tmp_path, monkeypatch):
    code = "import time; print('begun', flush=True); time.sleep(60)"
    monkeypatch.setattr(matrix, "command", lambda *_: [sys.executable, "-c", code])
    chosen = options(matrix, tmp_path, deadline=1.0)
    row = next(matrix.runs(["dp2-2xtp1:p2p"], matrix.Host(False, 0, "embedded", None), chosen))
    matrix.execute(row, matrix.Host(False, 0, "embedded", None), chosen)
    assert (row["status"], row["reason"]) == ("timeout", "no end within 1 s")
    assert Path(row["log"]).read_text().startswith("begun")


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["pp2-2xtp1:disk-delta-in-place", "ep2-2xtp1:p2p"])
def test_a_cell_compares_every_version_and_sees_both_engines_come_back(tmp_path, cell):
    done = run(
        *("--only", cell, "--device", "cpu", "--steps", "6", "--json", "--output", str(tmp_path), "--deadline", "400"),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["versions_compared"] == 7 + 2
    assert row["killed"]["answers_of_others"] > 0
    assert row["replaced"]["version"] == 4
    assert json.loads((tmp_path / "results.json").read_text())["results"] == [row]
