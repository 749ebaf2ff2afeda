"""A run in progress: what the loop in `train_async` calls, one method a line of it.

Holds the handles and the clock of one run. How they are built and stopped is `assemble`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from miles_disagg.buffer.base import Batch
from miles_disagg.cluster import checkpoints
from miles_disagg.cluster.calls import Lifeline
from miles_disagg.cluster.endpoint import ServiceFleet
from miles_disagg.cluster.evaluation import Evaluations
from miles_disagg.cluster.evaluation_replicas import EvaluationReplicas
from miles_disagg.cluster.external_evaluation import ExternalEvaluation
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.producer import RemoteProducer
from miles_disagg.cluster.publications import Publications
from miles_disagg.cluster.resume import Continuation
from miles_disagg.cluster.saving import CheckpointSaver
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.config.imports import import_function
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.versions import Constraint
from miles_disagg.observe.console import RunConsole, Summary
from miles_disagg.observe.events import EventLog, Timeline
from miles_disagg.observe.sample_log import SampleLog
from miles_disagg.observe.trackers import Trackers
from miles_disagg.trainer.batch import batch_metrics


class Run:
    """Handles of a run, its step counter and its books."""

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerGroup,
        fleet: Fleet | ServiceFleet,
        producer: RemoteProducer,
        publications: Publications,
        *,
        trackers: Trackers,
        console: RunConsole,
        events: EventLog,
        timeline: Timeline,
        run_dir: Path,
        identity: Mapping[str, Any],
        continued: Continuation | None = None,
        evaluators: EvaluationReplicas | None = None,
        lifeline: Lifeline,
    ):
        self.config, self.trainer, self.fleet, self.producer = config, trainer, fleet, producer
        self.publications, self.timeline, self._lifeline = publications, timeline, lifeline
        self._trackers, self._console, self._events, self._run_dir = trackers, console, events, run_dir
        self._samples = SampleLog(run_dir / "samples")
        self._begun = self._step_began = time.monotonic()
        self._pending: dict[str, float] = {}
        self._identity, self._continued = identity, continued
        self.steps_done = continued.step if continued else 0
        state = continued.state if continued else None
        self._external, self.evaluators = _external_evaluation(config), evaluators
        logger = config.plugins.custom_eval_rollout_log_function_path
        self._evaluations = Evaluations(
            self._evaluate, trackers, console.say, run_dir,
            wait=config.evaluation.eval_overflow == "wait",
            log=import_function(logger, "--custom-eval-rollout-log-function-path") if logger else None,
            before=state.accuracies if state else (),
        )  # fmt: skip
        logger = config.plugins.custom_rollout_log_function_path
        self._log_step = import_function(logger, "--custom-rollout-log-function-path") if logger else None
        self._saver = CheckpointSaver(
            run_dir, trainer, timeline,
            keep=config.output.save_total_limit,
            behind=config.output.async_save,
            timeout=config.timeouts.save_timeout,
        )  # fmt: skip
        self._saved_step = self.steps_done
        self._cancel: Callable[[], object] | None = None
        self._training = self._waiting = False
        self._lags: list[float] = []
        self.ledger: dict[str, Any] = {}

    @property
    def version(self) -> int:
        """The trainer's policy version: the newest that was copied out."""
        return self.publications.version

    @property
    def steps(self) -> Iterator[int]:
        """Indices of the steps to do. Ends with CancelledError after a step in which `leave_after_step` was called."""
        for step in range(self.steps_done, self.config.rollout.num_rollout or 0):
            if self.leaving:
                raise asyncio.CancelledError
            yield step

    @property
    def synchronous(self) -> bool:
        """True under --schedule sync."""
        return self.config.pacing.schedule == "sync"

    # --- continuing and leaving -----------------------------------------------------------------

    async def take_up(self) -> None:
        """A continued run: its weights become the next version, then its books are opened again. See `resume`."""
        if self._continued is None:
            if names := await self.fleet.without_version():
                self._console.say(f"{', '.join(names)}: sending the base weights first, as version {self.version + 1}")
                await self.publish_next_version()
                await self.settle()
            return
        await self.publish_next_version()
        await self.settle()
        state, options = self._continued.state, self.config
        if state is not None:
            since = state.step % options.pacing.update_weights_interval * options.rollout.rollout_batch_size
            what = "take up its books"
            await self._ask_producer("load_state", what, state.producer, self.version, since, timeout=300.0)

    def leave_after_step(self, cancel: Callable[[], object]) -> bool:
        """Asked to end: True if the loop will, by `cancel` or by itself, where its state is whole."""
        if not self._training or self.leaving:
            return False
        self._console.say("ending after this step with a checkpoint; once more ends at once")
        self._cancel = cancel
        if self._waiting:
            cancel()
        return True

    @property
    def leaving(self) -> bool:
        """True after `leave_after_step`."""
        return self._cancel is not None

    async def save_before_leaving(self) -> None:
        """Save what was done since the last checkpoint, if anything."""
        try:
            if self._saved_step < self.steps_done:
                await self.save_checkpoint(self.steps_done - 1)
            await self._saver.settle()
        except asyncio.CancelledError:  # asked twice
            self._saver.give_up()
            raise

    # --- generation -----------------------------------------------------------------------------

    async def start_generation(self) -> None:
        """Start keeping samples in flight (under --schedule sync nothing is started ahead)."""
        if not self.synchronous:
            await self._ask_producer("start", "start generating")
        self._step_began, self._training = time.monotonic(), True

    async def next_batch(self, step: int) -> Batch:
        """The groups of this step, none staler than --max-weight-staleness at the trainer's version."""
        self._saver.raise_failure()
        wait = self.config.timeouts.rollout_wait_timeout
        self._waiting = True  # nothing of this step is done yet: a good place to leave
        try:
            with self.timeline.span("wait_for_rollout", self.version):
                if self.synchronous:
                    await self._lifeline.hold(self.publications.settle())
                method = "produce_and_take" if self.synchronous else "next_batch"
                what, patience = f"groups for step {step}", wait * (2 if self.synchronous else 1) + 10
                asked = self._ask_producer(method, what, self.version, wait, timeout=patience)
                batch: Batch = await self._lifeline.hold(asked)
        finally:
            self._waiting = False
        self._lags.extend(batch.lags)
        return batch

    async def generation_saw(self, batch: Batch) -> None:
        """Enter the trained groups into the ledger."""
        await self._ask_producer("trained", "enter trained groups", batch.keys)

    async def stop_generation(self) -> None:
        """Stop starting samples and drop what is still in flight, by name in the ledger."""
        self._training = False
        await self._ask_producer("stop", "stop generating", timeout=self.config.timeouts.shutdown_timeout)

    async def _ask_producer(self, method: str, what: str, *args: Any, timeout: float = 30.0) -> Any:
        return await self.producer.ask(method, what, *args, timeout=timeout)

    # --- versions -------------------------------------------------------------------------------

    def publication_is_due(self, step: int) -> bool:
        """Every --update-weights-interval steps, and after the last one."""
        last = step + 1 == self.config.rollout.num_rollout
        return last or (step + 1) % self.config.pacing.update_weights_interval == 0

    async def publish_next_version(self) -> None:
        """Copy the weights out and let the rest of the publication run behind the next step."""
        self._pending.update(await self.publications.begin())

    async def settle(self) -> None:
        """Wait until the newest version is served and the last checkpoint is complete."""
        await self._lifeline.hold(self.publications.settle())
        await self._saver.settle()

    # --- evaluation, checkpoints ----------------------------------------------------------------

    async def evaluate_base(self) -> None:
        """Accuracy of version 0, before anything is trained; not again in a continued run."""
        section = self.config.evaluation
        if section.eval_interval and not section.skip_eval_before_train and not self.steps_done:
            await self._evaluations.now(0, self.version)

    def evaluation_is_due(self, step: int) -> bool:
        """Every --eval-interval steps; the last one is done by `evaluate_final`."""
        interval, last = self.config.evaluation.eval_interval, step + 1 == self.config.rollout.num_rollout
        return bool(interval) and not last and (step + 1) % (interval or 1) == 0

    async def evaluate_in_background(self, step: int) -> None:
        """Evaluate the newest version while training goes on."""
        await self._evaluations.in_background(step, self.version)

    async def evaluate_final(self) -> None:
        """Accuracy of the last version; skipped with its reason where it cannot be had."""
        if self.config.evaluation.eval_interval:
            await self._evaluations.last(self.steps_done, self.version)
            self._trackers.log(self.steps_done, self.version, self._take_pending())

    async def _evaluate(self, constraint: Constraint) -> dict[str, float]:
        timeout = self.config.timeouts.rollout_wait_timeout
        with self.timeline.span("evaluate", constraint.exact_version):
            if self._external is not None:
                return await self._external(constraint, timeout)
            pinned = {}
            if self.evaluators is not None and constraint.exact_version is not None:
                pinned["eval/pin_seconds"] = await self.evaluators.pin(constraint.exact_version)
            what = f"evaluate {constraint}"
            asked = self._ask_producer("evaluate", what, constraint, timeout, timeout=timeout + 10)
            metrics = await self._lifeline.hold(asked)
            return {**metrics, **pinned}

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(version, accuracy) of every evaluation so far, by version."""
        return self._evaluations.accuracies

    def checkpoint_is_due(self, step: int) -> bool:
        """Every --save-interval steps, and after the last one."""
        interval = self.config.output.save_interval
        last = step + 1 == self.config.rollout.num_rollout
        return interval is not None and (last or (step + 1) % interval == 0)

    async def save_checkpoint(self, step: int) -> None:
        """Write the run's state after `step` to RUN_DIR/checkpoints/step_NNNNNN.

        The trainer waits while its state is copied out; all the rest is behind the next steps.
        """
        done = step + 1

        async def describe() -> checkpoints.RunState:
            books = await self._ask_producer("state", "hand over its books", timeout=300.0)
            seen = tuple(self.accuracies)
            return checkpoints.RunState(self.config.run_id, done, self.version, self._identity, seen, books)

        self._pending.update(await self._saver.save(done, describe))
        self._saved_step = done

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
        lags = {"rollout/version_lag_histogram": dict(sorted(Counter(batch.lags).items()))}
        self._trackers.log(step, self.version, values, lags)
        await asyncio.to_thread(self._samples.write, step, batch.groups, batch.trainer_version)
        if self._log_step is not None:
            await asyncio.to_thread(self._log_step, step, batch, values, self._run_dir)
        self._console.step(step, self.version, {**values, **self._evaluations.news()})
        self._events.write(self.timeline.drain())
        self._events.write(await self.trainer.events())
        self._events.write(await self.fleet.events())
        if self.evaluators is not None:
            self._events.write(await self.evaluators.events())

    def _take_pending(self) -> dict[str, float]:
        finished = {**self.publications.take_metrics(), **self._saver.take_metrics()}
        out, self._pending = {**self._pending, **finished}, {}
        return out

    async def close_books(self) -> None:
        """End generation if it still goes on, and fetch the ledger's totals."""
        await self._evaluations.cancel()
        await self._saver.settle_anyway(self._console.say)
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
            evaluations_skipped=self._evaluations.skipped,
        )


def _external_evaluation(config: RunConfig) -> ExternalEvaluation | None:
    path = config.evaluation.eval_function_path
    if path is None:
        return None
    function, scratch = import_function(path, "--eval-function-path"), config.run_dir / "evaluation"
    return ExternalEvaluation(function, config.version_store, config.run_id, config.checkpoint.absolute(), scratch)
