"""Pauses and lags are counted once for each replica and version, whatever heartbeats repeat or leave out."""

from __future__ import annotations

from miles_disagg.domain.versions import VersionRef
from miles_disagg.gateway.router import Router


def test_pauses_and_lags_are_counted_once_for_each_replica_and_version() -> None:
    now = 100.0
    router = Router(clock=lambda: now)

    def beat(name: str, applied: int, latest: int, pause: float, run: str = "run") -> None:
        message = {"replica_id": name, "url": f"http://{name}", "run_id": run, "applied": applied, "ready": True}
        message |= {"latest": str(VersionRef(run, latest)), "phase_timings": {"pause_seconds": pause}}
        router.heartbeat(message)

    beat("a", 1, 1, 9.0)  # what it did before it registered is not ours to count
    beat("b", 1, 2, 9.0)
    now = 100.4
    beat("a", 2, 2, 0.02)
    beat("a", 2, 2, 0.02)
    now = 103.0
    beat("a", 2, 3, 0.02)
    now = 103.7
    beat("b", 3, 3, 0.2)  # over 2, which it never served
    beat("b", 0, 0, 0.3, run="other")  # another run: a pause, and no lag of ours
    seen = router.observed
    assert sum(seen.pauses.counts) == 3
    assert round(seen.pauses.total, 3) == 0.52
    assert sum(seen.lags.counts) == 3
    assert round(seen.lags.total, 3) == round(0.4 + 3.7 + 0.7, 3)
