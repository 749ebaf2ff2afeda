"""An engine whose model is never updated (a reference, a reward model, a tool's): its process, watched and restarted.

It stands beside the fleet, not behind the gateway: it has no version, and whoever uses it knows its URL. `FrozenEngine`
is the Ray shell of `FrozenHost`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

import ray

from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.rollout.processes import EngineCommand, EngineProcesses

log = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class FrozenSpec:
    """loopback: it listens on 127.0.0.1, else on its node's address. start_timeout: seconds to answer. port: 0 for a
    free one."""

    name: str
    command: EngineCommand
    loopback: bool
    start_timeout: float
    restart_limit: int = 5
    port: int = 0


class FrozenHost:
    """See the module. A restarted process has the same address."""

    def __init__(self, spec: FrozenSpec, host: str):
        self.spec = spec
        self._processes = EngineProcesses(spec.command, None, spec.start_timeout, host=host, port=spec.port)
        self._watch: asyncio.Task[None] | None = None
        self.restarts = 0
        self.failure: str | None = None

    async def start(self) -> str:
        """Start it; its URL. EngineStartError carries its last lines."""
        url = await self._processes.start()
        self._watch = asyncio.create_task(self._watch_process(), name=f"watch {self.spec.name}")
        return url

    async def _watch_process(self) -> None:
        processes = self._processes
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            reason = await processes.ended()
            if reason is None:
                continue
            if self.restarts >= self.spec.restart_limit:
                self.failure = f"{reason}; given up after {self.restarts} restarts. {processes.log_tail()}"
                return
            self.restarts += 1
            log.warning("%s: %s; restarting it", self.spec.name, reason)
            await processes.stop()
            try:
                await processes.start()
            except MilesDisaggError as error:
                log.warning("%s: restart failed: %s", self.spec.name, error)

    async def stop(self) -> None:
        """End it. Nothing is left running."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._processes.stop()


@ray.remote(max_restarts=0)
class FrozenEngine:
    """One frozen engine on its node."""

    def __init__(self, spec: FrozenSpec):
        host = "127.0.0.1" if spec.loopback else ray.util.get_node_ip_address()
        self._host = FrozenHost(spec, host)

    async def start(self) -> str:
        """Start it; its URL."""
        return await self._host.start()

    async def status(self) -> dict[str, object]:
        """Restarts and a final failure."""
        return {"name": self._host.spec.name, "restarts": self._host.restarts, "failure": self._host.failure}

    async def stop(self) -> None:
        """End its process."""
        await self._host.stop()
