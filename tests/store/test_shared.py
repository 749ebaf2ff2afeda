"""Several replicas on a host fetch a version once, and never another run's bytes."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path

import pytest

from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.shared import SharedFetch, shared_fetch
from miles_disagg.store.versions import VersionStore
from tests.fakes.fault_proxy import fault_proxy
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base
from tests.store.conftest import BUCKET, CREDENTIALS


async def test_replicas_on_one_host_fetch_a_version_once(
    tmp_path: Path, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": moto_endpoint}.items():
        monkeypatch.setenv(name, value)
    url, tensors = f"s3://{BUCKET}/{uuid.uuid4().hex}", tiny_tensors(size=16)
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(open_store(url), tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    with fault_proxy(moto_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        stagers = [
            DiskStager(
                VersionStore(shared_fetch(open_store(url), tmp_path / "shared")), tmp_path / f"replica-{i}",
                tmp_path / "base", reader=f"r{i}", workers=1,
            )
            for i in range(3)
        ]  # fmt: skip
        for version in (1, 2, 3):
            tensors = step(tensors, version)
            ref = (await trainer.publish(tensors, None if version == 2 else "xor")).ref
            done = await asyncio.gather(*(stager.materialize(ref) for stager in stagers))
            assert all(on_disk(materialized.path) == raw(tensors) for materialized in done)
        payloads = [path for method, path in proxy.requests if method == "GET" and path.endswith(".safetensors")]
        assert len(payloads) == len(set(payloads)) >= 3
    for stager in stagers:
        stager.close()


def test_files_of_an_emptied_store_are_not_taken_for_those_of_its_next_run_of_that_name(tmp_path: Path) -> None:
    key = "run/weight_v000001/model-00000-of-00001.safetensors"
    for number, body in enumerate((b"one", b"two")):
        store = VersionStore(open_store(str(tmp_path / "store")))
        store.claim("run", "xxh3-128:0")
        store.objects.put(key, body)
        shared = SharedFetch(store.objects, tmp_path / "shared")
        assert shared.download(key, tmp_path / f"out-{number}") == 3
        assert (tmp_path / f"out-{number}").read_bytes() == body
        store.release()
        for entry in sorted((tmp_path / "store").rglob("*"), reverse=True):
            entry.unlink() if not entry.is_dir() else entry.rmdir()
        time.sleep(0.01)


def test_files_that_nobody_asks_for_any_more_are_removed(tmp_path: Path) -> None:
    store = VersionStore(open_store(str(tmp_path / "store")))
    store.claim("run", "xxh3-128:0")
    shared = SharedFetch(store.objects, tmp_path / "shared", keep_seconds=60)
    for name in ("a", "b"):
        store.objects.put(f"run/weight_v000001/{name}", name.encode())
    shared.download("run/weight_v000001/a", tmp_path / "a")
    (old,) = (p for p in (tmp_path / "shared").iterdir() if p.suffix != ".lock")
    os.utime(old, (0, 0))
    shared.download("run/weight_v000001/b", tmp_path / "b")
    assert not old.exists()
