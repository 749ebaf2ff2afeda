"""`sparse` and `sparse-max`: changed elements as gaps and integer differences in byte planes; one zstd frame.

Frame (little-endian, before compression): header `MDSP`, format version, element bytes, block bytes, tensor bytes;
then per block of BLOCK_BYTES a `_BLOCK` record and, by its form,

* EMPTY: nothing changed.
* SPARSE: a `_CLASS` record per class; per class its gaps (`kernels.pack_gaps`); then per class the zigzag differences
  of its changed elements, plane by plane, or as packed bits where all, or nearly all, are small.
* DENSE: the zigzag differences of all elements, plane by plane. Chosen where more than half changed. zstd stores what
  it cannot compress, so no frame exceeds the raw bytes by more than 1 % (and a header).

`sparse` has one class. `sparse-max` has up to 16, by the exponent of the *old* value, which the receiver holds: under a
fixed step size the chance that a rounded weight moves halves with every octave, so gaps within a class cost less.
zstd blocks end where streams end, so every stream gets its own entropy table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import zstandard

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs import kernels
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, FrameReader, Sink, check_pair
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.dtypes import element_size, non_finite_mask, unsigned

FORMAT_VERSION = 1
_HEADER = struct.Struct("<4sBBHIQ")
_MAGIC = b"MDSP"
_BLOCK = struct.Struct("<BBHI")  # form, classes, 0, changed elements
_CLASS = np.dtype([("threshold", "<u8"), ("count", "<u4"), ("gap_bytes", "<u4"), ("wide", "<u2"), ("bits", "<u2")])
_EMPTY, _SPARSE, _DENSE = 0, 1, 2
_ESCAPES, _ESCAPED = 5, 16  # `bits` of a class in 4 bits a value where 16 means "in full, after these"
# Our streams have skewed bytes and no repeats: a short match found by chance costs more than its literals. A tiny hash
# table and long matches leave the work to the entropy coder (5 to 10 % smaller than level 1, and faster both ways).
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, window_log=19)
_HOT_BYTES = 256 << 10  # compared, hashed and gathered while in the second-level cache
_PIECE_BYTES = 2 << 20  # written and hashed together
_OWN_ZSTD_BLOCK = 1 << 10  # shorter streams share an entropy table
_WIDE_FROM = 600  # mean gap above which two bytes a gap are cheaper than escapes
_MAX_CLASSES = 10
_CLASSES_FROM = 1 << 14  # elements below which classes cost more than they save
# dtype -> mantissa bits: a class is an octave of the old value's magnitude.
_MANTISSA = {"F16": 10, "BF16": 7, "F32": 23, "F64": 52, "F8_E4M3": 3, "F8_E5M2": 2}


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
        block = _BlockEncoder(dtype, min(BLOCK_BYTES, new.size), self.name == "sparse-max")
        changed = 0
        for begin in range(0, new.size, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, new.size)
            changed += block.encode(old[begin:end], new[begin:end], hasher, out)
        out.finish()
        return EncodeStats(changed, block.non_finite)

    def decoder(self, frame: Any, nbytes: int, dtype: str) -> _SparseDecoder:
        return _SparseDecoder(frame, nbytes, dtype)


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


class _BlockEncoder:
    """Scratch memory for one tensor's blocks (a few bytes per element of one block), and the encoding of one."""

    def __init__(self, dtype: str, block_bytes: int, by_class: bool):
        self._dtype, self._width = dtype, element_size(dtype)
        self._zero = unsigned(dtype).type(0)
        self._finite_mask = np.uint64(non_finite_mask(dtype))
        self._by_class = by_class
        elements = block_bytes // self._width
        self._positions = np.empty(elements, np.uint32)
        self._planes = np.empty((self._width, elements), np.uint8)
        self.non_finite = 0

    def encode(self, old: np.ndarray, new: np.ndarray, hasher: Hasher | None, out: Compressor) -> int:
        """Compare, hash and gather one block in one pass over memory; how many elements changed."""
        n, elements, hot = 0, new.size // self._width, _HOT_BYTES // self._width
        a, b = old.ctypes.data, new.ctypes.data
        for begin in range(0, elements, hot):
            end = min(begin + hot, elements)
            n, bad = kernels.scan(a, b, begin, end, self._zero, self._finite_mask, self._positions, self._planes, n)
            self.non_finite += bad
            if hasher is not None:
                hasher.update(new[begin * self._width : end * self._width])
        if not n:
            write_empty(out)
        elif 2 * n > elements:
            kernels.all_differences(a, b, elements, self._zero, self._planes)
            write_dense(out, self._planes[:, :elements], n)
        else:
            self._write_sparse(old, n, out)
        return n

    def _write_sparse(self, old: np.ndarray, n: int, out: Compressor) -> None:
        elements, positions, planes = old.size // self._width, self._positions[:n], self._planes[:, :n]
        thresholds = class_thresholds(old, self._dtype) if self._by_class else np.zeros(1, np.uint64)
        gaps, counts = np.empty(n, np.uint32), np.zeros(thresholds.size, np.int64)
        if thresholds.size == 1:
            kernels.positions_to_gaps(positions, gaps)
            counts[0] = n
        else:
            classes, unsorted = np.empty(n, np.uint8), gaps.copy()
            keep, keys = class_key(thresholds, self._dtype)
            address = old.ctypes.data
            kernels.class_gaps(address, elements, self._zero, keep, keys, positions, classes, unsorted, counts)
            planes = np.empty((self._width, n), np.uint8)
            kernels.sort_by_class(classes, np.cumsum(counts) - counts, unsorted, self._planes, gaps, planes)
        write_sparse(out, thresholds, counts, gaps, planes, elements)


