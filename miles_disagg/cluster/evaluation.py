"""Evaluations of a run: on the shared engines, each at one exact version, filed under that version and its step.

One runs at a time, beside training. An evaluation that cannot be had is skipped, counted and listed with its reason in
RUN_DIR/evaluations.jsonl. What an evaluation is, is `rollout.evaluate`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.domain.versions import Constraint
from miles_disagg.observe.trackers import Trackers

Ask = Callable[[Constraint], Awaitable[dict[str, float]]]
EvalLogger = Callable[[int, int, Mapping[str, float], Path], object]
"""What --custom-eval-rollout-log-function-path names: called with step, version, metrics and the run directory."""


class Evaluations:
    """Starts evaluations and files their results.

    ask: evaluates under a constraint. wait: wait for an evaluation that still runs when the next one is due, instead of
    skipping that one. before: (version, accuracy) of a continued run's earlier evaluations.
    """

    def __init__(
        self,
        ask: Ask,
        trackers: Trackers,
        say: Callable[[str], None],
        run_dir: Path,
        *,
        wait: bool = False,
        log: EvalLogger | None = None,
        before: Sequence[tuple[int, float]] = (),
    ):
        self._ask, self._trackers, self._say, self._run_dir, self._wait, self._log = (
            ask, trackers, say, run_dir, wait, log,
        )  # fmt: skip
        self.accuracies = list(before)
        self.skipped = 0
        self._running: asyncio.Task[None] | None = None
        self._news: dict[str, float] = {}

    async def now(self, step: int, version: int) -> None:
        """Evaluate `version`, the one after `step`, and wait for it; raises what kept it from being evaluated."""
        await self._evaluate(step, version)

    async def last(self, step: int, version: int) -> None:
        """As `now`, after the one that still runs; one that cannot be had is skipped: all training is done by then."""
        await self.finish()
        await self._try(step, version)

    async def in_background(self, step: int, version: int) -> None:
        """Start evaluating `version`, the one after `step`. At once, unless `wait` and the last one still runs."""
        if self._running is not None and not self._running.done():
            if not self._wait:
                self._skip(step, version, "the evaluation before it still ran (see --eval-overflow)")
                return
            await self._running
        self._running = asyncio.create_task(self._try(step, version), name=f"evaluate version {version}")

    async def finish(self) -> None:
        """Wait for the evaluation that still runs, if one does."""
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        """Give it up: the run is ending."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def news(self) -> dict[str, float]:
        """Metrics of evaluations that ended since the last call, for showing; they are filed already."""
        out, self._news = self._news, {}
        return out

    async def _try(self, step: int, version: int) -> None:
        try:
            await self._evaluate(step, version)
        except MilesDisaggError as error:
            self._skip(step, version, f"{type(error).__name__}: {error}")

    async def _evaluate(self, step: int, version: int) -> None:
        metrics = await self._ask(Constraint(exact_version=version))
        self.accuracies.append((version, metrics["eval/accuracy"]))
        self.accuracies.sort()
        self._trackers.log(step, version, metrics)
        self._news.update(metrics)
        self._file({"step": step, "weight_version": version, "status": "done", **metrics})
        if self._log is not None:
            await asyncio.to_thread(self._log, step, version, metrics, self._run_dir)

    def _skip(self, step: int, version: int, reason: str) -> None:
        self.skipped += 1
        self._say(f"evaluation of version {version} skipped: {reason}")
        self._trackers.log(step, version, {"eval/skipped": float(self.skipped)})
        self._file({"step": step, "weight_version": version, "status": "skipped", "reason": reason})

    def _file(self, row: Mapping[str, Any]) -> None:
        with (self._run_dir / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
