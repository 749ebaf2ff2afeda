"""What a transfer plan costs, in words and numbers: bytes of each rank, the slowest pair, expected seconds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_disagg.weights.transfer.plan import Plan

_MIB = 2**20


@dataclass(frozen=True)
class Rates:
    """GB/s that one rank can send and receive, and seconds that every write costs beside its bytes."""

    send: float = 50.0
    receive: float = 50.0
    per_write: float = 5e-6


@dataclass(frozen=True)
class Expected:
    """Seconds of the whole transfer, and the rank that it waits for."""

    seconds: float
    bottleneck: str


def expected(plan: Plan, rates: Rates, bucket: int, scale: float = 1.0) -> Expected:
    """The time of the busiest rank: all ranks send and receive at once, and links are full duplex.

    scale: of bytes and writes, where the plan is of a part of the model.
    """
    sent, got = plan.sent(), [0] * len(plan.targets)
    calls_out, calls_in = [0] * len(plan.sources), [0] * len(plan.targets)
    for (_, target), count in plan.pairs().items():
        got[target] += count
    for write in plan.writes(bucket):
        calls_out[write.source] += 1
        calls_in[write.target] += 1
    times = [
        (n / rates.send / 1e9 + calls * rates.per_write, layout.name)
        for n, calls, layout in zip(sent, calls_out, plan.sources, strict=True)
    ] + [
        (n / rates.receive / 1e9 + calls * rates.per_write, layout.name)
        for n, calls, layout in zip(got, calls_in, plan.targets, strict=True)
    ]
    seconds, name = max(times)
    return Expected(seconds * scale, name)


def summary(plan: Plan, bucket: int, rates: Rates | None = None) -> list[str]:
    """The plan for people, a few lines."""
    sent, pairs, writes = plan.sent(), plan.pairs(), plan.writes(bucket)
    if not pairs:
        return ["nothing is sent"]
    (source, target), most = max(pairs.items(), key=lambda item: item[1])
    idle = sum(not count for count in sent)
    buffers = max(plan.packed_bytes)
    out = [
        f"{sum(sent) / _MIB:,.1f} MiB from {len(plan.sources)} trainer rank(s) to {len(plan.targets)} engine rank(s): "
        f"{len(plan.pieces):,} pieces in {len(writes):,} writes, every element once",
        f"a trainer rank sends {_span(sent)} MiB{f' ({idle} send nothing)' if idle else ''}, "
        f"an engine rank receives {_span(plan.staged_bytes)} MiB",
        f"slowest pair: {plan.sources[source].name} -> {plan.targets[target].name}, {most / _MIB:,.1f} MiB",
        f"extra memory of a trainer rank: at most {buffers / _MIB:,.1f} MiB, {-(-buffers // bucket)} bucket(s) of "
        f"{bucket / _MIB:,.0f} MiB",
    ]
    if rates is not None:
        found = expected(plan, rates, bucket)
        out.append(
            f"expected: {found.seconds:.3f} s at {rates.send:g} GB/s out and {rates.receive:g} GB/s in, "
            f"waiting for {found.bottleneck}"
        )
    return out


def _span(values: Sequence[int]) -> str:
    low, high = min(values) / _MIB, max(values) / _MIB
    return f"{high:,.1f}" if low == high else f"{low:,.1f} to {high:,.1f}"
