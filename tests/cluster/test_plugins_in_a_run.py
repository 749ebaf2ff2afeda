"""A run with everything plugged in, evaluating beside training: as a process of its own, with the examples."""

import json

import pytest

from tests.cluster import processes
from tests.cluster.test_train_command import Run


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_plugged_in_parts_are_used_and_evaluations_are_filed_under_their_version(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    run = Run(
        tiny_checkpoint, run_dir, "--num-rollout", "6", "--eval-interval", "2",
        "--custom-generate-function-path", "examples.single_turn.generate",
        "--custom-rollout-log-function-path", "examples.log.best_answer",
        "--custom-eval-rollout-log-function-path", "examples.log.evaluation",
        "--advantage-estimator", "rloo", "--policy-loss", "gspo", "--use-rs", "--rs-level", "geometric",
    )  # fmt: skip
    assert run.wait(timeout=400) == 0, run.log.read_text()
    assert len((run_dir / "best_answers.txt").read_text().splitlines()) == 6
    evaluations = rows(run_dir / "evaluations.jsonl")
    done = [row for row in evaluations if row["status"] == "done"]
    assert [row["weight_version"] for row in evaluations] == sorted(row["weight_version"] for row in evaluations)
    assert {0, 6} <= {row["weight_version"] for row in done}
    assert all(row["eval/weight_version"] == row["weight_version"] for row in done), "an exact version, or none"
    assert all(row["reason"] for row in evaluations if row["status"] == "skipped")
    assert {row["weight_version"] for row in evaluations} == {0, 2, 4, 6}
    assert len((run_dir / "evaluations.txt").read_text().splitlines()) == len(done)
    metrics = rows(run_dir / "metrics.jsonl")
    for row in metrics:
        if "eval/accuracy" in row:
            assert row["step"] == max(0, row["weight_version"] - 1) or row["weight_version"] in (0, 6)
        if "train/loss" in row:
            histogram = row["rollout/version_lag_histogram"]
            assert sum(histogram.values()) == 16
            assert max(map(int, histogram)) == row["rollout/version_lag_max"] <= 2
            assert 0 <= row["train/rejected_fraction"] <= 1
    assert processes.gone(run.marker, timeout=60) == []