def write_header(out: Compressor, dtype: str, nbytes: int) -> None:
    """Start a frame for a tensor of `nbytes` bytes."""
    out.write(_HEADER.pack(_MAGIC, FORMAT_VERSION, element_size(dtype), 0, BLOCK_BYTES, nbytes))


def write_empty(out: Compressor) -> None:
    """A block in which nothing changed."""
    out.write(_BLOCK.pack(_EMPTY, 0, 0, 0))


def write_dense(out: Compressor, planes: np.ndarray, changed: int) -> None:
    """A block as the zigzag differences of all its elements; planes: uint8 [element bytes, elements]."""
    out.write(_BLOCK.pack(_DENSE, 0, 0, changed))
    for plane in planes:
        out.write_stream(plane)


def write_sparse(
    out: Compressor, thresholds: np.ndarray, counts: np.ndarray, gaps: np.ndarray, planes: np.ndarray, elements: int
) -> None:
    """A block as gaps (uint32 [n]) and zigzag differences (uint8 [element bytes, n]), both in class order.

    thresholds, counts: of each class (uint64, int64 [classes]); elements: of the block.
    """
    table = np.zeros(thresholds.size, _CLASS)
    table["threshold"], table["count"] = thresholds, counts
    ends = np.cumsum(counts)
    parts = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    streams = [_pack_gaps(row, gaps[part]) for row, part in zip(table, parts, strict=True)]
    streams += [_pack_values(row, planes[:, part]) for row, part in zip(table, parts, strict=True)]
    out.write(_BLOCK.pack(_SPARSE, thresholds.size, 0, gaps.size))
    out.write(table.tobytes())
    for stream in chain.from_iterable(streams):
        out.write_stream(stream)


