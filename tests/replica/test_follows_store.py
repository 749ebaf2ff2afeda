"""Replicas on a real store with real staging: what is loaded is what was published, under load and faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_disagg.domain.errors import EngineUnavailable, WeightVersionGone, WeightVersionNotReady
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.reconciler import Reconciler, ReconcilerSettings
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource
from tests.fakes.engine import FakeEngine
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base
from tests.fakes.replica import at_least, make_replica, ref, request

FAST = ReconcilerSettings(poll=0.2, engine_check=0.05, backoff_first=0.01, backoff_cap=0.05)


class LoadingEngine(FakeEngine):
    """Notes what every checkpoint held when it was loaded, by stamp."""

    def __init__(self) -> None:
        super().__init__(str(ref(0)), token_delay=0.001)
        self.loaded: dict[str, list[dict[str, bytes]]] = {}

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        held = await asyncio.to_thread(on_disk, Path(path))
        await super().update_from_disk(path, version, flush_cache=flush_cache)
        self.loaded.setdefault(version, []).append(held)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(2))
async def test_what_is_loaded_under_a_stamp_is_what_was_published_under_it(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tensors = tiny_tensors()
    write_base(tmp_path / "base", tensors)
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    engine = LoadingEngine()
    replica = make_replica(engine, mode="in_place")
    await replica.attach("run")
    store = VersionStore(open_store(str(tmp_path / "store")))
    stager = DiskStager(store, tmp_path / "replica", tmp_path / "base", reader="replica-0", workers=1)
    loop = asyncio.create_task(Reconciler(replica, PollingSource(store), stager, settings=FAST).run())
    published = {str(ref(0)): raw(tensors)}
    newest, answered = 0, 0

    async def client(name: str) -> None:
        nonlocal answered
        for i in range(1000):
            if newest == 6 and replica.applied == ref(6):
                return
            wanted = max(0, newest - rng.randint(0, 2))
            try:
                answer = await replica.sessions.result(
                    request(f"{name}-{i}", n=rng.randint(1, 30), weight_version=at_least(wanted))
                )
            except (WeightVersionNotReady, WeightVersionGone, EngineUnavailable):
                await asyncio.sleep(0.02)
                continue
            assert min(v for _, v in answer["meta_info"]["weight_version_spans"]) >= wanted
            answered += 1

    clients = [asyncio.create_task(client(f"c{i}")) for i in range(4)]
    for version in range(1, 7):
        tensors = step(tensors, version)
        encoding = rng.choice(["xor", "overwrite", None])
        result = await trainer.publish(tensors, encoding)
        published[str(result.ref)] = raw(tensors)
        newest = version
        engine.fail_updates = rng.choice([0, 0, 2])
        if version == 3:
            await until(lambda: replica.applied is not None and replica.applied >= ref(1))
            engine.kill()
            await until(lambda: replica.state == "fenced")
            engine.revive(str(ref(0)))
        await asyncio.sleep(rng.random() * 0.2)
    await until(lambda: replica.applied == ref(6))
    await asyncio.gather(*clients)
    assert answered > 10
    for stamp, loads in engine.loaded.items():
        assert all(held == published[stamp] for held in loads), stamp
    assert VersionRef.parse(engine.version) == ref(6)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    stager.close()
    await replica.close()
