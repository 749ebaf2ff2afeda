"""A data buffer by import path: the example at work, and what is no buffer."""

import dataclasses

import pytest

from examples.buffer import MostTellingFirst
from miles_disagg.buffer.base import Buffer
from miles_disagg.buffer.data_buffer import DataBuffer, make_buffer
from miles_disagg.domain.errors import ConfigError
from miles_disagg.domain.samples import SampleGroup
from tests.fakes.samples import make_group

HERE = "tests.buffer.test_plugged_in"


class NoBuffer:
    def __init__(self, capacity: int):
        self.capacity = capacity

    async def put(self, group, timeout=None): ...


def scored(index: int, *rewards: float) -> SampleGroup:
    group = make_group(index)
    samples = tuple(
        dataclasses.replace(group.samples[0], sample_id=f"{index}/{i}", reward=r) for i, r in enumerate(rewards)
    )
    return dataclasses.replace(group, samples=samples)


class Listener:
    def __init__(self):
        self.heard: list[tuple[str, str]] = []

    def queued(self, group):
        self.heard.append(("queued", group.group_id))

    def taken(self, group, trainer_version):
        self.heard.append(("taken", group.group_id))

    def dropped(self, group, reason):
        self.heard.append((reason, group.group_id))

    def upstream(self):
        return ""


async def test_the_most_telling_groups_come_first_and_every_group_is_told_of_once():
    buffer = make_buffer("examples.buffer.MostTellingFirst", 8)
    assert isinstance(buffer, MostTellingFirst)
    assert isinstance(buffer, Buffer)
    listener = Listener()
    buffer.listen(listener)
    dull, clear, mixed = scored(0, 1.0, 1.0), scored(1, 0.0, 0.1), scored(2, 0.0, 1.0)
    for group in (dull, clear, mixed):
        await buffer.put(group)
    batch = await buffer.get_batch(2, trainer_version=0, max_staleness=None, timeout=1)
    assert list(batch.groups) == [mixed, clear]
    assert await buffer.close() == [dull]
    told = [(what, group) for what, group in listener.heard if what != "queued"]
    assert told == [("taken", mixed.group_id), ("taken", clear.group_id), ("closed", dull.group_id)]


def test_without_a_path_it_is_the_usual_one():
    assert type(make_buffer(None, 3)) is DataBuffer
    assert isinstance(make_buffer(None, 3), Buffer)


def test_what_is_no_buffer_is_refused_with_what_it_lacks():
    with pytest.raises(ConfigError, match="it lacks") as caught:
        make_buffer(f"{HERE}.NoBuffer", 3)
    text = str(caught.value)
    assert "--custom-async-data-buffer-path" in text
    for name in ("get_batch", "snapshot", "close", "listen", "__len__"):
        assert name in text
    assert " put" not in text
