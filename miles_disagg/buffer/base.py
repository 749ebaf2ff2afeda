"""Ports of the buffer: what one must do, who hears what becomes of a group, and what a batch is.

The buffer itself is `data_buffer`; the ledger that usually listens is `prompts.ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Protocol, runtime_checkable

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.domain.samples import SampleGroup, flatten


class BufferClosed(MilesDisaggError):
    """The buffer was closed while somebody waited on it, or is used after that."""


class EndOfData(MilesDisaggError):
    """The last prompt is through and fewer groups are left than a batch needs."""

    def __init__(self, wanted: int, left: int):
        self.wanted, self.left = wanted, left
        super().__init__(f"the prompt data is over: {left} groups are left, a batch needs {wanted}")


class BufferListener(Protocol):
    """Hears, synchronously and in order, what becomes of every group."""

    def queued(self, group: SampleGroup) -> None:
        """The group was accepted."""
        ...

    def taken(self, group: SampleGroup, trainer_version: int) -> None:
        """The group went to the trainer, which was at `trainer_version`."""
        ...

    def dropped(self, group: SampleGroup, reason: str) -> None:
        """The group left without being trained on (`stale`, `closed`)."""
        ...

    def upstream(self) -> str:
        """One line on what is on its way, for the message of a deadline."""
        ...


@dataclass(frozen=True)
class Batch:
    """What one optimizer step consumes, oldest groups first.

    trainer_version: version of the trainer's weights when the batch was taken; every token's lag against it is within
    the staleness that was asked for. waited_seconds: how long the trainer waited for it.
    """

    groups: tuple[SampleGroup, ...]
    trainer_version: int
    waited_seconds: float

    @property
    def keys(self) -> list[str]:
        """Ledger keys of the prompts."""
        return [g.prompt.key for g in self.groups]

    @property
    def lags(self) -> list[int]:
        """Lag of every sample: trainer's version minus the oldest version among its tokens."""
        return [s.lag(self.trainer_version) for g in self.groups for s in g.samples]

    def metrics(self) -> dict[str, float]:
        """Reward, length, lag and wait by their stable names (PROTOCOL 5)."""
        samples = flatten(self.groups)
        lags, rewards = self.lags, [r for g in self.groups for r in g.rewards]
        return {
            "rollout/version_lag_mean": fmean(lags or [0]),
            "rollout/version_lag_max": float(max(lags, default=0)),
            "rollout/reward_mean": fmean(rewards or [0]),
            "rollout/reward_std": pstdev(rewards or [0]),
            "rollout/response_length_mean": fmean([len(s.tokens) for s in samples] or [0]),
            "rollout/truncated_fraction": fmean([s.finish_reason == "length" for s in samples] or [0]),
            "rollout/zero_variance_groups": float(sum(len(set(g.rewards)) == 1 for g in self.groups)),
            "perf/wait_for_rollout_seconds": self.waited_seconds,
        }


@runtime_checkable
class Buffer(Protocol):
    """The queue of scored groups between rollout and trainer, owned by one event loop.

    `data_buffer.DataBuffer` is the one there is; --custom-async-data-buffer-path names another class, called with the
    capacity in groups (most simply a subclass that changes `order`). Every group that was put is told to the listener
    exactly once more, as `taken` or `dropped`: the ledger's balance is checked in every run.
    """

    def listen(self, listener: BufferListener) -> None:
        """Who hears what becomes of groups from now on (one listener)."""
        ...

    async def put(self, group: SampleGroup, timeout: float | None = None) -> None:
        """Queue a group, waiting for room. DeadlineExceeded after `timeout` s, BufferClosed when closed meanwhile."""
        ...

    async def get_batch(
        self, n_groups: int, *, trainer_version: int, max_staleness: int | None, timeout: float
    ) -> Batch:
        """Exactly `n_groups` groups, none with a token that lags more than `max_staleness`; all or nothing.

        DeadlineExceeded after `timeout` s; EndOfData when no more will come; the error given to `fail`.
        """
        ...

    async def drop_stale(self, trainer_version: int, max_staleness: int | None) -> None:
        """Drop what could not be handed out at `trainer_version` any more."""
        ...

    def set_ended(self, ended: bool) -> None:
        """The producer has no more prompts, or has some again."""
        ...

    def fail(self, error: BaseException) -> None:
        """Production ended for good: whoever waits for a batch gets `error` now."""
        ...

    async def close(self) -> list[SampleGroup]:
        """Refuse every further put and get, wake all waiters, drop what is queued (reason `closed`)."""
        ...

    def metrics(self) -> dict[str, float]:
        """Declared metrics (`observe.metrics`) of what is queued."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """JSON-able contents and counters, for a checkpoint."""
        ...

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot, into an empty buffer."""
        ...

    def __len__(self) -> int:
        """Groups queued."""
        ...
