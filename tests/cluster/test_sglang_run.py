"""The whole system with stock SGLang servers on the CPU as its managed engines, in every weight-sync mode."""

import asyncio
import json

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.observe.console import RunConsole
from tests.cluster.test_weight_sync import LAYOUTS, train_and_compare
from tests.engine import sglang_env

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def checkpoints_in_bf16(tmp_path_factory):
    """A dense model and a mixture of four experts, untrained, in the dtype that leaves most elements where they are."""
    import torch

    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    paths = {}
    for name, experts in (("dense", 0), ("experts", 4)):
        paths[name] = tmp_path_factory.mktemp("bf16") / name
        model = make_model(Recipe(hidden_size=64, layers=2, experts=experts))
        model.to(torch.bfloat16).save_pretrained(paths[name])
        make_tokenizer().save_pretrained(paths[name])
    return paths


async def train_and_compare_every_rank(config) -> list[dict]:
    """Train as the loop does, comparing after each publication; what the engines say of themselves at the end."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    versions = []
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            versions.append(await run.trainer.digests())
            assert await run.fleet.digests() == [versions[-1]] * len(run.fleet.members)
            await run.report(step, batch, metrics)
        await run.stop_generation()
        status = await run.fleet.statuses()
        for row in status:
            engine = SGLangEngine(row["engine_url"])
            row["ranks"] = (await engine.server_info())["tp_size"]
            await engine.close()
        await run.close_books()
    assert len({tuple(sorted(digests.items())) for digests in versions}) == len(versions), "a step changed nothing"
    return status


async def train(config) -> list:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    samples = []
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            samples += [(batch.trainer_version, s) for group in batch.groups for s in group.samples]
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()  # so that the next step's samples can be of this version
            await run.report(step, batch, metrics)
        status = await run.fleet.status()
        assert [row["applied"] for row in status] == [run.version] * len(status)
        await run.stop_generation()
        await run.close_books()
    return samples


@pytest.mark.parametrize(
    ("layout", "staging"),
    [
        ("tp1", "always"),
        pytest.param("tp2", "always", marks=pytest.mark.slow),
        ("tp2", "never"),
        ("pp2", "always"),
        pytest.param("pp2", "never", marks=pytest.mark.slow),
    ],
)
def test_stock_sglang_serves_the_export_bit_for_bit_after_peer_to_peer_updates(
    local_ray, run_config, capsys, layout, staging
):
    ranks = ("--actor-num-gpus-per-node", "2", *LAYOUTS[layout]) if layout in LAYOUTS else ()
    config = run_config(
        *("--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python())),
        *("--update-weight-transfer-mode", "p2p", "--update-weight-p2p-staging", staging),
        *ranks,
        *("--engine-start-timeout", "300"),
    )
    seen = asyncio.run(train_and_compare(config))
    assert seen[0] == {0}
    assert len(seen) == 2 * 4 * 4
    how = "into a staging area" if staging == "always" else "straight into the live weights"
    assert f"p2p: engine-0: nixl, {how}" in capsys.readouterr().out


def test_stock_sglang_serves_the_export_of_experts_that_are_spread_over_trainer_ranks(
    local_ray, run_config, tiny_experts
):
    config = run_config(
        *("--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python())),
        *("--update-weight-transfer-mode", "p2p", "--hf-checkpoint", str(tiny_experts)),
        *("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2", "--engine-start-timeout", "300"),
    )
    assert len(asyncio.run(train_and_compare(config))) == 2 * 4 * 4


@pytest.mark.parametrize("mode", ["broadcast", "disk-full", "disk-delta"])
def test_a_run_with_stock_sglang_stamps_its_samples_right(local_ray, run_config, mode):
    config = run_config(
        *("--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python())),
        *("--update-weight-transfer-mode", mode, "--num-rollout", "3", "--lr", "1e-4"),
        *("--max-weight-staleness", "1", "--engine-start-timeout", "300", "--pause-generation-mode", "in_place"),
    )
    samples = asyncio.run(train(config))
    assert {s.version_start for version, s in samples if version == 0} == {0}
    for trainer_version, sample in samples:
        assert trainer_version - 1 <= sample.oldest_version <= sample.version_end <= trainer_version
        assert len(sample.token_versions()) == len(sample.tokens) == len(sample.logprobs)
    assert max(s.version_end for _, s in samples) >= 1, "no sample came from a published version"
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    # The engine runs the checkpoint in bfloat16, the trainer in fp32: same policy, so the logprobs stay close.
    assert all(row["train/rollout_logprob_abs_diff"] < 0.1 for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "mode"),
    [
        ("experts", 1, "disk-delta"),
        ("experts", 1, "broadcast"),
        ("experts", 2, "disk-delta"),
        ("dense", 2, "disk-delta"),
        ("dense", 2, "broadcast"),
        ("dense", 2, "p2p"),
    ],
)
def test_a_run_whose_sglang_engine_has_experts_or_ranks_is_served_bit_for_bit(
    local_ray, run_config, checkpoints_in_bf16, model, ranks, mode
):
    config = run_config(
        *("--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python()), "--engine-start-timeout", "300"),
        *("--hf-checkpoint", str(checkpoints_in_bf16[model]), "--rollout-num-gpus-per-engine", str(ranks)),
        *("--train-dtype", "bf16", "--use-distributed-optimizer", "--lr", "3e-6", "--entropy-coef", "0.01"),
        *("--update-weight-transfer-mode", mode, "--pause-generation-mode", "in_place", "--num-rollout", "3"),
        *(("--activation", "in-place") if mode == "disk-delta" else ()),
    )
    (status,) = asyncio.run(train_and_compare_every_rank(config))
    assert status["ranks"] == ranks
    if mode == "disk-delta":
        assert (status["loader"]["mode"], status["loader"]["in_place"]) == ("in-place", 3), status["loader"]
