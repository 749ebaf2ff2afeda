"""What a gateway sees of updates across its fleet, from heartbeats: how long engines paused, how late versions came.

Counts and sums only; a restart begins anew. Who serves what right now is `status`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.exposition import Histogram

_VERSIONS = 256


class Observed:
    """pauses: seconds of each activation, as the replica measured them. lags: seconds from this gateway's first word of
    a version to each replica's serving it or a newer one. Both once for each replica and version."""

    def __init__(self) -> None:
        self.pauses, self.lags = Histogram(), Histogram()
        self._first: OrderedDict[VersionRef, float] = OrderedDict()

    def heard(self, latest: VersionRef | None, now: float) -> None:
        """Somebody knows of `latest`."""
        if latest is not None and latest not in self._first:
            self._first[latest] = now
            while len(self._first) > _VERSIONS:
                self._first.popitem(last=False)

    def activated(self, before: VersionRef | None, serves: VersionRef, timings: Mapping[str, Any], now: float) -> None:
        """A replica that served `before` serves `serves`. One that only just registered says nothing about either."""
        if before is None or before == serves:
            return
        if isinstance(pause := timings.get("pause_seconds"), int | float):
            self.pauses.observe(float(pause))
        for version, first in self._first.items():
            if version.run_id == serves.run_id and before.run_id == serves.run_id and before < version <= serves:
                self.lags.observe(max(0.0, now - first))

    def to_json(self) -> dict[str, Any]:
        """For `/fleet`: per histogram the upper bounds in seconds and how many lie below each (the last: above all)."""
        return {
            name: {"bounds": list(histogram.bounds), "counts": histogram.counts}
            for name, histogram in (("pause_seconds", self.pauses), ("lag_seconds", self.lags))
        }
