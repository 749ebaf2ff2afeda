"""A run that is killed, interrupted or loses a trainer rank is continued by one command, to the same books."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import open_store
from miles_disagg.store.inspect import verify_lineage
from miles_disagg.store.versions import VersionStore
from tests.cluster import processes
from tests.cluster.test_train_command import Run


def balanced(summary: dict) -> bool:
    ledger = summary["ledger"]
    dropped, failed = sum(ledger["dropped"].values()), sum(ledger["failed"].values())
    generated = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + dropped
    handed_out = ledger["generating"] + ledger["generated"] + failed
    return ledger["generated"] == generated and ledger["handed_out"] == handed_out


def steps_in(run_dir: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()]


def published(run_dir: Path, run_id: str) -> tuple[list[int], int]:
    """Versions with an index, and the pointer's."""
    store = VersionStore(open_store(str(run_dir / "weights")))
    newest = store.latest()
    assert newest is not None
    return store.versions(run_id), newest.version


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def sigkill_while_saving(run: Run) -> str:
    """The same, at the moment at which a checkpoint is being written; the name of its directory."""
    directory, deadline = run.run_dir / "checkpoints", time.monotonic() + 120
    while time.monotonic() < deadline:
        newest = max((p.name for p in directory.iterdir() if p.name.startswith("step_")), default="")
        begun = [p.name for p in directory.glob(".step_*.partial") if p.name[1:12] > newest]  # the others are removed
        if begun:
            sigkill(run)
            return begun[0]
    raise AssertionError(f"no checkpoint was begun:\n{run.log.read_text()}")


def sigkill(run: Run) -> None:
    """The driver's process group, as a machine that loses power would end it; what it started follows by itself."""
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    assert processes.gone(run.marker, timeout=60) == []


