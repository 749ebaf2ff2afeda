"""Leases: what a reader is about to read, so that retention leaves it alone until a deadline.

A lease lives in `<run_id>/leases/<reader>.json`. What it protects is decided in `retention`.
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
            lease = Lease(run_id, json_field(body, "reader", str, info.key), target, have, expires)
        except (ObjectNotFound, CheckpointError):
            continue
        if lease.key == info.key:
            yield lease


def live_leases(objects: ObjectStore, run_id: str, now: float) -> Iterator[Lease]:
    """Leases that have not lapsed."""
    return (lease for lease in leases(objects, run_id) if lease.expires > now)


def drop_lapsed(objects: ObjectStore, run_id: str, now: float) -> None:
    """Remove leases whose readers are gone."""
    for lease in leases(objects, run_id):
        if lease.expires <= now:
            release_lease(objects, lease)
