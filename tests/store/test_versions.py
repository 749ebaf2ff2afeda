"""Claims, publication and the pointer: one wins, the other is told, and nothing half-written is a version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_disagg.domain.errors import (
    BaseMismatch,
    ChainBroken,
    CheckpointError,
    ChecksumMismatch,
    ClaimConflict,
    InvalidVersionRef,
    PointerConflict,
    PublicationFailed,
    VersionNotFound,
)
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import ObjectStore
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.versions import POINTER, VersionStore
from miles_disagg.weights.checkpoint import INDEX_FILE
from miles_disagg.weights.digest import digest

XOR = Description("xor", 0)


NewStore = Callable[[], ObjectStore]


def shard(index: int = 0, count: int = 1, tensor: str = "t") -> Receipt:
    return Receipt(f"model-{index:05d}-of-{count:05d}.safetensors", 7, digest(b"payload"), {tensor: "00"}, 10)


def publish(store: VersionStore, version: int, encoding: str | None = "xor", run: str = "a") -> VersionRef:
    ref = VersionRef(run, version)
    prefix = store.begin(ref)
    receipt = shard()
    store.objects.put(f"{prefix}/{receipt.file}", b"payload")
    store.commit(ref, Description(encoding, version - 1), [receipt])
    return ref


@pytest.fixture
def store(objects: ObjectStore) -> VersionStore:
    store = VersionStore(objects)
    store.claim("a", "digest-a")
    return store


@pytest.fixture
def local(tmp_path: Path) -> VersionStore:
    """For rules that have nothing to do with the kind of store."""
    store = VersionStore(LocalStore(tmp_path))
    store.claim("a", "digest-a")
    return store


def test_before_a_claim_there_is_no_version_and_after_it_the_base(objects: ObjectStore) -> None:
    store = VersionStore(objects)
    assert store.latest() is None
    claim = store.claim("a", "digest-a", boot_version=3)
    assert store.latest() == VersionRef("a", 3)
    assert store.claim_of("a") == claim


def test_a_published_version_is_what_a_new_reader_sees(store: VersionStore, new_store: NewStore) -> None:
    publish(store, 1)
    reader = VersionStore(new_store())
    assert reader.latest() == VersionRef("a", 1)
    index = reader.index(VersionRef("a", 1))
    assert index is not None
    assert (index.base_version, index.encoding, index.files) == (0, "xor", ("model-00000-of-00001.safetensors",))
    assert index.metadata["version"] == "000001"
    assert index.metadata["base_version"] == "000000"


def test_two_runs_cannot_share_a_publication_directory(store: VersionStore, new_store: NewStore) -> None:
    with pytest.raises(ClaimConflict, match="run a .*--update-weight-disk-dir"):
        VersionStore(new_store()).claim("b", "digest-b")


def test_a_run_id_that_is_taken_is_refused(store: VersionStore, new_store: NewStore) -> None:
    with pytest.raises(ClaimConflict, match="owner token"):
        VersionStore(new_store()).claim("a", "digest-a")


def test_a_released_directory_is_free_for_the_next_run_at_once(store: VersionStore, new_store: NewStore) -> None:
    publish(store, 1)
    store.release()
    other = VersionStore(new_store())
    other.claim("b", "digest-b")
    assert other.latest() == VersionRef("b", 0)
    publish(other, 1, run="b")
    with pytest.raises(ClaimConflict):
        store.begin(VersionRef("a", 2))


def test_a_lapsed_claim_does_not_block_another_run(objects: ObjectStore, new_store: NewStore) -> None:
    VersionStore(objects).claim("a", "digest-a", ttl=0.0)
    VersionStore(new_store()).claim("b", "digest-b")


def test_a_claim_whose_process_died_on_this_machine_does_not_block(tmp_path: Path) -> None:
    code = (
        "import sys; from miles_disagg.store.local import LocalStore;"
        "from miles_disagg.store.versions import VersionStore;"
        "VersionStore(LocalStore(sys.argv[1])).claim('a', 'digest-a', ttl=3600)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    VersionStore(LocalStore(tmp_path)).claim("b", "digest-b")


def test_a_resume_needs_the_owner_token_and_the_same_base(store: VersionStore, new_store: NewStore) -> None:
    publish(store, 1)
    owner = store.claim_of("a").owner
    with pytest.raises(BaseMismatch, match="digest-x"):
        VersionStore(new_store()).claim("a", "digest-x", owner=owner)
    resumed = VersionStore(new_store())
    assert resumed.claim("a", "digest-a", owner=owner).epoch == 1
    assert resumed.published == VersionRef("a", 1)
    publish(resumed, 2)


def test_a_resume_fences_off_the_process_it_replaces(store: VersionStore, new_store: NewStore) -> None:
    ref = VersionRef("a", 1)
    store.objects.put(f"{store.begin(ref)}/{shard().file}", b"payload")
    VersionStore(new_store()).claim("a", "digest-a", owner=store.claim_of("a").owner)
    with pytest.raises(PointerConflict):
        store.commit(ref, XOR, [shard()])
    with pytest.raises(ClaimConflict, match="resumed elsewhere"):
        store.renew()
    assert VersionStore(new_store()).latest() == VersionRef("a", 0)


def test_two_publishers_race_and_one_wins(store: VersionStore, new_store: NewStore) -> None:
    """The second publisher took the pointer's state before the first one moved it."""
    rival = VersionStore(new_store())
    rival._claim, rival._claim_token, rival._pointer = store._claim, store._claim_token, store._pointer
    publish(store, 1)
    with pytest.raises(PointerConflict) as caught:
        publish(rival, 1)
    assert (caught.value.expected, caught.value.actual) == (VersionRef("a", 0), VersionRef("a", 1))


