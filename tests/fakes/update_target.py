"""Update targets for tests of broadcasting: a real engine over HTTP, and engines that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_disagg.domain.errors import UpdateFailed
from miles_disagg.engine.base import Engine
from miles_disagg.publish.base import GroupSpec


class EngineTarget:
    """An engine driven directly, as a replica would: paused while it is updated."""

    def __init__(self, engine: Engine, num_ranks: int = 1):
        self.engine, self.name, self.num_ranks = engine, engine.url, num_ranks
        self.events: list[str] = []
        self.groups: set[str] = set()

    async def begin_update(self, version: str) -> None:
        self.events.append(f"begin {version}")
        await self.engine.pause("in_place")

    async def init_group(self, group: GroupSpec) -> None:
        self.events.append("init")
        await self.engine.init_group(
            master_address=group.master_address,
            master_port=group.master_port,
            rank_offset=group.rank_offset,
            world_size=group.world_size,
            group_name=group.name,
            backend=group.backend,
        )
        self.groups.add(group.name)

    async def in_group(self, group_name: str) -> bool:
        return group_name in self.groups

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        load_format: str | None,
    ) -> None:
        self.events.append("bucket")
        await self.engine.update_from_distributed(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            version=version,
            flush_cache=False,
            load_format=load_format,
        )

    async def destroy_group(self, group_name: str) -> None:
        self.events.append("destroy")
        self.groups.discard(group_name)
        await self.engine.destroy_group(group_name)

    async def finish_update(self, version: str) -> None:
        self.events.append(f"finish {version}")
        await self.engine.resume()

    async def abort_update(self, reason: str) -> None:
        self.events.append(f"abort: {reason}")
        await self.engine.resume()


class AbsentTarget:
    """Says yes to everything and never joins a group; `refuses` names a method that raises instead."""

    num_ranks = 2

    def __init__(self, refuses: str = ""):
        self.name, self.refuses, self.events = "absent", refuses, list[str]()

    async def _said(self, what: str) -> None:
        self.events.append(what)
        if what == self.refuses:
            raise UpdateFailed(f"no {what} today")

    async def begin_update(self, version: str) -> None:
        await self._said("begin")

    async def init_group(self, group: GroupSpec) -> None:
        await self._said("init")
        await asyncio.sleep(3600)

    async def in_group(self, group_name: str) -> bool:
        return False

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        load_format: str | None,
    ) -> None:
        await self._said("bucket")

    async def destroy_group(self, group_name: str) -> None:
        await self._said("destroy")

    async def finish_update(self, version: str) -> None:
        await self._said("finish")

    async def abort_update(self, reason: str) -> None:
        await self._said("abort")
