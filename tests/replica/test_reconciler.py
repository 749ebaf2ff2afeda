"""A replica follows the store by itself, through errors, restarts, holds and another run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from miles_disagg.domain.errors import InvalidRequest, WeightVersionGone, WeightVersionNotReady
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.reconciler import Reconciler, ReconcilerSettings
from miles_disagg.replica.replica import Replica
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import at_least, ref, request
from tests.fakes.source import FakeStore

FAST = ReconcilerSettings(poll=0.1, engine_check=0.05, store=2.0, backoff_first=0.01, backoff_cap=0.05)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@pytest.fixture
async def store() -> FakeStore:
    return FakeStore(ref(0))


@pytest.fixture
async def reconciler(replica: Replica, store: FakeStore) -> AsyncIterator[Reconciler]:
    reconciler = Reconciler(replica, store, store, sink=store, settings=FAST)
    loop = asyncio.create_task(reconciler.run())
    yield reconciler
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_publication_is_materialized_activated_and_acknowledged(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    store.publish(ref(1))
    await until(lambda: store.activations == [("replica-0", ref(1))])
    assert replica.applied == ref(1)
    assert {"fetch_seconds", "materialize_seconds", "pause_seconds"} <= set(replica.status()["phase_timings"])


async def test_newer_versions_coalesce_while_one_materializes_and_the_old_one_serves(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    store.materialize_delay = 0.1
    store.publish(ref(1))
    await until(lambda: replica.state == "materializing")
    assert (await replica.sessions.result(request("a")))["meta_info"]["weight_version"] == 0
    for version in (2, 3, 4):
        store.publish(ref(version))
    await until(lambda: replica.applied == ref(4))
    assert store.materialized == [ref(1), ref(4)]


async def test_a_lost_wake_costs_latency_only(replica: Replica, store: FakeStore, reconciler: Reconciler) -> None:
    store.deaf = True
    await asyncio.sleep(0.05)
    store.publish(ref(1))
    await until(lambda: replica.applied == ref(1))


async def test_a_store_that_is_down_for_a_while_is_asked_again(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    store.down = True
    store.publish(ref(1))
    await until(lambda: reconciler.errors_in_a_row >= 2)
    assert "store unreachable" in (reconciler.last_error or "")
    assert (await replica.sessions.result(request("a")))["output_ids"]  # serving goes on
    store.down = False
    await until(lambda: replica.applied == ref(1) and len(store.activations) == 1)


async def test_a_failed_activation_is_retried_until_it_holds(
    replica: Replica, store: FakeStore, engine: FakeEngine, reconciler: Reconciler
) -> None:
    engine.fail_updates = 3
    store.publish(ref(1))
    await until(lambda: replica.applied == ref(1))
    assert store.activations == [("replica-0", ref(1))]


async def test_an_engine_that_restarted_at_another_version_is_brought_back(
    replica: Replica, store: FakeStore, engine: FakeEngine, reconciler: Reconciler
) -> None:
    store.publish(ref(2))
    await until(lambda: replica.applied == ref(2))
    engine.kill()
    await until(lambda: replica.state == "fenced")
    engine.revive(str(ref(0)))
    await until(lambda: replica.applied == ref(2))
    assert engine.version == str(ref(2))


async def test_an_engine_that_was_out_of_reach_for_a_moment_serves_again_without_a_reload(
    replica: Replica, store: FakeStore, engine: FakeEngine, reconciler: Reconciler
) -> None:
    store.publish(ref(1))
    await until(lambda: replica.applied == ref(1))
    engine.kill()
    await until(lambda: replica.state == "fenced")
    engine.revive(str(ref(1)))
    await until(lambda: replica.applied == ref(1))
    assert store.materialized == [ref(1)]


async def test_a_held_replica_stays_and_then_catches_up(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    store.publish(ref(1))
    await until(lambda: replica.applied == ref(1))
    assert reconciler.hold(None, 60.0) == ref(1)
    store.publish(ref(5))
    await asyncio.sleep(0.15)
    assert replica.applied == ref(1)
    with pytest.raises(WeightVersionNotReady) as caught:
        await replica.sessions.result(request("a", weight_version=at_least(5)))
    assert (caught.value.served, caught.value.latest) == (1, 5)
    with pytest.raises(WeightVersionGone):
        reconciler.hold(0, 60.0)
    reconciler.release()
    await until(lambda: replica.applied == ref(5))


async def test_a_hold_ends_by_itself_and_with_its_run(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    with pytest.raises(InvalidRequest, match="nothing is served yet"):
        Reconciler(replica, store, None).hold(None, 1.0)
    await until(lambda: replica.applied == ref(0))
    reconciler.hold(0, 0.3)
    store.publish(ref(1))
    await asyncio.sleep(0.1)
    assert replica.applied == ref(0)
    await until(lambda: replica.applied == ref(1))
    reconciler.hold(1, 60.0)
    store.publish(VersionRef("other", 0))
    await until(lambda: replica.applied == VersionRef("other", 0))
    assert reconciler.held is None


async def test_a_hold_that_comes_while_the_next_version_materializes_is_kept(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    await until(lambda: replica.applied == ref(0))
    store.materialize_delay = 0.1
    store.publish(ref(1))
    await until(lambda: replica.state == "materializing")
    reconciler.hold(0, 60.0)
    await until(lambda: store.materialized[-1:] == [ref(1)])
    await asyncio.sleep(0.1)
    assert replica.applied == ref(0)
    reconciler.hold(1, 60.0)  # a version that it is to stay at when it gets there
    store.publish(ref(3))
    await until(lambda: replica.applied == ref(1))
    await asyncio.sleep(0.1)
    assert replica.applied == ref(1)


async def test_a_version_that_is_not_published_yet_is_waited_for_and_kept(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    await until(lambda: replica.applied == ref(0))
    reconciler.hold(2, 60.0)
    store.publish(ref(1))
    await until(lambda: replica.applied == ref(1))
    store.publish(ref(2))
    await until(lambda: replica.applied == ref(2))
    store.publish(ref(3))
    await asyncio.sleep(0.15)
    assert replica.applied == ref(2)
    assert store.materialized == [ref(1), ref(2)]
    assert reconciler.errors_in_a_row == 0


async def test_one_that_does_not_follow_serves_only_what_it_is_told(
    replica: Replica, store: FakeStore, engine: FakeEngine
) -> None:
    reconciler = Reconciler(replica, store, store, settings=FAST, follow=False)
    loop = asyncio.create_task(reconciler.run())
    store.publish(ref(3))
    await asyncio.sleep(0.15)
    assert (replica.applied, store.materialized) == (ref(0), [])
    reconciler.hold(5, float("inf"))
    store.publish(ref(4))
    await asyncio.sleep(0.15)
    assert replica.applied == ref(0), "not by way of versions that nobody asked for"
    store.publish(ref(5))
    await until(lambda: replica.applied == ref(5))
    store.publish(ref(6))
    engine.kill()
    await until(lambda: replica.state == "fenced")
    engine.revive(str(ref(0)))
    await until(lambda: replica.applied == ref(5))
    reconciler.release()
    await asyncio.sleep(0.15)
    assert replica.applied == ref(5)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_a_new_run_takes_over_and_old_version_numbers_are_refused_meanwhile(
    replica: Replica, store: FakeStore, reconciler: Reconciler
) -> None:
    store.publish(ref(7))
    await until(lambda: replica.applied == ref(7))
    store.materialize_delay = 0.1
    other = VersionRef("other", 0)
    store.publish(other)
    await until(lambda: replica.gate.latest == other)
    with pytest.raises(WeightVersionNotReady):  # version 7 satisfies it by number, but is of another run
        await replica.sessions.result(request("a", weight_version=at_least(1)))
    await until(lambda: replica.applied == other)


async def test_without_a_stager_a_restarted_engine_serves_what_it_says_it_holds(
    replica: Replica, store: FakeStore, engine: FakeEngine
) -> None:
    loop = asyncio.create_task(Reconciler(replica, store, None, settings=FAST).run())
    engine.kill()
    await until(lambda: replica.state == "fenced")
    engine.revive(str(ref(0)))
    await until(lambda: replica.applied == ref(0))
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
