"""Numba kernels behind `sparse`: compare, class masks, gaps, byte planes. Bytes in, bytes out; no format, no policy.

Compiled on first use and cached beside the module; all release the GIL. An element's width is carried by the type of
the argument `zero` (`np.uint8(0)` ... `np.uint64(0)`), and tensors are addresses, so alignment never matters. The
vector compares are plain LLVM vector operations on 64 elements and become a few instructions on AVX2, AVX-512 or NEON.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64  # elements per mask
_NEVER = 1 << 62
# The mask loop stalls on mispredicted branches and scattered writes miss the cache: fetching ahead hides both.
_AHEAD_BYTES, _AHEAD_ELEMENTS = 8192, 32
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
def _store(typingctx, address, value, zero):
    """Write the low bits of a u64 as an element at `address`, any alignment."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[2].bitwidth)
        element = builder.trunc(args[1], bits) if bits.width < 64 else args[1]
        builder.store(element, builder.inttoptr(args[0], bits.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uintp, types.uint64, zero), codegen


@intrinsic
def _prefetch(typingctx, address):
    """Ask for a cache line that is about to be read and written; any address is allowed."""

    def codegen(context, builder, signature, args):
        pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        prototype = ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0")
        flags = [ir.Constant(int32, value) for value in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], pointer), *flags])
        return context.get_dummy_value()

    return types.void(types.uintp), codegen


@intrinsic
def _lowest_bit(typingctx, mask):
    """Index of the lowest set bit of a non-zero mask."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], _I1(1))


@intrinsic
def _count_bits(typingctx, mask):
    """Number of set bits."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


_jit = njit(nogil=True, cache=True, boundscheck=False)
_inline = njit(nogil=True, cache=True, boundscheck=False, inline="always")  # a call would count references per group


@_jit
def scan(old, new, begin, end, zero, finite_mask, positions, planes, n) -> tuple[int, int]:
    """Append what differs in elements [begin, end), begin a multiple of 64, to `positions` and `planes` from n on.

    positions: u4. planes[b, i] is byte b of zigzag(new - old): the sign goes to the lowest bit, so that small moves
    either way leave high planes zero. Returns the new n, and how many of the new values are NaN or Inf.
    """
    width, one = _width(zero), np.uint64(1)
    a, b = np.uint64(old), np.uint64(new)
    full = begin + (end - begin) // GROUP * GROUP
    bad = 0
    for at in range(begin, end, GROUP):
        here = np.uint64(at) * width
        for line in range(np.int64(width)):
            _prefetch(a + here + np.uint64(_AHEAD_BYTES + 64 * line))
            _prefetch(b + here + np.uint64(_AHEAD_BYTES + 64 * line))
        if at < full:
            mask = _differ(a + here, b + here, zero)
        else:
            mask = np.uint64(0)
            for j in range(at, end):
                shift = np.uint64(j) * width
                if _load(a + shift, zero) != _load(b + shift, zero):
                    mask |= one << np.uint64(j - at)
        while mask:
            position = at + _lowest_bit(mask)
            mask &= mask - one
            shift = np.uint64(position) * width
            after = np.uint64(_load(b + shift, zero))
            folded = _zigzag(after - np.uint64(_load(a + shift, zero)), width)
            positions[n] = position
            for plane in range(np.int64(width)):
                planes[plane, n] = folded >> np.uint64(8 * plane)
            n += 1
            if finite_mask and (after & finite_mask) == finite_mask:
                bad += 1
    return n, bad


@_jit
def _zigzag(moved, width):
    unused = np.uint64(64) - np.uint64(8) * width
    moved <<= unused
    return ((moved << np.uint64(1)) ^ np.uint64(np.int64(moved) >> np.int64(63))) >> unused


@_jit
def add_differences(target, positions, order, zero, planes):
    """Undo `scan`: target[positions[i]] += unzigzag(planes[:, order[i]]); an empty `order` means i."""
    width, one = _width(zero), np.uint64(1)
    a = np.uint64(target)
    for i in range(positions.size):
        if i + _AHEAD_ELEMENTS < positions.size:
            _prefetch(a + np.uint64(positions[i + _AHEAD_ELEMENTS]) * width)
        j = np.int64(order[i]) if order.size else i
        folded = np.uint64(0)
        for plane in range(np.int64(width)):
            folded |= np.uint64(planes[plane, j]) << np.uint64(8 * plane)
        moved = (folded >> one) ^ (np.uint64(0) - (folded & one))
        address = a + np.uint64(positions[i]) * width
        _store(address, np.uint64(_load(address, zero)) + moved, zero)


@_jit
def all_differences(old, new, elements, zero, planes):
    """`planes` of every element, changed or not."""
    width = _width(zero)
    a, b = np.uint64(old), np.uint64(new)
    for i in range(elements):
        shift = np.uint64(i) * width
        folded = _zigzag(np.uint64(_load(b + shift, zero)) - np.uint64(_load(a + shift, zero)), width)
        for plane in range(np.int64(width)):
            planes[plane, i] = folded >> np.uint64(8 * plane)


