"""Numba kernels behind `sparse`: compare, class masks, gaps, byte planes. Bytes in, bytes out; no format, no policy.

Compiled on first use and cached beside the module; all release the GIL. An element's width is carried by the type of
the argument `zero` (`np.uint8(0)` ... `np.uint64(0)`), and tensors are addresses, so alignment never matters. The
vector compares are plain LLVM vector operations on 64 elements and become a few instructions on AVX2, AVX-512 or NEON.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

GROUP = 64  # elements per mask
_NEVER = 1 << 62
_I1, _I64 = ir.IntType(1), ir.IntType(64)


def _vector(builder, address, bits):
    pointer = builder.inttoptr(address, ir.VectorType(ir.IntType(bits), GROUP).as_pointer())
    value = builder.load(pointer, typ=ir.VectorType(ir.IntType(bits), GROUP))
    value.align = 1
    return value


def _splat(builder, scalar, bits):
    vector_type = ir.VectorType(ir.IntType(bits), GROUP)
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), lanes)


@intrinsic
def _differ(typingctx, a, b, zero):
    """u64 mask of the 64 elements at addresses `a` and `b` that differ."""

    def codegen(context, builder, signature, args):
        bits = signature.args[2].bitwidth
        mask = builder.icmp_unsigned("!=", _vector(builder, args[0], bits), _vector(builder, args[1], bits))
        return builder.bitcast(mask, _I64)

    return types.uint64(types.uintp, types.uintp, zero), codegen


@intrinsic
def _at_least(typingctx, a, keep, threshold):
    """u64 mask of the 64 elements x at address `a` with `x & keep >= threshold` (unsigned)."""

    def codegen(context, builder, signature, args):
        bits = signature.args[2].bitwidth
        value = builder.and_(_vector(builder, args[0], bits), _splat(builder, args[1], bits))
        return builder.bitcast(builder.icmp_unsigned(">=", value, _splat(builder, args[2], bits)), _I64)

    return types.uint64(types.uintp, threshold, threshold), codegen


@intrinsic
def _width(typingctx, zero):
    """Bytes of the element type, a constant."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_I64, signature.args[0].bitwidth // 8)

    return types.uint64(zero), codegen


