"""The transfer plan: which source rank sends which box of which tensor to which place of which engine rank.

Computed once for a set of layouts. Every element that an engine rank loads comes from exactly one source; where several
sources hold it (data parallel copies, replicated weights) it is given to the one with the least to send. Pure.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.weights.transfer.blocks import Block, Box, RankLayout, cells, intersection, split

ALIGN = 64
"""Bytes that each piece starts at a multiple of, in a source's send buffer and in an engine rank's staging area."""

MAIL_SHARE = 8
"""A mailbox for changes has an eighth of the bytes that it patches; more changes than fit are sent whole."""


class PlanError(MilesDisaggError):
    """Layouts that do not fit each other; names rank and tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box on its way. Offsets and strides in elements of the source's and the target's storage.

    packed, staged: byte offsets in the source's send buffer and in the target's staging area, in the target's type.
    """

    source: int
    target: int
    tensor: str
    shape: tuple[int, ...]
    source_storage: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_storage: int
    target_offset: int
    target_strides: tuple[int, ...]
    nbytes: int
    packed: int
    staged: int


@dataclass(frozen=True, slots=True)
class Write:
    """Contiguous bytes from a source's send buffer to a target's staging area."""

    source: int
    target: int
    packed: int
    staged: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Room for the changed words of one source in one target: `at` and `room` in bytes of the staging area, which they
    patch from `begin` on, `span` bytes."""

    at: int
    room: int
    begin: int
    span: int


@dataclass(frozen=True)
class Plan:
    """Pieces in staging order of each target; sizes of send buffers and staging areas, in bytes."""

    sources: tuple[RankLayout, ...]
    targets: tuple[RankLayout, ...]
    pieces: tuple[Piece, ...]
    packed_bytes: tuple[int, ...]
    staged_bytes: tuple[int, ...]

    def of_source(self, source: int) -> list[Piece]:
        """What a source packs, each box once, in the order of its send buffer."""
        unique = {piece.packed: piece for piece in self.pieces if piece.source == source}
        return [unique[at] for at in sorted(unique)]

    def of_target(self, target: int) -> list[Piece]:
        """What a target receives, in staging order."""
        return [piece for piece in self.pieces if piece.target == target]

    def writes(self, limit: int) -> list[Write]:
        """The pieces as contiguous writes of at most `limit` bytes (a larger piece is cut), neighbours merged."""
        out: list[Write] = []
        for piece in self.pieces:
            size = aligned(piece.nbytes)
            last = out[-1] if out else None
            if (
                last is not None
                and (last.source, last.target) == (piece.source, piece.target)
                and last.packed + last.nbytes == piece.packed
                and last.staged + last.nbytes == piece.staged
                and last.nbytes + size <= limit
            ):
                out[-1] = Write(last.source, last.target, last.packed, last.staged, last.nbytes + size)
                continue
            for at in range(0, size, limit):
                count = min(limit, size - at)
                out.append(Write(piece.source, piece.target, piece.packed + at, piece.staged + at, count))
        return out

    def mailboxes(self) -> dict[tuple[int, int], Mailbox]:
        """Where each source's changed words for each target go: behind the staging area, a share of its own."""
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for piece in self.pieces:  # a source's pieces stand together in a staging area
            key = piece.source, piece.target
            begin, _ = spans.get(key, (piece.staged, 0))
            spans[key] = begin, piece.staged + aligned(piece.nbytes)
        out = {}
        for (source, target), (begin, end) in spans.items():
            at = self.staged_bytes[target] + begin // MAIL_SHARE // ALIGN * ALIGN
            room = (end - begin) // MAIL_SHARE // ALIGN * ALIGN
            out[source, target] = Mailbox(at, room, begin, end - begin)
        return out

    def pairs(self) -> dict[tuple[int, int], int]:
        """Payload bytes from each source to each target."""
        out: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            pair = piece.source, piece.target
            out[pair] = out.get(pair, 0) + piece.nbytes
        return out

    def sent(self) -> list[int]:
        """Payload bytes that each source sends."""
        out = [0] * len(self.sources)
        for (source, _), count in self.pairs().items():
            out[source] += count
        return out


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def make_plan(sources: Sequence[RankLayout], targets: Sequence[RankLayout], *, bucket: int) -> Plan:
    """The plan of moving what `sources` hold into every one of `targets`, in pieces of at most `bucket` bytes.

    PlanError if a target loads an element that no source holds. Layouts hold no element twice within one rank.
    """
    held = _holders(sources)
    load = [0] * len(sources)
    chosen = []
    for target, layout in enumerate(targets):
        for block in layout.blocks:
            routes = list(_routes(block, layout, held, load, bucket))
            if not exactly_once((block.lo, block.hi), [box for *_, box in routes]):
                raise PlanError(f"{layout.name}: the plan does not send every element of {block.tensor} once")
            chosen += [(target, source, own, block, box) for source, own, box in routes]
    chosen.sort(key=lambda c: (c[0], c[1]))  # stable: tensor order within a pair
    pieces: list[Piece] = []
    packed: list[dict[Any, int]] = [{} for _ in sources]
    packed_bytes, staged_bytes = [0] * len(sources), [0] * len(targets)
    for target, source, own, block, box in chosen:
        storage = targets[target].storages[block.storage]
        shape = tuple(h - lo for lo, h in zip(*box, strict=True))
        nbytes = math.prod(shape) * storage.itemsize
        key = (own.tensor, box, storage.dtype)
        at = packed[source].get(key)
        if at is None:
            at = packed[source][key] = packed_bytes[source]
            packed_bytes[source] += aligned(nbytes)
        pieces.append(
            Piece(
                source, target, block.tensor, shape, own.storage, own.at(box[0]), own.strides,
                block.storage, block.at(box[0]), block.strides, nbytes, at, staged_bytes[target],
            )
        )  # fmt: skip
        staged_bytes[target] += aligned(nbytes)
    plan = Plan(tuple(sources), tuple(targets), tuple(pieces), tuple(packed_bytes), tuple(staged_bytes))
    check(plan)
    return plan


