"""What `simulate_fleet` puts around the real reconcilers, gates, sessions and relays: engines, links, a store, hosts.

Seconds are whatever `time.monotonic` says. The fleet, its load and its churn are `simulate_fleet`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_disagg.domain.errors import EngineUnavailable
from miles_disagg.domain.versions import VersionRef
from miles_disagg.gateway.router import Router
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.reconciler import Reconciler, ReconcilerSettings
from miles_disagg.replica.registration import Registration
from miles_disagg.replica.relay import PeerFailed, Relay, RelaySettings
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.store.publication import FileProof
from miles_disagg.store.watch import PollingSource
from miles_disagg.weights.digest import digest

RUN = "sim"
SETTINGS = ReconcilerSettings(poll=30.0, engine_check=10.0)
BLOCKS = 8  # a delta is so many bytes here, each stands for a block
RELAYING = RelaySettings(block=1, slowest=0.25 * BLOCKS)
CONNECT_SECONDS = 2.0
LOCAL = 10.0


@dataclass(frozen=True)
class Region:
    """latency: seconds to the store, or to another region, and back; bandwidth: deltas a second of one host's link to
    the world. Within the region a host's link is `LOCAL` times as fast and 1 ms long."""

    name: str
    latency: float
    bandwidth: float


@dataclass
class Origin:
    """The store: what is published when, and how many deltas' bytes it sent."""

    published: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    sent: float = 0.0
    anchor_every: int = 8
    anchor_deltas: float = 30.0

    @property
    def newest(self) -> int:
        """Newest published version."""
        return max(self.published)

    def plan(self, have: int | None, target: int) -> dict[str, float]:
        """Files to get from `have` (None: the base, here already) to `target` by the cheaper way, in deltas' bytes."""
        anchor, start, first = target - target % self.anchor_every, have or 0, {}
        if anchor > start and self.anchor_deltas + target - anchor < target - start:
            first, start = {f"anchor {anchor}": self.anchor_deltas}, anchor
        return first | {f"delta {version}": 1.0 for version in range(start + 1, target + 1)}

    def bytes_of(self, key: str) -> bytes:
        """Contents of a file: a byte for each block, another one for each file."""
        size = BLOCKS * (self.anchor_deltas if key.startswith("anchor") else 1.0)
        return bytes([int(digest(key.encode())[:2], 16)]) * int(size)


class SimSource(PollingSource):
    """The real polling, over a simulated link."""

    def __init__(self, origin: Origin, region: Region):
        super().__init__(store=None)  # type: ignore[arg-type]
        self._origin, self._region = origin, region

    async def latest(self) -> VersionRef | None:
        """What the pointer names, after a round trip."""
        await asyncio.sleep(self._region.latency)
        return VersionRef(RUN, self._origin.newest)


class MemorySpool:
    """A relay's spool."""

    def __init__(self) -> None:
        self._data = bytearray()

    async def append(self, data: bytes) -> None:
        self._data += data

    async def read(self, begin: int, end: int) -> bytes:
        return bytes(self._data[begin:end])

    async def clear(self) -> None:
        self._data.clear()

    def remove(self) -> None:
        self._data.clear()


class SimLinks:
    """A relay's links: the bytes are real, the seconds simulated."""

    def __init__(self, origin: Origin, region: Region, find: Callable[[str], SimReplica | None], rng: random.Random):
        self._origin, self._region, self._find, self._rng = origin, region, find, rng

    async def from_origin(self, key: str, nbytes: int, block: int) -> AsyncGenerator[bytes, None]:
        speed = BLOCKS * self._region.bandwidth * self._rng.uniform(0.8, 1.25)
        await asyncio.sleep(self._region.latency)
        for byte in self._origin.bytes_of(key):
            await asyncio.sleep(1 / speed)
            self._origin.sent += 1 / BLOCKS
            yield bytes([byte])

    async def from_peer(self, url: str, key: str, block: int) -> AsyncGenerator[bytes, None]:
        peer = self._find(url)
        if peer is None:
            await asyncio.sleep(CONNECT_SECONDS)
            raise PeerFailed("no answer")
        near, begun = peer.region is self._region, False
        await asyncio.sleep(0.001 if near else self._region.latency)
        peer.sending += 1
        try:
            async with aclosing(peer.relay.pass_on(key)) as blocks:
                async for data in blocks:
                    if peer.engine.dead:
                        raise PeerFailed("gone", begun)
                    speed = min(self._region.bandwidth, peer.region.bandwidth / peer.sending)
                    if near:
                        speed = LOCAL * self._region.bandwidth / peer.sending
                    await asyncio.sleep(len(data) / (BLOCKS * speed * self._rng.uniform(0.8, 1.25)))
                    begun = True
                    yield data
        finally:
            peer.sending -= 1

    async def proof(self, key: str) -> FileProof:
        await asyncio.sleep(self._region.latency)
        data = self._origin.bytes_of(key)
        return FileProof(len(data), digest(data))

    def spool(self, key: str, proof: FileProof) -> MemorySpool:
        return MemorySpool()


