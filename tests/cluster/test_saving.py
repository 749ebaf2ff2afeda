"""Checkpoints saved behind the steps: order, verification, and failures that are heard."""

import asyncio
from pathlib import Path

import pytest

from miles_disagg.cluster import checkpoints
from miles_disagg.cluster.checkpoints import RunState
from miles_disagg.cluster.saving import CheckpointSaver
from miles_disagg.domain.errors import CheckpointError, DeadlineExceeded
from miles_disagg.observe.events import Timeline
from miles_disagg.weights.digest import digest

DATA = bytes(range(256)) * 64


class Ranks:
    """In place of a TrainerGroup: one file of DATA, written when `disk` is set, described as `claims`."""

    def __init__(self) -> None:
        self.disk = asyncio.Event()
        self.claims = (len(DATA), digest(DATA))
        self.error: Exception | None = None
        self.begun: list[str] = []

    async def begin_save(self, directory: str) -> None:
        self.begun.append(directory)

    async def write_save(self, directory: str, timeout: float) -> dict[str, tuple[int, str]]:
        await self.disk.wait()
        if self.error:
            raise self.error
        Path(directory).mkdir()
        (Path(directory) / "__0_0.distcp").write_bytes(DATA)
        return {"trainer/__0_0.distcp": self.claims}


def saver(run_dir: Path, ranks: Ranks, *, behind: bool = True, timeout: float = 20.0) -> CheckpointSaver:
    return CheckpointSaver(run_dir, ranks, Timeline("test"), keep=1, behind=behind, timeout=timeout)  # type: ignore[arg-type]


def describing(step: int):
    async def describe() -> RunState:
        return RunState("run", step, step, {})

    return describe


def names(run_dir: Path) -> list[str]:
    return [path.name for path in checkpoints.complete(run_dir)]


async def test_a_step_waits_for_the_copy_only_and_the_next_save_for_the_disk(tmp_path):
    ranks = Ranks()
    saving = saver(tmp_path, ranks)
    metrics = await asyncio.wait_for(saving.save(1, describing(1)), 5)
    saving.raise_failure()
    assert names(tmp_path) == []
    assert metrics["perf/wait_for_checkpoint_seconds"] < 1
    second = asyncio.create_task(saving.save(2, describing(2)))
    await asyncio.sleep(0.1)
    assert len(ranks.begun) == 1, "the first one is still in the host copies"
    ranks.disk.set()
    await second
    await saving.settle()
    assert names(tmp_path) == ["step_000002"]
    checkpoints.read(checkpoints.place(tmp_path, 2))
    assert saving.take_metrics()["perf/write_checkpoint_seconds"] >= 0


async def test_with_async_save_off_a_checkpoint_is_complete_when_the_step_goes_on(tmp_path):
    ranks = Ranks()
    ranks.disk.set()
    await saver(tmp_path, ranks, behind=False).save(1, describing(1))
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("failure", ["bits", "disk", "host"])
async def test_a_save_that_failed_is_heard_at_the_next_step_and_nothing_appears(tmp_path, failure):
    ranks = Ranks()
    ranks.disk.set()
    saving = saver(tmp_path, ranks)
    await saving.save(1, describing(1))
    await saving.settle()
    if failure == "bits":
        ranks.claims = (len(DATA), digest(DATA[::-1]))
    elif failure == "disk":
        ranks.error = OSError(28, "No space left on device")
    else:
        ranks.write_save = elsewhere
    await saving.save(2, describing(2))
    with pytest.raises(CheckpointError, match={"bits": "reads back", "disk": "No space", "host": "RUN_DIR"}[failure]):
        await later_steps(saving)
    assert names(tmp_path) == ["step_000001"]
    checkpoints.remove_partial(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


async def later_steps(saving: CheckpointSaver) -> None:
    for _ in range(500):
        saving.raise_failure()
        await asyncio.sleep(0.01)


async def elsewhere(directory: str, timeout: float) -> dict[str, tuple[int, str]]:
    """A rank on another host, with a directory of its own."""
    return {"trainer/__1_0.distcp": (1, "")}


async def test_a_disk_that_hangs_is_named_at_the_deadline(tmp_path):
    saving = saver(tmp_path, Ranks(), timeout=0.2)
    await saving.save(1, describing(1))
    with pytest.raises(DeadlineExceeded, match=r"the checkpoint of step 1 to be written.*--save-timeout"):
        await asyncio.wait_for(saving.settle(), 10)


async def test_the_end_of_a_run_waits_for_the_checkpoint_also_when_it_was_interrupted(tmp_path):
    ranks, said = Ranks(), []
    saving = saver(tmp_path, ranks)
    await saving.save(1, describing(1))
    waiting = asyncio.create_task(saving.settle())
    await asyncio.sleep(0)
    waiting.cancel()  # Ctrl-C in the middle of waiting
    asyncio.get_running_loop().call_later(0.1, ranks.disk.set)
    await saving.settle_anyway(said.append)
    assert names(tmp_path) == ["step_000001"]
    assert "waiting for the checkpoint of step 1" in said[0]

    ranks.error = OSError("the disk is gone")
    await saving.save(2, describing(2))
    await saving.settle_anyway(said.append)
    assert "the disk is gone" in said[-1]
