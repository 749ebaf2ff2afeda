"""Engines that only evaluate: at the version that is evaluated, whatever rollouts do meanwhile."""

import asyncio
import json
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from miles_disagg.cluster.assemble import assembled
from miles_disagg.cluster.evaluation_replicas import EvaluationReplicas
from miles_disagg.config.placement import plan_placement
from miles_disagg.domain.errors import EngineError, WeightVersionGone
from miles_disagg.observe.console import RunConsole
from tests.cluster.steps import publish_step


class Answer:
    """A Ray reference that is there already."""

    def __init__(self, error: Exception | None):
        self._future: Future[None] = Future()
        self._future.set_exception(error) if error else self._future.set_result(None)

    def future(self) -> Future[None]:
        return self._future


def member(name: str, *errors: Exception | None) -> Any:
    """An engine whose `pin` ends with one error after another, and well once they are through."""
    left = list(errors)
    pin = SimpleNamespace(remote=lambda version, seconds: Answer(left.pop(0) if left else None))
    spec, actor = SimpleNamespace(replica_id=name), SimpleNamespace(pin=pin)
    return SimpleNamespace(spec=spec, actor=actor, given_up=None)


def replicas(*members: Any, timeout: float = 5.0) -> tuple[EvaluationReplicas, list[str]]:
    said: list[str] = []
    fleet: Any = SimpleNamespace(members=list(members), say=said.append)
    return EvaluationReplicas(fleet, timeout, pause=0.01), said


async def test_one_that_cannot_is_named_and_the_others_evaluate():
    some, said = replicas(member("eval-0", WeightVersionGone(3, 4)), member("eval-1"))
    await some.pin(3)
    assert len(said) == 1
    assert "eval-0 does not evaluate version 3" in said[0]


async def test_an_engine_that_is_started_anew_is_asked_again():
    some, said = replicas(member("eval-0", EngineError("eval-0 has not started"), EngineError("nor yet")))
    await some.pin(3)
    assert said == []


async def test_where_none_can_the_evaluation_fails_with_the_reason():
    some, _ = replicas(member("eval-0", WeightVersionGone(3, 4)), member("eval-1", WeightVersionGone(3, 5)))
    with pytest.raises(WeightVersionGone, match="4"):
        await some.pin(3)
    hopeless, _ = replicas(member("eval-0", *[EngineError("dead")] * 1000), timeout=0.05)
    with pytest.raises(EngineError, match="dead"):
        await hopeless.pin(3)


async def test_one_that_was_given_up_is_not_waited_for():
    lost = member("eval-0", *[EngineError("dead")] * 1000)
    some, said = replicas(lost, member("eval-1"), timeout=600)
    lost.given_up = "given up after 5 replacements of its actor"
    await asyncio.wait_for(some.pin(3), 5)
    assert "eval-0 does not evaluate version 3: given up after 5 replacements" in said[0]


async def train_without_an_evaluator(config) -> None:
    import ray

    config.run_dir.mkdir(parents=True, exist_ok=True)
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        assert run.evaluators is not None
        (judge,) = run.evaluators.fleet.members
        judge.spec = replace(judge.spec, restart_limit=0)
        ray.kill(judge.actor)
        async with asyncio.timeout(60):
            while judge.given_up is None:
                await asyncio.sleep(0.1)
        await run.start_generation()
        for step in run.steps:
            batch, metrics = await publish_step(run, step)
            await run.report(step, batch, metrics)
        await run.stop_generation()
        await run.settle()
        async with asyncio.timeout(30):
            await run.evaluate_final()
        await run.close_books()
        assert "1 evaluation(s) were skipped" in " ".join(run.summary("completed").sentences())


@pytest.mark.slow
def test_a_run_whose_evaluator_is_lost_for_good_trains_to_its_end_and_says_what_is_missing(local_ray, run_config):
    config = run_config(
        "--update-weight-transfer-mode", "disk-delta", "--eval-num-replicas", "1", "--eval-interval", "10",
        "--skip-eval-before-train",
    )  # fmt: skip
    asyncio.run(train_without_an_evaluator(config))
    (row,) = [json.loads(line) for line in (config.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert (row["step"], row["weight_version"], row["status"]) == (2, 2, "skipped")
    assert "given up after 0 replacements" in row["reason"]


async def evaluate_beside_training(config) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    published = []
    async with assembled(config, plan_placement(config), RunConsole("test", config.num_rollout)) as run:
        evaluators = run.evaluators
        assert evaluators is not None
        async with aiohttp.ClientSession() as session, session.get(f"{run.fleet.gateway_url}/fleet") as response:
            assert [row["replica_id"] for row in (await response.json())["replicas"]] == ["engine-0"]
        published.append(await run.trainer.digests())
        await run.evaluate_base()
        assert await evaluators.fleet.digests() == [published[0]]
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            assert {s.replica_id for group in batch.groups for s in group.samples} == {"engine-0"}
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            if run.evaluation_is_due(step):  # before the version is published
                await run.evaluate_in_background(step)
            await run.settle()
            published.append(await run.trainer.digests())
            await run.report(step, batch, metrics)
        await run.stop_generation()
        async with asyncio.timeout(60):
            while len(run.accuracies) < 2:
                await asyncio.sleep(0.05)
        assert await run.fleet.digests() == [published[3]], "rollouts have moved on"
        assert await evaluators.fleet.digests() == [published[2]], "exactly what was evaluated is still there"
        await run.evaluate_final()
        assert await evaluators.fleet.digests() == [published[3]]
        assert len({json.dumps(digests, sort_keys=True) for digests in published}) == 4
        await run.close_books()


@pytest.mark.long
def test_an_engine_of_evaluation_alone_stays_at_the_version_while_rollouts_go_on(local_ray, run_config):
    config = run_config(
        "--update-weight-transfer-mode", "disk-delta", "--eval-num-replicas", "1",
        "--eval-interval", "2", "--num-rollout", "3",
    )  # fmt: skip
    asyncio.run(evaluate_beside_training(config))
    rows = [json.loads(line) for line in (config.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["step"], row["weight_version"], row["status"]) for row in rows] == [
        (0, 0, "done"), (1, 2, "done"), (3, 3, "done"),
    ]  # fmt: skip
    assert all(row["eval/weight_version"] == row["weight_version"] for row in rows)
    assert all(row["eval/failed"] == 0 and row["eval/pin_seconds"] >= 0 for row in rows)
