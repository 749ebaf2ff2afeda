"""A latest source, a stager and an activation sink in memory, with failures on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

from miles_disagg.domain.errors import VersionNotFound
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.base import Materialized


class FakeStore:
    """`publish` moves the pointer; `stager()` is one host's stager; `activations` records acknowledgements.

    down: every question fails. deaf: `wait_newer` never tells (a lost wake). materialize_delay: seconds.
    """

    def __init__(self, latest: VersionRef | None = None):
        self.pointer = latest
        self.down = self.deaf = False
        self.materialize_delay = 0.0
        self.broken: set[VersionRef] = set()
        self.materialized: list[VersionRef] = []
        self.activations: list[tuple[str, VersionRef]] = []
        self._moved = asyncio.Event()

    def publish(self, ref: VersionRef) -> None:
        self.pointer = ref
        event, self._moved = self._moved, asyncio.Event()
        event.set()

    def _up(self) -> None:
        if self.down:
            raise OSError("store unreachable")

    async def latest(self) -> VersionRef | None:
        self._up()
        return self.pointer

    async def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        self._up()
        try:
            async with asyncio.timeout(timeout):
                while self.deaf or self.pointer == than:
                    await (asyncio.sleep(3600) if self.deaf else self._moved.wait())
        except TimeoutError:
            return None
        return self.pointer

    async def materialize(self, target: VersionRef) -> Materialized:
        self._up()
        await asyncio.sleep(self.materialize_delay)
        if target in self.broken:
            raise VersionNotFound(target, "the fake store")
        self.materialized.append(target)
        return Materialized(target, Path(f"/checkpoints/{target}"), seconds={"fetch": 0.1, "materialize": 0.2})

    async def record_activation(self, replica_id: str, ref: VersionRef, at: float) -> None:
        self._up()
        self.activations.append((replica_id, ref))
