"""A user's evaluation function gets the published version's bytes as a checkpoint, and its failures have its name."""

import asyncio
import time
from pathlib import Path

import pytest

from miles_disagg.cluster.external_evaluation import ExternalEvaluation
from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError
from miles_disagg.domain.versions import Constraint
from miles_disagg.store.base import open_store
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base


class Published:
    """A run with versions 1 and 2 in a store."""

    async def make(self, directory: Path) -> None:
        self.base, self.url, self.scratch = directory / "base", str(directory / "weights"), directory / "scratch"
        self.tensors = [tiny_tensors()]
        write_base(self.base, self.tensors[0])
        self.trainer = FakeTrainer(open_store(self.url), self.base, "run")
        await self.trainer.claim()
        for seed in (1, 2):
            await self.publish(seed)

    async def publish(self, seed: int) -> None:
        self.tensors.append(step(self.tensors[-1], seed))
        await self.trainer.publish(self.tensors[-1])

    def evaluation(self, function) -> ExternalEvaluation:
        return ExternalEvaluation(function, self.url, "run", self.base, self.scratch)


@pytest.fixture
async def published(tmp_path) -> Published:
    made = Published()
    await made.make(tmp_path)
    return made


async def test_the_function_gets_the_bytes_of_exactly_that_version(published: Published):
    seen = []

    def function(checkpoint: Path, version: int) -> float:
        seen.append((version, on_disk(checkpoint), (checkpoint / "config.json").exists()))
        return 0.25

    for version in (1, 2, 0):
        metrics = await published.evaluation(function)(Constraint(exact_version=version), 30)
        assert (metrics["eval/accuracy"], metrics["eval/weight_version"]) == (0.25, version)
    assert seen == [(v, raw(published.tensors[v]), True) for v in (1, 2, 0)]
    assert list(published.scratch.iterdir()) == [], "exported checkpoints are removed"


async def test_a_version_that_is_not_published_yet_is_waited_for(published: Published):
    work = asyncio.create_task(published.evaluation(lambda path, version: 1.0)(Constraint(exact_version=3), 30))
    await asyncio.sleep(0.2)
    assert not work.done()
    await published.publish(3)
    assert (await work)["eval/weight_version"] == 3


async def test_what_goes_wrong_has_the_functions_name(published: Published):
    def broken(path: Path, version: int) -> float:
        raise KeyError("task")

    def slow(path: Path, version: int) -> float:
        time.sleep(1.0)
        return 0.0

    with pytest.raises(MilesDisaggError, match="broken raised KeyError for run/weight_v000002"):
        await published.evaluation(broken)(Constraint(exact_version=2), 30)
    with pytest.raises(MilesDisaggError, match="not finite"):
        await published.evaluation(lambda path, version: float("nan"))(Constraint(exact_version=2), 30)
    with pytest.raises(DeadlineExceeded, match="slow to evaluate run/weight_v000002"):
        await published.evaluation(slow)(Constraint(exact_version=2), 0.3)
