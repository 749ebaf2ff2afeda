"""`xor`: `new ^ old`, byte by byte, one zstd frame; byte-compatible with miles and slime.

Must be applied exactly once: applied twice it reverts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from miles_disagg.weights.codecs.base import EncodeStats, FrameReader, Sink, check_pair
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import count_non_finite, unsigned

_HOT_BYTES = 256 << 10


class XorCodec:
    """See the module."""

    name = "xor"

    def encode(
        self, old: np.ndarray, new: np.ndarray, dtype: str, sink: Sink, hasher: Hasher | None = None
    ) -> EncodeStats:
        check_pair(old, new)
        changed = non_finite = 0
        # The size in the frame header is what lets their receivers decompress in one call.
        compressor = zstandard.ZstdCompressor(level=1).compressobj(size=new.size)
        scratch = np.empty(min(_HOT_BYTES, new.size), np.uint8)
        for begin in range(0, new.size, _HOT_BYTES):
            after = new[begin : begin + _HOT_BYTES]
            difference = np.bitwise_xor(old[begin : begin + _HOT_BYTES], after, out=scratch[: after.size])
            mask = difference.view(unsigned(dtype)) != 0
            count = int(np.count_nonzero(mask))
            if count:
                changed += count
                non_finite += count_non_finite(after.view(unsigned(dtype))[mask], dtype)
            if hasher is not None:
                hasher.update(after)
            sink(compressor.compress(difference.data))
        sink(compressor.flush())
        return EncodeStats(changed, non_finite)

    def decoder(self, frame: Any, nbytes: int, dtype: str) -> _XorDecoder:
        return _XorDecoder(frame, nbytes)


class _XorDecoder:
    def __init__(self, frame: Any, nbytes: int):
        self._reader = FrameReader(frame)
        self._scratch = np.empty(min(_HOT_BYTES, nbytes), np.uint8)

    def step(self, block: np.ndarray, hasher: Hasher | None = None) -> None:
        for begin in range(0, block.size, _HOT_BYTES):
            part = block[begin : begin + _HOT_BYTES]
            difference = self._scratch[: part.size]
            self._reader.read_into(difference)
            np.bitwise_xor(part, difference, out=part)
            if hasher is not None:
                hasher.update(part)

    def finish(self) -> None:
        self._reader.finish()
