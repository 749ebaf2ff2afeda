"""After every update, in every mode and layout, the engines serve what the trainer would export: bit for bit."""

import asyncio
import json

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.observe.console import RunConsole
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore

LAYOUTS = {"tp2": ("--tensor-model-parallel-size", "2"), "pp2": ("--pipeline-model-parallel-size", "2")}


async def train_and_compare(config) -> list[set[int]]:
    """Train as the loop does, comparing every engine with the trainer after each publication.

    Returns the versions that wrote each consumed sample.
    """
    config.run_dir.mkdir(parents=True, exist_ok=True)
    console = RunConsole("test", config.num_rollout)
    seen = []
    async with assembled(config, plan_placement(config), console) as run:
        before = await run.trainer.digests()
        assert await run.fleet.digests() == [before] * len(run.fleet.members)
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            seen += [set(s.token_versions()) for group in batch.groups for s in group.samples]
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            published = await run.trainer.digests()
            assert published != before, "the optimizer step changed nothing"
            served = await run.fleet.digests()
            assert served == [published] * len(run.fleet.members)
            before = published
            await run.report(step, batch, metrics)
        await run.stop_generation()
        await run.close_books()
    return seen


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("disk-delta", "pp2"),
        pytest.param("broadcast", "pp2", marks=pytest.mark.long),
        pytest.param("p2p", "pp2", marks=pytest.mark.long),
        pytest.param("p2p", "tp2", marks=pytest.mark.slow),
        pytest.param("disk-full", "tp2", marks=pytest.mark.slow),
        pytest.param("disk-delta", "tp2", marks=pytest.mark.slow),
        pytest.param("broadcast", "tp2", marks=pytest.mark.slow),
        pytest.param("disk-full", "pp2", marks=pytest.mark.slow),
    ],
)
def test_engines_serve_the_trainers_export_after_every_update(local_ray, run_config, capsys, mode, layout):
    flags = ("--update-weight-transfer-mode", mode, "--actor-num-gpus-per-node", "2", "--num-rollout-engines", "2")
    config = run_config(*flags, *LAYOUTS[layout])
    seen = asyncio.run(train_and_compare(config))
    assert len(seen) == 2 * 4 * 4
    assert seen[0] == {0}, "the first samples are the base's"
    written = (config.run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["weight_version_start"] for line in written] == [0] * 16
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [1, 2]
    assert all(row["train/rollout_logprob_abs_diff"] < 0.5 for row in rows)
    said = capsys.readouterr().out
    if mode == "p2p":
        planned = ("from 2 trainer rank(s) to 2 engine rank(s)", "every element once", "slowest pair: trainer rank ")
        for what in (*planned, "extra memory of a trainer rank: at most ", "engine-1: nixl, into a staging area"):
            assert what in said
    if mode == "disk-full":  # version 1 went when both engines had acknowledged it
        assert VersionStore(open_store(config.version_store)).versions(config.run_id) == [2]


@pytest.mark.parametrize(
    ("transport", "layout"),
    [
        pytest.param("broadcast", "tp2", marks=pytest.mark.long),
        pytest.param("broadcast", "pp2", marks=pytest.mark.slow),
        pytest.param("p2p", "tp2", marks=pytest.mark.slow),
    ],
)
def test_changed_elements_sent_to_engines_leave_them_equal_to_the_export(local_ray, run_config, transport, layout):
    flags = ("--update-weight-mode", "delta", "--update-weight-transport", transport)
    ranks = ("--actor-num-gpus-per-node", "2", "--num-rollout-engines", "2", "--num-rollout", "3", "--lr", "1e-5")
    config = run_config(*flags, *ranks, *LAYOUTS[layout])
    asyncio.run(train_and_compare(config))
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    wire = [row["perf/update_weights_wire_bytes"] for row in rows]
    # In fp32 a step may change every element: then the dense form goes, never more than a whole version.
    assert max(wire[1:]) <= wire[0] * 1.01


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["p2p", "broadcast", "disk-delta"])
def test_engines_serve_the_export_of_experts_that_are_spread_over_trainer_ranks(
    local_ray, run_config, tiny_experts, mode
):
    flags = ("--update-weight-transfer-mode", mode, "--actor-num-gpus-per-node", "2", "--num-rollout-engines", "2")
    config = run_config(*flags, "--expert-model-parallel-size", "2", "--hf-checkpoint", str(tiny_experts))
    seen = asyncio.run(train_and_compare(config))
    assert len(seen) == 2 * 4 * 4
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/rollout_logprob_abs_diff"] < 0.5 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "staging"), [("torch", "never"), ("nixl", "never"), ("torch", "always")])
def test_peer_to_peer_by_other_ways_leaves_engines_equal_to_the_export(
    local_ray, run_config, capsys, transport, staging
):
    flags = ("--update-weight-transfer-mode", "p2p", "--actor-num-gpus-per-node", "2", "--num-rollout-engines", "2")
    ways = ("--update-weight-p2p-transport", transport, "--update-weight-p2p-staging", staging)
    config = run_config(*flags, *ways, *LAYOUTS["tp2"])
    asyncio.run(train_and_compare(config))
    how = "into a staging area" if staging == "always" else "straight into the live weights, under the pause"
    assert f"engine-0: {transport}, {how}" in capsys.readouterr().out
