"""Numba kernels behind `sparse`: compare, gaps, small values, scatter. Bytes in, bytes out; no format, no policy.

Compiled on first use and cached beside the module; all release the GIL. What is compared or scattered is digested in
the same loop, PIECE by PIECE, while it is in the first-level cache (`state`: see `xxh3.Xxh3.lend`; 0 digests nothing).
Values are zigzag differences of integer representations, in unsigned integers of the element's width.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import numpy as np
from numba import njit

from miles_disagg.weights.codecs.vector import GROUP, count_bits, differ, load, lowest_bit, store, width_of
from miles_disagg.weights.codecs.xxh3 import CHUNK, absorb_chunk

PIECE = 4096  # bytes compared or scattered before they are digested
SLACK = 2  # elements that `scan` may write beyond the last change
ESCAPED = 16  # in packed 4-bit values: "in full, elsewhere"
_NEVER = 1 << 62
_jit = njit(nogil=True, cache=True, boundscheck=False)
_inline = njit(nogil=True, cache=True, boundscheck=False, inline="always")  # a call would count references per group


@_jit
def scan(old, new, elements, zero, finite_mask, positions, values, state, secret) -> tuple[int, int]:
    """Positions (u4) and values of the elements that differ; (how many, how many of them become NaN or Inf).

    Both outputs need SLACK spare entries. Digests all whole CHUNKs of `new` but the last bytes (1 to CHUNK).
    """
    width, one = np.int64(width_of(zero)), np.uint64(1)
    a, b = np.uint64(old), np.uint64(new)
    chunks = max(elements * width - 1, 0) // CHUNK if state else 0
    n = bad = 0
    for begin in range(0, elements, PIECE // width):
        end, first = min(begin + PIECE // width, elements), n
        for at in range(begin, end, GROUP):
            here = np.uint64(at * width)
            if at + GROUP <= elements:
                mask = differ(a + here, b + here, zero)
            else:
                mask = np.uint64(0)
                for j in range(at, elements):
                    shift = np.uint64(j * width)
                    if load(a + shift, zero) != load(b + shift, zero):
                        mask |= one << np.uint64(j - at)
            # Two at a time whether there are any or not: most groups have at most two, and no branch is guessed wrong.
            last = n + count_bits(mask)
            while True:
                positions[n] = at + lowest_bit(mask)
                mask &= mask - one
                positions[n + 1] = at + lowest_bit(mask)
                mask &= mask - one
                n += 2
                if n >= last:
                    break
            n = last
        for i in range(first, n):
            shift = np.uint64(positions[i]) * np.uint64(width)
            after = np.uint64(load(b + shift, zero))
            values[i] = _zigzag(after - np.uint64(load(a + shift, zero)), width)
            bad += np.int64(finite_mask != 0 and (after & finite_mask) == finite_mask)
        digest(b, begin * width, min(chunks, end * width // CHUNK), state, secret)
    return n, bad


@_inline
def digest(base, begin, until, state, secret):
    """Absorb the chunks from byte `begin` up to chunk number `until`."""
    for chunk in range(begin // CHUNK, until):
        absorb_chunk(np.uint64(state), base + np.uint64(CHUNK * chunk), np.uint64(secret))


@_jit
def _zigzag(moved, width):
    unused = np.uint64(64 - 8 * width)
    moved <<= unused
    return ((moved << np.uint64(1)) ^ np.uint64(np.int64(moved) >> np.int64(63))) >> unused


@_inline
def add_value(address, value, zero):
    """Undo one zigzag difference."""
    folded = np.uint64(value)
    moved = (folded >> np.uint64(1)) ^ (np.uint64(0) - (folded & np.uint64(1)))
    store(address, np.uint64(load(address, zero)) + moved, zero)


@_jit
def apply_gaps(target, elements, zero, low, low_bytes, high, high_bytes, wide, values, state, secret) -> int:
    """Undo `scan` and `pack_gaps`: add values[i] to the elements that the gap streams name; how many were found.

    low, high: addresses of the streams. Fewer than all: gaps lead beyond the tensor, or streams have the wrong length.
    """
    width, n = np.int64(width_of(zero)), values.size
    a = np.uint64(target)
    chunks = max(elements * width - 1, 0) // CHUNK if state else 0
    escaped, size = (high, high_bytes) if wide else (low, low_bytes)
    i = at = 0
    gap, at = _read_gap(escaped, at, size, low, wide, i) if n else (_NEVER, 0)
    position = np.int64(gap)
    if position < 0 or (n and position >= elements):
        return 0
    for begin in range(0, elements, PIECE // width):
        end = min(begin + PIECE // width, elements)
        while position < end:
            add_value(a + np.uint64(position * width), values[i], zero)
            i += 1
            if i == n:
                position = _NEVER
                break
            gap, at = _read_gap(escaped, at, size, low, wide, i)
            position += gap + 1
            if gap < 0 or position >= elements:
                return i
        digest(a, begin * width, min(chunks, end * width // CHUNK), state, secret)
    return i if at == size else -1


@_inline
def _read_gap(escaped, at, size, low, wide, i):
    """(gap number `i`, where the next begins); a gap of -_NEVER where the stream ends too early."""
    gap, byte = np.int64(0), np.int64(255)
    while byte == 255 and at < size:
        byte = np.int64(load(np.uint64(escaped + at), np.uint8(0)))
        gap += byte
        at += 1
    if byte == 255:
        gap = -_NEVER
    elif wide:
        gap = (gap << 8) | np.int64(load(np.uint64(low + i), np.uint8(0)))
    return gap, at


@_jit
def all_differences(old, new, elements, zero, planes):
    """Byte planes of every element's value, changed or not: planes[b, i] is byte b."""
    width = np.int64(width_of(zero))
    a, b = np.uint64(old), np.uint64(new)
    for i in range(elements):
        shift = np.uint64(i * width)
        folded = _zigzag(np.uint64(load(b + shift, zero)) - np.uint64(load(a + shift, zero)), width)
        for plane in range(width):
            planes[plane, i] = folded >> np.uint64(8 * plane)


