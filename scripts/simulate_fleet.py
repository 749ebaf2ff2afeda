"""A fleet of thousands of replicas in one process: real reconcilers, gates, sessions and router; the rest is simulated.

Simulated: the clock (virtual seconds), engines (a token is the version that wrote it, so that attribution can be
checked), links (a region each, with latency and bandwidth, ten times that within the region; a host that sends to
several shares its link among them), publications and churn. With relays (the real ones, on simulated links), replicas
fetch from each other; --no-relay lets each read from the store. Every request carries a constraint; every answer is
checked. With --json the last line of stdout is one object: `convergence_ratio` (of the fleet's 99th percentile to a
replica alone), `origin_egress_deltas` (deltas that the store sent, for each publication), `violations`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class VirtualClock:
    """Seconds that pass only when everybody waits."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class VirtualSelector(selectors.SelectSelector):
    """Does not sleep: the clock jumps to the next timer."""

    def __init__(self, clock: VirtualClock):
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None):
        """See the base class; `timeout` passes at once."""
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self._clock.now += max(0.0, timeout)
        return super().select(0)


CLOCK = VirtualClock()
if __name__ == "__main__":  # before the modules that take `time.monotonic` as a default
    time.monotonic = CLOCK
    time.time = CLOCK

from miles_disagg.domain.errors import EngineUnavailable, MilesDisaggError, WeightVersionNotReady  # noqa: E402
from miles_disagg.domain.versions import Constraint, VersionRef, token_versions  # noqa: E402
from miles_disagg.domain.versions import TokenSpan as Span  # noqa: E402
from miles_disagg.gateway.router import Member, Router  # noqa: E402
from miles_disagg.replica.base import Materialized  # noqa: E402
from miles_disagg.replica.reconciler import Reconciler, ReconcilerSettings  # noqa: E402
from miles_disagg.replica.registration import Registration  # noqa: E402
from miles_disagg.replica.relay import PeerFailed, Relay, RelaySettings  # noqa: E402
from miles_disagg.replica.replica import Replica, ReplicaSettings  # noqa: E402
from miles_disagg.replica.wire import parse_requests  # noqa: E402
from miles_disagg.store.publication import FileProof  # noqa: E402
from miles_disagg.store.watch import PollingSource  # noqa: E402
from miles_disagg.weights.digest import digest  # noqa: E402

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


class SimReplica:
    """One replica: the real thing around a simulated engine, with its two loops."""

    def __init__(self, name: str, fleet: Fleet, region: Region, rng: random.Random):
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


