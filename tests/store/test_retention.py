"""What collection removes, and what it must never remove."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_disagg.domain.errors import CheckpointError, InvalidVersionRef
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import ObjectStore, store_time
from miles_disagg.store.leases import DEFAULT_TTL, leased, leases, live_leases, release_lease, take_lease
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.retention import Collected, collect
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import INDEX_FILE
from miles_disagg.weights.digest import digest

FILE = "model-00000-of-00001.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    store = VersionStore(LocalStore(tmp_path))
    store.claim("run", "digest")
    return store


def publish(store: VersionStore, kinds: str) -> None:
    """`d`: a delta, `F`: a full version."""
    for kind in kinds:
        ref = store.published.next()
        store.objects.put(f"{store.begin(ref)}/{FILE}", b"x")
        receipt = Receipt(FILE, 1, digest(b"x"), {"t": "0"})
        store.commit(ref, Description("xor" if kind == "d" else None, ref.version - 1), [receipt])


@pytest.mark.parametrize(
    ("kinds", "keep", "removed"),
    [
        ("dddd", 1, ()),  # everything is needed to reach version 4 from the base
        ("ddFdd", 1, (1, 2)),
        ("ddFdd", 2, (1, 2)),
        ("ddFdd", 4, ()),  # version 2 is to be buildable, so 1 and 2 stay
        ("ddFdF", 1, (1, 2, 3, 4)),
        ("ddFdF", 2, (1, 2)),
        ("FFFF", 1, (1, 2, 3)),
        ("FFFF", 3, (1,)),
        ("", 1, ()),
    ],
)
def test_the_newest_versions_stay_buildable_and_the_rest_goes(
    store: VersionStore, kinds: str, keep: int, removed: tuple[int, ...]
) -> None:
    publish(store, kinds)
    assert collect(store, "run", keep=keep).versions == removed
    assert collect(store, "run", keep=keep) == Collected()
    for version in range(max(0, len(kinds) - keep + 1), len(kinds) + 1):
        store.plan(VersionRef("run", version))


def test_full_versions_that_everybody_loaded_go_but_never_the_newest(store: VersionStore) -> None:
    publish(store, "FFFF")
    assert collect(store, "run", keep=9, acknowledged=2).versions == (1, 2)
    assert collect(store, "run", keep=9, acknowledged=4, keep_files=True).versions == ()
    assert collect(store, "run", keep=9, acknowledged=4).versions == (3,)
    assert store.versions("run") == [4]


def test_an_anchor_that_deltas_build_on_stays_although_everybody_loaded_it(store: VersionStore) -> None:
    publish(store, "Fdd")
    assert collect(store, "run", keep=1, acknowledged=3).versions == ()


def test_a_lease_protects_until_its_deadline_or_release(store: VersionStore) -> None:
    publish(store, "dFdF")
    lease = take_lease(store.objects, "run", "reader", target=3, have=None, ttl=60)
    assert collect(store, "run", keep=1).versions == (1,)
    release_lease(store.objects, lease)
    take_lease(store.objects, "run", "reader", target=3, have=2, ttl=60)
    assert collect(store, "run", keep=1).versions == (2,)
    assert collect(store, "run", keep=1, now=store_time(store.objects) + 63).versions == (3,)
    assert list(leases(store.objects, "run")) == [], "a lapsed one is removed"


def test_a_slow_reader_keeps_its_lease_for_as_long_as_it_reads(store: VersionStore) -> None:
    publish(store, "dFdF")
    with leased(store.objects, "run", "slow", target=3, have=None, ttl=0.3):
        time.sleep(0.5)
        lease = next(iter(leases(store.objects, "run")))
        assert (lease.target, lease.is_live(lease.taken + 0.3)) == (3, True)
        assert time.time() - lease.taken < 0.5, "renewed"
        assert collect(store, "run", keep=1).versions == (1,)
    assert list(leases(store.objects, "run")) == []
    assert collect(store, "run", keep=1).versions == (2, 3)


@pytest.mark.parametrize("skew", [-600.0, 600.0])
@pytest.mark.parametrize("whose", ["reader", "collector"])
def test_a_clock_that_is_ten_minutes_off_neither_ends_a_lease_nor_keeps_one(
    new_store: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch, skew: float, whose: str
) -> None:
    store, clock = VersionStore(new_store()), time.time
    store.claim("run", "digest")
    publish(store, "FFFF")
    with monkeypatch.context() as off:
        if whose == "reader":
            off.setattr(time, "time", lambda: clock() + skew)
        take_lease(store.objects, "run", "reader", target=2, have=None, ttl=60)
    if whose == "collector":
        monkeypatch.setattr(time, "time", lambda: clock() + skew)
    assert collect(store, "run", keep=1).versions == (1, 3)
    assert [lease.reader for lease in live_leases(store.objects, "run", store_time(store.objects) + 50)] == ["reader"]
    assert collect(store, "run", keep=1, now=store_time(store.objects) + 70).versions == (2,)


def test_a_lease_written_by_an_older_reader_counts_for_the_usual_time(store: VersionStore, tmp_path: Path) -> None:
    publish(store, "FF")
    body = {"run_id": "run", "reader": "old", "target": 1, "have": None, "expires": 0.0}
    store.objects.put("run/leases/old.json", json.dumps(body).encode())
    assert collect(store, "run", keep=1).versions == ()
    aged = time.time() - DEFAULT_TTL - 10
    os.utime(tmp_path / "run" / "leases" / "old.json", (aged, aged))
    assert collect(store, "run", keep=1).versions == (1,)
    assert not (tmp_path / "run" / "leases").exists()


def test_what_is_no_lease_protects_nothing_and_is_left_alone(store: VersionStore, tmp_path: Path) -> None:
    publish(store, "FF")
    store.objects.put("run/leases/notes.txt", b"not JSON")
    store.objects.put("run/leases/other.json", b'{"reader": "somebody", "target": 1, "have": null, "expires": 1e18}')
    assert collect(store, "run", keep=1).versions == (1,)
    assert sorted(path.name for path in (tmp_path / "run" / "leases").iterdir()) == ["notes.txt", "other.json"]


@pytest.mark.parametrize("reader", ["../x", "a/b", "", "x" * 65])
def test_a_reader_cannot_name_a_path(store: VersionStore, reader: str) -> None:
    with pytest.raises((InvalidVersionRef, CheckpointError)):
        take_lease(store.objects, "run", reader, target=1, have=None)


def test_an_open_publication_is_left_alone(store: VersionStore) -> None:
    publish(store, "F")
    store.objects.put(f"{store.begin(VersionRef('run', 2))}/{FILE}", b"x")
    assert collect(store, "run", keep=1, stale_after=0) == Collected()
    assert store.objects.size(f"run/weight_v000002/{FILE}") == 1


def test_a_removal_that_crashed_half_way_is_finished(store: VersionStore) -> None:
    publish(store, "FFF")
    store.objects.delete(f"run/weight_v000001/{INDEX_FILE}")
    assert collect(store, "run", keep=2).leftovers == 1
    assert list(store.objects.list("run/weight_v000001")) == []


def test_unfinished_writes_go_when_they_are_old(store: VersionStore, tmp_path: Path) -> None:
    (tmp_path / ".store" / "tmp" / "1-dead").write_bytes(b"x")
    (tmp_path / ".store" / "tmp" / "publish-dead").mkdir()
    assert collect(store, "run", keep=1, stale_after=3600).unfinished == 0
    assert collect(store, "run", keep=1, stale_after=0).unfinished == 2
    assert list((tmp_path / ".store" / "tmp").iterdir()) == []


def test_another_runs_versions_are_not_touched(store: VersionStore) -> None:
    publish(store, "FF")
    store.release()
    other = VersionStore(store.objects)
    other.claim("other", "digest")
    assert collect(other, "run", keep=1).versions == ()
    assert store.versions("run") == [1, 2]
