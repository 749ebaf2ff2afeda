"""Heartbeats of a replica to its gateways: who it is, what it serves, how busy it is; goodbye at the end.

A gateway forgets a silent replica by itself. Routing is `gateway.router`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from miles_disagg.replica.relay import Relay
from miles_disagg.replica.replica import Replica

log = logging.getLogger(__name__)


def this_host() -> str:
    """A name that the replicas of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Registration:
    """Posts `replica`'s status to every gateway each `interval` seconds, and at once when what it serves changes."""

    def __init__(
        self,
        replica: Replica,
        url: str,
        gateways: Sequence[str],
        *,
        token: str | None = None,
        interval: float = 1.0,
        relay: Relay | None = None,
        zone: str = "",
        host: str | None = None,
    ):
        self._relay, self._place = relay, {"zone": zone, "host": host or this_host()}
        self._replica, self._url, self._interval = replica, url, interval
        self._gateways = [g.rstrip("/") for g in gateways]
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        timeout = aiohttp.ClientTimeout(total=max(5.0, 2 * self._interval))
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        self._tasks = [asyncio.create_task(self._beat(self._session, g), name=f"heartbeat {g}") for g in self._gateways]

    async def stop(self) -> None:
        """Say goodbye (best effort) and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is None:
            return
        for gateway in self._gateways:
            try:
                async with self._session.delete(f"{gateway}/replicas/{self._replica.replica_id}"):
                    pass
            except (aiohttp.ClientError, TimeoutError) as error:
                log.info("goodbye to %s was not heard: %s", gateway, error)
        await self._session.close()

    def message(self) -> dict[str, Any]:
        """One heartbeat."""
        status = self._replica.status()
        names = ("replica_id", "run_id", "applied", "latest", "state", "ready", "reason", "active_requests")
        names += ("phase_timings", "max_in_flight", "fingerprint", "held")
        relay = None if self._relay is None else self._place
        return {"url": self._url, "relay": relay, **{name: status[name] for name in names}}

    def hear(self, answer: dict[str, Any]) -> None:
        """What a gateway answered."""
        if self._relay is not None and (above := answer.get("relays")) is not None:
            self._relay.follow(above)

    def _visible(self) -> tuple[Any, ...]:
        replica = self._replica
        return replica.applied, replica.state, replica.gate.latest, replica.fingerprint, replica.held

    async def _beat(self, session: aiohttp.ClientSession, gateway: str) -> None:
        heard = True
        while True:
            seen = self._visible()
            try:
                async with session.post(f"{gateway}/replicas", json=self.message()) as response:
                    if response.status != 200:
                        raise aiohttp.ClientError(f"status {response.status}: {(await response.text())[:200]}")
                    self.hear(await response.json())
                heard = True
            except (aiohttp.ClientError, TimeoutError) as error:
                if heard:
                    log.warning("%s: heartbeat to %s failed: %s", self._replica.replica_id, gateway, error)
                heard = False
            await self._until_changed(seen)

    async def _until_changed(self, seen: tuple[Any, ...]) -> None:
        """Sleep for the interval; less if what we would say changes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._interval
        while self._visible() == seen:
            remaining = until - loop.time()
            if remaining <= 0 or not await self._replica.gate.wait_changed(remaining):
                return
