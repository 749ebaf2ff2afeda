"""Activations that succeed, fail, heal or stay fenced; updates broadcast by the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles_disagg.domain.errors import EngineUnavailable, UpdateFailed
from miles_disagg.replica.activation import ActivationFailed, ActivationLimits
from miles_disagg.replica.gate import Phase
from miles_disagg.replica.replica import Replica
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import checkpoint, make_replica, ref, request


async def bucket(replica: Replica) -> None:
    await replica.activator.receive_bucket(names=["w"], dtypes=["float32"], shapes=[[1]], group_name="g")


async def join(replica: Replica) -> None:
    await replica.activator.init_group(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo"
    )


async def test_an_activation_pauses_loads_stamps_and_resumes_without_a_flush(
    replica: Replica, engine: FakeEngine
) -> None:
    report = await replica.activate(checkpoint(1, "/checkpoints/1"))
    assert engine.calls[1:] == [  # the first resume is the adoption
        ("pause", "in_place"),
        ("update_from_disk", ("/checkpoints/1", str(ref(1)))),
        ("resume", None),
    ]
    assert replica.applied == ref(1)
    assert 0 < report.pause_seconds < 5
    assert replica.status()["phase_timings"]["pause_seconds"] == report.pause_seconds


async def test_a_refused_update_reloads_the_last_good_checkpoint_and_serves_on(
    replica: Replica, engine: FakeEngine, tmp_path: Path
) -> None:
    await replica.activate(checkpoint(1, str(tmp_path)))
    engine.fail_updates = 1
    work = asyncio.create_task(replica.sessions.result(request("a", n=40)))
    await asyncio.sleep(0.02)
    with pytest.raises(ActivationFailed) as caught:
        await replica.activate(checkpoint(2, "/checkpoints/2"))
    assert caught.value.healed
    assert replica.applied == ref(1)
    assert engine.paths[-1] == str(tmp_path)
    assert (await work)["meta_info"]["weight_version_spans"] == [[0, 1]]


async def test_a_refused_update_without_a_checkpoint_to_reload_serves_on_what_the_engine_confirms(
    replica: Replica, engine: FakeEngine
) -> None:
    engine.fail_updates = 1
    with pytest.raises(ActivationFailed) as caught:
        await replica.activate(checkpoint(1))
    assert caught.value.healed
    assert replica.applied == ref(0)


async def test_a_lost_engine_leaves_the_replica_fenced_and_requests_fail(replica: Replica, engine: FakeEngine) -> None:
    work = asyncio.create_task(replica.sessions.result(request("a", n=4000)))
    await asyncio.sleep(0.02)
    engine.update_delay = 0.05
    activation = asyncio.create_task(replica.activate(checkpoint(1)))
    while replica.gate.phase is not Phase.PAUSED:
        await asyncio.sleep(0.001)
    engine.kill()
    with pytest.raises(ActivationFailed) as caught:
        await activation
    assert not caught.value.healed
    assert replica.state == "fenced"
    assert replica.applied is None
    for pending in (work, replica.sessions.result(request("b"))):
        with pytest.raises(EngineUnavailable):
            await pending
    engine.revive(str(ref(1)))  # the stamp alone is not believed after half an update
    with pytest.raises(Exception, match="half an update"):
        await replica.activator.adopt(ref(1))
    await replica.activate(checkpoint(1))
    assert replica.applied == ref(1)


async def test_a_load_that_never_ends_is_given_up_and_healed_from_disk(engine: FakeEngine, tmp_path: Path) -> None:
    replica = make_replica(engine, activation=ActivationLimits(drain=0.1, control=1.0, load=0.1))
    await replica.attach()
    await replica.activate(checkpoint(1, str(tmp_path)))
    engine.update_delay = 0.3
    activation = asyncio.create_task(replica.activate(checkpoint(2)))
    await asyncio.sleep(0.05)
    engine.update_delay = 0.0
    with pytest.raises(ActivationFailed, match="serving run/weight_v000001 again"):
        await activation
    await replica.close()


async def test_a_broadcast_update_is_served_after_its_last_bucket(replica: Replica, engine: FakeEngine) -> None:
    await join(replica)
    work = asyncio.create_task(replica.sessions.result(request("a", n=60)))
    await asyncio.sleep(0.02)
    await replica.activator.begin_update(ref(1))
    before = next(replica.gate.flights()).tokens
    await bucket(replica)
    await bucket(replica)
    assert replica.gate.served == ref(0)
    await replica.activator.finish_update()
    assert replica.applied == ref(1)
    assert (await work)["meta_info"]["weight_version_spans"] == [[0, 0], [before, 1]]


async def test_a_broadcast_given_up_before_any_bucket_changes_nothing(replica: Replica) -> None:
    await replica.activator.begin_update(ref(1))
    await replica.activator.abort_update("test")
    assert replica.applied == ref(0)
    assert (await replica.sessions.result(request("a")))["output_ids"]


async def test_a_broadcast_given_up_halfway_fences_until_the_next_whole_update(replica: Replica) -> None:
    await join(replica)
    await replica.activator.begin_update(ref(1))
    await bucket(replica)
    await replica.activator.abort_update("test")
    assert replica.state == "fenced"
    with pytest.raises(EngineUnavailable):
        await replica.sessions.result(request("a"))
    await replica.activator.begin_update(ref(2))
    await bucket(replica)
    await replica.activator.finish_update()
    assert replica.applied == ref(2)


async def test_a_failed_bucket_fences_and_frees_the_replica_for_the_next_update(
    replica: Replica, engine: FakeEngine
) -> None:
    await join(replica)
    await replica.activator.begin_update(ref(1))
    engine.fail_updates = 1
    with pytest.raises(UpdateFailed):
        await bucket(replica)
    assert replica.state == "fenced"
    assert not replica.activator.busy


async def test_a_trainer_that_goes_silent_does_not_hold_the_replica_for_ever(engine: FakeEngine) -> None:
    replica = make_replica(engine, activation=ActivationLimits(drain=0.1, broadcast=0.1))
    await replica.attach()
    await replica.activator.begin_update(ref(1))
    await asyncio.sleep(0.2)
    assert replica.applied == ref(0)
    with pytest.raises(UpdateFailed, match="begin_update"):
        await bucket(replica)
    await replica.close()


async def test_a_broadcast_never_goes_backwards(replica: Replica) -> None:
    await replica.activate(checkpoint(3))
    with pytest.raises(UpdateFailed, match="already serving"):
        await replica.activator.begin_update(ref(3))
    assert not replica.activator.busy


async def test_another_run_is_activated_only_after_every_request_of_the_old_one(replica: Replica) -> None:
    work = asyncio.create_task(replica.sessions.result(request("a", n=15)))
    await asyncio.sleep(0.01)
    await replica.activate(checkpoint(0, run="other"))
    meta = (await work)["meta_info"]
    assert (meta["completion_tokens"], meta["weight_version_spans"]) == (15, [[0, 0]])
    assert str(replica.applied) == "other/weight_v000000"


async def test_a_cancelled_activation_does_not_leave_a_half_updated_replica_serving(
    replica: Replica, engine: FakeEngine
) -> None:
    engine.update_delay = 1.0
    activation = asyncio.create_task(replica.activate(checkpoint(1)))
    while replica.gate.phase is not Phase.PAUSED:
        await asyncio.sleep(0.001)
    activation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activation
    assert replica.state == "fenced"


async def test_a_bucket_for_a_group_that_a_restarted_engine_never_joined_does_not_reach_it(
    replica: Replica, engine: FakeEngine
) -> None:
    await join(replica)
    replica.activator.fence("its process was started anew", whole=True)
    assert replica.activator.groups == set()
    await replica.activator.begin_update(ref(1))
    with pytest.raises(UpdateFailed, match="not in process group g"):
        await bucket(replica)
    assert "update_from_distributed" not in [name for name, _ in engine.calls]
    await replica.activator.abort_update("the trainer forms a new group")