@pytest.mark.parametrize("version", [0, 1, 3, 7])
def test_only_the_next_version_can_be_begun(local: VersionStore, version: int) -> None:
    publish(local, 1)
    with pytest.raises(PointerConflict, match="weight_v000002"):
        local.begin(VersionRef("a", version))


def test_a_missing_or_short_or_changed_shard_stops_the_commit(store: VersionStore) -> None:
    ref = VersionRef("a", 1)
    prefix = store.begin(ref)
    with pytest.raises(PublicationFailed, match="model-00000-of-00001"):
        store.commit(ref, XOR, [shard()])
    store.objects.put(f"{prefix}/{shard().file}", b"paylo")
    with pytest.raises(PublicationFailed, match="5 bytes"):
        store.commit(ref, XOR, [shard()])
    store.objects.put(f"{prefix}/{shard().file}", b"paXload")
    with pytest.raises(ChecksumMismatch, match="model-00000"):
        store.commit(ref, XOR, [shard()])
    assert store.latest() == VersionRef("a", 0)
    assert store.index(ref) is None


def test_rank_files_have_no_gaps_and_tensors_are_not_twice(local: VersionStore) -> None:
    ref = VersionRef("a", 1)
    local.begin(ref)
    with pytest.raises(PublicationFailed, match="model-00001-of-00002"):
        local.commit(ref, XOR, [shard(0, 2), shard(0, 2, "u")])
    with pytest.raises(PublicationFailed, match="'same'"):
        local.commit(ref, XOR, [shard(0, 2, "same"), shard(1, 2, "same")])


def test_a_version_in_which_nothing_changed_exists(local: VersionStore) -> None:
    ref = VersionRef("a", 1)
    local.begin(ref)
    index = local.commit(ref, XOR, [Receipt(None), Receipt(None)])
    assert index.weight_map == {}
    assert local.latest() == ref


def test_a_commit_may_be_repeated_and_a_wrong_base_is_refused(local: VersionStore) -> None:
    ref = VersionRef("a", 1)
    local.objects.put(f"{local.begin(ref)}/{shard().file}", b"payload")
    with pytest.raises((PublicationFailed, CheckpointError)):
        local.commit(ref, Description("xor", 5), [shard()])
    local.commit(ref, XOR, [shard()])
    token = local.objects.read(POINTER).token
    local.commit(ref, XOR, [shard()])
    assert local.objects.read(POINTER).token == token


def test_what_a_crashed_publication_left_is_cleared_by_the_next(store: VersionStore) -> None:
    ref = VersionRef("a", 1)
    store.objects.put(f"{ref}/model-00000-of-00009.safetensors", b"old")
    store.objects.put(f"{ref}/{INDEX_FILE}", b"{}")
    store.begin(ref)
    assert list(store.objects.list(str(ref))) == []


def test_a_published_version_cannot_be_discarded(local: VersionStore) -> None:
    ref = publish(local, 1)
    with pytest.raises(PublicationFailed, match="retention"):
        local.discard(ref)


def test_wait_newer_returns_what_differs_or_nothing_in_time(store: VersionStore) -> None:
    base = VersionRef("a", 0)
    assert store.wait_newer(None, 0) == base
    assert store.wait_newer(base, 0.05) is None
    publish(store, 1)
    assert store.wait_newer(base, 5) == VersionRef("a", 1)


