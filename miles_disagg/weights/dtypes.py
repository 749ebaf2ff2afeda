"""Safetensors dtype strings: element sizes, byte counts, and which bit patterns are not finite.

Pure tables and arithmetic on raw bytes. No torch: a torch dtype is named by its string (`"torch.bfloat16"`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from miles_disagg.domain.errors import CheckpointError

BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element, by safetensors dtype string."""

OF_TORCH: dict[str, str] = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32",
    "torch.int64": "I64", "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64",
    "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ", "torch.float8_e5m2fnuz": "F8_E5M2FNUZ", "torch.complex64": "C64",
}  # fmt: skip
"""`str(tensor.dtype)` to safetensors dtype string."""

_UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
# dtype -> (mask, pattern): (bits & mask) == pattern means NaN or Inf, on unsigned integers of the element's size.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000,
             "F8_E5M2": 0x7C, "F8_E4M3": 0x7F, "F8_E8M0": 0xFF}  # fmt: skip
_NON_FINITE = {dtype: (mask, mask) for dtype, mask in _EXPONENT.items()}
_NON_FINITE |= {"F8_E4M3FNUZ": (0xFF, 0x80), "F8_E5M2FNUZ": (0xFF, 0x80)}  # no infinity; NaN where -0 would be


def element_size(dtype: str) -> int:
    """Bytes of the unit that codecs compare: the element's size, or 1 for formats below a byte."""
    return max(_bits(dtype) // 8, 1)


def unsigned(dtype: str) -> np.dtype:
    """Little-endian unsigned integer dtype of one element's size; how codecs view any tensor."""
    return _UNSIGNED[element_size(dtype)]


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; CheckpointError for an unknown dtype or a shape that does not fill whole bytes."""
    bits = _bits(dtype) * math.prod(shape)
    if bits % 8:
        raise CheckpointError(f"shape {list(shape)} of dtype {dtype} is not a whole number of bytes")
    return bits // 8


def non_finite_test(dtype: str) -> tuple[int, int]:
    """(mask, pattern) with `bits & mask == pattern` exactly for NaN and Inf; never where the dtype has neither."""
    return _NON_FINITE.get(dtype, (0, 1))


def count_non_finite(values: np.ndarray, dtype: str) -> int:
    """How many of `values` (unsigned integers of the element's size) are NaN or Inf in `dtype`."""
    if dtype not in _NON_FINITE:
        return 0
    mask, pattern = map(values.dtype.type, _NON_FINITE[dtype])
    return int(np.count_nonzero((values & mask) == pattern))


def _bits(dtype: str) -> int:
    try:
        return BITS[dtype]
    except (KeyError, TypeError):
        raise CheckpointError(f"unknown safetensors dtype {dtype!r}; known: {', '.join(BITS)}") from None
