"""What one side of a transfer tells the other: an engine rank's registered memory, and layouts as JSON. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_disagg.weights.transfer.blocks import RankLayout, Storage, blocks_of
from miles_disagg.weights.transfer.plan import Plan

Patch = list[int]
"""Changed words in a mailbox: [byte offset, count, bytes of a word, of a position, byte offset they count from]."""

Sums = list[list[Any]]
"""Checksums of what was sent: [byte offset in the staging area, bytes, [sums]]."""


@dataclass(frozen=True)
class Link:
    """Where the bytes for one engine rank go.

    target: its number in the plan. token: changes whenever its memory is registered anew. mode: `staging` (base is the
    area's address) or `direct` (slots: address of each storage). metadata: NIXL's, empty without it.
    """

    target: int
    token: str
    mode: Literal["staging", "direct"]
    metadata: bytes
    base: int
    slots: Mapping[int, int]
    device: int
    cuda: bool
    mail: int = 0
    """Bytes of the mailboxes behind the staging area; 0: changes cannot be sent."""

    @classmethod
    def parse(cls, target: int, raw: Mapping[str, Any]) -> Link:
        """From the plugin's answer."""
        return cls(
            target, raw["token"], raw["mode"], base64.b64decode(raw["metadata"]), raw["base"],
            {int(slot): pointer for slot, pointer in raw["slots"].items()}, raw["device"], raw["cuda"], raw["mail"],
        )  # fmt: skip

    def encoded_metadata(self) -> str:
        """The metadata as JSON can carry it."""
        return base64.b64encode(self.metadata).decode()


@dataclass(frozen=True)
class GroupSeat:
    """torch.distributed: how all sources and engine ranks of one update meet; `ranks` of the engine's own ranks."""

    address: str
    port: int
    world: int
    name: str
    backend: str
    timeout: float
    ranks: tuple[int, ...] = ()

    def fields(self) -> dict[str, Any]:
        """What each side passes on, beside its rank."""
        return {key: getattr(self, key) for key in ("address", "port", "world", "name", "backend", "timeout")}


def parse_layout(name: str, raw: Mapping[str, Any]) -> RankLayout:
    """An engine rank's recorded layout (the plugin's JSON)."""
    blocks = [
        block
        for tensor, (shape, rows) in raw["tensors"].items()
        for slot, dims, source_offset, slot_offset in rows
        for block in blocks_of(tensor, shape, [tuple(dim) for dim in dims], source_offset, slot, slot_offset)
    ]
    return RankLayout(name, tuple(Storage(*storage) for storage in raw["storages"]), tuple(blocks))


def arrivals(plan: Plan, target: int) -> list[list[Any]]:
    """The pieces of an engine rank as its plugin reads them: [staged, nbytes, storage, offset, shape, strides]."""
    return [
        [p.staged, p.nbytes, p.target_storage, p.target_offset, list(p.shape), list(p.target_strides)]
        for p in plan.of_target(target)
    ]


def ranks_of(engines: Sequence[Sequence[RankLayout]]) -> list[tuple[int, ...]]:
    """Numbers in the plan of each engine's ranks, where the targets are the engines' ranks one after another."""
    out, at = [], 0
    for ranks in engines:
        out.append(tuple(range(at, at + len(ranks))))
        at += len(ranks)
    return out
