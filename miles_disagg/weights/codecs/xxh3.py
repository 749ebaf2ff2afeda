"""xxh3-128 whose inner loop can run inside other kernels, on bytes that are in cache anyway.

The same digests as `xxhash.xxh3_128`. Specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
(XXH3, inputs of more than 240 bytes; shorter ones are handed to `xxhash`).
"""

# pyright: reportCallIssue=false
from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from miles_disagg.weights.digest import Hasher

CHUNK = 1024  # bytes between two scrambles; kernels absorb whole chunks
_STRIPE, _SHORT = 64, 240
_I64, _I32 = ir.IntType(64), ir.IntType(32)
_LANES = ir.VectorType(_I64, 8)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = np.array([_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64)
_SECRET = np.frombuffer(bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
), np.uint8)  # fmt: skip
SECRET = _SECRET.ctypes.data
"""Address of the specification's default secret; an argument of every kernel that absorbs."""


def _lanes(builder, address, align=1):
    value = builder.load(builder.inttoptr(address, _LANES.as_pointer()), typ=_LANES)
    value.align = align
    return value


def _same(value):
    return ir.Constant(_LANES, [value] * 8)


def _add_stripe(builder, state, data, secret):
    value = _lanes(builder, data)
    key = builder.xor(value, _lanes(builder, secret))
    neighbours = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(value, ir.Constant(_LANES, ir.Undefined), neighbours)
    product = builder.mul(builder.and_(key, _same(0xFFFFFFFF)), builder.lshr(key, _same(32)))
    return builder.add(builder.add(state, swapped), product)


@intrinsic
def absorb_chunk(typingctx, state, data, secret):
    """Add the CHUNK bytes at `data` to the eight u64 at `state`; all three are addresses."""

    def codegen(context, builder, signature, args):
        value = _lanes(builder, args[0], 8)
        for i in range(CHUNK // _STRIPE):
            data, secret = (builder.add(args[k], ir.Constant(_I64, step * i)) for k, step in ((1, _STRIPE), (2, 8)))
            value = _add_stripe(builder, value, data, secret)
        value = builder.xor(value, builder.lshr(value, _same(47)))
        value = builder.xor(value, _lanes(builder, builder.add(args[2], ir.Constant(_I64, 128))))
        value = builder.mul(value, _same(_PRIME32[0]))
        builder.store(value, builder.inttoptr(args[0], _LANES.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp), codegen


@intrinsic
def _absorb_stripe(typingctx, state, data, secret):
    """Add the 64 bytes at `data`."""

    def codegen(context, builder, signature, args):
        value = _add_stripe(builder, _lanes(builder, args[0], 8), args[1], args[2])
        builder.store(value, builder.inttoptr(args[0], _LANES.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp), codegen


_jit = njit(nogil=True, cache=True, boundscheck=False)


@_jit
def _absorb(state, data, secret, chunks):
    for i in range(chunks):
        absorb_chunk(np.uint64(state), np.uint64(data + CHUNK * i), np.uint64(secret))


@_jit
def _absorb_stripes(state, data, secret, stripes, step):
    for i in range(stripes):
        _absorb_stripe(np.uint64(state), np.uint64(data + _STRIPE * i), np.uint64(secret + step * i))


class Xxh3:
    """`xxhash.xxh3_128` with its state open to kernels: `lend` before one absorbs chunks, `settle` after it.

    The last 1 to CHUNK bytes are always kept back, since the end of the input is treated differently.
    """

    def __init__(self) -> None:
        self._state, self._absorbed = _START.copy(), 0
        self._address = address_of(self._state)
        self._kept = np.empty(_STRIPE + CHUNK, np.uint8)  # the last stripe absorbed, then what is kept back
        self._count = 0

    def update(self, data: Any, /) -> None:
        """Add bytes (any contiguous buffer)."""
        raw = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        if self._count:
            part = raw[: CHUNK - self._count]
            self._keep(part)
            raw = raw[part.size :]
        if raw.size:
            address = self.lend()
            chunks = (raw.size - 1) // CHUNK
            _absorb(address, raw.ctypes.data, SECRET, chunks)
            self.settle(raw, chunks)

    def lend(self) -> int:
        """Address of the state for a kernel that absorbs CHUNKs from here on; 0 where the input is not at a boundary.

        At least one more byte must follow.
        """
        if self._count == CHUNK:
            _absorb(self._address, self._kept.ctypes.data + _STRIPE, SECRET, 1)
            self._absorbed += CHUNK
            self._kept[:_STRIPE] = self._kept[-_STRIPE:]
            self._count = 0
        return 0 if self._count else self._address

    def settle(self, data: np.ndarray, chunks: int) -> None:
        """A kernel has absorbed the first `chunks` CHUNKs of `data` (uint8 [n], at most a CHUNK more): the rest."""
        at = CHUNK * chunks
        if chunks:
            self._absorbed += at
            self._kept[:_STRIPE] = data[at - _STRIPE : at]
        self._keep(data[at:])

    def _keep(self, data: np.ndarray) -> None:
        self._kept[_STRIPE + self._count : _STRIPE + self._count + data.size] = data
        self._count += data.size

    def hexdigest(self) -> str:
        """32 lower-case hex digits of everything so far."""
        size, begin = self._absorbed + self._count, self._kept.ctypes.data
        if size <= _SHORT:
            return xxhash.xxh3_128(self._kept[_STRIPE : _STRIPE + self._count].tobytes()).hexdigest()
        state = self._state.copy()
        _absorb_stripes(state.ctypes.data, begin + _STRIPE, SECRET, (self._count - 1) // _STRIPE, 8)
        _absorb_stripes(state.ctypes.data, begin + self._count, SECRET + 121, 1, 0)
        lanes = [int(lane) for lane in state]
        low = _merge(lanes, 11, size * _PRIME64[0])
        return f"{_merge(lanes, 117, ~(size * _PRIME64[1])):016x}{low:016x}"


_WORD = (1 << 64) - 1


def _merge(lanes: list[int], at: int, start: int) -> int:
    result = start
    for i in range(4):
        keys = (int.from_bytes(_SECRET[at + 16 * i + b : at + 16 * i + b + 8].tobytes(), "little") for b in (0, 8))
        product = (lanes[2 * i] ^ next(keys)) * (lanes[2 * i + 1] ^ next(keys))
        result += (product & _WORD) ^ (product >> 64)
    result &= _WORD
    result ^= result >> 37
    result = (result * 0x165667919E3779F9) & _WORD
    return result ^ (result >> 32)


def address_of(array: np.ndarray) -> int:
    """Where its bytes are; several times faster than `array.ctypes.data`."""
    return array.__array_interface__["data"][0]


def lend(hasher: Hasher | None, block: np.ndarray) -> int:
    """The state of an `Xxh3` for a kernel that digests `block`; 0: nothing to lend. `settle` afterwards."""
    return hasher.lend() if isinstance(hasher, Xxh3) and block.size else 0


def settle(hasher: Hasher | None, block: np.ndarray, state: int) -> None:
    """After a kernel that had `state`: now `hasher` has taken all of `block`."""
    if state and isinstance(hasher, Xxh3):
        hasher.settle(block, (block.size - 1) // CHUNK)
    elif hasher is not None:
        hasher.update(block)
