"""Ports of the buffer: who hears what becomes of a group, and what a batch is.

The buffer itself is `data_buffer`; the ledger that usually listens is `prompts.ledger`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Protocol

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
