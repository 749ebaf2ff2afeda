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
def scan(old, new, elements, zero, non_finite, positions, values, state, secret) -> tuple[int, int]:
    """Positions (u4) and values of the elements that differ; (how many, how many of them become NaN or Inf).

    Both outputs need SLACK spare entries. non_finite: (mask, pattern), see `dtypes.non_finite_test`. Digests all whole
    CHUNKs of `new` but the last bytes (1 to CHUNK).
    """
    width = np.int64(width_of(zero))
    a, b = np.uint64(old), np.uint64(new)
    chunks = max(elements * width - 1, 0) // CHUNK if state else 0
    n, bad = np.uint64(0), np.int64(0)
    for begin in range(0, elements, PIECE // width):
        end, first = min(begin + PIECE // width, elements), n
        n = _find(a, b, begin, end, zero, positions, n)
        for i in range(first, n):
            shift = np.uint64(positions[i]) * np.uint64(width)
            after = np.uint64(load(b + shift, zero))
            values[i] = _zigzag(after - np.uint64(load(a + shift, zero)), width)
            bad += np.int64((after & non_finite[0]) == non_finite[1])
        digest(b, begin * width, min(chunks, end * width // CHUNK), state, secret)
    return np.int64(n), bad


@_jit
def scan_packed(
    old, new, elements, zero, non_finite, gaps, values, low, codes, large, state, secret
) -> tuple[int, int, int, int, int, int]:
    """`scan` on the way to one class: gaps (u4) for positions, and also packed.

    low: the gaps as `pack_gaps` writes them when narrow. codes (u1): what `pack_codes` takes. large: the values of
    ESCAPED and more, with one spare entry. (How many, how many become NaN or Inf, bytes in `low`, sum of the gaps,
    greatest value, how many are in `large`.)
    """
    width = np.int64(width_of(zero))
    a, b = np.uint64(old), np.uint64(new)
    chunks = max(elements * width - 1, 0) // CHUNK if state else 0
    n, packed, larger, one, most = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(1), np.uint64(255)
    top, before, bad = np.uint64(0), np.uint64(0), np.int64(0)  # before: the last position, plus one
    for begin in range(0, elements, PIECE // width):
        end, first = min(begin + PIECE // width, elements), n
        n = _find(a, b, begin, end, zero, gaps, n)
        for i in range(first, n):
            position = np.uint64(gaps[i])
            shift = position * np.uint64(width)
            after = np.uint64(load(b + shift, zero))
            value = _zigzag(after - np.uint64(load(a + shift, zero)), width)
            bad += np.int64((after & non_finite[0]) == non_finite[1])
            values[i], codes[i], large[larger] = value, _code(value), value
            larger += np.uint64(value >= np.uint64(ESCAPED))
            top = max(top, value)
            gap = position - before
            gaps[i], before = gap, position + one
            while gap >= most:
                low[packed] = most
                packed += one
                gap -= most
            low[packed] = gap
            packed += one
        digest(b, begin * width, min(chunks, end * width // CHUNK), state, secret)
    return np.int64(n), bad, np.int64(packed), np.int64(before - n), top, np.int64(larger)


@_inline
def _find(a, b, begin, end, zero, positions, n):
    """Positions of the elements in [begin, end) that differ, from entry `n` (u8) on; n and their number."""
    width, one, two = np.uint64(width_of(zero)), np.uint64(1), np.uint64(2)
    for at in range(begin, end, GROUP):
        here = np.uint64(at) * width
        if at + GROUP <= end:
            mask = differ(a + here, b + here, zero)
        else:
            mask = np.uint64(0)
            for j in range(at, end):
                shift = np.uint64(j) * width
                if load(a + shift, zero) != load(b + shift, zero):
                    mask |= one << np.uint64(j - at)
        # Two at a time whether there are any or not: most groups have at most two, and no branch is guessed wrong.
        last = n + np.uint64(count_bits(mask))
        while True:
            positions[n] = at + lowest_bit(mask)
            mask &= mask - one
            positions[n + one] = at + lowest_bit(mask)
            mask &= mask - one
            n += two
            if n >= last:
                break
        n = last
    return n


@_inline
def _code(value):
    """A value as it is packed: minus one, and ESCAPED for all that are as large or larger."""
    return min(value, np.uint64(ESCAPED)) - np.uint64(1)


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
            add_value(a + np.uint64(position * width), values[np.uint64(i)], zero)
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
def measure(gaps, values, codes, large):
    """(Sum of the gaps, greatest value, how many are in `large`); codes and large as `scan_packed` gives them."""
    total, larger, top = np.int64(0), np.uint64(0), np.uint64(0)
    for i in range(gaps.size):
        total += np.int64(gaps[i])
    for i in range(values.size):
        value = np.uint64(values[i])
        codes[i], large[larger] = _code(value), value
        larger += np.uint64(value >= np.uint64(ESCAPED))
        top = max(top, value)
    return total, top, np.int64(larger)


@_jit
def pack_codes(codes, bits, packed, large, planes):
    """Codes of `bits` bits each (1, 2 or 4), lowest first, filled up with zero bits; byte planes of `large`."""
    slots, n = 8 // bits, codes.size
    whole = n // slots
    for j in range(whole):
        if bits == 4:
            packed[j] = codes[2 * j] | (codes[2 * j + 1] << 4)
        else:
            byte = 0
            for slot in range(slots):
                byte |= codes[slots * j + slot] << (slot * bits)
            packed[j] = byte
    byte = 0
    for i in range(whole * slots, n):
        byte |= codes[i] << ((i - whole * slots) * bits)
    if whole < packed.size:
        packed[whole] = byte
    for plane in range(large.itemsize):
        for i in range(large.size):
            planes[plane * large.size + i] = np.uint64(large[i]) >> np.uint64(8 * plane)


@_jit
def unpack_values(packed, bits, large, values) -> bool:
    """Values of `pack_codes` and `large_values` (one spare entry); False unless all of `large` is used."""
    n, slots, low = values.size, 8 // bits, (1 << bits) - 1
    whole = n // slots
    for j in range(whole):
        if bits == 4:
            values[2 * j] = (packed[j] & 15) + 1
            values[2 * j + 1] = (packed[j] >> 4) + 1
        else:
            for slot in range(slots):
                values[slots * j + slot] = ((packed[j] >> (slot * bits)) & low) + 1
    for i in range(whole * slots, n):
        values[i] = ((packed[whole] >> ((i - whole * slots) * bits)) & low) + 1
    seen, spare = 0, large.size - 1
    for i in range(n if bits == 4 else 0):
        if values[i] == ESCAPED:
            values[i] = large[min(seen, spare)]
            seen += 1
    return seen == spare


@_jit
def join_planes(planes, values):
    """Values from their byte planes, one behind the other in `planes`."""
    n = values.size
    for i in range(n):
        value = np.uint64(0)
        for plane in range(values.itemsize):
            value |= np.uint64(planes[plane * n + i]) << np.uint64(8 * plane)
        values[i] = value
