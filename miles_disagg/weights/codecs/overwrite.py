"""`overwrite`: count (u4), positions of changed bytes (u4 each), new byte values; one zstd frame.

Byte-compatible with miles and slime. Idempotent. Positions are 32-bit, so tensors below 4 GiB only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, FrameReader, Sink, check_pair
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import count_non_finite, unsigned

_U4 = np.dtype("<u4")
_CHUNK = 1 << 20  # positions read at a time


class OverwriteCodec:
    """See the module."""

    name = "overwrite"

    def encode(
        self, old: np.ndarray, new: np.ndarray, dtype: str, sink: Sink, hasher: Hasher | None = None
    ) -> EncodeStats:
        check_pair(old, new)
        _check_size(new.size)
        changed = non_finite = total = 0
        for begin in range(0, new.size, BLOCK_BYTES):  # the count comes first, so count first
            before, after = old[begin : begin + BLOCK_BYTES], new[begin : begin + BLOCK_BYTES]
            total += int(np.count_nonzero(before != after))
            elements = after.view(unsigned(dtype))
            mask = before.view(unsigned(dtype)) != elements
            changed += int(np.count_nonzero(mask))
            non_finite += count_non_finite(elements[mask], dtype)
            if hasher is not None:
                hasher.update(after)
        compressor = zstandard.ZstdCompressor(level=1).compressobj(size=4 + 5 * total)
        sink(compressor.compress(total.to_bytes(4, "little")))
        for pass_values in (False, True):
            for begin in range(0, new.size, BLOCK_BYTES):
                after = new[begin : begin + BLOCK_BYTES]
                mask = old[begin : begin + BLOCK_BYTES] != after
                part = after[mask] if pass_values else (np.flatnonzero(mask) + begin).astype(_U4)
                sink(compressor.compress(part.tobytes()))
        sink(compressor.flush())
        return EncodeStats(changed, non_finite)

    def decoder(self, frame: Any, nbytes: int, dtype: str) -> _OverwriteDecoder:
        _check_size(nbytes)
        return _OverwriteDecoder(frame, nbytes)


class _OverwriteDecoder:
    """Reads positions and values through two readers of the same frame, so that memory is bounded by a chunk."""

    def __init__(self, frame: Any, nbytes: int):
        self._positions, self._values = FrameReader(frame), FrameReader(frame)
        self._nbytes = nbytes
        self._count = self._left = int(self._positions.read(4).view(_U4)[0])
        if self._count > nbytes:
            raise CheckpointError(f"frame claims {self._count} changed bytes in a tensor of {nbytes}")
        self._values.skip(4 + 4 * self._count)
        self._pending = np.empty(0, np.int64)  # read but beyond the blocks stepped so far
        self._last = -1
        self._begin = 0

    def step(self, block: np.ndarray, hasher: Hasher | None = None) -> None:
        end = self._begin + block.size
        while True:
            count = int(np.searchsorted(self._pending, end))
            block[self._pending[:count] - self._begin] = self._values.read(count)
            self._pending = self._pending[count:]
            if self._pending.size or not self._left:
                break
            self._fill()
        self._begin = end
        if hasher is not None:
            hasher.update(block)

    def finish(self) -> None:
        if self._left or self._pending.size:
            raise CheckpointError(f"{self._left + self._pending.size} positions lie beyond the tensor")
        self._values.finish()

    def _fill(self) -> None:
        count = min(self._left, _CHUNK)
        positions = self._positions.read(4 * count).view(_U4).astype(np.int64)
        if positions[0] <= self._last or np.any(positions[1:] <= positions[:-1]) or positions[-1] >= self._nbytes:
            raise CheckpointError(f"positions must ascend below {self._nbytes}")
        self._left -= count
        self._last = int(positions[-1])
        self._pending = positions


def _check_size(nbytes: int) -> None:
    if nbytes >= 1 << 32:
        raise CheckpointError(
            f"tensor of {nbytes} bytes: `overwrite` addresses less than 4 GiB; "
            "use --update-weight-delta-encoding sparse"
        )
