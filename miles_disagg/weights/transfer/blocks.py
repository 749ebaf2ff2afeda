"""Boxes of checkpoint tensors and where their elements lie in a rank's storages. Pure geometry, no tensors.

Coordinates are those of the checkpoint tensor without its dimensions of size one. A shard, a fused or a transposed
weight is a few boxes with offsets and strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Lower and upper corner (exclusive), one number a dimension."""


@dataclass(frozen=True, slots=True)
class Block:
    """The box [lo, hi) of `tensor`; its element lo + i lies at offset + sum(i * strides) of `storage`, in elements."""

    tensor: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    storage: int
    offset: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return tuple(h - lo for lo, h in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def at(self, corner: Sequence[int]) -> int:
        """Where the element at `corner` lies in the storage."""
        return self.offset + sum((c - lo) * s for c, lo, s in zip(corner, self.lo, self.strides, strict=True))


@dataclass(frozen=True)
class Storage:
    """Memory of one rank that blocks lie in: size in elements, bytes and name of an element's type (torch's)."""

    elements: int
    itemsize: int
    dtype: str


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds. `name`: for messages (`trainer rank 3`, `engine-0 rank 1`)."""

    name: str
    storages: tuple[Storage, ...]
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that its blocks cover."""
        return sum(block.numel * self.storages[block.storage].itemsize for block in self.blocks)


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape without dimensions of size one."""
    return tuple(s for s in shape if s != 1)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def blocks_of(
    tensor: str,
    shape: Sequence[int],
    dims: Sequence[tuple[int, int, int]],
    source_offset: int,
    storage: int,
    storage_offset: int,
) -> list[Block]:
    """Blocks of a strided piece: `dims` of (size, stride in the flat tensor, stride in the storage), any order.

    ValueError if the piece does not lie within the tensor.
    """
    full = squeezed(shape)
    strides = contiguous(full)
    start = _coordinates(source_offset, strides)
    steps: list[list[tuple[int, int, int]]] = [[] for _ in full]  # by dimension: (count, step in it, storage stride)
    for dim in sorted(dims, key=lambda d: -d[1]):
        _assign(dim, full, strides, steps, tensor)
    out: list[Block] = []
    inner = [next(((c, s) for c, step, s in parts if step == 1), (1, 0)) for parts in steps]
    outer = [[(d, *part) for part in parts if part[1] != 1] for d, parts in enumerate(steps)]
    flat = [part for parts in outer for part in parts]
    for index in itertools.product(*(range(count) for _, count, _, _ in flat)):
        lo, offset = list(start), storage_offset
        for i, (d, _, step, stride) in zip(index, flat, strict=True):
            lo[d] += i * step
            offset += i * stride
        hi = tuple(a + count for a, (count, _) in zip(lo, inner, strict=True))
        if any(h > size for h, size in zip(hi, full, strict=True)):
            raise ValueError(f"{tensor}: a piece ends at {hi}, outside its shape {tuple(full)}")
        out.append(Block(tensor, tuple(lo), hi, storage, offset, tuple(s for _, s in inner)))
    return out


def _assign(
    dim: tuple[int, int, int],
    full: tuple[int, ...],
    strides: tuple[int, ...],
    steps: list[list[tuple[int, int, int]]],
    tensor: str,
) -> None:
    """Give a strided dimension to the tensor's dimension that it runs along; split it where it covers several."""
    size, stride, storage_stride = dim
    if size == 1:
        return
    along = next((i for i, s in enumerate(strides) if s <= stride), None)
    if along is None or stride % strides[along]:
        raise ValueError(f"{tensor}: stride {stride} runs along no dimension of {tuple(full)}")
    step = stride // strides[along]
    room = full[along] // step
    if size > room:
        if size % room or full[along] % step:
            raise ValueError(f"{tensor}: {size} elements of stride {stride} do not fill whole rows of {tuple(full)}")
        _assign((size // room, stride * room, storage_stride * room), full, strides, steps, tensor)
        size = room
    if size > 1:
        steps[along].append((size, step, storage_stride))


def _coordinates(offset: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for stride in strides:
        out.append(offset // stride)
        offset %= stride
    return tuple(out)


def intersection(a: Box, b: Box) -> Box | None:
    """The common box, None if there is none."""
    lo = tuple(map(max, a[0], b[0]))
    hi = tuple(map(min, a[1], b[1]))
    return None if any(x >= y for x, y in zip(lo, hi, strict=True)) else (lo, hi)


def cells(box: Box, cuts: Sequence[Box]) -> Iterator[Box]:
    """`box` cut along all corners of `cuts`: none of them then holds a part of a cell only."""
    lo, hi = box
    edges = []
    for d in range(len(lo)):
        inside = {c[d] for pair in cuts for c in pair if lo[d] < c[d] < hi[d]}
        edges.append([lo[d], *sorted(inside), hi[d]])
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    for combination in itertools.product(*spans):
        yield tuple(a for a, _ in combination), tuple(b for _, b in combination)


def split(box: Box, limit: int) -> Iterator[Box]:
    """`box` cut along its first dimensions into boxes of at most `limit` elements (at least one each)."""
    lo, hi = box
    count = math.prod(h - a for a, h in zip(lo, hi, strict=True))
    if count <= limit or not lo:
        yield box
        return
    d = next(i for i in range(len(lo)) if hi[i] - lo[i] > 1)
    step = max(1, limit // (count // (hi[d] - lo[d])))
    for at in range(lo[d], hi[d], step):
        part = (*lo[:d], at, *lo[d + 1 :]), (*hi[:d], min(at + step, hi[d]), *hi[d + 1 :])
        yield from split(part, limit)
