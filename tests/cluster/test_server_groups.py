"""--sglang-config in a run: engines of several kinds for the policy, a frozen judge that rewards, a placeholder."""

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.config.placement import plan_placement
from miles_disagg.domain.errors import ConfigError
from miles_disagg.engine.discovery import ModelFacts
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.observe.console import RunConsole
from miles_disagg.rollout.frozen import FrozenHost, FrozenSpec
from miles_disagg.rollout.processes import EngineCommand
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import digest
from tests.cluster import processes


@pytest.fixture(scope="session")
def judge_checkpoint(tmp_path_factory):
    """Another model than the policy: its own random weights, wider, the same tokenizer."""
    import torch

    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    path = tmp_path_factory.mktemp("judge") / "judge"
    torch.manual_seed(7)
    make_model(Recipe(hidden_size=128, layers=1)).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def digests(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {name: digest(checkpoint.bytes(name), "xxh3-128") for name in checkpoint.tensors}


async def trained(config, seen: dict) -> None:
    config.run_dir.mkdir(parents=True)
    plan = plan_placement(config)
    async with assembled(config, plan, RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            seen.setdefault("rewards", []).extend(s.reward for group in batch.groups for s in group.samples)
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            await run.report(step, batch, metrics)
        assert await run.fleet.digests() == [await run.trainer.digests()] * 2
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in policy_servers(config)]
        seen["overridden"] = sorted(line.count(b"--max-running-requests\0" + b"3\0") for line in lines)
        log = (config.run_dir / "logs" / "judge-0.log").read_text()
        address = re.search(r"on (127\.0\.0\.1:\d+)", log)
        assert address is not None, log
        judge = SGLangEngine(f"http://{address[1]}")
        seen["judge"] = (await judge.model_info())["weight_version"], await judge.weights_digest()
        await judge.close()
        await run.close_books()


def policy_servers(config) -> set[int]:
    """Processes of the run's policy engines (their version stamp names the run), without their guards."""
    return set(processes.with_text(f"{config.run_id}/weight", "cmdline")) - set(
        processes.with_text("guard.py", "cmdline")
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_judge_rewards_and_policy_engines_differ_by_their_group(
    local_ray, run_config, tmp_path, judge_checkpoint
):
    file = tmp_path / "groups.yaml"
    groups = [{"num_engines": 1}, {"num_engines": 1, "overrides": {"max-running-requests": 3}}]
    groups.append({"worker_type": "placeholder", "num_engines": 1})
    judge = {"name": "judge", "model_path": str(judge_checkpoint), "update_weights": False}
    judge["server_groups"] = [{"num_engines": 1}]
    file.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": groups}, judge]}))
    config = run_config(
        *("--sglang-config", str(file), "--update-weight-transfer-mode", "disk-delta", "--num-rollout", "2"),
        *("--custom-rm-path", "examples.judge.mean_logprob", "--prompt-data", str(prompts(tmp_path))),
    ).replace(task=None, task_size=None)
    plan = plan_placement(config)
    assert [g.unit.name for g in plan.groups if g.unit] == [
        "engine-0", "engine-1", "judge-0", "engine-placeholder-0",
    ]  # fmt: skip
    seen: dict = {}
    asyncio.run(trained(config, seen))
    assert len(set(seen["rewards"])) > 1
    assert all(reward < 0 for reward in seen["rewards"]), "logprobs of another model"
    assert seen["overridden"] == [0, 1], "the override reached one engine and not the other"
    assert seen["judge"] == ("default", digests(judge_checkpoint)), "the judge was touched"
    assert processes.gone(str(judge_checkpoint), timeout=30) == []


def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"{n}+{n}="}) + "\n" for n in range(10, 60)))
    return path


async def test_a_frozen_engine_that_dies_is_there_again_under_its_address(judge_checkpoint, tmp_path):
    command = EngineCommand(
        "embedded", str(judge_checkpoint), "cpu", tmp_path / "judge.log",
        args=("--dtype", ModelFacts.read(judge_checkpoint).dtype),
    )  # fmt: skip
    host = FrozenHost(FrozenSpec("judge-0", command, True, 120.0), "127.0.0.1")
    url = await host.start()

    async def alive() -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    try:
        port = url.rpartition(":")[2]
        (pid,) = set(processes.with_text(f"--port\0{port}", "cmdline")) - set(
            processes.with_text("guard.py", "cmdline")
        )
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while not (host.restarts == 1 and await alive()):
            assert time.monotonic() < deadline, host.failure
            await asyncio.sleep(0.2)
    finally:
        await host.stop()
    assert not await alive()
    assert processes.with_text(f"--port\0{port}", "cmdline") == []


async def trained_against_a_reference(config, run_of: dict, kill_at: int | None = None) -> None:
    config.run_dir.mkdir(parents=True)
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        await run.start_generation()
        for step in run.steps:
            if step == kill_at:
                below = psutil.Process().children(recursive=True)
                for actor in [p for p in below if "ray::FrozenEngine" in " ".join(p.cmdline())]:
                    actor.kill()
            batch = await run.next_batch(step)
            samples = [s for group in batch.groups for s in group.samples]
            assert all(s.reference_logprobs is not None and len(s.reference_logprobs) == len(s.tokens) for s in samples)
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            run_of.setdefault("kl", []).append(metrics["train/kl"])
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            await run.report(step, batch, metrics)
        await run.close_books()
        run_of["ledger"] = run.ledger


def with_a_reference(tmp_path: Path, checkpoint: Path) -> tuple[str, ...]:
    """Flags of a run whose KL term is to a frozen model, served by two engines."""
    reference = {"name": "ref", "model_path": str(checkpoint), "update_weights": False}
    reference["server_groups"] = [{"num_engines": 2}]
    file = tmp_path / "groups.yaml"
    file.write_text(json.dumps({"sglang": [{"name": "policy", "server_groups": [{"num_engines": 1}]}, reference]}))
    kl = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-reference", "ref")
    return ("--sglang-config", str(file), *kl, "--update-weight-transfer-mode", "disk-delta")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_model_is_the_reference_of_the_kl_term(local_ray, run_config, tmp_path, tiny_checkpoint):
    seen: dict = {}
    asyncio.run(trained_against_a_reference(run_config(*with_a_reference(tmp_path, tiny_checkpoint)), seen))
    assert seen["kl"][0] == pytest.approx(0.0, abs=1e-4), "the first policy is the reference"
    assert seen["kl"][1] > 1e-5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_frozen_engines_whose_actors_die_are_there_again_and_no_prompt_is_given_up(
    local_ray, run_config, tmp_path, tiny_checkpoint, capsys
):
    seen: dict = {}
    config = run_config(*with_a_reference(tmp_path, tiny_checkpoint), "--num-rollout", "8")
    asyncio.run(trained_against_a_reference(config, seen, kill_at=1))
    assert len(seen["kl"]) == 8
    assert seen["ledger"]["given_up"] == {}
    said = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert said.count("starting a new one at http") >= 2, "once more if a port was not free yet"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reference_with_another_vocabulary_is_refused_once_it_is_there(local_ray, run_config, tmp_path):
    from tests.engine.checkpoints import make_checkpoint

    other = make_checkpoint(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"--kl-reference http.*: the reference has another vocabulary"):
        asyncio.run(trained_against_a_reference(run_config(*with_a_reference(tmp_path, other)), {}))
