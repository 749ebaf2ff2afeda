"""Triton kernels behind `device_diff`; imported on CUDA hosts only."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # elements of one program
Pair = tuple[torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit(do_not_specialize=["first"])
def _count(old, new, counts, first, elements, BLOCK: tl.constexpr):
    """counts[first + p]: elements of block p that differ."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    a = tl.load(old + at, mask=inside, other=0)
    b = tl.load(new + at, mask=inside, other=0)
    tl.store(counts + first + block, tl.sum((a != b).to(tl.int32), 0))


@triton.jit(do_not_specialize=["first"])
def _write(old, new, ends, first, positions, before, after, elements, BLOCK: tl.constexpr):
    """Position and both values of each difference. ends: sums of `counts`, over the tensors before this one too."""
    block = tl.program_id(0).to(tl.int64)
    base = tl.load(ends + first - 1, mask=first > 0, other=0)
    begin = tl.load(ends + first + block - 1, mask=first + block > 0, other=0) - base
    end = tl.load(ends + first + block) - base
    if end > begin:
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < elements
        a = tl.load(old + at, mask=inside, other=0)
        b = tl.load(new + at, mask=inside, other=0)
        differ = a != b
        to = begin + tl.cumsum(differ.to(tl.int32), 0) - 1
        tl.store(positions + to, at.to(positions.dtype.element_ty), mask=differ)
        tl.store(before + to, a, mask=differ)
        tl.store(after + to, b, mask=differ)


def compact(pairs: Sequence[Pair], kinds: Sequence[torch.dtype]) -> list[Found]:
    """(positions of the pair's kind, old values, new values) of what differs, for flat tensors of at least one element.

    All counts, one wait for the host, then all writes: a GPU is not left idle between tensors.
    """
    device = pairs[0][0].device
    blocks = [triton.cdiv(old.numel(), _BLOCK) for old, _ in pairs]
    firsts = [sum(blocks[:i]) for i in range(len(blocks))]
    with torch.cuda.device_of(pairs[0][0]):
        counts = torch.empty(sum(blocks), dtype=torch.int32, device=device)
        for (old, new), first, grid in zip(pairs, firsts, blocks, strict=True):
            _count[(grid,)](old, new, counts, first, old.numel(), BLOCK=_BLOCK, num_warps=8)
        ends = torch.cumsum(counts, 0, dtype=torch.int64)
        last = torch.tensor([first + grid - 1 for first, grid in zip(firsts, blocks, strict=True)])
        sums = [0, *ends[last.to(device)].tolist()]
        found: list[Found] = []
        for (old, new), kind, first, grid, begin, end in zip(
            pairs, kinds, firsts, blocks, sums, sums[1:], strict=False
        ):
            positions = torch.empty(end - begin, dtype=kind, device=device)
            before, after = (torch.empty(end - begin, dtype=old.dtype, device=device) for _ in range(2))
            if end > begin:
                _write[(grid,)](old, new, ends, first, positions, before, after, old.numel(), BLOCK=_BLOCK, num_warps=8)
            found.append((positions, before, after))
    return found
