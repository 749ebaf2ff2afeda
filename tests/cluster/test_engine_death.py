"""An engine's process, its actor, the gateway's or the version store's, killed in a run: training goes on in step."""

import asyncio
import os
import re
import signal
import time

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.observe.console import RunConsole
from tests.cluster import processes, test_gateway_death
from tests.cluster.steps import publish_step
from tests.cluster.test_ledger import kill_store


async def train_through_a_kill(config, kill) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            batch, metrics = await publish_step(run, step)
            if step == 0:
                await run.settle()
                await kill(run)
            await run.report(step, batch, metrics)
        await run.settle()
        assert await run.fleet.digests() == [await run.trainer.digests()] * len(run.fleet.members)
        await run.close_books()
        ledger = run.ledger
        assert ledger["trained"] == 4 * config.num_rollout
        assert ledger["generated"] == ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values())


async def kill_engine_process(run) -> None:
    engines = set(processes.with_text("miles_disagg.engine.embedded", "cmdline"))
    engines &= set(processes.with_text(run.config.run_id, "cmdline"))
    pid, *_ = sorted(engines - set(processes.with_text("guard.py", "cmdline")))
    os.kill(pid, signal.SIGKILL)


async def kill_engine_actor(run) -> None:
    import ray

    ray.kill(run.fleet.members[0].actor, no_restart=True)


async def kill_gateway(run) -> None:
    test_gateway_death.process().kill()


async def kill_version_store(run) -> None:
    kill_store()


@pytest.mark.parametrize(
    ("mode", "kill"),
    [
        ("disk-delta", kill_engine_process),
        pytest.param("disk-delta", kill_gateway, marks=pytest.mark.slow),
        pytest.param("disk-delta", kill_version_store, marks=pytest.mark.slow),
        pytest.param("broadcast", kill_version_store, marks=pytest.mark.slow),
        pytest.param("p2p", kill_version_store, marks=pytest.mark.slow),
        pytest.param("broadcast", kill_engine_process, marks=pytest.mark.slow),
        pytest.param("p2p", kill_engine_process, marks=pytest.mark.slow),
        pytest.param("p2p", kill_engine_actor, marks=pytest.mark.slow),
        pytest.param("disk-delta", kill_engine_actor, marks=pytest.mark.slow),
        pytest.param("broadcast", kill_engine_actor, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_when_a_part_is_killed(local_ray, run_config, mode, kill):
    config = run_config("--update-weight-transfer-mode", mode, "--num-rollout", "4")
    asyncio.run(train_through_a_kill(config, kill))


async def until_all_serve_again(run, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    down = False
    while True:
        rows = await run.fleet.status()
        up = [row["process_up"] and row["ready"] and row["applied"] == run.version for row in rows]
        if down and up == [True] * len(run.fleet.members):
            return
        down = down or not all(up) or len(up) < len(run.fleet.members)
        assert time.monotonic() < deadline, rows
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_engine_process, kill_engine_actor])
def test_an_engine_that_comes_back_gets_its_weights_from_another_one_not_from_the_trainer(
    local_ray, run_config, capsys, kill
):
    async def kill_and_wait(run) -> None:
        await kill(run)
        await until_all_serve_again(run)

    config = run_config("--update-weight-transfer-mode", "p2p", "--num-rollout-engines", "2", "--num-rollout", "3")
    asyncio.run(train_through_a_kill(config, kill_and_wait))
    said = capsys.readouterr().out
    assert re.search(r"engine-(\d) got \S+_v000001 from engine-(?!\1)", said), said
    assert "from the trainer" not in said
