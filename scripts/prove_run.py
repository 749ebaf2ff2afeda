"""Train as `train_async.py` does, and compare after every update what each engine serves with the trainer's export.

Takes the flags of `miles-disagg train`. Weights are read out of the engines (SGLang too) and digested tensor by tensor.
Prints one JSON object, last line of stdout: {"steps", "versions_compared", "tensors", "steps_without_gradient" (the
rewards of every group were equal), "reward_first", "reward_last", "pause_ms_p50", "convergence_s_p50", "update_s_p50",
"activation"}; exits with 1 at the first difference.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from statistics import fmean, median
from typing import Any

from miles_disagg.cluster.assemble import running
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.run import Run
from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import Machine
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig


class Proof:
    """The loop of `train_async.train`, settled and compared after each publication (every `every`-th, and the last)."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.versions, self.tensors, self.unchanged = every, 0, 0, 0
        self.status: list[dict[str, Any]] = []
        self.update_seconds: list[float] = []  # from the start of the copy-out until every engine serves the version

    async def train(self, run: Run) -> None:
        """Train; AssertionError where an engine serves anything but the trainer's weights."""
        before = await run.trainer.digests()
        await self.compare(run, before)
        await run.start_generation()
        for step in run.steps:
            batch = await run.next_batch(step)
            metrics = await run.trainer.train(batch.groups, batch.trainer_version)
            await run.generation_saw(batch)
            begun = time.monotonic()
            await run.publish_next_version()
            await run.settle()
            self.update_seconds.append(time.monotonic() - begun)
            if (step + 1) % self.every == 0 or step + 1 == run.config.num_rollout:
                published = await run.trainer.digests()
                self.unchanged += published == before
                rewards = [reward for group in batch.groups for reward in group.rewards]
                norm, rate = metrics["train/grad_norm"], run.trainer.learning_rate
                assert published != before or not norm, (
                    f"step {step}: the optimizer changed nothing, at a gradient of norm {norm:.3g}, a learning rate of "
                    f"{rate:g} and rewards of {min(rewards)} to {max(rewards)}"
                )
                await self.compare(run, published)
                before = published
            await run.report(step, batch, metrics)
            await self.after_step(run, step, before)
        await run.stop_generation()
        assert self.unchanged < self.versions - 1, "no step changed a weight: every gradient was zero"
        if isinstance(run.fleet, Fleet):
            self.status = await run.fleet.statuses()

    async def after_step(self, run: Run, step: int, served: dict[str, str]) -> None:
        """For those who do more; `served`: digests of the version compared last."""

    async def compare(self, run: Run, expected: dict[str, str]) -> None:
        """AssertionError unless every engine serves exactly the tensors with these digests."""
        fleet = run.fleet
        assert isinstance(fleet, Fleet), "--rollout-endpoint: a service's engines cannot be read from here"
        served = await fleet.digests()
        assert len(served) == len(run.fleet.members), "an engine did not answer"
        for row in served:
            wrong = [name for name, digest in expected.items() if row.get(name) != digest]
            assert not wrong, f"{len(wrong)} tensors differ, first {wrong[0]}"
        self.versions, self.tensors = self.versions + 1, len(expected)


def outcome(config: RunConfig, proof: Proof, status: int) -> dict[str, Any]:
    """What was proved, and the run's metrics."""
    path = config.run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    pauses = [row["replica/pause_seconds"] * 1e3 for row in rows if "replica/pause_seconds" in row]
    converged = [row["fleet/convergence_seconds"] for row in rows if "fleet/convergence_seconds" in row]
    loader = [row.get("loader") for row in proof.status]
    some = max(1, min(5, len(rewards) // 2))  # steps that a mean is of
    return {
        "status": status,
        "steps": len(rewards),
        "versions_compared": proof.versions,
        "tensors": proof.tensors,
        "steps_without_gradient": proof.unchanged,
        "reward_first": fmean(rewards[:some]) if rewards else None,
        "reward_last": fmean(rewards[-some:]) if rewards else None,
        "pause_ms_p50": median(pauses) if pauses else None,
        "convergence_s_p50": median(converged) if converged else None,
        "activation": [row.get("activation") for row in proof.status],
        "loader": loader,
        "update_s_p50": median(proof.update_seconds[1:] or proof.update_seconds) if proof.update_seconds else None,
    }


def main() -> int:
    """Command line: the flags of a training run."""
    config = resolve(parse_run(sys.argv[1:]), Machine.local().gpus)
    proof = Proof()
    status = running(config, proof.train)
    print(json.dumps(outcome(config, proof, status)))
    return status


if __name__ == "__main__":
    asyncio.set_event_loop_policy(None)
    sys.exit(main())
