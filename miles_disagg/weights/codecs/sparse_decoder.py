"""Reading a `sparse` frame block by block; every count is checked before memory is taken for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs import class_kernels, kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, FrameReader
from miles_disagg.weights.codecs.class_kernels import MAX_CLASSES
from miles_disagg.weights.codecs.scratch import scratch
from miles_disagg.weights.codecs.sparse_format import (
    BLOCK,
    CLASS,
    DENSE,
    EMPTY,
    ESCAPES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    SPARSE,
    ClassRow,
    bits_of,
    class_key,
)
from miles_disagg.weights.codecs.xxh3 import SECRET, address_of, lend, settle
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import element_size, unsigned


class _Gaps(NamedTuple):
    """Where one class's gap streams are: addresses and bytes."""

    low: int
    low_bytes: int
    high: int
    high_bytes: int
    wide: bool


class SparseDecoder:
    """One frame being applied; `codecs.base.Decoder`."""

    def __init__(self, frame: Any, nbytes: int, dtype: str):
        self._reader, self._dtype, self._width = FrameReader(frame), dtype, element_size(dtype)
        self._zero = unsigned(dtype).type(0)
        self._payload, self._values = np.empty(0, np.uint8), np.empty(0, self._zero.dtype)
        raw = self._reader.take(HEADER.size)
        magic, version, width, _, block_bytes, size = HEADER.unpack(raw)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise CheckpointError(f"not a `sparse` frame of format {FORMAT_VERSION}: {raw[:5]!r}")
        if (width, block_bytes, size) != (self._width, BLOCK_BYTES, nbytes):
            raise CheckpointError(
                f"frame is for {size} bytes of {width}-byte elements in blocks of {block_bytes}, "
                f"the tensor has {nbytes} bytes of {dtype} in blocks of {BLOCK_BYTES}"
            )

    def step(self, block: np.ndarray, hasher: Hasher | None = None) -> None:
        form, classes, _, n = BLOCK.unpack(self._reader.take(BLOCK.size))
        elements = block.size // self._width
        if n > elements or form > DENSE or (form == EMPTY) != (n == 0):
            raise CheckpointError(f"block of form {form} claims {n} changes in {elements} elements")
        if form == SPARSE:
            rows = self._table(classes, n, elements)
            gaps = self._read_streams(rows, n)
            state = lend(hasher, block)
            found = self._add(block, rows, gaps, n, state)
            settle(hasher, block, state)
            if found != n:
                raise CheckpointError(f"gaps are not well-formed, or lead beyond the block's {elements} elements")
            return
        if form == DENSE:
            planes = self._reader.read(block.size).reshape(self._width, elements)
            kernels.add_all_differences(address_of(block), elements, self._zero, planes)
        if hasher is not None:
            hasher.update(block)

    def finish(self) -> None:
        self._reader.finish()

    def _table(self, classes: int, n: int, elements: int) -> list[ClassRow]:
        """The class table of a SPARSE block; with it, every stream's size is known and possible."""
        if not 1 <= classes <= MAX_CLASSES:
            raise CheckpointError(f"block claims {classes} classes")
        rows = [ClassRow(*row) for row in CLASS.iter_unpack(self._reader.take(classes * CLASS.size))]
        thresholds = [row.threshold for row in rows]
        ascending = all(low < high for low, high in zip(thresholds, thresholds[1:], strict=False))
        possible = ascending and not thresholds[0] and not thresholds[-1] >> (8 * self._width - 1)
        if sum(row.changed for row in rows) != n or not possible:
            raise CheckpointError(f"class table does not add up to {n} changes")
        for row in rows:
            if row.wide > 1 or not row.changed <= row.gap_bytes <= 2 * row.changed + elements // 255:
                raise CheckpointError(f"{row.gap_bytes} bytes cannot hold {row.changed} gaps")
            if row.bits not in (0, 1, 2, 4, ESCAPES) or row.large > (row.changed if row.bits == ESCAPES else 0):
                raise CheckpointError(f"{row.changed} values of {row.bits} bits, {row.large} of them large")
        return rows

    def _read_streams(self, rows: list[ClassRow], n: int) -> list[_Gaps]:
        """Read all streams of a block: values are then in `_values`, gaps still packed in `_payload`."""
        scratch.begin()
        self._payload = scratch.take(sum(row.gap_bytes + row.value_bytes(self._width) for row in rows))
        self._values = scratch.take(n, self._zero.dtype)
        self._reader.read_into(self._payload)
        gaps, at, begin, payload = [], 0, 0, address_of(self._payload)
        for row in rows:
            low_bytes, low = row.changed if row.wide else row.gap_bytes, payload + at
            gaps.append(_Gaps(low, low_bytes, low + low_bytes, row.gap_bytes - low_bytes, bool(row.wide)))
            at += row.gap_bytes
        for row in rows:
            size = row.value_bytes(self._width)
            self._unpack(row, self._payload[at : at + size], self._values[begin : begin + row.changed])
            at, begin = at + size, begin + row.changed
        return gaps

    def _unpack(self, row: ClassRow, streams: np.ndarray, values: np.ndarray) -> None:
        if not row.bits:
            kernels.join_planes(streams, values)
            return
        packed, planes = streams[: row.packed_bytes], streams[row.packed_bytes :]
        large = scratch.take(row.large + 1, values.dtype)
        large[row.large] = 0
        if row.large:
            kernels.join_planes(planes, large[: row.large])
        if not kernels.unpack_values(packed, bits_of(row.bits), large, values):
            raise CheckpointError("values are not well-formed")

    def _add(self, block: np.ndarray, rows: list[ClassRow], streams: list[_Gaps], n: int, state: int) -> int:
        """Add the values to the elements that the gaps name, digesting the result; how many were found."""
        address, elements, values = address_of(block), block.size // self._width, self._values
        if len(rows) == 1:
            return kernels.apply_gaps(address, elements, self._zero, *streams[0], values, state, SECRET)
        gaps = scratch.take(n, np.uint32)
        starts, counts, begin = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64), 0
        for c, (row, stream) in enumerate(zip(rows, streams, strict=True)):
            if not kernels.unpack_gaps(*stream, gaps[begin : begin + row.changed]):
                return -1
            starts[c], counts[c] = begin, row.changed
            begin += row.changed
        keep, keys = class_key([row.threshold for row in rows], self._dtype)
        return class_kernels.apply_class_gaps(
            address, elements, self._zero, keep, keys, gaps, values, starts, counts, state, SECRET
        )
