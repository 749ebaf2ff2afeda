"""--sglang-config with stock SGLang: a trained policy beside a frozen model, which the loss and the reward ask."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.observe.console import RunConsole
from miles_disagg.replica.inplace import Plugin
from tests.cluster import processes
from tests.cluster.test_server_groups import digests, judge_checkpoint, prompts
from tests.engine import sglang_env

__all__ = ["judge_checkpoint"]
pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


async def train(config, judge: Path) -> dict:
    """Train as the loop does; what was seen of both engines after every version, and of the samples."""
    config.run_dir.mkdir(parents=True)
    seen: dict = {"policy": [], "frozen": [], "samples": [], "kl": []}
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        log = (config.run_dir / "logs" / "judge-0.log").read_text()
        address = re.search(r"running on (http://127\.0\.0\.1:\d+)", log)
        assert address is not None, log
        frozen = SGLangEngine(address[1])
        plugin = Plugin(frozen)
        await plugin.open(judge)
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            seen["samples"] += [s for group in batch.groups for s in group.samples]
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            seen["kl"].append(metrics["train/kl"])
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            seen["policy"].append((await run.trainer.digests(), await run.fleet.digests()))
            stamp = (await frozen.model_info())["weight_version"]
            seen["frozen"].append((stamp, await plugin.digests(judge)))
            await run.report(step, batch, metrics)
        await run.stop_generation()
        (row,) = await run.fleet.status()
        policy = SGLangEngine(row["engine_url"])
        seen["info"] = await policy.server_info(), await frozen.server_info()
        plugin.close()
        await policy.close()
        await frozen.close()
        await run.close_books()
    return seen


def test_a_frozen_model_scores_for_loss_and_reward_and_only_the_policy_is_updated(
    local_ray, run_config, tmp_path, judge_checkpoint
):
    policy = {"name": "policy", "server_groups": [{"num_engines": 1, "overrides": {"max-running-requests": 9}}]}
    judge = {"name": "judge", "model_path": str(judge_checkpoint), "update_weights": False}
    judge["server_groups"] = [{"num_engines": 1, "overrides": {"max_running_requests": 5, "random-seed": 77}}]
    file = tmp_path / "groups.yaml"
    file.write_text(json.dumps({"sglang": [policy, judge]}))
    config = run_config(
        *("--sglang-config", str(file), "--rollout-engine", "sglang", "--sglang-python", str(sglang_env.python())),
        *("--engine-start-timeout", "300", "--sglang-random-seed", "11", "--num-rollout", "3", "--lr", "1e-4"),
        *("--update-weight-transfer-mode", "disk-delta", "--pause-generation-mode", "in_place"),
        *("--custom-rm-path", "examples.judge.mean_logprob", "--prompt-data", str(prompts(tmp_path))),
        *("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-reference", "judge"),
    ).replace(task=None, task_size=None)
    seen = asyncio.run(train(config, judge_checkpoint))
    asked = [(info["max_running_requests"], info["random_seed"]) for info in seen["info"]]
    assert asked == [(9, 11), (5, 77)], "overrides win over the command line, each in its own group"
    trained = [trainer for trainer, _ in seen["policy"]]
    assert [served for _, served in seen["policy"]] == [[digest] for digest in trained]
    assert len({json.dumps(digest, sort_keys=True) for digest in trained}) == 3, "every version differs"
    assert seen["frozen"] == [("default", digests(judge_checkpoint))] * 3
    assert len(seen["samples"]) == 3 * 4 * 4
    for sample in seen["samples"]:
        scores = sample.reference_logprobs
        assert sample.reward == pytest.approx(sum(scores) / len(scores), abs=1e-4), "the judge's own logprobs"
    assert len({sample.reward for sample in seen["samples"]}) > 8
    assert all(kl > 1e-3 for kl in seen["kl"]), "the policy is not the frozen model"
    assert processes.gone(str(judge_checkpoint), timeout=30) == []