@_jit
def add_all_differences(target, elements, zero, planes):
    """Undo `all_differences`."""
    width, one = _width(zero), np.uint64(1)
    a = np.uint64(target)
    for i in range(elements):
        folded = np.uint64(0)
        for plane in range(np.int64(width)):
            folded |= np.uint64(planes[plane, i]) << np.uint64(8 * plane)
        moved = (folded >> one) ^ (np.uint64(0) - (folded & one))
        address = a + np.uint64(i) * width
        _store(address, np.uint64(_load(address, zero)) + moved, zero)


@_jit
def pack_gaps(gaps, wide, low, high) -> tuple[int, int]:
    """Gaps (u4) as bytes; (bytes in `low`, bytes in `high`).

    Narrow: all of it in `low`, 255 meaning "255 more, keep reading". Wide: low bytes in `low`, the rest so in `high`.
    """
    escaped, n = (high if wide else low), 0
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
def pack_values(values, bits, packed):
    """values (u1, 1 to 2**bits) minus one, `bits` bits each (1, 2 or 4), lowest first; `packed` is zeroed."""
    for i in range(values.size):
        packed[(i * bits) >> 3] |= (values[i] - 1) << ((i * bits) & 7)


@_jit
def unpack_values(packed, bits, values):
    """Undo `pack_values`."""
    low = (1 << bits) - 1
    for i in range(values.size):
        values[i] = ((packed[(i * bits) >> 3] >> ((i * bits) & 7)) & low) + 1


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
    width = _width(zero)
    a, number = np.uint64(old), thresholds.size
    since = np.zeros(number, np.int64)  # elements of the class since its last change, this group included
    masks = np.zeros(number, np.uint64)
    i, n = 0, positions.size
    for at in range(0, elements, GROUP):
        _class_masks(a + np.uint64(at) * width, min(GROUP, elements - at), keep, thresholds, masks)
        for c in range(number):
            since[c] += _count_bits(masks[c])
        while i < n and positions[i] < at + GROUP:
            c = _class_of(_load(a + np.uint64(positions[i]) * width, zero) & keep, thresholds)
            left = _count_bits(masks[c] >> np.uint64(positions[i] - at))  # this one and those after it
            classes[i], gaps[i] = c, since[c] - left
            since[c] = left - 1
            counts[c] += 1
            i += 1


@_jit
def class_positions(old, elements, zero, keep, thresholds, gaps, starts, counts, positions, order):
    """Undo `class_gaps`: `gaps` is class after class, class c from starts[c] on, counts[c] of them.

    Writes positions and, beside each, its index in class order; how many were found (fewer than all: a bad frame).
    """
    width, one = _width(zero), np.uint64(1)
    a, number, n = np.uint64(old), thresholds.size, 0
    cursor, ends = starts.copy(), starts + counts
    left = np.empty(number, np.int64)  # elements of the class to pass before its next change
    masks = np.zeros(number, np.uint64)
    for c in range(number):
        left[c] = gaps[cursor[c]] if counts[c] else _NEVER
    for at in range(0, elements, GROUP):
        _class_masks(a + np.uint64(at) * width, min(GROUP, elements - at), keep, thresholds, masks)
        due = np.uint64(0)
        for c in range(number):
            rest = left[c] - _count_bits(masks[c])
            left[c] = rest
            due |= (np.uint64(rest) >> np.uint64(63)) << np.uint64(c)
        while due:
            c = _lowest_bit(due)
            due &= due - one
            here, passed = masks[c], np.int64(0)
            total = _count_bits(here)
            rest = left[c] + total
            while rest < total:
                while passed < rest:
                    here &= here - one
                    passed += 1
                positions[n], order[n] = at + _lowest_bit(here), cursor[c]
                n += 1
                cursor[c] += 1
                rest = rest + 1 + gaps[cursor[c]] if cursor[c] < ends[c] else _NEVER
            left[c] = rest - total
    return n


@_inline
def _class_masks(address, elements, keep, thresholds, masks):
    """masks[c]: which of the up to 64 elements from `address` on belong to class c."""
    number = thresholds.size
    if elements == GROUP:
        above = ~np.uint64(0)
        for c in range(number - 1):
            higher = _at_least(address, keep, thresholds[c + 1])
            masks[c] = above & ~higher
            above = higher
        masks[number - 1] = above
    else:
        masks[:] = 0
        for j in range(elements):
            value = _load(address + np.uint64(j) * _width(keep), keep) & keep
            masks[_class_of(value, thresholds)] |= np.uint64(1) << np.uint64(j)


@_inline
def _class_of(value, thresholds):
    c = 0
    for i in range(1, thresholds.size):
        c += value >= thresholds[i]
    return c


@_jit
def sort_by_class(classes, starts, gaps, planes, sorted_gaps, sorted_planes):
    """Stable counting sort of gaps and plane columns by class, class c from starts[c] on."""
    cursor = starts.copy()
    for i in range(classes.size):
        to = cursor[classes[i]]
        cursor[classes[i]] += 1
        sorted_gaps[to] = gaps[i]
        for plane in range(planes.shape[0]):
            sorted_planes[plane, to] = planes[plane, i]
