"""What a thread keeps between tensors: scratch memory and zstd contexts. Fresh ones cost as much as a small frame."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import zstandard


class Scratch(threading.local):
    """Memory for one block at a time: as much as some block before it wanted."""

    def __init__(self) -> None:
        self._buffer, self._wanted = np.empty(0, np.uint8), 0

    def begin(self) -> None:
        """The next block: everything taken so far may be overwritten."""
        if self._wanted > self._buffer.size:
            self._buffer = np.empty(self._wanted + self._wanted // 8, np.uint8)
        self._wanted = 0

    def take(self, count: int, kind: np.dtype | type = np.uint8) -> np.ndarray:
        """`kind` [count], contents undefined."""
        nbytes = count * np.dtype(kind).itemsize
        begin = self._wanted
        self._wanted += -(-nbytes // 64) * 64
        if self._wanted > self._buffer.size:
            return np.empty(count, kind)
        return self._buffer[begin : begin + nbytes].view(kind)


class Found(NamedTuple):
    """Room for what one block's comparison finds, whatever it is; pages that are not written to cost nothing."""

    positions: np.ndarray
    values: np.ndarray
    low: np.ndarray
    codes: np.ndarray
    large: np.ndarray


class FoundOf(threading.local):
    """One `Found` for each element type."""

    def __init__(self) -> None:
        self._kept: dict[np.dtype, Found] = {}

    def block(self, elements: int, kind: np.dtype) -> Found:
        """For blocks of at most `elements` elements (always the same number) of `kind`."""
        if kind not in self._kept:
            room = elements + 64  # kernels write a little beyond what they find
            counts = {"low": room + elements // 255, "codes": room}
            bytewise = {name: np.empty(count, np.uint8) for name, count in counts.items()}
            self._kept[kind] = Found(
                np.empty(room, np.uint32), np.empty(room, kind), large=np.empty(room, kind), **bytewise
            )
        return self._kept[kind]


class Idle(threading.local):
    """zstd contexts that no frame of this thread is using."""

    def __init__(self) -> None:
        self.compressors: list[zstandard.ZstdCompressor] = []
        self.decompressors: list[zstandard.ZstdDecompressor] = []


scratch, found_of, idle = Scratch(), FoundOf(), Idle()
