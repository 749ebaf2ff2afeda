"""What every ObjectStore must do, run on a directory, on moto and on SeaweedFS."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.store.base import CasConflict, ObjectNotFound, ObjectStore, StoreError, open_store


def test_bytes_come_back_whole_in_ranges_and_by_size(objects: ObjectStore) -> None:
    objects.put("a/b", b"0123456789")
    assert objects.get("a/b") == b"0123456789"
    assert objects.get_range("a/b", 2, 5) == b"234"
    assert objects.size("a/b") == 10
    objects.put("a/b", b"")
    assert objects.get("a/b") == b""
    assert objects.size("a/b") == 0


def test_an_absent_object_is_named(objects: ObjectStore) -> None:
    for call in (objects.get, objects.read, objects.size):
        with pytest.raises(ObjectNotFound, match="nope/x"):
            call("nope/x")
    objects.delete("nope/x")


def test_a_range_beyond_the_end_is_an_error(objects: ObjectStore) -> None:
    objects.put("k", b"0123")
    with pytest.raises(StoreError):
        objects.get_range("k", 2, 9)


def test_an_oversized_object_is_refused_before_it_is_read(objects: ObjectStore) -> None:
    objects.put("k", bytes(100))
    with pytest.raises(CheckpointError, match="99"):
        objects.get("k", max_bytes=99)


def test_a_large_file_goes_up_and_comes_down(objects: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 37 + b"tail"
    (tmp_path / "up").write_bytes(data)
    objects.put("big", tmp_path / "up")
    assert objects.download("big", tmp_path / "down") == len(data)
    assert (tmp_path / "down").read_bytes() == data
    assert objects.get_range("big", len(data) - 4, len(data)) == b"tail"


def test_an_empty_file_comes_down(objects: ObjectStore, tmp_path: Path) -> None:
    objects.put("empty", b"")
    assert objects.download("empty", tmp_path / "down") == 0
    assert (tmp_path / "down").read_bytes() == b""


def test_listing_is_by_whole_segments_and_sorted(objects: ObjectStore) -> None:
    for key in ("run/b/1", "run/a", "run/b/0", "runner/x"):
        objects.put(key, key.encode())
    assert [i.key for i in objects.list("run")] == ["run/a", "run/b/0", "run/b/1"]
    assert [i.key for i in objects.list("")] == ["run/a", "run/b/0", "run/b/1", "runner/x"]
    assert [i.size for i in objects.list("runner")] == [8]
    assert list(objects.list("none")) == []
    objects.delete("run/b/0")
    assert [i.key for i in objects.list("run/b")] == ["run/b/1"]


@pytest.mark.parametrize(
    "key", ["", "/abs", "a/../b", "../x", "a//b", "a/", "a\\b", "a\0b", ".hidden", "a/.b", "x" * 1025]
)
def test_illegal_keys_are_refused_by_name(objects: ObjectStore, key: str) -> None:
    for call in (objects.get, objects.delete, lambda k: objects.put(k, b""), lambda k: objects.put_if_absent(k, b"")):
        with pytest.raises(CheckpointError, match="legal object key"):
            call(key)


def test_names_with_unicode_and_spaces_are_legal(objects: ObjectStore) -> None:
    key = "run/模型 % 1+1=2?&#.json"
    objects.put(key, b"x")
    assert objects.get(key) == b"x"
    assert [i.key for i in objects.list("run")] == [key]


def test_put_if_absent_has_one_winner_and_is_idempotent(objects: ObjectStore) -> None:
    objects.put_if_absent("claim", b"mine")
    objects.put_if_absent("claim", b"mine")
    with pytest.raises(CasConflict):
        objects.put_if_absent("claim", b"theirs")
    assert objects.get("claim") == b"mine"


def test_compare_and_swap_moves_only_from_the_expected_state(objects: ObjectStore) -> None:
    first = objects.compare_and_swap("p", None, b"1")
    assert objects.read("p").token == first
    second = objects.compare_and_swap("p", first, b"2")
    for stale in (None, first):
        with pytest.raises(CasConflict):
            objects.compare_and_swap("p", stale, b"3")
    assert objects.read("p").data == b"2"
    assert objects.read("p").token == second
    with pytest.raises(CasConflict):
        objects.compare_and_swap("absent", second, b"x")


def test_a_race_of_twelve_has_exactly_one_winner(new_store: Callable[[], ObjectStore]) -> None:
    token = new_store().compare_and_swap("p", None, b"start")
    stores = [new_store() for _ in range(12)]

    def race(i: int) -> bool:
        try:
            stores[i].compare_and_swap("p", token, f"winner {i}".encode())
            return True
        except CasConflict:
            return False

    with ThreadPoolExecutor(12) as pool:
        won = list(pool.map(race, range(12)))
    assert sum(won) == 1
    assert new_store().get("p") == f"winner {won.index(True)}".encode()


def test_counting_by_compare_and_swap_loses_no_increment(new_store: Callable[[], ObjectStore]) -> None:
    """Each body carries a nonce, as the port demands: equal bytes would make a lost race look like one's own write."""
    new_store().put("n", b"0 start")

    def add(_: int) -> None:
        store = new_store()
        done = 0
        while done < 5:
            seen = store.read("n")
            try:
                count = int(seen.data.split()[0]) + 1
                store.compare_and_swap("n", seen.token, f"{count} {uuid.uuid4().hex}".encode())
                done += 1
            except CasConflict:
                continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert new_store().get("n").split()[0] == b"20"


def test_an_unknown_scheme_names_the_flag() -> None:
    with pytest.raises(StoreError, match="--update-weight-disk-dir"):
        open_store("gs://bucket/x")
