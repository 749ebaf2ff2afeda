"""S3 behind a network that fails: what passes by itself is retried, and no failure is taken for success."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles_disagg.domain.errors import CheckpointError, ChecksumMismatch
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import CasConflict, StoreError
from miles_disagg.store.s3 import S3Store
from miles_disagg.store.versions import POINTER, VersionStore
from tests.fakes.fault_proxy import PART, FaultProxy, fault_proxy
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base

BUCKET = "miles"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any-secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def proxy(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with fault_proxy(moto_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def objects(proxy: FaultProxy) -> S3Store:
    return S3Store(f"s3://{BUCKET}/{uuid.uuid4().hex}", attempts=4, timeout=1.0)


@pytest.mark.parametrize("fault", ["500", "truncate", "lose-answer"])
def test_reads_survive_passing_faults(objects: S3Store, proxy: FaultProxy, tmp_path: Path, fault: str) -> None:
    data = os.urandom(100_000)
    objects.put("k", data)
    for read in (lambda: objects.get("k"), lambda: objects.read("k").data):
        proxy.first(2, fault, "GET")
        assert read() == data
    proxy.first(2, fault, "GET")
    objects.download("k", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


@pytest.mark.parametrize("fault", ["500", "lose-answer", "twice", "delay"])
def test_writes_survive_passing_faults(objects: S3Store, proxy: FaultProxy, fault: str) -> None:
    proxy.first(2, fault, "PUT")
    objects.put("k", b"data")
    assert objects.get("k") == b"data"


@pytest.mark.parametrize("fault", ["500", "lose-answer", "twice", "delay"])
def test_a_pointer_whose_answer_was_lost_is_not_reported_as_a_lost_race(
    objects: S3Store, proxy: FaultProxy, fault: str
) -> None:
    token = objects.compare_and_swap("p", None, b"1 nonce-a")
    proxy.first(1, fault, "PUT")
    assert objects.compare_and_swap("p", token, b"2 nonce-b") == objects.read("p").token
    assert objects.get("p") == b"2 nonce-b"
    proxy.first(1, fault, "PUT")
    with pytest.raises(CasConflict):
        objects.compare_and_swap("p", token, b"3 nonce-c")
    assert objects.get("p") == b"2 nonce-b"


def test_a_refusal_is_not_retried_and_says_what_to_check(objects: S3Store, proxy: FaultProxy) -> None:
    for method, call in (
        ("GET", lambda: objects.get("k")),
        ("PUT", lambda: objects.put("k", b"x")),
        ("PUT", lambda: objects.compare_and_swap("k", None, b"x")),
    ):
        proxy.first(100, "403", method)
        proxy.requests.clear()
        with pytest.raises(StoreError, match="credentials"):
            call()
        assert len(proxy.requests) == 1


def test_a_server_that_stays_broken_ends_in_an_error_not_in_a_hang(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.faults = lambda method, path: "500"
    for call in (objects.get, objects.size, lambda k: objects.compare_and_swap(k, "token", b"x")):
        with pytest.raises(StoreError):
            call("k")


def test_parts_that_overtake_one_another_end_up_where_they_belong(
    objects: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    (tmp_path / "up").write_bytes(data := os.urandom(2 * PART + 1000))
    patient = S3Store(objects.url, attempts=2, timeout=30.0)
    proxy.first(2, "overtaken", "PUT")
    patient.put("k", tmp_path / "up")
    assert sum("partNumber" in path for _, path in proxy.requests) == 3
    assert proxy.answered != sorted(proxy.answered)
    proxy.requests, proxy.answered = [], []
    proxy.first(2, "overtaken", "GET")
    patient.download("k", tmp_path / "down")
    assert [method for method, _ in proxy.requests] == ["HEAD", "GET", "GET", "GET"]
    assert proxy.answered != sorted(proxy.answered)
    assert (tmp_path / "down").read_bytes() == data


async def test_parts_in_another_order_never_reach_the_checkpoint(
    objects: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    patient = S3Store(objects.url, attempts=2, timeout=30.0)
    base = {"big": torch.randn(3 * PART // 4)}  # with its header, three whole parts and a bit
    write_base(tmp_path / "base", base)
    trainer = FakeTrainer(patient, tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    ref = (await trainer.publish({"big": base["big"] + 1}, None)).ref
    stager = DiskStager(VersionStore(patient), tmp_path / "local", tmp_path / "base", reader="r", workers=1)
    held = await stager.materialize(VersionRef("run", 0))
    proxy.faults = lambda method, path: "other-part" if method == "GET" else None
    with pytest.raises(ChecksumMismatch, match="big"):
        await stager.materialize(ref)
    assert on_disk(held.path) == raw(base)
    proxy.faults = lambda method, path: None
    assert on_disk((await stager.materialize(ref)).path) == raw({"big": base["big"] + 1})


def test_a_slow_loris_is_cut_off(objects: S3Store, proxy: FaultProxy) -> None:
    objects.put("k", bytes(1000))
    proxy.first(1, "slow", "GET")
    assert objects.get("k") == bytes(1000)
    proxy.faults = lambda method, path: "slow"
    with pytest.raises(StoreError):
        S3Store(objects.url, attempts=2, timeout=0.5).get("k")


def test_a_claim_that_could_not_be_finished_is_not_in_the_way_of_the_next(objects: S3Store, proxy: FaultProxy) -> None:
    proxy.faults = lambda method, path: "500" if method == "PUT" and path.endswith(POINTER) else None
    with pytest.raises(StoreError):
        VersionStore(objects).claim("run", "digest")
    proxy.faults = lambda method, path: None
    VersionStore(objects).claim("run", "digest")


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_published(
    objects: S3Store, proxy: FaultProxy
) -> None:
    proxy.faults = lambda method, path: "unconditional"
    with pytest.raises(StoreError, match="conditional writes"):
        VersionStore(objects).claim("run", "digest")
    assert list(objects.list("")) == []


async def test_a_publication_over_a_failing_network_is_whole_or_absent(
    objects: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    tensors = tiny_tensors(size=32)
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(objects, tmp_path / "base", "run")
    await trainer.claim()
    stager = DiskStager(VersionStore(objects), tmp_path / "local", tmp_path / "base", reader="r", workers=1)
    counter = iter(range(10_000))
    faults = ["500", None, None, None, "lose-answer", None, None, None, None, "truncate", None, None, None]
    proxy.faults = lambda method, path: faults[next(counter) % len(faults)]
    for version in range(1, 3):
        tensors = step(tensors, version)
        published = await trainer.publish(tensors)
        assert on_disk((await stager.materialize(published.ref)).path) == raw(tensors)
    proxy.faults = lambda method, path: "500" if method == "PUT" and path.endswith(POINTER) else None
    with pytest.raises(StoreError):
        await trainer.publish(step(tensors, 9))
    proxy.faults = lambda method, path: None
    assert VersionStore(objects).latest() == VersionRef("run", 2)
    assert (await trainer.publish(step(tensors, 10))).ref == VersionRef("run", 3)


async def test_bits_flipped_on_the_way_never_reach_the_checkpoint(
    objects: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    base = tiny_tensors(size=32)
    write_base(tmp_path / "base", base)
    trainer = FakeTrainer(objects, tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    tensors = step(base, 1, density=0.5)
    ref = (await trainer.publish(tensors)).ref
    stager = DiskStager(VersionStore(objects), tmp_path / "local", tmp_path / "base", reader="r", workers=1)
    held = await stager.materialize(VersionRef("run", 0))
    proxy.faults = lambda method, path: "flip" if method == "GET" and path.endswith(".safetensors") else None
    with pytest.raises(CheckpointError, match="model-00000"):
        await stager.materialize(ref)
    assert on_disk(held.path) == raw(base)
    proxy.first(1, "flip", "GET")
    assert on_disk((await stager.materialize(ref)).path) == raw(tensors)
