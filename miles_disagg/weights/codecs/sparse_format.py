"""The layout of a `sparse` frame, shared by its writers (CPU, device) and its reader.

Frame (little-endian, before compression): header `MDSP`, format version, element bytes, block bytes, tensor bytes;
then per block of BLOCK_BYTES a BLOCK record and, by its form,

* EMPTY: nothing changed.
* SPARSE: a `ClassRow` per class; per class its gaps (`kernels.pack_gaps`); then per class the zigzag differences of its
  changed elements: plane by plane, or as packed bits where all, or nearly all, are small (`kernels.pack_values`).
* DENSE: the zigzag differences of all elements, plane by plane.

zstd blocks end where streams end, so every stream gets its own entropy table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import zstandard

from miles_disagg.weights.codecs import kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, Sink
from miles_disagg.weights.codecs.class_kernels import MAX_CLASSES
from miles_disagg.weights.dtypes import element_size, unsigned

FORMAT_VERSION = 2
HEADER = struct.Struct("<4sBBHIQ")
MAGIC = b"MDSP"
BLOCK = struct.Struct("<BBHI")  # form, classes, 0, changed elements
EMPTY, SPARSE, DENSE = 0, 1, 2
ESCAPES = 5  # `bits` of a class in 4 bits a value, with `large` values in full after these
# Our streams have skewed bytes and no repeats: a short match found by chance costs more than its literals. A tiny hash
# table and long matches leave the work to the entropy coder (5 to 10 % smaller than level 1, and faster both ways).
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, window_log=19)
_OWN_ZSTD_BLOCK = 1 << 10  # shorter streams share an entropy table
_WIDE_FROM = 600  # mean gap above which two bytes a gap are cheaper than escapes
# dtype -> mantissa bits: where the exponent begins.
_MANTISSA = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52, "F8_E4M3": 3, "F8_E5M2": 2}
_CLASSES_FROM = 1 << 14  # elements below which classes cost more than they save


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class of a SPARSE block. `wide` 0 or 1; `bits` 0 (byte planes), 1, 2, 4 or ESCAPES."""

    threshold: int
    count: int
    gap_bytes: int
    large: int
    wide: int
    bits: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed small values."""
        return -(-self.count * bits_of(self.bits) // 8)

    def value_bytes(self, width: int) -> int:
        """Bytes of all value streams, for elements of `width` bytes."""
        return self.packed_bytes + (self.large if self.bits else self.count) * width


CLASS = struct.Struct("<QIIIHH")


def bits_of(form: int) -> int:
    """Bits of one packed value under a row's `bits`."""
    return 4 if form == ESCAPES else form


