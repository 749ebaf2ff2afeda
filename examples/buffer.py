"""Data buffer: train first on what says most, groups whose samples earned the most different rewards.

`--custom-async-data-buffer-path examples.buffer.MostTellingFirst`

Everything else is `DataBuffer`'s: bounds, deadlines, the staleness filter, the ledger, checkpoints. A group that is put
back long enough becomes too old, and is dropped as `stale`: give --max-weight-staleness some room.
"""

from collections.abc import Sequence
from statistics import pvariance

from miles_disagg.buffer.data_buffer import DataBuffer
from miles_disagg.domain.samples import SampleGroup


class MostTellingFirst(DataBuffer):
    """Hands out groups by the variance of their rewards, largest first; among equals the oldest."""

    def order(self, groups: Sequence[SampleGroup], trainer_version: int) -> list[SampleGroup]:
        """See `DataBuffer.order`."""
        return sorted(groups, key=lambda g: (-pvariance(g.rewards), g.oldest_version))
