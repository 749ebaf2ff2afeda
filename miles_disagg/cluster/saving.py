"""Saving the run's checkpoints behind the training steps: one at a time, in order, with back-pressure.

`save` returns when the trainer's state is copied out and the books are taken; files, digests, verification, the rename
and retention follow in a task. What a failed one raises is raised by the next call. What a checkpoint holds is
`checkpoints`; when one is due is `run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from miles_disagg.cluster import checkpoints
from miles_disagg.cluster.checkpoints import RunState
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.domain.errors import CheckpointError, DeadlineExceeded, MilesDisaggError
from miles_disagg.observe.events import Timeline


class CheckpointSaver:
    """Saves to RUN_DIR/checkpoints. keep: how many stay; behind: False to wait for each (--no-async-save).

    timeout: seconds for one to be written and verified.
    """

    def __init__(
        self,
        run_dir: Path,
        trainer: TrainerGroup,
        timeline: Timeline,
        *,
        keep: int | None,
        behind: bool,
        timeout: float,
    ):
        self._run_dir, self._trainer, self._timeline = run_dir, trainer, timeline
        self._keep, self._behind, self._timeout = keep, behind, timeout
        self._task: asyncio.Task[Path] | None = None
        self._finished: dict[str, float] = {}

    async def save(self, step: int, describe: Callable[[], Awaitable[RunState]]) -> dict[str, float]:
        """Save the state after `step` steps. describe: everything besides the trainer's own, asked once that is copied
        out. Returns the stall's metrics."""
        begun = time.monotonic()
        await self.settle()
        waited = time.monotonic() - begun
        partial = await asyncio.to_thread(checkpoints.begin, self._run_dir, step)
        with self._timeline.span("save_checkpoint"):
            await self._trainer.begin_save(str(partial / checkpoints.TRAINER))
            state = await describe()
        self._task = asyncio.create_task(self._complete(state, partial), name=f"checkpoint of step {step}")
        if not self._behind:
            await self.settle()
        return {
            "perf/save_checkpoint_seconds": time.monotonic() - begun,
            "perf/wait_for_checkpoint_seconds": waited,
        }

    async def _complete(self, state: RunState, partial: Path) -> Path:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                with self._timeline.span("write_checkpoint"):
                    directory = str(partial / checkpoints.TRAINER)
                    written = await self._trainer.write_save(directory, self._timeout)
                    done = await asyncio.to_thread(checkpoints.finish, self._run_dir, state, self._keep, written)
        except TimeoutError:
            what = f"the checkpoint of step {state.step} to be written"
            raise DeadlineExceeded(what, self._timeout, "raise --save-timeout") from None
        except OSError as error:
            message = f"the checkpoint of step {state.step} could not be saved: {error}"
            raise CheckpointError(message, file=str(partial)) from error
        self._finished["perf/write_checkpoint_seconds"] = time.monotonic() - begun
        return done

    def raise_failure(self) -> None:
        """Raise what ended the last save, if it failed; does not wait."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def settle(self) -> None:
        """Wait until the last checkpoint is complete; raises what went wrong. A caller that is cancelled ends nothing:
        ask again."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self.raise_failure()

    async def settle_anyway(self, say: Callable[[str], None]) -> None:
        """Wait for it at the end of a run that has its reason already: what went wrong is said."""
        if self._task is not None and not self._task.done():
            say(f"waiting for the {self._task.get_name()} to be written; Ctrl-C ends without it")
        try:
            await self.settle()
        except MilesDisaggError as error:
            say(f"[bold red]no checkpoint[/bold red]: {type(error).__name__}: {error}")

    def give_up(self) -> None:
        """Do not wait for the last one any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def take_metrics(self) -> dict[str, float]:
        """Metrics of checkpoints finished since the last call."""
        out, self._finished = self._finished, {}
        return out