class SimStager:
    """Fetches through the relay; takes the time that applying takes."""

    def __init__(self, origin: Origin, links: SimLinks, relay: Relay):
        self._origin, self._links, self._relay = origin, links, relay
        self._have: int | None = None

    async def materialize(self, target: VersionRef) -> Materialized:
        """Fetch and apply."""
        begun, plan = time.monotonic(), self._origin.plan(self._have, target.version)
        for key in plan:
            await self._relay.fetch(key, await self._links.proof(key))
        fetched = time.monotonic()
        await asyncio.sleep(0.3 + 0.1 * sum(plan.values()))
        self._have = target.version
        seconds = {"fetch": fetched - begun, "materialize": time.monotonic() - fetched}
        return Materialized(target, Path("/sim"), seconds=seconds)


class SimEngine:
    """Writes tokens that are the number of the version that wrote them."""

    def __init__(self, name: str, rng: random.Random):
        self.url, self._rng = f"http://{name}", rng
        self.version, self.dead = "default", False
        self._running = asyncio.Event()
        self._running.set()

    def _alive(self) -> None:
        if self.dead:
            raise EngineUnavailable(f"{self.url} is gone")

    async def server_info(self) -> dict[str, Any]:
        self._alive()
        return {"weight_version": self.version}

    model_info = server_info

    async def pause(self, mode: str) -> None:
        self._alive()
        self._running.clear()

    async def resume(self) -> None:
        self._alive()
        self._running.set()

    async def abort(self, rid: str | None = None) -> None:
        self._alive()

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        await asyncio.sleep(self._rng.uniform(0.2, 0.6))
        self._alive()
        self.version = version

    async def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        output: list[int] = []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            await asyncio.sleep(0.25)
            await self._running.wait()
            self._alive()
            output.append(VersionRef.parse(self.version).version)
            done = len(output) == body["sampling_params"]["max_new_tokens"]
            meta = {"completion_tokens": len(output), "weight_version": self.version, "prompt_tokens": 1}
            yield {
                "output_ids": list(output),
                "meta_info": {**meta, "finish_reason": {"type": "length"} if done else None},
            }


class World(Protocol):
    """What a host needs of the fleet that it is in. `beat`: seconds between heartbeats; `live`: hosts by name."""

    origin: Origin
    router: Router
    relaying: bool
    beat: float
    live: dict[str, SimReplica]


class SimReplica:
    """One replica: the real thing around a simulated engine, with its two loops."""

    def __init__(self, name: str, fleet: World, region: Region, rng: random.Random):
        self.name, self._router, self._beat, self._rng = name, fleet.router, fleet.beat, rng
        self.region, self.sending = region, 0
        self.engine = SimEngine(name, rng)
        self.replica = Replica(ReplicaSettings(name), self.engine)  # type: ignore[arg-type]
        self.served: dict[int, float] = {}
        links = SimLinks(fleet.origin, region, lambda url: fleet.live.get(url.removeprefix("http://")), rng)
        self.relay = Relay(name, links, RELAYING)
        if not fleet.relaying:
            self.relay.follow(())
        source, stager = SimSource(fleet.origin, region), SimStager(fleet.origin, links, self.relay)
        self.reconciler = Reconciler(self.replica, source, stager, sink=self, settings=SETTINGS)
        relay = self.relay if fleet.relaying else None
        self._registration = Registration(self.replica, self.engine.url, (), relay=relay, zone=region.name, host=name)
        self._tasks: list[asyncio.Task[None]] = []

    async def record_activation(self, replica_id: str, ref: VersionRef, at: float) -> None:
        """The reconciler's acknowledgement."""
        self.served[ref.version] = at

    async def start(self) -> None:
        """Come up."""
        await self.replica.attach()
        self._tasks = [asyncio.create_task(self.reconciler.run()), asyncio.create_task(self._heart())]

    async def _heart(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, self._beat))
        while True:
            member = self._router.heartbeat(self._registration.message())
            self._registration.hear({"relays": self._router.relays_above(member)})
            await self.replica.gate.wait_changed(self._beat)

    def kill(self) -> None:
        """The host is gone, without a word."""
        self.engine.dead = True
        self.engine._running.set()
        for task in self._tasks:
            task.cancel()
