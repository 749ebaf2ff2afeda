"""A driver that is killed while its engines are somebody else's: they are found again, by the same run, and kept."""

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.attached import OutsideEngine, ended, started
from tests.cluster.test_attached import attached
from tests.cluster.test_resume import balanced, checkpoints, sigkill, steps_in
from tests.cluster.test_train_command import Run
from tests.fakes.service import Service, serves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def killed_and_continued(
    checkpoint: Path, run_dir: Path, flags: tuple[str, ...], between: Callable[[], Awaitable[None]]
) -> int:
    """A run is killed after some steps and continued to its end; the last version."""
    first = Run(checkpoint, run_dir, "--run-id", "outside", "--num-rollout", "1000", "--save-interval", "2", *flags)
    await asyncio.to_thread(first.wait_for_steps, 5, 400)
    await asyncio.to_thread(sigkill, first)
    await between()
    done = int([name for name in checkpoints(run_dir) if not name.startswith(".")][-1].removeprefix("step_"))
    second = Run(checkpoint, run_dir, "--load", str(run_dir), "--num-rollout", str(done + 3), *flags)
    assert await asyncio.to_thread(second.wait, 400) == 0, second.log.read_text()
    summary = second.summary
    assert (summary["status"], summary["steps"]) == ("completed", done + 3)
    assert balanced(summary), summary
    assert sorted(set(steps_in(run_dir))) == list(range(done + 3))
    assert processes.gone(second.marker, timeout=60) == []
    return summary["final_version"]


@pytest.mark.parametrize("mode", ["disk-delta", "broadcast"])
async def test_attached_engines_outlive_a_killed_driver_and_serve_the_continued_run(tiny_checkpoint, tmp_path, mode):
    engines = [OutsideEngine("embedded", tiny_checkpoint, tmp_path / f"engine-{i}.log") for i in range(2)]
    try:
        await started(engines)
        before = [engine.process for engine in engines]

        async def alive() -> None:
            assert all(process is not None and process.exit_code is None for process in before)

        final = await killed_and_continued(tiny_checkpoint, tmp_path / "run", attached(engines, mode), alive)
        await alive()
        for engine in engines:
            with await asyncio.to_thread(urllib.request.urlopen, f"http://{engine.address}/model_info") as answer:
                assert json.load(answer)["weight_version"] == f"outside/weight_v{final:06d}"
    finally:
        await ended(engines)


async def test_a_service_outlives_a_killed_driver_and_serves_the_continued_run(tiny_checkpoint, tmp_path):
    store = str(tmp_path / "store")
    async with Service(tmp_path / "service", store, tiny_checkpoint) as service:
        await asyncio.gather(service.add("a"), service.add("b"))
        pids = {name: command.process.pid for name, command in service.engines.items()}
        flags = ("--rollout-endpoint", service.url, "--version-store", store)

        async def alive() -> None:
            await service.until(lambda fleet: sorted(n for n, row in fleet.items() if row["ready"]) == ["a", "b"])

        final = await killed_and_continued(tiny_checkpoint, tmp_path / "run", flags, alive)
        await service.until(serves("outside", final, "a", "b"))
        assert {name: command.process.pid for name, command in service.engines.items()} == pids
        assert all(command.process.poll() is None for command in service.engines.values())
