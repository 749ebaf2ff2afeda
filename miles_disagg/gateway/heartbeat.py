"""What a replica says of itself in a heartbeat, checked field by field. Pure; what comes of it is `router`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import InvalidRequest, InvalidVersionRef
from miles_disagg.domain.versions import VersionRef, check_run_id
from miles_disagg.gateway.relays import RelayPoint

_REPLICA_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_URL = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]{1,255}/?")
_MAX_IN_FLIGHT = 1024


@dataclass(frozen=True)
class Fingerprint:
    """What a look at live weights found: the version's name, its digest as published, the digest of what is served."""

    version: str
    published: str
    live: str


@dataclass(frozen=True)
class Heartbeat:
    """See the module. `active`: requests there, by whomever; `held`: the version it is held at; `relay`: where it
    relays from."""

    replica_id: str
    url: str
    run_id: str | None
    applied: int | None
    latest: VersionRef | None
    state: str
    ready: bool
    reason: str
    active: int
    max_in_flight: int
    phase_timings: Mapping[str, Any]
    fingerprint: Fingerprint | None
    held: str | None
    relay: RelayPoint | None


def parse_heartbeat(message: Mapping[str, Any]) -> Heartbeat:
    """InvalidRequest names a field that is wrong."""
    replica_id, url = check_replica_id(message.get("replica_id")), message.get("url")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise InvalidRequest("url: must be http(s)://host[:port]")
    url = url.rstrip("/")
    for name, kind in (("state", str), ("reason", str), ("ready", bool), ("phase_timings", dict)):
        if not isinstance(message.get(name, kind()), kind):
            raise InvalidRequest(f"{name}: must be a {kind.__name__}")
    run_id, latest = message.get("run_id"), message.get("latest")
    try:
        run_id = None if run_id is None else check_run_id(run_id)
        latest = None if latest is None else VersionRef.parse(latest)
    except InvalidVersionRef as error:
        raise InvalidRequest(f"run_id, latest: {error}") from None
    limit = _number(message, "max_in_flight")
    if limit == 0:
        raise InvalidRequest("max_in_flight: must be at least 1")
    return Heartbeat(
        replica_id=replica_id,
        url=url,
        run_id=run_id,
        applied=_number(message, "applied"),
        latest=latest,
        state=message.get("state", "booting"),
        ready=message.get("ready", False),
        reason=message.get("reason", ""),
        active=_number(message, "active_requests") or 0,
        max_in_flight=limit or _MAX_IN_FLIGHT,
        phase_timings=message.get("phase_timings", {}),
        fingerprint=_fingerprint(message),
        held=_text(message, "held"),
        relay=_relay_point(message, replica_id, url),
    )


def check_replica_id(value: Any) -> str:
    """Return a legal replica id or raise InvalidRequest."""
    if not isinstance(value, str) or not _REPLICA_ID.fullmatch(value):
        raise InvalidRequest("replica_id: must be 1 to 200 of letters, digits, '.', '_', ':', '-'")
    return value


def _number(message: Mapping[str, Any], name: str) -> int | None:
    value = message.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (type(value) is not int or value < 0):
        raise InvalidRequest(f"{name}: must be a non-negative integer or null")
    return value


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be a string or null")
    return value


def _fingerprint(message: Mapping[str, Any]) -> Fingerprint | None:
    value = message.get("fingerprint")
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    version, published, live = (fields.get(name) for name in ("version", "published", "live"))
    if not (isinstance(version, str) and isinstance(published, str) and isinstance(live, str)):
        raise InvalidRequest("fingerprint: must be null or an object with the texts version, published and live")
    return Fingerprint(version, published, live)


def _relay_point(message: Mapping[str, Any], replica_id: str, url: str) -> RelayPoint | None:
    value = message.get("relay")
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    zone, host = fields.get("zone"), fields.get("host")
    if not (isinstance(zone, str) and isinstance(host, str) and max(len(zone), len(host)) <= 200):
        raise InvalidRequest("relay: must be null or an object with the texts zone and host")
    return RelayPoint(zone, host, replica_id, url)
