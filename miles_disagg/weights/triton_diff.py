"""Triton kernels behind `device_diff`; imported on CUDA hosts, and in tests under Triton's interpreter.

Compaction in two passes. `_compare` reads both copies once and leaves one bit an element and a count a block. After a
sum over the counts, `_gather` reads the bits (a 32nd of 16-bit elements' bytes) and, of both copies, only what changed.
One launch of each serves all tensors of a kind: a table says where each program's block is.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 8192  # elements of one program
_WORD = tl.constexpr(32)  # elements, one bit each, in an int32
_ALIGNED = 16  # bytes that one thread reads at a time
_ELEMENTS = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}
Pair = tuple[torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _compare(blocks, words, counts, ELEMENT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """words[BLOCK // 32 * program + i]: bit j is set where element 32 * i + j differs; counts[program]: bits set."""
    program = tl.program_id(0).to(tl.int64)
    row = blocks + 4 * program
    old = tl.multiple_of(tl.load(row).to(tl.pointer_type(ELEMENT)), ALIGN)
    new = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(ELEMENT)), ALIGN)
    left = tl.load(row + 2)
    rows, lanes = tl.arange(0, BLOCK // _WORD), tl.arange(0, _WORD)
    at = rows[:, None] * _WORD + lanes[None, :]
    if left >= BLOCK:  # no mask: a thread reads ALIGN bytes at a time
        a = tl.load(old + at, eviction_policy="evict_first")
        b = tl.load(new + at, eviction_policy="evict_first")
    else:
        a = tl.load(old + at, mask=at < left, other=0)
        b = tl.load(new + at, mask=at < left, other=0)
    differ = (a != b).to(tl.int32)
    tl.store(words + program * (BLOCK // _WORD) + rows, tl.sum(differ << lanes[None, :], 1))
    tl.store(counts + program, tl.sum(tl.sum(differ, 1), 0))


@triton.jit
def _bits(word):
    """Bits set in each uint32."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _gather(blocks, words, ends, positions, before, after, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Position in its tensor and both values of each bit. ends[program]: bits in all programs up to this one.

    A thread takes the bits of its word from the lowest up: as many rounds as the fullest word has bits, few where few
    elements changed.
    """
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + program - 1, mask=program > 0, other=0)
    if tl.load(ends + program) > begin:
        row = blocks + 4 * program
        old, new = tl.load(row).to(tl.pointer_type(ELEMENT)), tl.load(row + 1).to(tl.pointer_type(ELEMENT))
        first = tl.load(row + 3)
        rows = tl.arange(0, BLOCK // _WORD)
        word = tl.load(words + program * (BLOCK // _WORD) + rows).to(tl.uint32, bitcast=True)
        count = _bits(word)
        to = begin + tl.cumsum(count, 0) - count
        for _ in range(tl.max(count, 0)):
            some = word != 0
            lowest = word & (~word + 1)
            exponent = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of a power of two
            at = rows * _WORD + exponent
            tl.store(positions + to, (first + at).to(positions.dtype.element_ty), mask=some)
            tl.store(before + to, tl.load(old + at, mask=some, other=0), mask=some)
            tl.store(after + to, tl.load(new + at, mask=some, other=0), mask=some)
            word ^= lowest
            to += 1


def compact(pairs: Sequence[Pair], kinds: Sequence[torch.dtype]) -> list[Found]:
    """(positions of the pair's kind, old values, new values) of what differs, for flat tensors of at least one element.

    The host waits once for each combination of element, kind and alignment among the pairs.
    """
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, ((old, new), kind) in enumerate(zip(pairs, kinds, strict=True)):
        aligned = (old.data_ptr() | new.data_ptr()) % _ALIGNED == 0
        groups.setdefault((old.dtype, kind, aligned), []).append(i)
    found: dict[int, Found] = {}
    with torch.cuda.device_of(pairs[0][0]):
        for (_, kind, aligned), members in groups.items():
            found |= zip(members, _compact([pairs[i] for i in members], kind, aligned), strict=True)
    return [found[i] for i in range(len(pairs))]


def _compact(pairs: list[Pair], kind: torch.dtype, aligned: bool) -> list[Found]:
    """`compact` of pairs of one element and one alignment."""
    device, dtype, width = pairs[0][0].device, pairs[0][0].dtype, pairs[0][0].element_size()
    sizes = [triton.cdiv(old.numel(), BLOCK) for old, _ in pairs]
    grid = sum(sizes)
    blocks, last = _table(pairs, sizes, device)
    words = torch.empty(grid * (BLOCK // 32), dtype=torch.int32, device=device)
    counts = torch.empty(grid, dtype=torch.int32, device=device)
    how = {"ELEMENT": _ELEMENTS[dtype], "BLOCK": BLOCK}
    _compare[(grid,)](blocks, words, counts, ALIGN=_ALIGNED if aligned else width, num_warps=16, **how)
    ends = torch.cumsum(counts, 0, dtype=torch.int64)
    edges = [0, *ends[last].tolist()]
    positions = torch.empty(edges[-1], dtype=kind, device=device)
    before, after = (torch.empty(edges[-1], dtype=dtype, device=device) for _ in range(2))
    if edges[-1]:
        _gather[(grid,)](blocks, words, ends, positions, before, after, num_warps=8, **how)
    parts = zip(edges, edges[1:], strict=False)
    return [(positions[begin:end], before[begin:end], after[begin:end]) for begin, end in parts]


def _table(pairs: list[Pair], sizes: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(address of each block in both copies, elements from there to the tensor's end, elements before it: int64 [n, 4];
    each tensor's last block: int64 [tensors])."""
    width, firsts = pairs[0][0].element_size(), [sum(sizes[:i]) for i in range(len(sizes))]
    rows = [
        [old.data_ptr(), new.data_ptr(), old.numel(), first, size]
        for (old, new), first, size in zip(pairs, firsts, sizes, strict=True)
    ]
    tensors = torch.tensor(rows).to(device)
    own = torch.repeat_interleave(tensors, tensors[:, 4], 0, output_size=sum(sizes))
    begin = (torch.arange(sum(sizes), device=device) - own[:, 3]) * BLOCK
    blocks = torch.stack([own[:, 0] + width * begin, own[:, 1] + width * begin, own[:, 2] - begin, begin], 1)
    return blocks.contiguous(), tensors[:, 3] + tensors[:, 4] - 1