def test_a_plan_starts_at_what_is_held_else_at_an_anchor_else_at_the_base(local: VersionStore) -> None:
    for version in range(1, 4):
        publish(local, version)
    publish(local, 4, encoding=None)
    publish(local, 5)

    def shape(target: int, have: VersionRef | None) -> tuple[str, int, list[int]]:
        plan = local.plan(VersionRef("a", target), have)
        return plan.start, plan.start_version, [d.ref.version for d in plan.deltas]

    assert shape(3, None) == ("base", 0, [1, 2, 3])
    assert shape(3, VersionRef("a", 1)) == ("held", 1, [2, 3])
    assert shape(3, VersionRef("other", 1)) == ("base", 0, [1, 2, 3])
    assert shape(5, None) == ("anchor", 4, [5])
    assert shape(5, VersionRef("a", 2)) == ("anchor", 4, [5])
    assert shape(5, VersionRef("a", 4)) == ("held", 4, [5])
    assert shape(2, VersionRef("a", 5)) == ("base", 0, [1, 2])
    assert shape(0, None) == ("base", 0, [])


def test_a_plan_reads_index_files_and_nothing_else(local: VersionStore, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watched(LocalStore):
        def _open(self, key: str):
            seen.append(key)
            return super()._open(key)

    for version, encoding in enumerate(["xor", None, "xor", "xor"], 1):
        publish(local, version, encoding)
    plan = VersionStore(Watched(tmp_path)).plan(VersionRef("a", 4), VersionRef("a", 1))
    assert (plan.start, [d.ref.version for d in plan.deltas]) == ("anchor", [3, 4])
    assert set(seen) == {"a/run.json", *(f"a/weight_v00000{v}/{INDEX_FILE}" for v in (2, 3, 4))}


def test_a_broken_chain_names_the_missing_version(local: VersionStore) -> None:
    for version in range(1, 4):
        publish(local, version)
    local.objects.delete(f"a/weight_v000002/{INDEX_FILE}")
    with pytest.raises(ChainBroken, match="cannot build a/weight_v000003: a/weight_v000002 is missing"):
        local.plan(VersionRef("a", 3))
    with pytest.raises(VersionNotFound, match="weight_v000002"):
        local.plan(VersionRef("a", 2))
    with pytest.raises(VersionNotFound, match="weight_v000009"):
        local.plan(VersionRef("a", 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "000009"}, "says it is version 9"),
        ({"base_version": "000001"}, "base_version"),
        ({"base_version": "-1"}, "base_version"),
        ({"base_version": 0}, "base_version"),
        ({"delta_encoding": "pickle"}, "delta_encoding"),
        ({"compression_format": "gzip"}, "compression_format"),
    ],
)
def test_an_index_that_lies_is_refused_by_field(local: VersionStore, change: dict, message: str) -> None:
    ref = publish(local, 1)
    body = json.loads(local.objects.get(f"{ref}/{INDEX_FILE}"))
    body["metadata"].update(change)
    local.objects.put(f"{ref}/{INDEX_FILE}", json.dumps(body).encode())
    with pytest.raises(CheckpointError, match=message):
        local.index(ref)


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "x.bin", "..", ""])
def test_an_index_cannot_name_a_path(local: VersionStore, file: str) -> None:
    ref = publish(local, 1)
    body = json.loads(local.objects.get(f"{ref}/{INDEX_FILE}"))
    body["weight_map"] = {"t": file}
    local.objects.put(f"{ref}/{INDEX_FILE}", json.dumps(body).encode())
    with pytest.raises(CheckpointError, match="plain"):
        local.index(ref)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"run_id": "../x", "version": 1, "nonce": ""}', b'{"run_id": "a", "version": -1}',
             b'{"run_id": "a", "version": true, "nonce": "n"}', b'{"run_id": "a", "version": "1", "nonce": "n"}'],
)  # fmt: skip
def test_a_pointer_that_cannot_be_read_is_an_error_never_the_base(local: VersionStore, body: bytes) -> None:
    local.objects.put(POINTER, body)
    with pytest.raises((CheckpointError, InvalidVersionRef)):
        local.latest()


def test_stray_files_and_directories_are_not_versions(local: VersionStore) -> None:
    publish(local, 1)
    for key in (
        "a/weight_v1/x",
        "a/notes.txt",
        f"a/tmp/{INDEX_FILE}",
        "a/weight_v000009/model-00000-of-00001.safetensors",
    ):
        local.objects.put(key, b"x")
    assert local.versions("a") == [1]
