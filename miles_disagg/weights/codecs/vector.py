"""LLVM building blocks of the kernels: unaligned loads, 64-element compares, bit counts. No format, no policy.

An element's width is carried by the type of the argument `zero` (`np.uint8(0)` ... `np.uint64(0)`), and tensors are
addresses, so alignment never matters. Compares are plain LLVM vector operations on 64 elements and become a few
instructions on AVX2, AVX-512 or NEON. Numba's cache of a kernel does not notice a change in this file: after one,
remove `__pycache__`.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64  # elements per mask
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
def differ(typingctx, a, b, zero):
    """u64 mask of the 64 elements at addresses `a` and `b` that differ."""

    def codegen(context, builder, signature, args):
        bits = signature.args[2].bitwidth
        mask = builder.icmp_unsigned("!=", _vector(builder, args[0], bits), _vector(builder, args[1], bits))
        return builder.bitcast(mask, _I64)

    return types.uint64(types.uintp, types.uintp, zero), codegen


@intrinsic
def at_least(typingctx, a, keep, threshold):
    """u64 mask of the 64 elements x at address `a` with `x & keep >= threshold` (unsigned)."""

    def codegen(context, builder, signature, args):
        bits = signature.args[2].bitwidth
        value = builder.and_(_vector(builder, args[0], bits), _splat(builder, args[1], bits))
        return builder.bitcast(builder.icmp_unsigned(">=", value, _splat(builder, args[2], bits)), _I64)

    return types.uint64(types.uintp, threshold, threshold), codegen


@intrinsic
def width_of(typingctx, zero):
    """Bytes of the element type, a constant."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_I64, signature.args[0].bitwidth // 8)

    return types.uint64(zero), codegen


@intrinsic
def load(typingctx, address, zero):
    """Element at `address`, any alignment."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[1].bitwidth)
        value = builder.load(builder.inttoptr(args[0], bits.as_pointer()), typ=bits)
        value.align = 1
        return value

    return zero(types.uintp, zero), codegen


@intrinsic
def store(typingctx, address, value, zero):
    """Write the low bits of a u64 as an element at `address`, any alignment."""

    def codegen(context, builder, signature, args):
        bits = ir.IntType(signature.args[2].bitwidth)
        element = builder.trunc(args[1], bits) if bits.width < 64 else args[1]
        builder.store(element, builder.inttoptr(args[0], bits.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uintp, types.uint64, zero), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """Index of the lowest set bit; 64 for none."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], _I1(0))


@intrinsic
def count_bits(typingctx, mask):
    """Number of set bits."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@intrinsic
def nth_bit(typingctx, mask, rank):
    """Index of the set bit that has `rank` set bits below it; there must be one."""

    def codegen(context, builder, signature, args):
        mask, rank = args
        if get_host_cpu_features().get("bmi2"):
            function = ir.FunctionType(_I64, [_I64, _I64])
            deposit = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.bmi.pdep.64")
            alone = builder.call(deposit, [builder.shl(ir.Constant(_I64, 1), rank), mask])
            return builder.cttz(alone, _I1(0))
        index = ir.Constant(_I64, 0)
        for half in (32, 16, 8, 4, 2, 1):
            below = builder.ctpop(builder.and_(mask, ir.Constant(_I64, (1 << half) - 1)))
            higher = builder.icmp_unsigned(">=", rank, below)
            step = builder.select(higher, ir.Constant(_I64, half), ir.Constant(_I64, 0))
            rank = builder.sub(rank, builder.select(higher, below, ir.Constant(_I64, 0)))
            mask, index = builder.lshr(mask, step), builder.add(index, step)
        return index

    return types.int64(types.uint64, types.int64), codegen
