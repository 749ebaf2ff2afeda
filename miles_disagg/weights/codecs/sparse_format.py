"""The layout of a `sparse` frame, shared by its writers (CPU, device) and its reader.

Frame (little-endian, before compression): header `MDSP`, format version, element bytes, block bytes, tensor bytes;
then per block of BLOCK_BYTES a BLOCK record and, by its form,

* EMPTY: nothing changed.
* SPARSE: a `ClassRow` per class; per class its gaps (`kernels.pack_gaps`); then per class the zigzag differences of its
  changed elements: plane by plane, or as packed bits where all, or nearly all, are small (`kernels.pack_codes`).
* DENSE: the zigzag differences of all elements, plane by plane.

zstd blocks end where streams end, so every stream gets its own entropy table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from miles_disagg.weights.codecs import kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, Sink
from miles_disagg.weights.codecs.class_kernels import MAX_CLASSES
from miles_disagg.weights.codecs.scratch import idle, scratch
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


class ClassRow(NamedTuple):
    """One class of a SPARSE block. `wide` 0 or 1; `bits` 0 (byte planes), 1, 2, 4 or ESCAPES."""

    threshold: int
    changed: int
    gap_bytes: int
    large: int
    wide: int
    bits: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed small values."""
        return -(-self.changed * bits_of(self.bits) // 8)

    def value_bytes(self, width: int) -> int:
        """Bytes of all value streams, for elements of `width` bytes."""
        return self.packed_bytes + (self.large if self.bits else self.changed) * width


CLASS = struct.Struct("<QIIIHH")


def bits_of(form: int) -> int:
    """Bits of one packed value under a row's `bits`."""
    return 4 if form == ESCAPES else form


def _new_context() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_ZSTD)


class Compressor:
    """One zstd frame, with a block boundary after every long stream."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._context = idle.compressors.pop() if idle.compressors else _new_context()
        self._zstd, self._pending = self._context.compressobj(), list[bytes]()

    def write(self, data: bytes) -> None:
        self._pending.append(data)  # a few bytes each: they go with what comes next

    def write_stream(self, data: np.ndarray) -> None:
        if data.size:
            self._flush_pending()
            self._sink(self._zstd.compress(data.data))
            if data.size >= _OWN_ZSTD_BLOCK:
                self._sink(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

    def _flush_pending(self) -> None:
        if self._pending:
            self._sink(self._zstd.compress(b"".join(self._pending)))
            self._pending.clear()

    def finish(self) -> None:
        """End the frame. The compressor is of no use afterwards."""
        self._flush_pending()
        self._sink(self._zstd.flush())
        idle.compressors.append(self._context)


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


class Packed(NamedTuple):
    """One class of a SPARSE block: its row but for threshold and count, and its streams."""

    wide: int
    gaps: Sequence[np.ndarray]
    bits: int
    large: int
    values: Sequence[np.ndarray]


def write_sparse(
    out: Compressor, thresholds: Sequence[int], counts: Sequence[int], gaps: np.ndarray, values: np.ndarray
) -> None:
    """A block as gaps (uint32 [n]) and zigzag differences (unsigned integers [n]), both in class order.

    thresholds, counts: of each class.
    """
    classes, begin = [], 0
    for count in counts:
        of_class = slice(begin, begin + count)
        codes, large = scratch.take(count), scratch.take(count + 1, values.dtype)
        total, top, larger = map(int, kernels.measure(gaps[of_class], values[of_class], codes, large))
        found = pack_values(values[of_class], codes, top, large[:larger])
        classes.append(Packed(*pack_gaps(gaps[of_class], total), *found))
        begin += count
    write_packed(out, thresholds, counts, classes)


def write_packed(out: Compressor, thresholds: Sequence[int], counts: Sequence[int], classes: Sequence[Packed]) -> None:
    """A block of which every class is packed."""
    head = [BLOCK.pack(SPARSE, len(classes), 0, sum(counts))]
    for threshold, count, (wide, gaps, bits, large, _) in zip(thresholds, counts, classes, strict=True):
        head.append(CLASS.pack(threshold, count, sum(stream.size for stream in gaps), large, wide, bits))
    out.write(b"".join(head))
    for streams in (*(packed.gaps for packed in classes), *(packed.values for packed in classes)):
        for stream in streams:
            out.write_stream(stream)


def pack_gaps(gaps: np.ndarray, total: int, narrow: np.ndarray | None = None) -> tuple[int, Sequence[np.ndarray]]:
    """(`wide`, streams); total: sum of the gaps. narrow: the stream, should it be narrow, if the caller has it."""
    wide = int(total > _WIDE_FROM * gaps.size)
    if narrow is not None and not wide:
        return 0, (narrow,)
    low = scratch.take(gaps.size + (0 if wide else total // 255))
    high = scratch.take(gaps.size + (total >> 8) // 255 if wide else 0)
    n_low, n_high = kernels.pack_gaps(gaps, wide, low, high)
    return wide, (low[:n_low], high[:n_high])


def pack_values(
    values: np.ndarray, codes: np.ndarray, top: int, large: np.ndarray
) -> tuple[int, int, Sequence[np.ndarray]]:
    """(`bits`, how many are large, streams): few bits where all are small; 4, and the large in full; or byte planes.

    codes, top, large: see `kernels.measure`.
    """
    if not large.size:
        bits = next(b for b in (1, 2, 4) if top <= 1 << b)
    elif large.size <= values.size // 8:
        bits = ESCAPES
    else:
        return 0, 0, list(byte_planes(values))
    packed, planes = scratch.take(-(-values.size * bits_of(bits) // 8)), scratch.take(large.nbytes)
    kernels.pack_codes(codes, bits_of(bits), packed, large, planes)
    return bits, large.size, (packed, *planes.reshape(values.itemsize, large.size))


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
