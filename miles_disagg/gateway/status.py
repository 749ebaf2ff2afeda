"""What a gateway says about itself and its fleet: `/health`, `/server_info`, `/fleet`, `/metrics`. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_disagg.gateway.router import Member, Router
from miles_disagg.replica.exposition import Family
from miles_disagg.replica.server import AnswerCount


@dataclass(frozen=True)
class Counts:
    """What the HTTP side counts: requests in flight, those of them that wait for a version, events, answers."""

    gateway_id: str
    active: int
    waiting: int
    totals: Mapping[str, int]
    answers: AnswerCount


def health(router: Router) -> tuple[bool, str]:
    """Is any replica ready, and how many."""
    members = router.members
    ready = sum(1 for m in members if m.ready and m.run_id == router.run_id)
    return ready > 0, f"{ready} of {len(members)} replicas ready" if members else "no replica is registered"


def server_info(router: Router, counts: Counts) -> dict[str, Any]:
    """Run, versions served, how many replicas."""
    members, latest = router.members, router.latest
    applied = [m.applied for m in members if m.applied is not None and m.run_id == router.run_id]
    return {
        "gateway_id": counts.gateway_id,
        "run_id": router.run_id,
        "latest": None if latest is None else str(latest),
        "applied": min(applied, default=None),
        "applied_max": max(applied, default=None),
        "replicas": len(members),
        "replicas_ready": sum(m.ready for m in members),
        "active_requests": counts.active,
        "state": "ready" if any(m.ready for m in members) else "no replica",
    }


def fleet(router: Router, counts: Counts) -> dict[str, Any]:
    """Everything about everybody."""
    latest, now = router.latest, time.monotonic()
    return {
        "gateway_id": counts.gateway_id,
        "run_id": router.run_id,
        "latest": None if latest is None else str(latest),
        "active_requests": counts.active,
        "waiting_for_a_version": counts.waiting,
        "sessions": router.sessions,
        "totals": counts.totals,
        "histograms": router.observed.to_json(),
        "replicas": [_member(m, now) for m in sorted(router.members, key=lambda m: m.replica_id)],
    }


def _member(m: Member, now: float) -> dict[str, Any]:
    return {
        "replica_id": m.replica_id,
        "url": m.url,
        "run_id": m.run_id,
        "applied": m.applied,
        "latest": None if m.latest is None else str(m.latest),
        "state": m.state,
        "ready": m.ready,
        "reason": m.reason,
        "held": m.held,
        "active_requests": m.active,
        "outstanding": len(m.outstanding),
        "heard_seconds_ago": round(now - m.heard, 3),
        "phase_timings": m.phase_timings,
        "fingerprint": None if m.fingerprint is None else m.fingerprint.live,
    }


def metrics(router: Router, counts: Counts) -> list[Family]:
    """For Prometheus."""
    members = router.members
    none: dict[str, str] = {}
    seen = router.observed
    gauges = [
        ("replicas", "replicas registered", len(members)),
        ("replicas_ready", "of them ready", sum(m.ready for m in members)),
        ("active_requests", "requests in flight", counts.active),
        ("waiting", "waiting for a version", counts.waiting),
    ]
    answers = tuple(({"status": str(s)}, float(n)) for s, n in sorted(counts.answers.statuses.items()))
    return [
        *(Family(f"miles_gateway_{name}", "gauge", text, ((none, float(n)),)) for name, text, n in gauges),
        Family("miles_gateway_request_seconds", "histogram", "answered requests", ((none, counts.answers.seconds),)),
        Family(
            "miles_gateway_answers_total", "counter", "rollout answers by HTTP status (499: the client left)", answers
        ),
        Family("miles_gateway_activation_pause_seconds", "histogram", "pauses of replicas", ((none, seen.pauses),)),
        Family(
            "miles_gateway_version_lag_seconds",
            "histogram",
            "from the first word of a version to a replica that serves it",
            ((none, seen.lags),),
        ),
        *(
            Family(f"miles_gateway_{name}_total", "counter", f"{name} so far", ((none, float(n)),))
            for name, n in counts.totals.items()
        ),
    ]
