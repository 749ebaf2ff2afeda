"""Runs whose engines stand behind a real sglang-router: each of them holds what the trainer exported."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.machine import free_port
from miles_disagg.config.placement import plan_placement
from miles_disagg.observe.console import RunConsole
from tests.cluster.attached import OutsideEngine, OutsideRouter, ended
from tests.engine import sglang_env

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def routed(router: OutsideRouter, engines: list[OutsideEngine], mode: str, *flags: str) -> tuple[str, ...]:
    return (
        *("--rollout-external", "--rollout-external-engine-addrs", *(engine.address for engine in engines)),
        *("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(router.port)),
        *("--update-weight-transfer-mode", mode, "--pause-generation-mode", "in_place", *flags),
    )


async def until(run, what, seconds: float = 60.0) -> None:
    """Wait for `what(status of the only replica)`."""
    deadline = time.monotonic() + seconds
    while True:
        (status,) = await run.fleet.status()
        if what(status):
            return
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.2)


async def workers(router: OutsideRouter) -> set[str]:
    """URLs of the workers that the router uses."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{router.port}/workers") as response:
        return {row["url"] for row in (await response.json())["workers"] if row["is_healthy"]}


async def train(
    config, router: OutsideRouter, engines: list[OutsideEngine], *, kill: bool, victim: int | None = None
) -> set[int]:
    """Train; with `kill` the second engine dies after the first step and comes back after the third; `victim`: which
    one dies after the first and is started again at once, because nothing is generated without it. Versions seen."""
    versions: set[int] = set()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    urls = {f"http://{engine.address}" for engine in engines}
    try:
        await router.start()
        for engine in engines:  # one at a time: each loads a model
            await engine.start()
        async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
            await run.take_up()
            assert await workers(router) == urls
            await run.start_generation()
            for step in run.steps:
                batch = await run.next_batch(step)
                versions |= {s.oldest_version for group in batch.groups for s in group.samples}
                metrics = await run.trainer.train(batch.groups, batch.trainer_version)
                await run.generation_saw(batch)
                await run.publish_next_version()
                await run.settle()
                if victim is not None and step == 0:
                    await engines[victim].kill()
                    await until(run, lambda s: not s["ready"] or f"http://{engines[victim].address}" in s["out"])
                    await engines[victim].start(wait=False)
                    await until(run, lambda s: s["ready"] and not s["out"] and s["applied"] == run.version, 240.0)
                if kill and step == 0:
                    await engines[1].kill()
                    await until(run, lambda status: list(status["out"]) == [f"http://{engines[1].address}"])
                if kill and step == 2:
                    await until(run, lambda status: status["ready"])
                    assert await workers(router) == {f"http://{engines[0].address}"}
                    await engines[1].start(wait=False)  # as soon as it answers it is given another checkpoint
                    await until(run, lambda s: all(row["answers"] for row in s["out"].values()), 240.0)
                await run.report(step, batch, metrics)
            await until(run, lambda status: not status["out"] and status["applied"] == run.version)
            ours = await run.trainer.digests()
            assert await run.fleet.digests() == [ours], "every member serves the trainer's export, bit for bit"
            deadline = time.monotonic() + 20
            while await workers(router) != urls:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            await run.close_books()
            ledger = run.ledger
            assert ledger["trained"] == 4 * config.num_rollout
            assert ledger["generated"] == ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values())
        assert all(e.process is not None and e.process.exit_code is None for e in engines), "ended what is not its own"
    finally:
        await ended([router, *engines])
    return versions


@pytest.mark.parametrize(
    ("kind", "mode", "kill"),
    [
        ("embedded", "disk-delta", True),
        ("embedded", "broadcast", True),
        ("sglang", "disk-delta", True),
        ("sglang", "broadcast", False),
    ],
)
def test_engines_behind_a_router_are_updated_together_and_one_may_die(
    local_ray, run_config, tiny_checkpoint, tmp_path, kind, mode, kill
):
    router = OutsideRouter(tmp_path / "router.log")
    engines = [OutsideEngine(kind, tiny_checkpoint, tmp_path / f"outside-{i}.log") for i in range(2)]
    steps = "6" if kill else "3"
    config = run_config(*routed(router, engines, mode, "--num-rollout", steps, "--lr", "1e-4"))
    versions = asyncio.run(train(config, router, engines, kill=kill))
    assert max(versions) >= 1, "no sample came from a published version"
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {row["fleet/replicas_ready"] for row in rows if "fleet/replicas_ready" in row} == {1}


def prefill_and_decode(checkpoint: Path, logs: Path) -> tuple[list[OutsideEngine], OutsideRouter]:
    """One server of each kind and the router before them, none started."""
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-mode")
    kinds = {"prefill": ("--disaggregation-bootstrap-port", str(free_port())), "decode": ()}
    engines = [
        OutsideEngine("sglang", checkpoint, logs / f"{kind}.log", *transfer, kind, *more, env=sglang_env.kv_transfer())
        for kind, more in kinds.items()
    ]
    return engines, OutsideRouter(logs / "router.log", "--pd-disaggregation")


@pytest.mark.parametrize("mode", ["disk-delta", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_a_prefill_decode_group_that_passes_kv_caches_on_is_updated_as_one_engine(
    local_ray, run_config, tiny_checkpoint, tmp_path, mode
):
    engines, router = prefill_and_decode(tiny_checkpoint, tmp_path)
    pace = ("--num-rollout", "4", "--max-weight-staleness", "1", "--lr", "1e-4")
    config = run_config(*routed(router, engines, mode, *pace))
    versions = asyncio.run(train(config, router, engines, kill=False))
    assert max(versions) >= 2, "no sample came from a published version"
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    # both kinds hold the policy: what is decoded on a prefill of other weights would have other logprobs
    assert all(row["train/rollout_logprob_abs_diff"] < 1e-3 for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_a_prefill_or_decode_server_that_is_killed_comes_back_at_the_current_version(
    local_ray, run_config, tiny_checkpoint, tmp_path, victim
):
    engines, router = prefill_and_decode(tiny_checkpoint, tmp_path)
    pace = ("--num-rollout", "4", "--max-weight-staleness", "1", "--lr", "1e-4")
    config = run_config(*routed(router, engines, "disk-delta", *pace))
    assert max(asyncio.run(train(config, router, engines, kill=False, victim=victim))) >= 2