@_jit
def add_all_differences(target, elements, zero, planes):
    """Undo `all_differences`."""
    width = np.int64(width_of(zero))
    for i in range(elements):
        folded = np.uint64(0)
        for plane in range(width):
            folded |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        add_value(np.uint64(target) + np.uint64(i * width), folded, zero)


@_jit
def pack_gaps(gaps, wide, low, high) -> tuple[int, int]:
    """Gaps (u4) as bytes; (bytes in `low`, bytes in `high`).

    Narrow: all of it in `low`, 255 meaning "255 more, keep reading". Wide: low bytes in `low`, the rest so in `high`.
    """
    escaped, n = high if wide else low, 0
    for i in range(gaps.size):
        gap = gaps[i]
        if wide:
            low[i] = gap & 255
            gap >>= 8
        while gap >= 255:
            escaped[n] = 255
            n += 1
            gap -= 255
        escaped[n] = gap
        n += 1
    return (gaps.size, n) if wide else (n, 0)


@_jit
def unpack_gaps(low, low_bytes, high, high_bytes, wide, gaps) -> bool:
    """Undo `pack_gaps` into `gaps` (u4 [count]); False unless exactly the given bytes give `count` gaps."""
    escaped, size = (high, high_bytes) if wide else (low, low_bytes)
    at = 0
    for i in range(gaps.size):
        gap, at = _read_gap(escaped, at, size, low, wide, i)
        if gap < 0:
            return False
        gaps[i] = min(gap, np.int64(0xFFFFFFFF))
    return at == size


@_jit
def pack_values(values, bits, packed, large):
    """Values minus one, `bits` bits each (1, 2 or 4), lowest first; those of ESCAPED and more go to `large` in full.

    packed: uint8, filled up with zero bits. `large` needs one spare entry. How many are there.
    """
    n, k = values.size, 0
    codes = np.zeros(8 * packed.size // bits, np.uint8)
    for i in range(n):
        codes[i] = min(np.uint64(values[i]), np.uint64(ESCAPED)) - np.uint64(1)
    if bits == 4:
        for i in range(n):
            large[k] = values[i]
            k += np.int64(codes[i] == ESCAPED - 1)
        for j in range(packed.size):
            packed[j] = codes[2 * j] | (codes[2 * j + 1] << 4)
        return k
    for j in range(packed.size):
        byte = 0
        for slot in range(8 // bits):
            byte |= codes[8 // bits * j + slot] << (slot * bits)
        packed[j] = byte
    return 0


@_jit
def unpack_values(packed, bits, large, values) -> bool:
    """Undo `pack_values` (`packed`: an address; `large`: one spare entry); False unless all of `large` is used."""
    seen, spare, low = 0, large.size - 1, (1 << bits) - 1
    for i in range(values.size):
        byte = np.int64(load(np.uint64(packed + ((i * bits) >> 3)), np.uint8(0)))
        value = ((byte >> ((i * bits) & 7)) & low) + 1
        values[i] = large[min(seen, spare)] if value == ESCAPED else value
        seen += np.int64(value == ESCAPED)
    return seen == spare


@_jit
def join_planes(planes, values):
    """Values from their byte planes at the address `planes`."""
    n = values.size
    for i in range(n):
        value = np.uint64(0)
        for plane in range(values.itemsize):
            value |= np.uint64(load(np.uint64(planes + plane * n + i), np.uint8(0))) << np.uint64(8 * plane)
        values[i] = value


@_jit
def positions_to_gaps(positions, gaps):
    """Distances between ascending positions, minus one; the first counts from -1."""
    last = np.int64(-1)
    for i in range(positions.size):
        gaps[i] = positions[i] - last - 1
        last = np.int64(positions[i])
