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
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from virtual_clock import CLOCK, VirtualSelector

if __name__ == "__main__":  # before the modules that take `time.monotonic` as a default
    time.monotonic = CLOCK
    time.time = CLOCK

from simulated_hosts import RUN, Origin, Region, SimReplica

from miles_disagg.domain.errors import EngineUnavailable, MilesDisaggError, WeightVersionNotReady
from miles_disagg.domain.versions import Constraint, VersionRef, token_versions
from miles_disagg.domain.versions import TokenSpan as Span
from miles_disagg.gateway.router import Member, Router
from miles_disagg.replica.wire import parse_requests


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
    parser.add_argument("--verbose", action="store_true", help="print what relays and the gateway log")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, format="%(message)s")
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
