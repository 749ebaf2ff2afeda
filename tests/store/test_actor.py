"""The ledger behind Ray: the same answers, the same errors, and long polls that never wait behind a publication."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from miles_disagg.domain.errors import PointerConflict  # noqa: E402
from miles_disagg.domain.versions import VersionRef  # noqa: E402
from miles_disagg.store.actor import RemoteLedger, VersionStoreActor  # noqa: E402
from miles_disagg.store.local import LocalStore  # noqa: E402
from miles_disagg.store.publication import Description, Receipt  # noqa: E402
from miles_disagg.store.versions import VersionStore  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def test_the_actor_publishes_watches_and_tells_errors(cluster: None, tmp_path: Path) -> None:
    actor = VersionStoreActor.remote("run", str(tmp_path))
    ledger = RemoteLedger(actor)
    claim = await ledger.claim("digest")
    assert claim is not None
    assert await ledger.latest() == VersionRef("run", 0)
    watching = asyncio.create_task(ledger.wait_newer(VersionRef("run", 0), 60))
    await ledger.register("replica")
    ref = await ledger.begin()
    blocked = asyncio.create_task(ledger.begin())
    assert await asyncio.wait_for(ledger.latest(), 20) == VersionRef("run", 0)
    await ledger.commit(ref, Description("xor", 0), [Receipt(None)])
    assert await watching == ref
    assert await blocked == ref.next()
    await ledger.abort(ref.next())
    await ledger.record_activation("replica", ref, 2e9)
    assert (await ledger.wait_converged(ref, 10) or 0) > 0
    with pytest.raises(PointerConflict) as caught:
        await ledger.commit(VersionRef("run", 9), Description("xor", 8), [Receipt(None)])
    assert caught.value.proposed == VersionRef("run", 9)
    await ledger.release()
    assert not VersionStore(LocalStore(tmp_path)).claim_of("run").is_live(time.time())
    ray.kill(actor)


async def test_without_a_store_the_numbering_is_the_same(cluster: None) -> None:
    actor = VersionStoreActor.remote("run", None)
    ledger = RemoteLedger(actor)
    assert await ledger.claim("digest") is None
    ref = await ledger.begin()
    await ledger.commit(ref)
    assert await ledger.latest() == VersionRef("run", 1)
    ray.kill(actor)