def test_a_run_that_was_killed_goes_on_from_its_newest_checkpoint_to_the_end(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    first = Run(
        tiny_checkpoint, run_dir, "--run-id", "killed", "--num-rollout", "1000",
        "--save-interval", "3", "--save-total-limit", "2", "--update-weight-disk-keep-files",
    )  # fmt: skip
    first.wait_for_steps(8, timeout=400)
    half = sigkill_while_saving(first)
    assert half in checkpoints(run_dir), "it was complete before the driver died"
    saved = [name for name in checkpoints(run_dir) if not name.startswith(".")]
    done, newest = int(saved[-1].removeprefix("step_")), published(run_dir, "killed")[1]
    assert done >= 6
    assert len(saved) <= 2

    more = ("--load", str(run_dir), "--num-rollout", str(done + 3), "--update-weight-disk-keep-files")
    second = Run(tiny_checkpoint, run_dir, *more)
    assert second.wait(timeout=400) == 0, second.log.read_text()
    summary = second.summary
    assert (summary["status"], summary["steps"]) == ("completed", done + 3)
    assert balanced(summary), summary
    assert summary["ledger"]["trained"] == 4 * (done + 3)
    assert sorted(set(steps_in(run_dir))) == list(range(done + 3)), "each step is done once"
    assert all(step >= done for step in steps_in(run_dir, "metrics.superseded.jsonl"))
    versions, pointer = published(run_dir, "killed")
    assert versions == list(range(1, pointer + 1)), "no number is skipped or used twice"
    assert pointer == newest + 1 + 3 == summary["final_version"]
    store = VersionStore(open_store(str(run_dir / "weights")))
    index = store.index(VersionRef("killed", newest + 1))
    assert index is not None
    assert index.base_version == newest, "a delta on what the killed run published last"
    latest = store.latest()
    assert latest is not None
    right = list(verify_lineage(store, latest, tiny_checkpoint, tmp_path / "verified"))
    assert [ref.version for ref in right] == list(range(pointer + 1))
    assert not (run_dir / "published").exists()
    assert not any(name.startswith(".") for name in checkpoints(run_dir))
    assert processes.gone(second.marker, timeout=60) == []
    assert "Traceback" not in second.log.read_text()


@pytest.mark.slow
def test_a_broadcast_run_goes_on_in_another_layout_and_never_uses_a_version_number_twice(tiny_checkpoint, tmp_path):
    run_dir, broadcast = tmp_path / "run", ("--update-weight-transfer-mode", "broadcast")
    first = Run(
        tiny_checkpoint, run_dir, "--run-id", "sent", "--num-rollout", "1000", "--save-interval", "2",
        "--actor-num-gpus-per-node", "2", "--use-distributed-optimizer", *broadcast,
    )  # fmt: skip
    first.wait_for_steps(5, timeout=400)
    sigkill(first)
    done = int(checkpoints(run_dir)[-1].removeprefix("step_"))
    given_out = json.loads((run_dir / "run.json").read_text())["version"]
    assert given_out >= done

    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1")
    second = Run(tiny_checkpoint, run_dir, "--load", str(run_dir), "--num-rollout", str(done + 2), *broadcast, *layout)
    assert second.wait(timeout=400) == 0, second.log.read_text()
    assert balanced(second.summary)
    assert second.summary["final_version"] == given_out + 1 + 2
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows if row["step"] >= done][:2] == [given_out + 2, given_out + 3]
    assert all(row.get("rollout/version_lag_max", 0) <= 2 for row in rows)


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_when_asked_and_a_killed_trainer_rank_is_named(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    first = Run(tiny_checkpoint, run_dir, "--num-rollout", "1000", "--save-on-interrupt")
    first.wait_for_steps(2, timeout=400)
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.wait(timeout=300) == 130, first.log.read_text()
    done = first.summary["steps"]
    assert checkpoints(run_dir) == [f"step_{done:06d}"]
    assert f"--load {run_dir}" in first.log.read_text()

    second = Run(tiny_checkpoint, run_dir, "--resume", "auto", "--num-rollout", "1000", "--save-interval", "2")
    second.wait_for_steps(done + 3, timeout=400)
    below = psutil.Process(second.process.pid).children(recursive=True)
    (rank,) = [process for process in below if "TrainerActor" in " ".join(process.cmdline())]
    rank.kill()
    assert second.wait(timeout=300) == 1
    assert "trainer rank 0" in second.summary["reason"]
    assert "process died" in second.summary["reason"]
    assert balanced(second.summary)

    saved = int(checkpoints(run_dir)[-1].removeprefix("step_"))
    third = Run(tiny_checkpoint, run_dir, "--resume", "auto", "--num-rollout", str(saved + 1))
    assert third.wait(timeout=400) == 0, third.log.read_text()
    assert third.summary["ledger"]["trained"] == 4 * (saved + 1)
    assert balanced(third.summary)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over_with_new_version_numbers(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    keep = ("--update-weight-disk-keep-files", "--resume", "auto")
    first = Run(tiny_checkpoint, run_dir, "--run-id", "early", "--num-rollout", "1000", *keep)
    first.wait_for_steps(2, timeout=400)
    sigkill(first)
    newest = published(run_dir, "early")[1]
    second = Run(tiny_checkpoint, run_dir, *keep, "--num-rollout", "1")
    assert second.wait(timeout=400) == 0, second.log.read_text()
    assert (second.summary["steps"], second.summary["final_version"]) == (1, newest + 2)
    assert published(run_dir, "early")[0] == list(range(1, newest + 3))


@pytest.mark.slow
def test_two_drivers_never_use_one_run_directory(tiny_checkpoint, tmp_path):
    run_dir = tmp_path / "run"
    first = Run(tiny_checkpoint, run_dir, "--num-rollout", "1000", "--save-interval", "1")
    try:
        first.wait_for_steps(2, timeout=400)
        second = Run(tiny_checkpoint, run_dir, "--load", str(run_dir), "--num-rollout", "1001")
        assert second.wait(timeout=200) == 2
        assert f"in use by process {first.process.pid}" in second.log.read_text()
    finally:
        os.killpg(first.process.pid, signal.SIGTERM)
        first.wait(timeout=200)