Holders = Mapping[str, Mapping[Box, list[tuple[int, Block]]]]


def _holders(sources: Sequence[RankLayout]) -> Holders:
    out: dict[str, dict[Box, list[tuple[int, Block]]]] = {}
    for source, layout in enumerate(sources):
        for block in layout.blocks:
            out.setdefault(block.tensor, {}).setdefault((block.lo, block.hi), []).append((source, block))
    return out


def _routes(
    block: Block, layout: RankLayout, held: Holders, load: list[int], bucket: int
) -> Iterator[tuple[int, Block, Box]]:
    """Cut a target's block into boxes that one source each holds whole, and choose the source."""
    whole = (block.lo, block.hi)
    boxes = {box: who for box, who in held.get(block.tensor, {}).items() if intersection(box, whole) is not None}
    if not boxes:
        raise PlanError(f"{layout.name} loads {block.tensor}, which no trainer rank holds")
    itemsize = layout.storages[block.storage].itemsize
    for cell in cells(whole, list(boxes)):
        who = [pair for box, pairs in boxes.items() if intersection(box, cell) == cell for pair in pairs]
        if not who:
            raise PlanError(f"{layout.name} loads {block.tensor} from {cell[0]} to {cell[1]}: no trainer rank holds it")
        for part in split(cell, max(1, bucket // itemsize)):
            size = itemsize * math.prod(h - lo for lo, h in zip(*part, strict=True))
            source, own = min(who, key=lambda pair: (load[pair[0]], pair[0]))
            load[source] += size
            yield source, own, part


def exactly_once(box: Box, parts: Sequence[Box]) -> bool:
    """True if `parts` fill `box`, none beyond it and no two over each other: halved at planes that cut no part."""
    if len(parts) == 1:
        return parts[0] == box
    for d, (lo, hi) in enumerate(zip(*box, strict=True)):
        spans = sorted({(low[d], high[d]) for low, high in parts})
        ends = list(itertools.accumulate((end for _, end in spans), max))
        planes = [spans[i][0] for i in range(1, len(spans)) if ends[i - 1] <= spans[i][0] and lo < spans[i][0] < hi]
        if planes:
            at = planes[len(planes) // 2]
            below, above = ((box[0], _with(box[1], d, at)), (_with(box[0], d, at), box[1]))
            return exactly_once(below, [p for p in parts if p[0][d] < at]) and exactly_once(
                above, [p for p in parts if p[0][d] >= at]
            )
    return False


def _with(corner: tuple[int, ...], dimension: int, value: int) -> tuple[int, ...]:
    return (*corner[:dimension], value, *corner[dimension + 1 :])


def check(plan: Plan) -> None:
    """PlanError unless each target receives as many bytes as it loads, none of them beyond its storages."""
    received = [0] * len(plan.targets)
    for piece in plan.pieces:
        storage = plan.targets[piece.target].storages[piece.target_storage]
        last = piece.target_offset + sum((n - 1) * s for n, s in zip(piece.shape, piece.target_strides, strict=True))
        if last >= storage.elements or piece.nbytes % storage.itemsize:
            raise PlanError(f"{plan.targets[piece.target].name}: {piece.tensor} would end outside its storage")
        received[piece.target] += piece.nbytes
    for layout, got in zip(plan.targets, received, strict=True):
        if got != layout.nbytes:
            raise PlanError(f"{layout.name}: the plan sends {got} bytes, its weights have {layout.nbytes}")


def fingerprint(layout: RankLayout) -> str:
    """Digest of a layout (not of its name): equal layouts can share a plan."""
    digest = hashlib.blake2b(repr(layout.storages).encode(), digest_size=16)
    for block in layout.blocks:
        digest.update(repr(block).encode())
    return digest.hexdigest()


def runs(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """A piece as contiguous runs in the target's storage: (elements into the packed piece, offset there, elements)."""
    shape, strides, run = list(piece.shape), list(piece.target_strides), 1
    while shape and strides[-1] in (run, 0):
        if shape[-1] > 1 and strides[-1] != run:
            break
        run *= shape.pop()
        strides.pop()
    count = math.prod(shape)
    for i in range(count):
        at, rest = piece.target_offset, i
        for n, s in zip(reversed(shape), reversed(strides), strict=True):
            at += rest % n * s
            rest //= n
        yield i * run, at, run
