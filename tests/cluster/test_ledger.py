"""The version store's process killed under its driver: nothing that was published or begun is lost."""

import asyncio
import os
import signal
import time
import uuid

import psutil
import pytest

from miles_disagg.cluster.ledger import KeptLedger
from miles_disagg.domain.errors import ClaimConflict
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.actor import RemoteLedger, VersionStoreActor
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.versions import VersionStore
from tests.fakes import hooks


def kill_store() -> None:
    """SIGKILL the one process of a version store below this one."""
    below = psutil.Process().children(recursive=True)
    (process,) = [p for p in below if p.is_running() and "ray::VersionStoreActor" in " ".join(p.cmdline())]
    os.kill(process.pid, signal.SIGKILL)


def publication(version: int) -> tuple:
    return Description("xor", version - 1), [Receipt(None)]


@pytest.fixture
def store(local_ray, tmp_path, request):
    import ray

    url = str(tmp_path) if getattr(request, "param", True) else None
    actor = VersionStoreActor.options(max_restarts=3).remote("run", url)
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize("store", [True, False], indirect=True, ids=["directory", "broadcast"])
def test_a_killed_store_goes_on_where_it_was_in_the_middle_of_a_publication(store, tmp_path):
    said: list[str] = []
    ledger, watcher = KeptLedger(store, said.append, timeout=60.0), RemoteLedger(store)

    async def served() -> dict[str, int | None]:
        return {"engine-0": 1, "engine-1": None, "stranger": 1}

    async def publish(version: int, kill: bool) -> VersionRef:
        ref = await ledger.begin()
        assert ref == VersionRef("run", version)
        if kill:
            kill_store()
        await ledger.commit(ref, *publication(version))
        return ref

    async def go() -> None:
        await ledger.claim("digest")
        ledger.served = served
        for name in ("engine-0", "engine-1"):
            await ledger.register(name)
        first = await publish(1, kill=False)
        await watcher.record_activation("engine-0", first, time.time())
        waiting = asyncio.create_task(watcher.wait_newer(first, 60.0))
        await asyncio.sleep(0.2)
        second = await publish(2, kill=True)
        assert await asyncio.wait_for(waiting, 60) == second
        assert await ledger.replicas() == {"engine-0": first, "engine-1": None}, "nothing else may be collected"
        for name in ("engine-0", "engine-1"):
            await watcher.record_activation(name, second, time.time())
        assert await ledger.wait_converged(first, 20.0) is not None, "a version from before the death converges too"

        kill_store()  # when nobody writes, the driver's look-out brings it back
        keeping = asyncio.create_task(ledger.keep())
        assert await asyncio.wait_for(watcher.latest(), 60) == second
        keeping.cancel()
        assert await publish(3, kill=False) == VersionRef("run", 3)
        await ledger.release()

    asyncio.run(asyncio.wait_for(go(), 150))
    assert ledger.deaths == 2
    assert sum("claims the run again at run/weight_v00000" in line for line in said) == 2
    if any(tmp_path.iterdir()):
        published = VersionStore(LocalStore(tmp_path))
        assert published.versions("run") == [1, 2, 3]
        assert not published.claim_of("run").is_live(time.time())


@pytest.mark.slow
def test_a_store_killed_between_the_pointer_and_the_hook_calls_the_hook_when_it_is_back(local_ray, tmp_path):
    import ray

    run_id = f"hooked-{uuid.uuid4().hex[:8]}"
    options = VersionStoreActor.options(max_restarts=3)
    actor = options.remote(run_id, str(tmp_path), 1.0, "tests.fakes.hooks.hangs_once")
    ledger, notes = KeptLedger(actor, lambda _: None, timeout=60.0), hooks.notes(run_id)

    async def go() -> None:
        await ledger.claim("digest")
        for version in (1, 2, 3):
            ref = await ledger.begin()
            committing = asyncio.create_task(ledger.commit(ref, *publication(version)))
            if version == 2:
                while "wrote 2" not in notes.read_text():
                    await asyncio.sleep(0.05)
                assert VersionStore(LocalStore(tmp_path)).latest() == ref, "the pointer has moved"
                kill_store()
            await committing
        await ledger.release()

    try:
        asyncio.run(asyncio.wait_for(go(), 120))
        assert notes.read_text().splitlines() == ["wrote 1", "wrote 2", "wrote 2", "wrote 3"]
    finally:
        notes.unlink(missing_ok=True)
        ray.kill(actor)
    assert ledger.deaths == 1


def test_a_killed_store_does_not_take_back_a_run_that_was_resumed_elsewhere(store, tmp_path):
    ledger = KeptLedger(store, lambda _: None, timeout=60.0)

    async def go() -> None:
        claim = await ledger.claim("digest")
        assert claim is not None
        VersionStore(LocalStore(tmp_path)).claim("run", "digest", owner=claim.owner)  # this process, which lives
        kill_store()
        with pytest.raises(ClaimConflict, match="resumed elsewhere"):
            await ledger.begin()

    asyncio.run(asyncio.wait_for(go(), 100))
