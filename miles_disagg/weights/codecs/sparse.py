"""`sparse` and `sparse-max`: changed elements as gaps and integer differences in byte planes; one zstd frame.

`sparse` has one class. `sparse-max` has up to six, by the exponent of the *old* value, which the receiver holds: under
a fixed step size the chance that a rounded weight moves halves with every octave, so gaps within a class cost less.
Where more than half of a block changed, both write differences of all elements; zstd stores what it cannot compress,
so no frame exceeds the raw bytes by more than 1 % (and a header). The layout is in `sparse_format`, reading in
`sparse_decoder`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from miles_disagg.weights.codecs import class_kernels, kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, Sink, check_pair
from miles_disagg.weights.codecs.class_kernels import MAX_CLASSES
from miles_disagg.weights.codecs.sparse_decoder import SparseDecoder
from miles_disagg.weights.codecs.sparse_format import (
    Compressor,
    class_key,
    sample_parts,
    thresholds_of,
    write_dense,
    write_empty,
    write_header,
    write_sparse,
)
from miles_disagg.weights.codecs.xxh3 import SECRET, digesting
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import element_size, non_finite_mask, unsigned


class SparseCodec:
    """See the module. `name` is `sparse` or `sparse-max`; both read either's frames."""

    def __init__(self, name: str = "sparse"):
        self.name = name
        self._scratch = _Scratch()

    def encode(
        self, old: np.ndarray, new: np.ndarray, dtype: str, sink: Sink, hasher: Hasher | None = None
    ) -> EncodeStats:
        check_pair(old, new)
        out = Compressor(sink)
        write_header(out, dtype, new.size)
        changed = non_finite = 0
        for begin in range(0, new.size, BLOCK_BYTES):
            before, after = old[begin : begin + BLOCK_BYTES], new[begin : begin + BLOCK_BYTES]
            n, bad = self._encode_block(before, after, dtype, hasher, out)
            changed, non_finite = changed + n, non_finite + bad
        out.finish()
        return EncodeStats(changed, non_finite)

    def decoder(self, frame: Any, nbytes: int, dtype: str) -> SparseDecoder:
        return SparseDecoder(frame, nbytes, dtype)

    def _encode_block(
        self, old: np.ndarray, new: np.ndarray, dtype: str, hasher: Hasher | None, out: Compressor
    ) -> tuple[int, int]:
        """Compare, digest and gather one block in one pass over memory; (changed, non-finite) elements."""
        kind, a, b = unsigned(dtype), old.ctypes.data, new.ctypes.data
        elements, zero = new.size // kind.itemsize, kind.type(0)
        positions, values = self._scratch.take(elements + kernels.SLACK, kind)
        with digesting(hasher, new) as state:
            n, bad = kernels.scan(
                a, b, elements, zero, np.uint64(non_finite_mask(dtype)), positions, values, state, SECRET
            )
        if not n:
            write_empty(out)
        elif 2 * n > elements:
            planes = np.empty((kind.itemsize, elements), np.uint8)
            kernels.all_differences(a, b, elements, zero, planes)
            write_dense(out, planes, n)
        else:
            thresholds = np.zeros(1, np.uint64)
            if self.name == "sparse-max":
                thresholds = thresholds_of(_sample(old.view(kind)), elements, dtype)
            _write_changes(old, dtype, positions[:n], values[:n], thresholds, out)
        return n, bad


def _write_changes(
    old: np.ndarray, dtype: str, positions: np.ndarray, values: np.ndarray, thresholds: np.ndarray, out: Compressor
) -> None:
    gaps = np.empty(positions.size, np.uint32)
    if thresholds.size == 1:
        kernels.positions_to_gaps(positions, gaps)
        write_sparse(out, thresholds, np.array([positions.size]), gaps, values)
        return
    classes, unsorted, counts = np.empty(gaps.size, np.uint8), np.empty_like(gaps), np.zeros(MAX_CLASSES, np.int64)
    keep, keys = class_key(thresholds, dtype)
    elements = old.size // element_size(dtype)
    class_kernels.class_gaps(
        old.ctypes.data, elements, keep.dtype.type(0), keep, keys, positions, classes, unsorted, counts
    )
    sorted_values = np.empty_like(values)
    class_kernels.sort_by_class(classes, np.cumsum(counts) - counts, unsorted, values, gaps, sorted_values)
    write_sparse(out, thresholds, counts[: thresholds.size], gaps, sorted_values)


def _sample(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[part] for part in sample_parts(values.size)])


class _Scratch(threading.local):
    """Positions and values of one block, kept by each thread that encodes: fresh pages cost more than the compare."""

    def __init__(self) -> None:
        self._positions = np.empty(0, np.uint32)
        self._values = np.empty(0, np.uint64)

    def take(self, count: int, kind: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """(uint32 [count], `kind` [count]), contents undefined."""
        if self._positions.size < count:
            self._positions = np.empty(count, np.uint32)
        words = -(-count * kind.itemsize // 8)
        if self._values.size < words:
            self._values = np.empty(words, np.uint64)
        return self._positions[:count], self._values.view(kind)[:count]
