"""Leases: what a reader is about to read, so that retention leaves it alone for a while.

A lease lives in `<run_id>/leases/<reader>.json`. What it protects is decided in `retention`. Hosts' clocks may be
minutes apart, so a lease is as old as the store's own clock says: the time at which the store took it, against the time
at which it takes another object now (`base.store_time`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.domain.versions import check_run_id
from miles_disagg.store.base import ObjectNotFound, ObjectStore, StoreError
from miles_disagg.store.claims import MAX_JSON_BYTES, json_field, load_json_object

DEFAULT_TTL = 300.0
_TICK = 2.0  # seconds to which stores round the times of their objects


@dataclass(frozen=True)
class Lease:
    """`reader` is building `target` of `run_id` from `have` (None: from nothing), for `ttl` seconds.

    expires: by the reader's clock, for people to read. taken: by the store's, 0 until it is read back; Unix seconds.
    """

    run_id: str
    reader: str
    target: int
    have: int | None
    expires: float
    ttl: float = DEFAULT_TTL
    taken: float = 0.0

    def is_live(self, now: float) -> bool:
        """Whether it protects something at `now`, by the store's clock."""
        return now - self.taken <= self.ttl + _TICK

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
    lease = Lease(run_id, reader, target, have, time.time() + ttl, ttl)
    body = {name: value for name, value in asdict(lease).items() if name != "taken"}
    objects.put(lease.key, json.dumps(body).encode())
    return lease


def release_lease(objects: ObjectStore, lease: Lease) -> None:
    """End a lease early."""
    objects.delete(lease.key)


@contextmanager
def leased(
    objects: ObjectStore, run_id: str, reader: str, target: int, have: int | None, ttl: float = DEFAULT_TTL
) -> Iterator[None]:
    """`take_lease` for the body, however long it takes: renewed behind it, so it lapses only with this process."""
    lease, done = take_lease(objects, run_id, reader, target, have, ttl), threading.Event()

    def renew() -> None:
        while not done.wait(ttl / 3):
            with suppress(StoreError, OSError):  # two more tries before it lapses
                take_lease(objects, run_id, reader, target, have, ttl)

    thread = threading.Thread(target=renew, name=f"lease of {reader}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        release_lease(objects, lease)


def leases(objects: ObjectStore, run_id: str) -> Iterator[Lease]:
    """All leases, lapsed ones too. What is no lease is left alone: readers write theirs in one piece."""
    for info in objects.list(f"{check_run_id(run_id)}/leases"):
        try:
            body = load_json_object(objects.get(info.key, MAX_JSON_BYTES), info.key)
            have = None if body.get("have") is None else json_field(body, "have", int, info.key)
            target, expires = json_field(body, "target", int, info.key), json_field(body, "expires", float, info.key)
            ttl = json_field({"ttl": DEFAULT_TTL, **body}, "ttl", float, info.key)  # older readers write none
            reader = json_field(body, "reader", str, info.key)
            lease = Lease(run_id, reader, target, have, expires, ttl, info.modified)
        except (ObjectNotFound, CheckpointError):
            continue
        if lease.key == info.key:
            yield lease


def live_leases(objects: ObjectStore, run_id: str, now: float) -> list[Lease]:
    """Leases that have not lapsed at `now`, by the store's clock."""
    return [lease for lease in leases(objects, run_id) if lease.is_live(now)]


def drop_lapsed(objects: ObjectStore, run_id: str, now: float) -> None:
    """Remove leases whose readers are gone, at `now` by the store's clock."""
    for lease in leases(objects, run_id):
        if not lease.is_live(now):
            release_lease(objects, lease)
