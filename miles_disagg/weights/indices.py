"""`indices`: changed elements as positions and absolute values; what `broadcast` + `delta` sends and patches hold.

Two arrays per tensor, both plain enough for torch to load: ascending element positions (I32, or I64 from 2**31 elements
on) and the new values in the tensor's own dtype. Idempotent. How they travel is `publish` and `engine`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs.base import BLOCK_BYTES, check_pair
from miles_disagg.weights.dtypes import element_size, unsigned

POSITIONS, VALUES = ":positions", ":values"
"""Suffixes of the two arrays of a tensor, in patch files and in broadcast buckets."""


class PositionDtype(NamedTuple):
    """Safetensors and numpy names of one integer type."""

    name: str
    numpy: str


class Indices(NamedTuple):
    """positions: int32 or int64 [n], ascending; values: uint8 [n * element size]; elements: of the whole tensor."""

    positions: np.ndarray
    values: np.ndarray
    elements: int


def position_dtype(elements: int) -> PositionDtype:
    """Integer type of positions in a tensor of `elements` elements."""
    return PositionDtype("I64", "<i8") if elements > 1 << 31 else PositionDtype("I32", "<i4")


def changed_positions(old: np.ndarray, new: np.ndarray, dtype: str) -> np.ndarray:
    """Element positions (int64 [n], ascending) where two uint8 arrays of one length differ."""
    return np.flatnonzero(old.view(unsigned(dtype)) != new.view(unsigned(dtype)))


def diff_indices(old: np.ndarray, new: np.ndarray, dtype: str) -> Indices:
    """Changed elements of one tensor (raw bytes, uint8 [n]); scratch memory is bounded by blocks."""
    check_pair(old, new)
    size, kind = element_size(dtype), position_dtype(new.size // element_size(dtype))
    positions, values = [np.empty(0, kind.numpy)], [np.empty(0, np.uint8)]
    for begin in range(0, new.size, BLOCK_BYTES):
        after = new[begin : begin + BLOCK_BYTES]
        found = changed_positions(old[begin : begin + BLOCK_BYTES], after, dtype)
        positions.append((found + begin // size).astype(kind.numpy))
        values.append(after.view(unsigned(dtype))[found].view(np.uint8))
    return Indices(np.concatenate(positions), np.concatenate(values), new.size // size)


def scatter(target: np.ndarray, dtype: str, positions: np.ndarray, values: np.ndarray) -> None:
    """Write `values` (uint8 [n * element size]) at element `positions` (int [n]) of `target` (uint8), in place."""
    size = element_size(dtype)
    if values.nbytes != positions.size * size:
        raise CheckpointError(
            f"{positions.size} positions need {positions.size * size} bytes of values, got {values.nbytes}"
        )
    if positions.size and (positions.min() < 0 or positions.max() >= target.size // size):
        raise CheckpointError(f"a position lies outside the tensor's {target.size // size} elements")
    target.view(unsigned(dtype))[positions] = np.ascontiguousarray(values).view(unsigned(dtype))
