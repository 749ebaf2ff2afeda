"""A replica's latest source that asks the store itself: for fleets that share a store with the trainer, not a Ray."""

from __future__ import annotations

import asyncio
import random
import time

from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.versions import VersionStore


class PollingSource:
    """`replica.base.LatestSource` on a store: polls with jitter, backing off from `fastest` to `slowest` seconds."""

    def __init__(self, store: VersionStore, *, fastest: float = 0.05, slowest: float = 2.0):
        self._store, self._fastest, self._slowest = store, fastest, slowest

    async def latest(self) -> VersionRef | None:
        """See LatestSource. StoreError when the store stays unreachable."""
        return await asyncio.to_thread(self._store.latest)

    async def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        """See LatestSource. StoreError when the store stays unreachable."""
        deadline, delay = time.monotonic() + timeout, self._fastest
        while True:
            found = await self.latest()
            if found is not None and found != than:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(left, delay * random.uniform(0.75, 1.25)))
            delay = min(self._slowest, delay * 1.5)
