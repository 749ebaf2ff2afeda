"""The bounded queue of scored groups between rollout and trainer, and the staleness filter on its exit.

Keeping groups from becoming stale in the first place is the producer's (`rollout.pacing`); this filter is the proof.
Saving and restoring contents is `snapshot`; the Ray shell is `actor`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from miles_disagg.buffer.base import Batch, Buffer, BufferClosed, BufferListener, EndOfData
from miles_disagg.buffer.snapshot import group_from_json, group_to_json
from miles_disagg.config.imports import import_function
from miles_disagg.domain.errors import ConfigError, DeadlineExceeded
from miles_disagg.domain.samples import SampleGroup


def capacity_groups(rollout_batch_size: int, capacity_factor: float) -> int:
    """Groups that fit: `--async-data-buffer-capacity-factor` times the batch, never less than one batch."""
    return max(rollout_batch_size, math.ceil(rollout_batch_size * capacity_factor))


class DataBuffer:
    """Groups wait here until a batch of them is taken. One event loop owns it; every method is safe against await.

    `put` waits while `capacity` groups are queued (back-pressure). `get_batch` drops what is too old for the trainer's
    version, then hands out the oldest groups first, all or nothing.
    """

    def __init__(
        self,
        capacity: int,
        listener: BufferListener | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        if capacity < 1:
            raise ValueError(f"a buffer needs room for at least one group, not {capacity}")
        self.capacity = capacity
        self._listener = listener
        self._clock = clock
        self._groups: list[SampleGroup] = []
        self._changed = asyncio.Condition()
        self._notifiers: set[asyncio.Task[None]] = set()
        self._closed = self._ended = False
        self._failure: BaseException | None = None
        self._trainer_version = 0
        self.taken = 0
        self.puts = 0
        self.dropped: Counter[str] = Counter()

    def listen(self, listener: BufferListener) -> None:
        """Who hears what becomes of groups from now on (one listener)."""
        self._listener = listener

    def __len__(self) -> int:
        return len(self._groups)

    async def put(self, group: SampleGroup, timeout: float | None = None) -> None:
        """Queue a group, waiting for room. DeadlineExceeded after `timeout` s, BufferClosed when closed meanwhile."""

        def ready() -> bool:
            return self._closed or len(self._groups) < self.capacity

        async with self._changed:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait_for(ready)
            except TimeoutError:
                raise DeadlineExceeded(
                    "room in the data buffer",
                    timeout or 0.0,
                    f"{len(self._groups)} of {self.capacity} groups are queued and the trainer took none",
                ) from None
            if self._closed:
                raise BufferClosed("the data buffer is closed")
            self._groups.append(group)
            self.puts += 1
            if self._listener:
                self._listener.queued(group)
            self._changed.notify_all()

    async def get_batch(
        self, n_groups: int, *, trainer_version: int, max_staleness: int | None, timeout: float
    ) -> Batch:
        """Exactly `n_groups` groups whose every token lags `trainer_version` by at most `max_staleness` (None: any).

        Waits up to `timeout` seconds; then DeadlineExceeded says what is here, what is on its way, what was dropped.
        Nothing is taken unless all can be. EndOfData when no more will come (`set_ended`) and too few are left.
        """
        if n_groups > self.capacity:
            raise ValueError(
                f"a batch of {n_groups} groups never fits in a buffer for {self.capacity}: "
                "raise --async-data-buffer-capacity-factor"
            )
        self._trainer_version = trainer_version
        begin, dropped_before = self._clock(), self.dropped["stale"]
        async with self._changed:
            try:
                async with asyncio.timeout(timeout):
                    while True:
                        if self._failure is not None:
                            raise self._failure
                        if self._closed:
                            raise BufferClosed("the data buffer is closed")
                        self._drop_stale(trainer_version, max_staleness)
                        if len(self._groups) >= n_groups:
                            break
                        if self._ended:
                            raise EndOfData(n_groups, len(self._groups))
                        await self._changed.wait()
            except TimeoutError:
                detail = f"have {len(self._groups)}, dropped as stale {self.dropped['stale'] - dropped_before}"
                if self._listener:
                    detail += f", {self._listener.upstream()}"
                raise DeadlineExceeded(f"{n_groups} groups at version {trainer_version}", timeout, detail) from None
            return self._take(n_groups, trainer_version, self._clock() - begin)

    async def drop_stale(self, trainer_version: int, max_staleness: int | None) -> None:
        """Drop what could not be handed out at `trainer_version` any more."""
        async with self._changed:
            self._drop_stale(trainer_version, max_staleness)

    def _drop_stale(self, trainer_version: int, max_staleness: int | None) -> None:
        if max_staleness is None:
            return
        stale = [g for g in self._groups if g.lag(trainer_version) > max_staleness]
        if stale:
            self._groups = [g for g in self._groups if g.lag(trainer_version) <= max_staleness]
            for group in stale:
                self._drop(group, "stale")
            self._changed.notify_all()

    def _drop(self, group: SampleGroup, reason: str) -> None:
        self.dropped[reason] += 1
        if self._listener:
            self._listener.dropped(group, reason)

    def order(self, groups: Sequence[SampleGroup], trainer_version: int) -> list[SampleGroup]:
        """All of `groups` (given in order of arrival), those to be trained on first in front: the oldest version.

        The one decision that a plugged-in buffer usually wants to take.
        """
        return sorted(groups, key=lambda g: g.oldest_version)  # stable: arrival order within a version

    def _take(self, n_groups: int, trainer_version: int, waited: float) -> Batch:
        ordered = self.order(self._groups, trainer_version)
        taken, self._groups = ordered[:n_groups], ordered[n_groups:]
        self.taken += n_groups
        if self._listener:
            for group in taken:
                self._listener.taken(group, trainer_version)
        self._changed.notify_all()
        return Batch(tuple(taken), trainer_version, waited)

    def set_ended(self, ended: bool) -> None:
        """The producer has no more prompts (or has some again): a batch that can never be filled is not waited for."""
        if ended != self._ended:
            self._ended = ended
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Production ended for good: everyone who waits for a batch gets `error` now, not at the deadline."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        """Wake all waiters from synchronous code; they look again once the lock is free."""

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._notifiers.add(task)
        task.add_done_callback(self._notifiers.discard)

    async def close(self) -> list[SampleGroup]:
        """Refuse every further put and get, wake all waiters, and drop what is queued (reason `closed`)."""
        async with self._changed:
            self._closed = True
            left, self._groups = self._groups, []
            for group in left:
                self._drop(group, "closed")
            self._changed.notify_all()
        return left

    def metrics(self) -> dict[str, float]:
        """`rollout/fully_async/*` by their stable names; staleness is that of what is queued, in versions."""
        lags = [g.lag(self._trainer_version) for g in self._groups]
        return {
            "rollout/fully_async/queue_size": float(len(self._groups)),
            "rollout/fully_async/stale_groups_filtered": float(self.dropped["stale"]),
            "rollout/fully_async/avg_staleness": sum(lags) / len(lags) if lags else 0.0,
            "rollout/fully_async/max_staleness": float(max(lags, default=0)),
        }

    def snapshot(self) -> dict[str, Any]:
        """JSON-able contents and counters; the buffer is unchanged."""
        return {
            "groups": [group_to_json(g) for g in self._groups],
            "taken": self.taken,
            "puts": self.puts,
            "dropped": dict(self.dropped),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot, into an empty buffer. The listener is not told: its own state was saved too."""
        if self._groups:
            raise ValueError(f"restoring into a buffer that holds {len(self._groups)} groups would lose them")
        self._groups = [group_from_json(g) for g in snapshot["groups"]]
        self.taken, self.puts = int(snapshot["taken"]), int(snapshot["puts"])
        self.dropped = Counter(snapshot["dropped"])


def make_buffer(path: str | None, capacity: int) -> Buffer:
    """The buffer of a run: the class at an import path, or DataBuffer. ConfigError names the flag and what it lacks."""
    if path is None:
        return DataBuffer(capacity)
    flag = "--custom-async-data-buffer-path"
    buffer = import_function(path, flag)(capacity)
    lacks = [name for name in sorted(vars(Buffer)) if callable(getattr(Buffer, name)) and not hasattr(buffer, name)]
    if not isinstance(buffer, Buffer):
        wanted = [name for name in lacks if not name.startswith("_") or name == "__len__"]
        raise ConfigError([f"{flag} {path}: not a buffer, it lacks {', '.join(wanted)}; see buffer.base.Buffer"])
    return buffer