def _pack_gaps(row: Any, gaps: np.ndarray) -> Sequence[np.ndarray]:
    total = int(gaps.sum(dtype=np.int64))
    wide = total > _WIDE_FROM * gaps.size
    low = np.empty(gaps.size + (0 if wide else total // 255), np.uint8)
    high = np.empty(gaps.size + (total >> 8) // 255 if wide else 0, np.uint8)
    n_low, n_high = kernels.pack_gaps(gaps, wide, low, high)
    row["wide"], row["gap_bytes"] = wide, n_low + n_high
    return low[:n_low], high[:n_high]


def _pack_values(row: Any, planes: np.ndarray) -> Sequence[np.ndarray]:
    """Byte planes of one class's differences; where few are large, packed bits and those few."""
    low, large = planes[0], planes[0] > _ESCAPED - 1
    for plane in planes[1:]:
        large |= plane != 0
    exceptions = int(np.count_nonzero(large))
    if exceptions:
        if exceptions > low.size // 8:
            return list(planes)
        row["bits"], bits, low = _ESCAPES, 4, np.where(large, np.uint8(_ESCAPED), low)
    else:
        row["bits"] = bits = next(b for b in (1, 2, 4) if low.max(initial=1) <= 1 << b)
    packed = np.zeros(-(-low.size * bits // 8), np.uint8)
    kernels.pack_values(low, bits, packed)
    return [packed, *(plane[large] for plane in planes)] if exceptions else [packed]


def class_key(thresholds: np.ndarray, dtype: str) -> tuple[Any, np.ndarray]:
    """(mask that drops the sign, thresholds) as elements."""
    kind = unsigned(dtype)
    return kind.type((1 << (8 * kind.itemsize - 1)) - 1), thresholds.astype(kind)


def class_thresholds(old: np.ndarray, dtype: str) -> np.ndarray:
    """Class boundaries (uint64 [classes]) of a block, from a sample of its old values."""
    values = old.view(unsigned(dtype))
    return thresholds_of(np.concatenate([values[part] for part in sample_parts(values.size)]), values.size, dtype)


def sample_parts(elements: int) -> list[slice]:
    """Which elements of a block decide its classes."""
    return [slice(at, at + 2048) for at in range(0, elements, max(2048, elements // 16))]


def has_classes(dtype: str) -> bool:
    """Whether `sparse-max` splits this dtype by the exponent of the old value."""
    return dtype in _MANTISSA


def thresholds_of(sample: np.ndarray, elements: int, dtype: str) -> np.ndarray:
    """Class boundaries: an octave each, rare octaves at both ends merged; one class for few elements."""
    if elements < _CLASSES_FROM or not has_classes(dtype):
        return np.zeros(1, np.uint64)
    shift = _MANTISSA[dtype]
    octaves = (sample >> shift) & sample.dtype.type((1 << (8 * sample.itemsize - 1 - shift)) - 1)
    share = np.bincount(octaves.astype(np.int64)) / sample.size
    rare = 1 / 4096
    top = int(np.flatnonzero(np.cumsum(share[::-1])[::-1] > rare)[-1])
    bottom = int(np.flatnonzero(np.cumsum(share) > rare)[0])
    bottom = max(bottom, top - _MAX_CLASSES + 1)
    return np.array([0, *(k << shift for k in range(bottom + 1, top + 1))], np.uint64)


class _SparseDecoder:
    """Reads one frame block by block; every count is checked before memory is taken for it."""

    def __init__(self, frame: Any, nbytes: int, dtype: str):
        self._reader, self._dtype, self._width = FrameReader(frame), dtype, element_size(dtype)
        self._zero = unsigned(dtype).type(0)
        raw = self._reader.read(_HEADER.size).tobytes()
        magic, version, width, _, block_bytes, size = _HEADER.unpack(raw)
        if magic != _MAGIC or version != FORMAT_VERSION:
            raise CheckpointError(f"not a `sparse` frame of format {FORMAT_VERSION}: {raw[:5]!r}")
        if (width, block_bytes, size) != (self._width, BLOCK_BYTES, nbytes):
            raise CheckpointError(
                f"frame is for {size} bytes of {width}-byte elements in blocks of {block_bytes}, "
                f"the tensor has {nbytes} bytes of {dtype} in blocks of {BLOCK_BYTES}"
            )

    def step(self, block: np.ndarray, hasher: Hasher | None = None) -> None:
        form, classes, _, n = _BLOCK.unpack(self._reader.read(_BLOCK.size).tobytes())
        elements = block.size // self._width
        if n > elements or form > _DENSE or (form == _EMPTY) != (n == 0):
            raise CheckpointError(f"block of form {form} claims {n} changes in {elements} elements")
        if form == _SPARSE:
            self._step_sparse(block, classes, n, hasher)
            return
        if form == _DENSE:
            planes = self._reader.read(block.size).reshape(self._width, elements)
            kernels.add_all_differences(block.ctypes.data, elements, self._zero, planes)
        if hasher is not None:
            hasher.update(block)

    def _step_sparse(self, block: np.ndarray, classes: int, n: int, hasher: Hasher | None) -> None:
        table, positions, order = self._positions(block, classes, n)
        ends = np.cumsum(table["count"], dtype=np.int64)
        parts = [slice(end - row["count"], end) for row, end in zip(table, ends, strict=True)]
        planes = np.zeros((self._width, n), np.uint8)
        for row, part in zip(table, parts, strict=True):
            self._read_values(row, planes[:, part])
        first = 0
        for begin in range(0, block.size, _PIECE_BYTES):  # positions of different pieces never interleave
            piece = block[begin : begin + _PIECE_BYTES]
            last = int(np.searchsorted(positions, np.uint32((begin + piece.size) // self._width)))
            own = (order[first:last], planes) if order.size else (order, planes[:, first:last])
            kernels.add_differences(block.ctypes.data, positions[first:last], own[0], self._zero, own[1])
            if hasher is not None:
                hasher.update(piece)
            first = last

    def finish(self) -> None:
        self._reader.finish()

    def _positions(self, block: np.ndarray, classes: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Class table and changed positions of a SPARSE block, and their index in class order (empty: as they are)."""
        elements = block.size // self._width
        if not 1 <= classes <= _MAX_CLASSES:
            raise CheckpointError(f"block claims {classes} classes")
        table = self._reader.read(classes * _CLASS.itemsize).view(_CLASS)
        thresholds, counts = table["threshold"].astype(np.uint64), table["count"].astype(np.int64)
        keep, keys = class_key(thresholds, self._dtype)
        if int(counts.sum()) != n or thresholds[0] or np.any(keys[1:] <= keys[:-1]) or np.any(keys != thresholds):
            raise CheckpointError(f"class table does not add up to {n} changes")
        gaps, at = np.empty(n, np.uint32), 0
        for row in table:
            self._read_gaps(row, gaps[at : at + int(row["count"])], elements)
            at += int(row["count"])
        positions = np.empty(n, np.uint32)
        if classes == 1:
            order = np.empty(0, np.uint32)
            found = n if kernels.gaps_to_positions(gaps, elements, positions) else 0
        else:
            order = np.empty(n, np.uint32)
            starts = np.cumsum(counts) - counts
            found = kernels.class_positions(
                block.ctypes.data, elements, self._zero, keep, keys, gaps, starts, counts, positions, order
            )
        if found != n:
            raise CheckpointError(f"gaps lead beyond the block's {elements} elements")
        return table, positions, order

    def _read_values(self, row: Any, planes: np.ndarray) -> None:
        count, bits = planes.shape[1], int(row["bits"])
        if bits not in (0, 1, 2, 4, _ESCAPES):
            raise CheckpointError(f"values of {bits} bits")
        if not bits:
            for plane in planes:
                self._reader.read_into(plane)
            return
        each = 4 if bits == _ESCAPES else bits
        kernels.unpack_values(self._reader.read(-(-count * each // 8)), each, planes[0])
        if bits == _ESCAPES:
            large = np.flatnonzero(planes[0] == _ESCAPED)
            for plane in planes:
                plane[large] = self._reader.read(large.size)

    def _read_gaps(self, row: Any, gaps: np.ndarray, elements: int) -> None:
        total, low_bytes = int(row["gap_bytes"]), gaps.size if row["wide"] else int(row["gap_bytes"])
        if row["wide"] > 1 or not low_bytes <= total <= 2 * gaps.size + elements // 255:
            raise CheckpointError(f"{total} bytes cannot hold {gaps.size} gaps")
        packed = self._reader.read(total)
        if not kernels.unpack_gaps(packed[:low_bytes], packed[low_bytes:], bool(row["wide"]), gaps, elements):
            raise CheckpointError("gaps are not well-formed")
