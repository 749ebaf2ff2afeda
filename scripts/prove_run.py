"""Train as `train_async.py` does, and compare after every update what each engine serves with the trainer's export.

Takes the flags of `miles-disagg train`. Weights are read out of the engines (SGLang too) and digested tensor by tensor.
Prints one JSON object, last line of stdout: {"steps", "versions_compared", "tensors", "reward_first", "reward_last",
"pause_ms_p50", "convergence_s_p50", "activation"}; exits with 1 at the first difference.
"""

from __future__ import annotations

import asyncio
import json
import sys
from statistics import fmean, median
from typing import Any

from miles_disagg.cluster.assemble import running
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.run import Run
from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import resolve


class Proof:
    """The loop of `train_async.train`, settled and compared after each publication."""

    def __init__(self) -> None:
        self.versions, self.tensors = 0, 0
        self.status: list[dict[str, Any]] = []

    async def train(self, run: Run) -> None:
        """Train; AssertionError where an engine serves anything but the trainer's weights."""
        before = await run.trainer.digests()
        await self._compare(run, before)
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            await run.publish_next_version()
            await run.settle()
            published = await run.trainer.digests()
            assert published != before, f"step {step}: the optimizer changed nothing"
            await self._compare(run, published)
            before = published
            await run.report(step, batch, metrics)
        await run.stop_generation()
        if isinstance(run.fleet, Fleet):
            self.status = await run.fleet.statuses()

    async def _compare(self, run: Run, expected: dict[str, str]) -> None:
        fleet = run.fleet
        assert isinstance(fleet, Fleet), "--rollout-endpoint: a service's engines cannot be read from here"
        served = await fleet.digests()
        assert len(served) == len(run.fleet.members), "an engine did not answer"
        for row in served:
            wrong = [name for name, digest in expected.items() if row.get(name) != digest]
            assert not wrong, f"{len(wrong)} tensors differ, first {wrong[0]}"
        self.versions, self.tensors = self.versions + 1, len(expected)


def main() -> int:
    """Command line: the flags of a training run."""
    config = resolve(parse_run(sys.argv[1:]), Machine.local().gpus)
    proof = Proof()
    status = running(config, proof.train)
    path = config.run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    pauses = [row["replica/pause_seconds"] * 1e3 for row in rows if "replica/pause_seconds" in row]
    converged = [row["fleet/convergence_seconds"] for row in rows if "fleet/convergence_seconds" in row]
    loader = [row.get("loader") for row in proof.status]
    result = {
        "status": status,
        "steps": len(rewards),
        "versions_compared": proof.versions,
        "tensors": proof.tensors,
        "reward_first": fmean(rewards[:3]) if rewards else None,
        "reward_last": fmean(rewards[-3:]) if rewards else None,
        "pause_ms_p50": median(pauses) if pauses else None,
        "convergence_s_p50": median(converged) if converged else None,
        "activation": [row.get("activation") for row in proof.status],
        "loader": loader,
    }
    print(json.dumps(result))
    return status


if __name__ == "__main__":
    asyncio.set_event_loop_policy(None)
    sys.exit(main())
