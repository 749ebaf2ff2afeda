"""Actors that are killed under a run: it goes on by itself, to the same books."""

import time

import psutil
import pytest

from tests.cluster import processes
from tests.cluster.test_resume import balanced, published, steps_in
from tests.cluster.test_train_command import Run


def kill(run: Run, name: str) -> None:
    """SIGKILL the one process below the driver whose command line has `name`."""
    below = psutil.Process(run.process.pid).children(recursive=True)
    (process,) = [p for p in below if p.is_running() and name in " ".join(p.cmdline())]
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_a_run_outlives_its_producer_and_trains_on_every_prompt_once(tiny_checkpoint, tmp_path, schedule):
    run_dir = tmp_path / "run"
    run = Run(tiny_checkpoint, run_dir, "--num-rollout", "16", "--save-interval", "4", "--schedule", schedule)
    run.wait_for_steps(2, timeout=400)  # before the first checkpoint: nothing but the start is known
    kill(run, "RolloutProducer")
    run.wait_for_steps(7, timeout=400)
    kill(run, "RolloutProducer")
    assert run.wait(timeout=400) == 0, run.log.read_text()
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("completed", 16)
    assert balanced(summary), summary
    assert summary["ledger"]["trained"] == 4 * 16, "64 prompts, each trained on once"
    assert sorted(set(steps_in(run_dir))) == list(range(16))
    assert run.log.read_text().count("A new one takes up its books") == 2
    assert "Traceback" not in run.log.read_text()
    assert processes.gone(run.marker, timeout=60) == []


@pytest.mark.slow
def test_a_run_outlives_the_actor_of_its_engine(tiny_checkpoint, tmp_path):
    run = Run(tiny_checkpoint, tmp_path / "run", "--num-rollout", "12")
    run.wait_for_steps(2, timeout=400)
    begun = time.monotonic()
    kill(run, "ray::RolloutEngine")
    run.wait_for_steps(8, timeout=400)
    assert time.monotonic() - begun < 300
    assert run.wait(timeout=400) == 0, run.log.read_text()
    assert balanced(run.summary)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_a_run_outlives_its_gateway(tiny_checkpoint, tmp_path, schedule):
    run = Run(tiny_checkpoint, tmp_path / "run", "--num-rollout", "16", "--schedule", schedule)
    for steps in (2, 8):
        run.wait_for_steps(steps, timeout=400)
        begun = time.monotonic()
        kill(run, "ray::GatewayActor")
    run.wait_for_steps(12, timeout=400)
    assert time.monotonic() - begun < 60, "its engines register with the new one within a heartbeat"
    assert run.wait(timeout=400) == 0, run.log.read_text()
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["final_version"]) == ("completed", 16, 16)
    assert balanced(summary), summary
    assert set(summary["ledger"]["failed"]) <= {"stopped"}, "a lost connection is no failure of a sample"
    assert run.log.read_text().count("gateway listens again") == 2
    assert "Traceback" not in run.log.read_text()
    assert processes.gone(run.marker, timeout=60) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_the_run_waits_for_samples_ends_it_at_once_and_by_name(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    run = Run(tiny_checkpoint, run_dir, "--num-rollout", "1000", "--save-interval", "1", "--no-async-save")
    run.wait_for_steps(2, timeout=400)
    below = psutil.Process(run.process.pid).children(recursive=True)
    for process in below:
        line = " ".join(process.cmdline())
        if "miles_disagg.engine.embedded" in line and "guard.py" not in line:
            process.suspend()  # nothing is generated from here on
    deadline, seen = time.monotonic() + 60, -1
    while seen != (seen := len(run.rows)):
        assert time.monotonic() < deadline
        time.sleep(5)
    begun = time.monotonic()
    kill(run, "ray::TrainerActor")
    assert run.wait(timeout=120) == 1, run.log.read_text()
    assert time.monotonic() - begun < 90, "long before --rollout-wait-timeout"
    assert "trainer rank 0" in run.summary["reason"]
    assert f"Continue it with: miles-disagg train --load {run_dir}" in run.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disk-delta", "broadcast"])
def test_a_run_outlives_its_version_store_and_skips_no_version(tiny_checkpoint, tmp_path, mode):
    run_dir = tmp_path / "run"
    run = Run(
        tiny_checkpoint, run_dir, "--run-id", "kept", "--num-rollout", "16", "--update-weight-transfer-mode", mode,
        "--update-weight-disk-keep-files",
    )  # fmt: skip
    for steps in (2, 7):
        run.wait_for_steps(steps, timeout=400)
        kill(run, "ray::VersionStoreActor")
    assert run.wait(timeout=400) == 0, run.log.read_text()
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["final_version"]) == ("completed", 16, 16)
    assert balanced(summary), summary
    assert run.log.read_text().count("claims the run again") == 2
    if mode == "disk-delta":
        assert published(run_dir, "kept") == (list(range(1, 17)), 16)
    assert "Traceback" not in run.log.read_text()
    assert processes.gone(run.marker, timeout=60) == []
