"""Prometheus text exposition of a replica's or gateway's own counters. Ray-free; `observe.metrics` is the run's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Histogram:
    """Cumulative histogram of seconds."""

    bounds: tuple[float, ...] = SECONDS_BUCKETS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """Sample lines of this histogram."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            edge = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{name}_bucket{_labels({**labels, 'le': edge})} {running}"
        yield f"{name}_sum{_labels(labels)} {self.total:.6f}"
        yield f"{name}_count{_labels(labels)} {running}"


@dataclass(frozen=True)
class Family:
    """One metric name with its help text and samples: (labels, value)."""

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    samples: tuple[tuple[Mapping[str, str], float | Histogram], ...]


def render(families: Iterable[Family]) -> str:
    """The text that `/metrics` answers."""
    lines: list[str] = []
    for family in families:
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            if isinstance(value, Histogram):
                lines += value.lines(family.name, labels)
            else:
                lines.append(
                    f"{family.name}{_labels(labels)} {value:g}"
                    if value < 1e6
                    else f"{family.name}{_labels(labels)} {value!r}"
                )
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = (
        f'{k}="{v}"' for k, v in ((k, str(v).replace("\\", "\\\\").replace('"', '\\"')) for k, v in labels.items())
    )
    return "{" + ",".join(quoted) + "}"
