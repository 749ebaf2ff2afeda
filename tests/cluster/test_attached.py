"""Runs on engines that somebody else runs: discovery, a death in the middle, a new run against live engines."""

import asyncio
import json
import re
import time

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.domain.errors import DeadlineExceeded, EngineMismatch
from miles_disagg.observe.console import RunConsole
from tests.cluster.attached import OutsideEngine, ended, started
from tests.cluster.steps import publish_step
from tests.engine.checkpoints import make_checkpoint


def attached(engines: list[OutsideEngine], mode: str, *flags: str) -> tuple[str, ...]:
    addresses = [engine.address for engine in engines]
    return (
        *("--rollout-external", "--rollout-external-engine-addrs", *addresses),
        *("--update-weight-transfer-mode", mode, "--pause-generation-mode", "in_place", *flags),
    )


async def until_all_serve(run, seconds: float = 60.0) -> list[dict]:
    deadline = time.monotonic() + seconds
    while True:
        status = await run.fleet.status()
        if [row["applied"] for row in status] == [run.version] * len(run.fleet.members):
            return status
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.2)


async def until_lost(run, index: int, lost: bool, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while run.fleet.members[index].lost != lost:
        assert time.monotonic() < deadline, await run.fleet.status()
        await asyncio.sleep(0.1)


async def train_through_a_death(config, engines: list[OutsideEngine]) -> set[int]:
    """Kill the second engine after the first step, start it again after the third; versions trained on."""
    versions: set[int] = set()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        await started(engines)
        assert plan_placement(config).engines == (), "nothing is reserved for engines of others"
        async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
            await run.take_up()
            await run.start_generation()
            for step in run.steps:
                batch = await run.next_batch(step)
                versions |= {s.oldest_version for group in batch.groups for s in group.samples}
                metrics = await run.trainer.train(batch.groups, batch.trainer_version)
                await run.generation_saw(batch)
                await run.publish_next_version()
                await run.settle()
                if step == 0:
                    await engines[1].kill()
                    await until_lost(run, 1, True)
                if step == 2:
                    assert [row["ready"] for row in await run.fleet.status()] == [True, False]
                    await engines[1].start()
                    await until_all_serve(run)
                    await until_lost(run, 1, False)
                await run.report(step, batch, metrics)
            await until_all_serve(run)
            ours = await run.trainer.digests()
            assert await run.fleet.digests() == [ours, ours]
            assert all(engine.process is not None and engine.process.exit_code is None for engine in engines)
            await run.close_books()
            ledger = run.ledger
            assert ledger["trained"] == 4 * config.num_rollout
            assert ledger["generated"] == ledger["trained"] + ledger["queued"] + sum(ledger["dropped"].values())
        assert all(engine.process is not None and engine.process.exit_code is None for engine in engines), (
            "the run ended engines that are not its own"
        )
    finally:
        await ended(engines)
    return versions


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("embedded", "disk-delta", marks=pytest.mark.slow),
        pytest.param("embedded", "broadcast", marks=pytest.mark.slow),
        pytest.param("embedded", "disk-full", marks=pytest.mark.slow),
        pytest.param("embedded", "p2p", marks=pytest.mark.slow),
        pytest.param("sglang", "disk-delta", marks=pytest.mark.sglang),
        pytest.param("sglang", "broadcast", marks=pytest.mark.sglang),
        pytest.param("sglang", "p2p", marks=[pytest.mark.sglang, pytest.mark.slow]),
    ],
)
def test_a_dead_attached_engine_leaves_rotation_and_comes_back(
    local_ray, run_config, tiny_checkpoint, tmp_path, capsys, kind, mode
):
    engines = [OutsideEngine(kind, tiny_checkpoint, tmp_path / f"outside-{i}.log") for i in range(2)]
    config = run_config(*attached(engines, mode, "--num-rollout", "5", "--lr", "1e-4"))
    versions = asyncio.run(train_through_a_death(config, engines))
    assert max(versions) >= 2, "no sample came from a published version"
    said = capsys.readouterr().out
    assert "engine-1" in said
    assert "is out of rotation" in said
    assert "is back" in said
    if mode == "p2p":
        assert re.search(r"engine-1 got \S+ from engine-0", said)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["fleet/replicas_ready"] for row in rows if "fleet/replicas_ready" in row][-1] == 2


async def two_runs(configs, engine: OutsideEngine) -> list[list]:
    """One run after another against the same live engine; what its trainer and the engine held at each end."""
    ends = []
    try:
        await engine.start()
        process = engine.process
        for config in configs:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
                await run.take_up()
                await run.start_generation()
                for step in run.steps:
                    batch, metrics = await publish_step(run, step)
                    await run.settle()
                    await run.save_checkpoint(step)
                    await run.report(step, batch, metrics)
                ends.append([run.version, await run.trainer.digests(), *await run.fleet.digests()])
                await run.close_books()
            assert engine.process is process
            assert process is not None
            assert process.exit_code is None
    finally:
        await ended([engine])
    return ends


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("embedded", "broadcast"), ("embedded", "p2p"), pytest.param("sglang", "p2p", marks=pytest.mark.sglang)],
)
def test_a_trainer_that_starts_again_sends_to_the_live_engine(
    local_ray, run_config, tiny_checkpoint, tmp_path, kind, mode
):
    from miles_disagg.config.flags import parse_run
    from miles_disagg.config.resolve import resolve

    engine = OutsideEngine(kind, tiny_checkpoint, tmp_path / "outside.log")
    first = run_config(*attached([engine], mode, "--run-id", "again"))

    def continued():
        from miles_disagg.config.flags import save_config

        save_config(first, first.run_dir / "config.yaml")
        return resolve(parse_run(["--load", str(first.run_dir), "--num-rollout", "4"]), gpus=0)

    first.run_dir.mkdir(parents=True)
    ends = asyncio.run(two_runs([first, continued()], engine))
    for version, trainers, served in ends:
        assert served == trainers, version
    assert ends[0][0] == 3  # the base weights went first, since the engine held no version of this run
    assert ends[1][0] == 3 + 1 + 2


def test_an_engine_with_another_model_is_refused_by_name(local_ray, run_config, tmp_path):
    other = make_checkpoint(tmp_path / "other", architecture="llama")
    engine = OutsideEngine("embedded", other, tmp_path / "outside.log", "--dtype", "bfloat16")
    config = run_config(*attached([engine], "disk-delta"))

    async def refused() -> None:
        config.run_dir.mkdir(parents=True)
        try:
            await engine.start()
            async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)):
                pass
        finally:
            await ended([engine])

    with pytest.raises(EngineMismatch) as caught:
        asyncio.run(refused())
    assert caught.value.problems[0] == "architectures are LlamaForCausalLM, the checkpoint's are Qwen3ForCausalLM"
    assert caught.value.problems[1].startswith("dtype is bfloat16, the run's is float32")


def test_an_address_where_nothing_answers_is_named_after_the_deadline(local_ray, run_config, tiny_checkpoint, tmp_path):
    engine = OutsideEngine("embedded", tiny_checkpoint, tmp_path / "outside.log")
    config = run_config(*attached([engine], "disk-delta", "--engine-start-timeout", "2"))

    async def refused() -> None:
        config.run_dir.mkdir(parents=True)
        async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)):
            pass

    with pytest.raises(DeadlineExceeded, match=engine.address) as caught:
        asyncio.run(refused())
    assert "--rollout-external-engine-addrs" in str(caught.value)