@intrinsic
def _load(typingctx, address, zero):
    """Element at `address`, any alignment."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[1].bitwidth)
        value = builder.load(builder.inttoptr(args[0], bits.as_pointer()), typ=bits)
        value.align = 1
        return value

    return zero(types.uintp, zero), codegen


@intrinsic
def _store(typingctx, address, value):
    """Write an element at `address`, any alignment."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[1].bitwidth)
        builder.store(args[1], builder.inttoptr(args[0], bits.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uintp, value), codegen


@intrinsic
def _narrow(typingctx, value, zero):
    """The low bits of a u64 as an element."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[1].bitwidth)
        return builder.trunc(args[0], bits) if signature.args[1].bitwidth < 64 else args[0]

    return zero(types.uint64, zero), codegen


@intrinsic
def _lowest_bit(typingctx, mask):
    """Index of the lowest set bit of a non-zero mask."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], _I1(1))

    return types.int64(types.uint64), codegen


@intrinsic
def _count_bits(typingctx, mask):
    """Number of set bits."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


_jit = njit(nogil=True, cache=True, boundscheck=False)


@_jit
def scan(old, new, begin, end, zero, positions, n):
    """Append to `positions` (u4, from n on) the elements in [begin, end) that differ; new n. begin is a multiple of 64."""
    width, one = _width(zero), np.uint64(1)
    a, b = np.uint64(old), np.uint64(new)
    full = begin + (end - begin) // GROUP * GROUP
    for at in range(begin, full, GROUP):
        shift = np.uint64(at) * width
        mask = _differ(a + shift, b + shift, zero)
        while mask:
            positions[n] = at + _lowest_bit(mask)
            n += 1
            mask &= mask - one
    for at in range(full, end):
        shift = np.uint64(at) * width
        if _load(a + shift, zero) != _load(b + shift, zero):
            positions[n] = at
            n += 1
    return n


@_jit
def differences(old, new, positions, first, last, zero, planes, finite_mask):
    """planes[b, i] = byte b of zigzag(new - old) for i in [first, last); how many new values are NaN or Inf.

    zigzag folds the sign into the lowest bit, modulo 2**width: small moves either way leave high planes zero.
    """
    width = _width(zero)
    top = np.uint64(8) * width - np.uint64(1)
    a, b = np.uint64(old), np.uint64(new)
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - np.uint64(8) * width)
    bad = 0
    for i in range(first, last):
        shift = np.uint64(positions[i]) * width
        after = np.uint64(_load(b + shift, zero))
        moved = (after - np.uint64(_load(a + shift, zero))) & low
        folded = ((moved << np.uint64(1)) & low) ^ (low if moved >> top else np.uint64(0))
        for plane in range(np.int64(width)):
            planes[plane, i] = folded >> np.uint64(8 * plane)
        if finite_mask and (after & finite_mask) == finite_mask:
            bad += 1
    return bad


@_jit
def add_differences(target, positions, first, last, zero, planes):
    """Undo `differences`: target[positions[i]] += unzigzag(planes[:, i])."""
    width, one = _width(zero), np.uint64(1)
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - np.uint64(8) * width)
    a = np.uint64(target)
    for i in range(first, last):
        folded = np.uint64(0)
        for plane in range(np.int64(width)):
            folded |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        moved = (folded >> one) ^ (low if folded & one else np.uint64(0))
        address = a + np.uint64(positions[i]) * width
        _store(address, _narrow((np.uint64(_load(address, zero)) + moved) & low, zero))


@_jit
def pack_gaps(gaps, wide, low, high):
    """Gaps (u4) as bytes; (bytes in `low`, bytes in `high`).

    Narrow: all of it in `low`: 255 means "255 more, keep reading". Wide: low bytes in `low`, the rest likewise in `high`.
    """
    n_low = n_high = 0
    for i in range(gaps.size):
        gap = gaps[i]
        if wide:
            low[i] = gap & 255
            gap >>= 8
            while gap >= 255:
                high[n_high] = 255
                n_high += 1
                gap -= 255
            high[n_high] = gap
            n_high += 1
        else:
            while gap >= 255:
                low[n_low] = 255
                n_low += 1
                gap -= 255
            low[n_low] = gap
            n_low += 1
    return (gaps.size if wide else n_low), n_high


@_jit
def unpack_gaps(low, high, wide, gaps, limit):
    """Undo `pack_gaps` into `gaps` (u4 [count]); False unless exactly the given bytes give `count` gaps below limit."""
    escaped = high if wide else low
    at = 0
    for i in range(gaps.size):
        gap = np.int64(0)
        while at < escaped.size and escaped[at] == 255:
            gap += 255
            at += 1
        if at == escaped.size:
            return False
        gap += escaped[at]
        at += 1
        if wide:
            gap = (gap << 8) | low[i]
        if gap >= limit:
            return False
        gaps[i] = gap
    return at == escaped.size


@_jit
def positions_to_gaps(positions, gaps):
    """Distances between ascending positions, minus one; the first counts from -1."""
    last = np.int64(-1)
    for i in range(positions.size):
        gaps[i] = positions[i] - last - 1
        last = np.int64(positions[i])


@_jit
def gaps_to_positions(gaps, limit, positions):
    """Undo `positions_to_gaps`; False if a position reaches `limit`."""
    last = np.int64(-1)
    for i in range(gaps.size):
        last += np.int64(gaps[i]) + 1
        if last >= limit:
            return False
        positions[i] = last
    return True


@_jit
def class_gaps(old, elements, zero, keep, thresholds, positions, classes, gaps, counts):
    """Split ascending `positions` by the class of the old value; gaps count elements of the same class only.

    Class c holds the old values x with thresholds[c] <= x & keep < thresholds[c + 1] (thresholds ascend from 0).
    Writes the class (u1) and the gap (u4) of every position in order, and how many fell in each class (`counts`).
    """
    width, one = _width(zero), np.uint64(1)
    a = np.uint64(old)
    number = thresholds.size
    passed = np.zeros(number, np.int64)
    i, n = 0, positions.size
    for at in range(0, elements, GROUP):
        shift = np.uint64(at) * width
        if at + GROUP <= elements:
            above = ~np.uint64(0)
            changed = np.uint64(0)
            first = i
            while i < n and positions[i] < at + GROUP:
                changed |= one << np.uint64(positions[i] - at)
                i += 1
            for c in range(number):
                here = above
                above = _at_least(a + shift, keep, thresholds[c + 1]) if c + 1 < number else np.uint64(0)
                here &= ~above
                inside = changed & here
                start = np.int64(0)
                while inside:
                    bit = inside & (~inside + one)
                    rank = _count_bits(here & (bit - one))
                    index = first + _count_bits(changed & (bit - one))
                    classes[index] = c
                    gaps[index] = passed[c] + rank - start
                    counts[c] += 1
                    passed[c], start = 0, rank + 1
                    inside &= inside - one
                passed[c] += _count_bits(here) - start
        else:
            for j in range(at, elements):
                c = _class_of(_load(a + np.uint64(j) * width, zero) & keep, thresholds)
                if i < n and positions[i] == j:
                    classes[i], gaps[i] = c, passed[c]
                    counts[c] += 1
                    passed[c] = 0
                    i += 1
                else:
                    passed[c] += 1


@_jit
def class_positions(old, elements, zero, keep, thresholds, gaps, starts, counts, positions, order):
    """Undo `class_gaps`: `gaps` is class after class, class c from starts[c] on, counts[c] of them.

    Writes positions and, beside each, its index in class order; how many were found (fewer than all: a bad frame).
    """
    width, one = _width(zero), np.uint64(1)
    a = np.uint64(old)
    number, n = thresholds.size, 0
    cursor = starts.copy()
    ends = starts + counts
    left = np.empty(number, np.int64)
    for c in range(number):
        left[c] = gaps[cursor[c]] if counts[c] else _NEVER
    for at in range(0, elements, GROUP):
        shift = np.uint64(at) * width
        if at + GROUP <= elements:
            above = ~np.uint64(0)
            for c in range(number):
                here = above
                above = _at_least(a + shift, keep, thresholds[c + 1]) if c + 1 < number else np.uint64(0)
                here &= ~above
                total = _count_bits(here)
                rest, rank = left[c], np.int64(0)
                while rest < total:
                    while rank < rest:
                        here &= here - one
                        rank += 1
                    positions[n], order[n] = at + _lowest_bit(here), cursor[c]
                    n += 1
                    cursor[c] += 1
                    rest = rest + 1 + gaps[cursor[c]] if cursor[c] < ends[c] else _NEVER
                left[c] = rest - total
        else:
            for j in range(at, elements):
                c = _class_of(_load(a + np.uint64(j) * width, zero) & keep, thresholds)
                if left[c]:
                    left[c] -= 1
                    continue
                positions[n], order[n] = j, cursor[c]
                n += 1
                cursor[c] += 1
                left[c] = gaps[cursor[c]] if cursor[c] < ends[c] else _NEVER
    return n


@_jit
def _class_of(value, thresholds):
    c = 0
    while c + 1 < thresholds.size and value >= thresholds[c + 1]:
        c += 1
    return c
