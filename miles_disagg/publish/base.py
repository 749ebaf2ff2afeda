"""Ports of the trainer's side of a weight update. Adapters: `broadcast.py` (process group), `disk.py` (store)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class GroupSpec:
    """A process group to join: the trainer's source is rank 0, `rank_offset` is this target's first rank in it."""

    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str


class BucketTarget(Protocol):
    """What a source rank needs of one engine: to meet it in a group and have it receive buckets.

    Backed by a Ray actor handle or by an engine's HTTP routes. Every method raises `EngineError` (or a subclass) when
    the engine refuses.
    """

    @property
    def name(self) -> str:
        """For messages and metrics, e.g. the replica id."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks this engine contributes to a group (its tensor parallel size)."""
        ...

    async def init_group(self, group: GroupSpec) -> None:
        """Join `group`. Called at the same time as the trainer's source joins; returns once joined."""
        ...

    async def in_group(self, group_name: str) -> bool:
        """True if the engine's present process has joined `group_name` and not left it."""
        ...

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        load_format: str | None,
    ) -> None:
        """Receive and load one bucket: torch dtype names (`bfloat16`); `load_format` None or `flattened_bucket`."""
        ...

    async def destroy_group(self, group_name: str) -> None:
        """Leave `group_name`; a group that never formed is no error."""
        ...


class UpdateTarget(BucketTarget, Protocol):
    """One engine as the coordinator sees it: `begin_update`, buckets from every source, `finish_update` or
    `abort_update`."""

    async def begin_update(self, version: str) -> None:
        """Fence or pause: from here to `finish_update` no token may be generated with half-updated weights."""
        ...

    async def finish_update(self, version: str) -> None:
        """All buckets arrived: stamp `version`, resume. Until it returns the engine advertises the old version."""
        ...

    async def abort_update(self, reason: str) -> None:
        """The trainer gave up. The engine stays fenced if any bucket was loaded."""
        ...
