"""Evaluations beside training: filed under their version and step however late, one at a time, skips with reasons."""

import asyncio
import json

import pytest

from miles_disagg.cluster.evaluation import Evaluations
from miles_disagg.domain.errors import WeightVersionGone
from miles_disagg.observe.trackers import JsonlTracker, Trackers


class Bench:
    """Evaluations whose answers are held back until `finish[version]` is set."""

    def __init__(self, run_dir, *, wait: bool = False):
        self.run_dir, self.asked, self.finish = run_dir, [], {}
        self.gone: set[int] = set()
        self.trackers = Trackers([JsonlTracker(run_dir / "metrics.jsonl")])
        self.said: list[str] = []
        self.evaluations = Evaluations(self.ask, self.trackers, self.said.append, run_dir, wait=wait)

    async def ask(self, constraint):
        version = constraint.exact_version
        self.asked.append(version)
        if version in self.gone:
            raise WeightVersionGone(version, version + 1)
        await self.finish.setdefault(version, asyncio.Event()).wait()
        return {"eval/accuracy": version / 100}

    def done(self, version: int) -> None:
        self.finish.setdefault(version, asyncio.Event()).set()

    def rows(self, name: str) -> list[dict]:
        self.trackers.close()
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


async def test_a_late_result_lands_at_its_own_step_and_version(tmp_path):
    bench = Bench(tmp_path)
    await bench.evaluations.in_background(9, 10)
    await asyncio.sleep(0)
    bench.trackers.log(10, 11, {"perf/step_seconds": 1.0})  # training goes on
    bench.trackers.log(11, 12, {"perf/step_seconds": 1.0})
    bench.done(10)
    await bench.evaluations.finish()
    (row,) = [r for r in bench.rows("metrics.jsonl") if "eval/accuracy" in r]
    assert (row["step"], row["weight_version"], row["eval/accuracy"]) == (9, 10, 0.1)
    assert bench.evaluations.accuracies == [(10, 0.1)]


async def test_one_that_is_due_too_early_is_skipped_with_its_reason(tmp_path):
    bench = Bench(tmp_path)
    await bench.evaluations.in_background(9, 10)
    await asyncio.sleep(0)
    await bench.evaluations.in_background(19, 20)
    bench.done(10)
    await bench.evaluations.finish()
    assert bench.asked == [10]
    filed = bench.rows("evaluations.jsonl")
    assert [(r["weight_version"], r["status"]) for r in filed] == [(20, "skipped"), (10, "done")]
    assert "still ran" in filed[0]["reason"]
    assert [r["eval/skipped"] for r in bench.rows("metrics.jsonl") if "eval/skipped" in r] == [1.0]


async def test_or_training_waits_for_the_one_before(tmp_path):
    bench = Bench(tmp_path, wait=True)
    await bench.evaluations.in_background(9, 10)
    second = asyncio.create_task(bench.evaluations.in_background(19, 20))
    await asyncio.sleep(0.01)
    assert not second.done()
    bench.done(10)
    bench.done(20)
    await second
    await bench.evaluations.finish()
    assert bench.evaluations.accuracies == [(10, 0.1), (20, 0.2)]
    assert bench.evaluations.skipped == 0


async def test_a_version_that_is_gone_is_a_skip_and_a_bug_is_an_error(tmp_path):
    bench = Bench(tmp_path)
    bench.gone = {10}
    await bench.evaluations.in_background(9, 10)
    await bench.evaluations.finish()
    assert "WeightVersionGone" in bench.rows("evaluations.jsonl")[0]["reason"]
    with pytest.raises(WeightVersionGone):
        await bench.evaluations.now(9, 10)


async def test_the_last_one_is_skipped_with_its_reason_where_it_cannot_be_had(tmp_path):
    bench = Bench(tmp_path)
    bench.gone = {20}
    await bench.evaluations.in_background(9, 10)
    last = asyncio.create_task(bench.evaluations.last(20, 20))
    await asyncio.sleep(0.01)
    assert bench.asked == [10], "after the one that still runs"
    bench.done(10)
    await last
    assert bench.asked == [10, 20]
    assert bench.evaluations.skipped == 1
    row = bench.rows("evaluations.jsonl")[-1]
    assert (row["step"], row["weight_version"], row["status"]) == (20, 20, "skipped")
    assert row["reason"].startswith("WeightVersionGone")
