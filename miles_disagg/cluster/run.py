"""A run in progress: what the loop in `train_async` calls, one method a line of it.

Holds the handles and the clock of one run. How they are built and stopped is `assemble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from miles_disagg.buffer.base import Batch
from miles_disagg.cluster.calls import call
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.publications import Publications
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.versions import Constraint
from miles_disagg.observe.console import RunConsole, Summary
from miles_disagg.observe.events import EventLog, Timeline
from miles_disagg.observe.trackers import Trackers
from miles_disagg.trainer.batch import batch_metrics


class Run:
    """Handles of a run, its step counter and its books."""

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerGroup,
        fleet: Fleet,
        producer: Any,
        publications: Publications,
        *,
        trackers: Trackers,
        console: RunConsole,
        events: EventLog,
        timeline: Timeline,
        run_dir: Path,
    ):
        self.config, self.trainer, self.fleet, self.producer = config, trainer, fleet, producer
        self.publications, self.timeline = publications, timeline
        self._trackers, self._console, self._events, self._run_dir = trackers, console, events, run_dir
        self._begun = self._step_began = time.monotonic()
        self._pending: dict[str, float] = {}
        self._evaluation: asyncio.Task[None] | None = None
        self.steps_done = 0
        self.accuracies: list[tuple[int, float]] = []
        self._lags: list[float] = []
        self.ledger: dict[str, Any] = {}

    @property
    def version(self) -> int:
        """The trainer's policy version: the newest that was copied out."""
        return self.publications.version

    @property
    def steps(self) -> Iterator[int]:
        """Indices of the steps to do."""
        yield from range(self.config.rollout.num_rollout or 0)

    @property
    def synchronous(self) -> bool:
        """True under --schedule sync."""
        return self.config.pacing.schedule == "sync"

    # --- generation -----------------------------------------------------------------------------

    async def start_generation(self) -> None:
        """Start keeping samples in flight (under --schedule sync nothing is started ahead)."""
        if not self.synchronous:
            await self._ask_producer("start", "start generating")
        self._step_began = time.monotonic()

    async def next_batch(self, step: int) -> Batch:
        """The groups of this step, none staler than --max-weight-staleness at the trainer's version."""
        wait = self.config.timeouts.rollout_wait_timeout
        with self.timeline.span("wait_for_rollout", self.version):
            if self.synchronous:
                await self.publications.settle()
                what = f"generate the batch of step {step}"
                await self._ask_producer("produce_batch", what, self.version, wait, timeout=wait + 10)
            what = f"groups for step {step}"
            batch: Batch = await self._ask_producer("next_batch", what, self.version, wait, timeout=wait + 10)
        self._lags.extend(batch.lags)
        return batch

    async def generation_saw(self, batch: Batch) -> None:
        """Enter the trained groups into the ledger."""
        await self._ask_producer("trained", "enter trained groups", batch.keys)

    async def stop_generation(self) -> None:
        """Stop starting samples and drop what is still in flight, by name in the ledger."""
        await self._ask_producer("stop", "stop generating", timeout=self.config.timeouts.shutdown_timeout)

    async def _ask_producer(self, method: str, what: str, *args: Any, timeout: float = 30.0) -> Any:
        return await call(getattr(self.producer, method).remote(*args), f"rollout producer: {what}", timeout)

    # --- versions -------------------------------------------------------------------------------

    def publication_is_due(self, step: int) -> bool:
        """Every --update-weights-interval steps, and after the last one."""
        last = step + 1 == self.config.rollout.num_rollout
        return last or (step + 1) % self.config.pacing.update_weights_interval == 0

    async def publish_next_version(self) -> None:
        """Copy the weights out and let the rest of the publication run behind the next step."""
        self._pending.update(await self.publications.begin())

    async def settle(self) -> None:
        """Wait until the newest version is served."""
        await self.publications.settle()

    # --- evaluation, checkpoints ----------------------------------------------------------------

    async def evaluate_base(self) -> None:
        """Accuracy of version 0, before anything is trained."""
        section = self.config.evaluation
        if section.eval_interval and not section.skip_eval_before_train:
            await self._evaluate(Constraint(exact_version=self.version))

    def evaluation_is_due(self, step: int) -> bool:
        """Every --eval-interval steps; the last one is done by `evaluate_final`."""
        interval, last = self.config.evaluation.eval_interval, step + 1 == self.config.rollout.num_rollout
        return bool(interval) and not last and (step + 1) % (interval or 1) == 0

    def evaluate_in_background(self) -> None:
        """Evaluate the newest version on the shared engines; skipped while the last evaluation still runs."""
        if self._evaluation is None or self._evaluation.done():
            self._evaluation = asyncio.create_task(
                self._evaluate(Constraint(min_version=self.version)), name="evaluate"
            )

    async def evaluate_final(self) -> None:
        """Accuracy of the last version."""
        if self._evaluation is not None:
            await self._evaluation
        if self.config.evaluation.eval_interval:
            await self._evaluate(Constraint(exact_version=self.version))
            self._trackers.log(self.steps_done, self.version, self._take_pending())

    async def _evaluate(self, constraint: Constraint) -> None:
        timeout = self.config.timeouts.rollout_wait_timeout
        with self.timeline.span("evaluate", self.version):
            what = f"evaluate {constraint}"
            row: dict[str, float] = await self._ask_producer(
                "evaluate", what, constraint, timeout, timeout=timeout + 10
            )
        self._pending.update(row)
        self.accuracies.append((int(row["eval/weight_version"]), row["eval/accuracy"]))

    def checkpoint_is_due(self, step: int) -> bool:
        """Every --save-interval steps."""
        interval = self.config.output.save_interval
        return interval is not None and (step + 1) % interval == 0

    async def save_checkpoint(self, step: int) -> None:
        """Write the trainer's state to RUN_DIR/checkpoints/step_NNNNNN."""
        await self.trainer.save(str(self._run_dir / "checkpoints" / f"step_{step + 1:06d}"))

    # --- reporting ------------------------------------------------------------------------------

    async def report(self, step: int, batch: Batch, trained: dict[str, float]) -> None:
        """Write the step's metrics everywhere and show them."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        values = {
            **batch_metrics(batch.groups, batch.trainer_version),
            **trained,
            **await self._ask_producer("metrics", "hand over its metrics"),
            **self._take_pending(),
            "perf/wait_for_rollout_seconds": batch.waited_seconds,
            "perf/step_seconds": seconds,
            "perf/tokens_per_second": sum(len(s.tokens) for g in batch.groups for s in g.samples) / seconds,
            "rollout/samples_per_second": sum(len(g.samples) for g in batch.groups) / seconds,
        }
        self.steps_done = step + 1
        self._trackers.log(step, self.version, values)
        self._console.step(step, self.version, values)
        self._events.write(self.timeline.drain())
        self._events.write(await self.trainer.events())
        self._events.write(await self.fleet.events())

    def _take_pending(self) -> dict[str, float]:
        out, self._pending = {**self._pending, **self.publications.take_metrics()}, {}
        return out

    async def close_books(self) -> None:
        """End generation if it still goes on, and fetch the ledger's totals."""
        with contextlib.suppress(Exception):
            await self.stop_generation()
        self.ledger = await self._ask_producer("ledger", "hand over the ledger")

    def summary(self, status: str, reason: str = "") -> Summary:
        """What happened."""
        return Summary(
            status=status,
            reason=reason,
            steps=self.steps_done,
            seconds=time.monotonic() - self._begun,
            final_version=self.version,
            accuracy_first=self.accuracies[0][1] if self.accuracies else None,
            accuracy_last=self.accuracies[-1][1] if len(self.accuracies) > 1 else None,
            ledger=self.ledger,
            run_dir=self._run_dir,
            lag_mean=fmean(self._lags) if self._lags else None,
            pause_ms=median(self.publications.pauses) * 1000 if self.publications.pauses else None,
        )
