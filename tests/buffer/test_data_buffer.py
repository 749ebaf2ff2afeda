"""The data buffer: back-pressure, staleness, deadlines, snapshots."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.buffer.base import BufferClosed, EndOfData
from miles_disagg.buffer.data_buffer import DataBuffer, capacity_groups
from miles_disagg.buffer.snapshot import group_from_json, group_to_json
from miles_disagg.domain.errors import DeadlineExceeded
from miles_disagg.domain.samples import SampleGroup
from miles_disagg.domain.versions import TokenSpan
from tests.fakes.samples import make_group, make_prompt, make_sample


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []

    def queued(self, group: SampleGroup) -> None:
        self.events.append(("queued", group.prompt.index, ""))

    def taken(self, group: SampleGroup, trainer_version: int) -> None:
        self.events.append(("taken", group.prompt.index, str(trainer_version)))

    def dropped(self, group: SampleGroup, reason: str) -> None:
        self.events.append(("dropped", group.prompt.index, reason))

    def upstream(self) -> str:
        return "in flight 12 groups"


async def filled(*groups: SampleGroup, capacity: int = 16, listener: Recorder | None = None) -> DataBuffer:
    buffer = DataBuffer(capacity, listener)
    for group in groups:
        await buffer.put(group)
    return buffer


async def take(buffer: DataBuffer, n: int, version: int = 0, staleness: int | None = None, timeout: float = 5):
    return await buffer.get_batch(n, trainer_version=version, max_staleness=staleness, timeout=timeout)


async def test_a_full_buffer_holds_back_the_producer_until_the_trainer_takes():
    buffer = await filled(make_group(0), make_group(1), capacity=2)
    waiting = asyncio.create_task(buffer.put(make_group(2)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await take(buffer, 1)
    await asyncio.wait_for(waiting, 5)
    assert len(buffer) == 2


async def test_a_put_that_waits_too_long_says_what_it_waited_for():
    buffer = await filled(make_group(0), capacity=1)
    with pytest.raises(DeadlineExceeded, match="room in the data buffer: 1 of 1 groups"):
        await buffer.put(make_group(1), timeout=0.02)
    assert len(buffer) == 1


async def test_a_batch_is_the_oldest_groups_first_then_arrival_order():
    buffer = await filled(make_group(0, 5), make_group(1, 4), make_group(2, 5), make_group(3, 4))
    batch = await take(buffer, 3, version=5)
    assert [g.prompt.index for g in batch.groups] == [1, 3, 0]
    assert batch.lags == [1, 1, 1, 1, 0, 0]


async def test_groups_beyond_the_staleness_bound_are_dropped_and_counted():
    recorder = Recorder()
    buffer = await filled(make_group(0, 1), make_group(1, 3), make_group(2, 2), listener=recorder)
    batch = await take(buffer, 2, version=4, staleness=2)
    assert [g.prompt.index for g in batch.groups] == [2, 1]
    assert recorder.events[3:] == [("dropped", 0, "stale"), ("taken", 2, "4"), ("taken", 1, "4")]
    assert buffer.metrics()["rollout/fully_async/stale_groups_filtered"] == 1


async def test_staleness_counts_the_oldest_token_of_any_sample():
    prompt = make_prompt(0)
    old = make_sample(prompt, 1, version_end=4, spans=(TokenSpan(0, 1), TokenSpan(1, 4)))
    buffer = await filled(SampleGroup("g", prompt, (make_sample(prompt, 4), old)))
    with pytest.raises(DeadlineExceeded):
        await take(buffer, 1, version=4, staleness=2, timeout=0.02)
    assert len(buffer) == 0


async def test_dropping_what_is_stale_makes_room_for_a_waiting_producer():
    buffer = await filled(make_group(0, 0), make_group(1, 0), capacity=2)
    waiting = [asyncio.create_task(buffer.put(make_group(i, 3))) for i in (2, 3)]
    batch = await take(buffer, 2, version=3, staleness=0)
    assert [g.prompt.index for g in batch.groups] == [2, 3]
    await asyncio.gather(*waiting)


async def test_a_batch_that_does_not_come_says_what_is_here_and_what_is_on_its_way():
    buffer = await filled(make_group(0), make_group(1, 9), listener=Recorder())
    with pytest.raises(
        DeadlineExceeded, match=r"4 groups at version 9: have 1, dropped as stale 1, in flight 12 groups"
    ):
        await take(buffer, 4, version=9, staleness=1, timeout=0.02)
    assert len(buffer) == 1, "nothing is taken unless all can be"


async def test_a_batch_larger_than_the_buffer_is_refused_at_once():
    with pytest.raises(ValueError, match="async-data-buffer-capacity-factor"):
        await take(DataBuffer(2), 3)


async def test_the_end_of_data_is_told_to_a_trainer_that_already_waits():
    buffer = await filled(make_group(0))
    waiting = asyncio.create_task(take(buffer, 2))
    await asyncio.sleep(0)
    buffer.set_ended(True)
    with pytest.raises(EndOfData, match="1 groups are left, a batch needs 2"):
        await waiting
    assert len((await take(buffer, 1)).groups) == 1


async def test_a_failure_upstream_reaches_the_trainer_at_once():
    buffer = DataBuffer(4)
    waiting = asyncio.create_task(take(buffer, 1, timeout=60))
    await asyncio.sleep(0)
    buffer.fail(KeyError("boom"))
    with pytest.raises(KeyError, match="boom"):
        await asyncio.wait_for(waiting, 5)


async def test_closing_wakes_everybody_and_drops_the_rest():
    recorder = Recorder()
    buffer = await filled(make_group(0), capacity=1, listener=recorder)
    waiting = [asyncio.create_task(buffer.put(make_group(1))), asyncio.create_task(take(buffer, 1))]
    await waiting[1]
    await waiting[0]
    blocked = asyncio.create_task(buffer.put(make_group(2)))
    await asyncio.sleep(0)
    assert [g.prompt.index for g in await buffer.close()] == [1]
    with pytest.raises(BufferClosed):
        await blocked
    with pytest.raises(BufferClosed):
        await take(buffer, 1)
    assert recorder.events[-1] == ("dropped", 1, "closed")


async def test_a_snapshot_goes_through_json_and_comes_back_exactly():
    buffer = await filled(make_group(0, 1), make_group(1, 2, epoch=1))
    text = json.dumps(buffer.snapshot())
    other = DataBuffer(16)
    other.restore(json.loads(text))
    assert (await take(other, 2)).groups == (await take(buffer, 2)).groups
    assert other.puts == 2


async def test_restoring_over_queued_groups_is_refused():
    buffer = await filled(make_group(0))
    with pytest.raises(ValueError, match="would lose them"):
        buffer.restore(buffer.snapshot())


def test_metrics_of_a_batch_have_their_stable_names():
    prompt = make_prompt()
    samples = (make_sample(prompt, 3, reward=1.0), make_sample(prompt, 1, reward=0.0, finish_reason="length"))
    from miles_disagg.buffer.base import Batch

    metrics = Batch((SampleGroup("g", prompt, samples), make_group(1, 4)), 4, 0.5).metrics()
    assert metrics == {
        "rollout/version_lag_mean": 1.0,
        "rollout/version_lag_max": 3.0,
        "rollout/reward_mean": 0.75,
        "rollout/reward_std": pytest.approx(0.4330127),
        "rollout/response_length_mean": 2.0,
        "rollout/truncated_fraction": 0.25,
        "rollout/zero_variance_groups": 1.0,
        "perf/wait_for_rollout_seconds": 0.5,
    }


@given(st.integers(1, 100), st.floats(0.1, 10))
def test_the_buffer_always_has_room_for_one_batch(batch, factor):
    assert capacity_groups(batch, factor) >= max(batch, batch * factor)


@given(
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False), max_size=5),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    masked=st.booleans(),
)
def test_floats_and_masks_survive_a_snapshot_bit_for_bit(logprobs, reward, masked):
    n = len(logprobs)
    sample = make_sample(
        tokens=tuple(range(n)), logprobs=tuple(logprobs), reward=reward, loss_mask=(1,) * n if masked else None
    )
    group = SampleGroup("g", sample.prompt, (sample,))
    assert group_from_json(json.loads(json.dumps(group_to_json(group)))) == group
