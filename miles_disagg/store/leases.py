"""Leases: what a reader is about to read, so that retention leaves it alone until a deadline.

A lease lives in `<run_id>/leases/<reader>.json`. What it protects is decided in `retention`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from miles_disagg.domain.versions import check_run_id
from miles_disagg.store.base import ObjectNotFound, ObjectStore
from miles_disagg.store.claims import MAX_JSON_BYTES, json_field, load_json_object

DEFAULT_TTL = 300.0


@dataclass(frozen=True)
class Lease:
    """`reader` is building `target` of `run_id` from `have` (None: from nothing). expires: Unix time in seconds."""

    run_id: str
    reader: str
    target: int
    have: int | None
    expires: float

    @property
    def key(self) -> str:
        """Where the lease is stored."""
        return f"{check_run_id(self.run_id)}/leases/{check_run_id(self.reader)}.json"


def take_lease(
    objects: ObjectStore, run_id: str, reader: str, target: int, have: int | None, ttl: float = DEFAULT_TTL
) -> Lease:
    """Protect what `target` from `have` needs for `ttl` seconds; taking it again renews or moves it.

    Plan *after* taking it: a gc that started earlier may still remove files, and then a new plan finds a way round.
    """
    lease = Lease(run_id, reader, target, have, time.time() + ttl)
    objects.put(lease.key, json.dumps(asdict(lease)).encode())
    return lease


def release_lease(objects: ObjectStore, lease: Lease) -> None:
    """End a lease early."""
    objects.delete(lease.key)


def live_leases(objects: ObjectStore, run_id: str, now: float) -> Iterator[Lease]:
    """Leases that have not lapsed; lapsed ones are removed."""
    for info in objects.list(f"{check_run_id(run_id)}/leases"):
        try:
            body = load_json_object(objects.get(info.key, MAX_JSON_BYTES), info.key)
        except ObjectNotFound:
            continue
        have = None if body.get("have") is None else json_field(body, "have", int, info.key)
        target, expires = json_field(body, "target", int, info.key), json_field(body, "expires", float, info.key)
        if expires > now:
            yield Lease(run_id, json_field(body, "reader", str, info.key), target, have, expires)
        else:
            objects.delete(info.key)
