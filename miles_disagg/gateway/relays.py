"""Who fetches version files from whom: a tree over zones, hosts and replicas, made of their names alone.

Zones stand in an order given by a hash of their names, hosts within their zone likewise, replicas within their host.
The first replica of a host fetches for it, the first host of a zone for the zone, the first zone for all: that one
reads from the origin. Whoever stands above somebody is before them in that order, so that gateways which know
different replicas can never send two of them to each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

FAN_OUT_ZONES = 3
"""Zones that one zone's first host serves: it sends over a wide-area link."""
FAN_OUT_HOSTS = 4
"""Hosts of its zone that a host serves."""


@dataclass(frozen=True)
class RelayPoint:
    """A replica that relays: where it is (zone and host, any text) and where it answers."""

    zone: str
    host: str
    replica_id: str
    url: str

    @property
    def order(self) -> tuple[bytes, bytes, bytes]:
        """Place in the order of everybody."""
        return _hash(self.zone), _hash(self.host), _hash(self.replica_id)


def tree(points: Mapping[str, RelayPoint]) -> dict[str, tuple[str, ...]]:
    """For each replica id the URLs above it: parent, then the parent's parent; empty for the one at the top."""
    parent: dict[str, str] = {}
    ordered = sorted(points.values(), key=lambda p: p.order)
    tops: list[RelayPoint] = []
    for _, zone in groupby(ordered, key=lambda p: p.zone):
        hosts: list[RelayPoint] = []
        for _, host in groupby(zone, key=lambda p: p.host):
            first, *others = host
            parent |= {point.replica_id: first.replica_id for point in others}
            hosts.append(first)
        parent |= _heap(hosts, FAN_OUT_HOSTS)
        tops.append(hosts[0])
    parent |= _heap(tops, FAN_OUT_ZONES)
    above: dict[str, tuple[str, ...]] = {}
    for replica_id in points:
        first = parent.get(replica_id)
        second = None if first is None else parent.get(first)
        above[replica_id] = tuple(points[name].url for name in (first, second) if name is not None)
    return above


class RelayTree:
    """The tree of a gateway's members, made anew when they changed, at most once in `interval` seconds."""

    def __init__(self, interval: float = 1.0):
        self._points: dict[str, RelayPoint] = {}
        self._above: dict[str, tuple[str, ...]] = {}
        self._interval, self._made, self._changed = interval, float("-inf"), False

    def put(self, replica_id: str, point: RelayPoint | None) -> None:
        """A replica relays from there; None: it does not, or it is gone."""
        if self._points.get(replica_id) != point:
            self._changed = True
            self._points.pop(replica_id, None)
            if point is not None:
                self._points[replica_id] = point

    def above(self, replica_id: str, now: float) -> tuple[str, ...] | None:
        """URLs above a replica; None if it does not relay, or its place is not known yet."""
        if self._changed and now - self._made >= self._interval:
            self._above, self._made, self._changed = tree(self._points), now, False
        return self._above.get(replica_id) if replica_id in self._points else None


def _heap(points: list[RelayPoint], fan_out: int) -> dict[str, str]:
    return {points[i].replica_id: points[(i - 1) // fan_out].replica_id for i in range(1, len(points))}


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