class Compressor:
    """One zstd frame, with a block boundary after every long stream."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._zstd = zstandard.ZstdCompressor(compression_params=_ZSTD).compressobj()

    def write(self, data: Any) -> None:
        self._sink(self._zstd.compress(data))

    def write_stream(self, data: np.ndarray) -> None:
        if data.size:
            self.write(data.data)
            if data.size >= _OWN_ZSTD_BLOCK:
                self._sink(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

    def finish(self) -> None:
        self._sink(self._zstd.flush())


def write_header(out: Compressor, dtype: str, nbytes: int) -> None:
    """Start a frame for a tensor of `nbytes` bytes."""
    out.write(HEADER.pack(MAGIC, FORMAT_VERSION, element_size(dtype), 0, BLOCK_BYTES, nbytes))


def write_empty(out: Compressor) -> None:
    """A block in which nothing changed."""
    out.write(BLOCK.pack(EMPTY, 0, 0, 0))


def write_dense(out: Compressor, planes: np.ndarray, changed: int) -> None:
    """A block as the zigzag differences of all its elements; planes: uint8 [element bytes, elements]."""
    out.write(BLOCK.pack(DENSE, 0, 0, changed))
    for plane in planes:
        out.write_stream(plane)


def write_sparse(
    out: Compressor, thresholds: np.ndarray, counts: np.ndarray, gaps: np.ndarray, values: np.ndarray
) -> None:
    """A block as gaps (uint32 [n]) and zigzag differences (unsigned integers [n]), both in class order.

    thresholds, counts: of each class (uint64, int64 [classes]).
    """
    rows: list[bytes] = []
    gap_streams: list[Sequence[np.ndarray]] = []
    value_streams: list[Sequence[np.ndarray]] = []
    begin = 0
    for threshold, count in zip(thresholds.tolist(), counts.tolist(), strict=True):
        wide, streams = _pack_gaps(gaps[begin : begin + count])
        gap_streams.append(streams)
        bits, large, planes = _pack_values(values[begin : begin + count])
        value_streams.append(planes)
        rows.append(CLASS.pack(threshold, count, streams[0].size + streams[1].size, large, wide, bits))
        begin += count
    out.write(BLOCK.pack(SPARSE, len(rows), 0, gaps.size) + b"".join(rows))
    for stream in chain.from_iterable(gap_streams + value_streams):
        out.write_stream(stream)


def _pack_gaps(gaps: np.ndarray) -> tuple[int, Sequence[np.ndarray]]:
    """(`wide`, both streams)."""
    total = int(gaps.sum(dtype=np.int64))
    wide = int(total > _WIDE_FROM * gaps.size)
    low = np.empty(gaps.size + (0 if wide else total // 255), np.uint8)
    high = np.empty(gaps.size + (total >> 8) // 255 if wide else 0, np.uint8)
    n_low, n_high = kernels.pack_gaps(gaps, wide, low, high)
    return wide, (low[:n_low], high[:n_high])


def _pack_values(values: np.ndarray) -> tuple[int, int, Sequence[np.ndarray]]:
    """(`bits`, `large`, streams): few bits where all are small; 4 and the larger ones in full; or byte planes."""
    top, bits, large = int(values.max(initial=1)), ESCAPES, 0
    if top < kernels.ESCAPED:
        bits = next(b for b in (1, 2, 4) if top <= 1 << b)
    else:
        large = int(np.count_nonzero(values >= kernels.ESCAPED))
        if large > values.size // 8:
            return 0, 0, list(byte_planes(values))
    packed = np.empty(-(-values.size * bits_of(bits) // 8), np.uint8)
    escaped = np.empty(large + 1, values.dtype)
    kernels.pack_values(values, bits_of(bits), packed, escaped)
    return bits, large, [packed, *byte_planes(escaped[:large])]


def byte_planes(values: np.ndarray) -> np.ndarray:
    """uint8 [element bytes, n]: all low bytes, all second bytes, ..."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)


def class_key(thresholds: Sequence[int] | np.ndarray, dtype: str) -> tuple[Any, np.ndarray]:
    """(mask that drops the sign, MAX_CLASSES thresholds of which unused ones are out of reach) as elements."""
    kind = unsigned(dtype)
    keep = (1 << (8 * kind.itemsize - 1)) - 1
    keys = np.full(MAX_CLASSES, keep + 1, kind)
    keys[: len(thresholds)] = thresholds
    return kind.type(keep), keys


def has_classes(dtype: str) -> bool:
    """Whether `sparse-max` splits this dtype by the exponent of the old value."""
    return dtype in _MANTISSA


def sample_parts(elements: int) -> list[slice]:
    """Which elements of a block decide its classes."""
    return [slice(at, at + 2048) for at in range(0, elements, max(2048, elements // 16))]


def thresholds_of(sample: np.ndarray, elements: int, dtype: str) -> np.ndarray:
    """Class boundaries (uint64 [classes]) of a block of `elements`, from a sample of its old values.

    Two octaves a class; what is above or below them joins the last at its end. One class for few elements.
    """
    if elements < _CLASSES_FROM or not has_classes(dtype):
        return np.zeros(1, np.uint64)
    shift = _MANTISSA[dtype]
    octaves = (sample >> shift) & sample.dtype.type((1 << (8 * sample.itemsize - 1 - shift)) - 1)
    share = np.bincount(octaves.astype(np.int64)) / sample.size
    rare = 1 / 4096
    top = int(np.flatnonzero(np.cumsum(share[::-1])[::-1] > rare)[-1])
    bottom = int(np.flatnonzero(np.cumsum(share) > rare)[0])
    lowest = max(bottom, top - 2 * MAX_CLASSES + 1)
    return np.array([0, *sorted(octave << shift for octave in range(top - 2, lowest, -2))], np.uint64)