class Fleet:
    """Replicas in their regions, a router, churn, load, and what went wrong."""

    def __init__(self, count: int, regions: int, seed: int, relaying: bool):
        self.relaying = relaying
        self.rng, self.origin = random.Random(seed), Origin()
        self.beat = 1.0 if count <= 2000 else 2.0
        self.router = Router(expiry=5.0 * self.beat, rng=random.Random(seed))
        self.regions = [
            Region(f"region-{i}", self.rng.uniform(0.005, 0.25), self.rng.uniform(1.0, 3.0)) for i in range(regions)
        ]
        self.live: dict[str, SimReplica] = {}
        self._names = iter(range(10**9))
        self.count, self.requests, self.answered, self.violations, self.refused = count, 0, 0, 0, 0

    async def add(self) -> None:
        """A new replica in some region."""
        number = next(self._names)
        region = self.regions[number % len(self.regions)]
        rng = random.Random(self.rng.random())
        replica = SimReplica(f"r{number}", self, region, rng)
        self.live[replica.name] = replica
        await replica.start()

    async def churn(self, share_a_minute: float) -> None:
        """Kill and add."""
        while share_a_minute:
            await asyncio.sleep(self.rng.expovariate(self.count * share_a_minute / 60))
            self.live.pop(self.rng.choice(list(self.live))).kill()
            await self.add()

    async def expire(self) -> None:
        """As the gateway does."""
        while True:
            await asyncio.sleep(0.5)
            self.router.expire()

    async def ask(self) -> None:
        """One request with a constraint, retried as a client does; its answer checked token by token."""
        self.requests += 1
        newest = self.origin.newest
        kind = self.rng.random()
        exact = kind < 0.1 and newest > 0
        wanted = Constraint(exact_version=newest) if exact else Constraint(min_version=max(0, newest - (kind < 0.7)))
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 8}, "rid": f"q{self.requests}"}
        give_up, excluded = time.monotonic() + 60.0, set[Member]()
        while time.monotonic() < give_up:
            try:
                pick = self.router.pick(wanted, exclude=excluded, rid=body["rid"])
                replica = self.live.get(pick.member.replica_id)
                if replica is None:
                    raise EngineUnavailable("the host is gone")
                (request,), _ = parse_requests("/generate", {**body, "weight_version": wanted.to_json()})
                return self.check(wanted, await replica.replica.sessions.result(request))
            except WeightVersionNotReady:
                await asyncio.sleep(0.25)
                excluded.clear()
            except EngineUnavailable:
                await asyncio.sleep(0.05)
            except MilesDisaggError:
                break  # an exact version that is gone
        self.refused += 1

    def check(self, wanted: Constraint, answer: Mapping[str, Any]) -> None:
        """The tokens say which version wrote them."""
        self.answered += 1
        meta, tokens = answer["meta_info"], answer["output_ids"]
        spans = [Span(first, version) for first, version in meta["weight_version_spans"]]
        wrong = token_versions(spans, len(tokens)) != tokens or not all(wanted.satisfied_by(v) for v in tokens)
        self.violations += wrong

    async def load(self, rate: float) -> None:
        """Requests at `rate` a second."""
        asked: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.rng.expovariate(rate))
                task = asyncio.create_task(self.ask())
                asked.add(task)
                task.add_done_callback(asked.discard)
        finally:
            await asyncio.gather(*asked, return_exceptions=True)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def simulate(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """One fleet through all publications."""
    fleet = Fleet(count, args.regions, args.seed, args.relay)
    for _ in range(count):
        await fleet.add()
    await asyncio.sleep(20.0)
    begun_with, fleet.origin.sent = fleet.origin.sent, 0.0
    background = [fleet.churn(args.churn if count > 1 else 0.0), fleet.expire(), fleet.load(args.rate)]
    tasks = [asyncio.create_task(work) for work in background]
    seconds: list[float] = []
    for version in range(1, args.publications + 1):
        at = fleet.origin.published[version] = time.monotonic()
        members = list(fleet.live.values())
        await asyncio.sleep(args.interval)
        times = [min((t for v, t in m.served.items() if v >= version), default=None) for m in members]
        seconds += [t - at for m, t in zip(members, times, strict=True) if t is not None and m.name in fleet.live]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    behind = sum(m.replica.applied != VersionRef(RUN, args.publications) for m in fleet.live.values())
    return {
        "seconds": {"p50": statistics.median(seconds), "p99": percentile(seconds, 0.99), "max": max(seconds)},
        "origin_egress_deltas": fleet.origin.sent / args.publications,
        "egress_at_start": begun_with,
        "violations": fleet.violations,
        "requests": fleet.requests,
        "answered": fleet.answered,
        "refused": fleet.refused,
        "behind_at_the_end": behind,
    }


def run(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Simulate on a loop of its own."""
    loop = asyncio.SelectorEventLoop(VirtualSelector(CLOCK))
    loop.time = CLOCK  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(simulate(args, count))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(1.0))
        loop.close()


def main() -> None:
    """Parse, simulate the fleet and replicas alone, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--regions", type=int, default=20)
    parser.add_argument("--publications", type=int, default=6)
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between publications")
    parser.add_argument("--churn", type=float, default=0.01, help="share of the replicas replaced in a minute")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-relay", dest="relay", action="store_false", help="everybody reads from the store")
    args = parser.parse_args()
    apart = {"rate": 0.5, "relay": False}
    alone = [run(argparse.Namespace(**{**vars(args), **apart, "seed": seed}), 1) for seed in range(20)]
    single = statistics.mean(one["seconds"]["p50"] for one in alone)
    fleet = run(args, args.replicas)
    result = {
        "replicas": args.replicas,
        "relay": args.relay,
        "convergence_ratio": round(fleet["seconds"]["p99"] / single, 2),
        "origin_egress_deltas": round(fleet["origin_egress_deltas"], 1),
        "violations": fleet["violations"] + sum(one["violations"] for one in alone),
        "single_seconds": round(single, 2),
        "seconds": {name: round(value, 2) for name, value in fleet["seconds"].items()},
        **{name: fleet[name] for name in ("requests", "answered", "refused", "behind_at_the_end")},
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
