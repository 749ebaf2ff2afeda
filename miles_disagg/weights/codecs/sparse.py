"""`sparse` and `sparse-max`: changed elements as gaps and integer differences in byte planes; one zstd frame.

`sparse` has one class. `sparse-max` has up to six, by the exponent of the *old* value, which the receiver holds: under
a fixed step size the chance that a rounded weight moves halves with every octave, so gaps within a class cost less.
Where more than half of a block changed, both write differences of all elements; zstd stores what it cannot compress,
so no frame exceeds the raw bytes by more than 1 % (and a header). The layout is in `sparse_format`, reading in
`sparse_decoder`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from miles_disagg.weights.codecs import class_kernels, kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, Sink, check_pair
from miles_disagg.weights.codecs.class_kernels import MAX_CLASSES
from miles_disagg.weights.codecs.scratch import found_of, scratch
from miles_disagg.weights.codecs.sparse_decoder import SparseDecoder
from miles_disagg.weights.codecs.sparse_format import (
    Compressor,
    Packed,
    class_key,
    pack_gaps,
    pack_values,
    sample_parts,
    thresholds_of,
    write_dense,
    write_empty,
    write_header,
    write_packed,
    write_sparse,
)
from miles_disagg.weights.codecs.xxh3 import SECRET, address_of, lend, settle
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import element_size, non_finite_test, unsigned


class SparseCodec:
    """See the module. `name` is `sparse` or `sparse-max`; both read either's frames."""

    def __init__(self, name: str = "sparse"):
        self.name = name

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
        scratch.begin()
        kind, zero, non_finite = _constants(dtype)
        elements = new.size // kind.itemsize
        found = found_of.block(BLOCK_BYTES // kind.itemsize, kind)
        scanned = (address_of(old), address_of(new), elements, zero)
        packed: list[Packed] = []
        state = lend(hasher, new)
        if self.name == "sparse":
            n, bad, size, total, top, large = kernels.scan_packed(*scanned, non_finite, *found, state, SECRET)
            if 0 < n <= elements // 2:
                gaps = pack_gaps(found.positions[:n], total, found.low[:size])
                values = pack_values(found.values[:n], found.codes[:n], top, found.large[:large])
                packed.append(Packed(*gaps, *values))
        else:
            n, bad = kernels.scan(*scanned, non_finite, found.positions, found.values, state, SECRET)
        settle(hasher, new, state)
        if not n:
            write_empty(out)
        elif n > elements // 2:
            planes = np.empty((kind.itemsize, elements), np.uint8)
            kernels.all_differences(*scanned, planes)
            write_dense(out, planes, n)
        elif packed:
            write_packed(out, [0], [n], packed)
        else:
            _write_by_class(old, dtype, found.positions[:n], found.values[:n], out)
        return n, bad


@cache
def _constants(dtype: str) -> tuple[np.dtype, Any, tuple[Any, Any]]:
    """(unsigned elements, a zero of them, what is NaN or Inf) as the kernels take them."""
    mask, pattern = map(np.uint64, non_finite_test(dtype))
    return unsigned(dtype), unsigned(dtype).type(0), (mask, pattern)


def _write_by_class(old: np.ndarray, dtype: str, positions: np.ndarray, values: np.ndarray, out: Compressor) -> None:
    elements = old.size // element_size(dtype)
    thresholds = thresholds_of(_sample(old.view(unsigned(dtype))), elements, dtype)
    gaps = scratch.take(positions.size, np.uint32)
    if thresholds.size == 1:
        gaps[0] = positions[0]
        np.subtract(positions[1:] - positions[:-1], 1, out=gaps[1:])
        write_sparse(out, [0], [gaps.size], gaps, values)
        return
    classes, unsorted = scratch.take(gaps.size), scratch.take(gaps.size, np.uint32)
    sorted_values, counts = scratch.take(gaps.size, values.dtype), np.zeros(MAX_CLASSES, np.int64)
    keep, keys = class_key(thresholds, dtype)
    class_kernels.class_gaps(
        address_of(old), elements, keep.dtype.type(0), keep, keys, positions, classes, unsorted, counts
    )
    class_kernels.sort_by_class(classes, np.cumsum(counts) - counts, unsorted, values, gaps, sorted_values)
    write_sparse(out, thresholds.tolist(), counts[: thresholds.size].tolist(), gaps, sorted_values)


def _sample(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[part] for part in sample_parts(values.size)])
