"""Engines behind a router: they hold one version at any moment, and one that is lost comes back only with that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_disagg.domain.errors import EngineError, EngineMismatch, EngineUnavailable, UpdateFailed
from miles_disagg.engine.discovery import ModelFacts, Wanted
from miles_disagg.engine.group import MIXED, RoutedEngine
from tests.fakes.router import FakeMember, FakeRouter

V1, V2, V3 = (f"run/weight_v{n:06d}" for n in (1, 2, 3))
WANTED = Wanted(ModelFacts(("Qwen3ForCausalLM",), "qwen3", "float32", {}), "float32", "disk", 100)


class Site:
    """A router, its engines, and the group as one engine."""

    def __init__(self, *members: FakeMember):
        self.router, self.members = FakeRouter(), members

    async def start(self) -> None:
        await self.router.start()
        for member in self.members:
            await member.start()
        self.engine = RoutedEngine(self.router.url, [m.url for m in self.members])

    async def end(self) -> None:
        await self.engine.close()
        for part in (self.router, *self.members):
            await part.end()

    async def update(self, version: str) -> None:
        await self.engine.pause("in_place")
        await self.engine.update_from_disk(f"/versions/{version[-1]}", version, flush_cache=False)
        assert (await self.engine.model_info())["weight_version"] == version
        await self.engine.resume()

    async def answers(self, count: int = 6) -> list[tuple[int, str]]:
        """Port and version of each of `count` answers through the router."""
        got = [await self.engine.generate({"input_ids": [1]}) for _ in range(count)]
        return [(row["output_ids"][0], row["meta_info"]["weight_version"]) for row in got]


def regular(version: str = V1) -> FakeMember:
    return FakeMember(version, dtype="float32", device="cpu", disable_radix_cache=True)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(regular(), regular())
    await site.start()
    await site.engine.look(WANTED)
    await site.engine.open(5.0)
    yield site
    await site.end()


async def test_members_are_registered_and_serve_through_the_router_as_one(site: Site):
    assert set(site.router.workers) == {m.url for m in site.members}
    found = await site.engine.look(WANTED)
    assert found is not None
    assert found.ranks == 2
    assert "2 regular" in found.describe()
    await site.update(V2)
    assert set(await site.answers()) == {(m.port, V2) for m in site.members}
    assert (await site.engine.server_info())["weight_version"] == V2
    chunks = [chunk async for chunk in site.engine.stream({"input_ids": [1]})]
    assert chunks[0]["meta_info"]["weight_version"] == V2


async def test_every_member_is_paused_before_any_is_updated(site: Site):
    await site.engine.pause("in_place")
    assert all(m.paused and not m.loaded for m in site.members)
    await site.engine.update_from_disk("/versions/2", V2, flush_cache=False)
    assert all(m.paused for m in site.members)
    await site.engine.resume()
    assert not any(m.paused for m in site.members)


async def test_an_update_that_only_some_take_is_no_refusal_that_changed_nothing(site: Site):
    site.members[1].refuses = True
    with pytest.raises(EngineError, match="only") as caught:
        await site.update(V2)
    assert not isinstance(caught.value, UpdateFailed)
    assert (await site.engine.model_info())["weight_version"].startswith(MIXED)
    site.members[0].refuses = True
    with pytest.raises(UpdateFailed):
        await site.update(V3)


async def test_a_dead_member_is_left_behind_and_readmitted_at_the_others_version(site: Site):
    dead, alive = site.members
    await dead.end()
    await site.update(V2)
    assert set(site.router.workers) == {alive.url}
    assert set(await site.answers()) == {(alive.port, V2)}
    await dead.start(V1)
    await site.engine.server_info()
    assert set(site.router.workers) == {alive.url}, "it answers, but it holds an old version"
    assert await site.engine.readmit("/versions/2", V2) == [dead.url]
    assert set(site.router.workers) == {alive.url, dead.url}
    assert set(await site.answers()) == {(alive.port, V2), (dead.port, V2)}


async def test_a_member_that_came_back_takes_part_in_the_next_update(site: Site):
    await site.members[0].end()
    await site.update(V2)
    await site.members[0].start(V1)
    await site.engine.server_info()
    await site.update(V3)
    await site.engine.server_info()
    assert {version for _, version in await site.answers()} == {V3}
    assert len(site.router.workers) == 2


async def test_a_member_restarted_behind_our_back_leaves_rotation_and_the_others_go_on(site: Site):
    await site.update(V2)
    await site.members[1].end()
    await site.members[1].start("default")
    assert (await site.engine.server_info())["weight_version"] == V2
    assert set(site.router.workers) == {site.members[0].url}
    assert {version for _, version in await site.answers()} == {V2}


async def test_a_member_that_came_back_as_another_model_stays_out(site: Site):
    await site.members[1].end()
    await site.update(V2)
    site.members[1].info["dtype"] = "bfloat16"
    await site.members[1].start(V2)
    await site.engine.server_info()
    assert await site.engine.readmit("/versions/2", V2) == []
    assert [m.out for m in site.engine.members.missing if m.out and "dtype is bfloat16" in m.out]
    assert set(site.router.workers) == {site.members[0].url}


async def test_when_all_are_gone_it_says_so_and_all_that_come_back_count_again(site: Site):
    await site.update(V2)
    for member in site.members:
        await member.end()
    with pytest.raises(EngineUnavailable, match="can serve"):
        await site.engine.server_info()
    with pytest.raises(EngineUnavailable):
        await site.engine.generate({"input_ids": [1]})
    for member in site.members:
        await member.start(V1)
    assert (await site.engine.server_info())["weight_version"] == V1, "what they hold, for the replica to judge"
    await site.update(V3)
    assert set(await site.answers()) == {(m.port, V3) for m in site.members}


async def test_the_members_ranks_follow_one_another_in_a_process_group(site: Site):
    group = {"master_address": "a", "master_port": 1, "world_size": 3, "backend": "gloo"}
    await site.engine.init_group(**group, rank_offset=1, group_name="first")
    assert [m.groups[-1]["rank_offset"] for m in site.members] == [1, 2]
    assert site.engine.joined("first")
    await site.members[0].end()
    with pytest.raises(EngineUnavailable):  # the others would wait in the group for ever
        await site.engine.update_from_distributed(
            names=[], dtypes=[], shapes=[], group_name="first", version=V2, flush_cache=False
        )
    found = site.engine.members.found()
    assert found is not None
    assert found.ranks == 1


async def test_a_worker_that_is_not_in_the_list_is_named():
    site = Site(regular())
    await site.start()
    site.router.workers["http://10.0.0.9:3000"] = {"id": "x", "url": "http://10.0.0.9:3000", "is_healthy": True}
    try:
        with pytest.raises(EngineMismatch, match=r"10\.0\.0\.9:3000, which is not in --rollout-external-engine-addrs"):
            await site.engine.look(WANTED)
    finally:
        await site.end()


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (("prefill", "decode"), None),
        (("prefill",), "without any decode"),
        (("decode", "null"), "beside prefill/decode"),
    ],
)
async def test_prefill_and_decode_workers_are_one_engine_together(kinds: tuple[str, ...], problem: str | None):
    members = [FakeMember(V1, dtype="float32", device="cpu", disaggregation_mode=k) for k in kinds]
    members[0].info["disaggregation_bootstrap_port"] = 9123
    site = Site(*members)
    await site.start()
    try:
        if problem is not None:
            with pytest.raises(EngineMismatch, match=problem):
                await site.engine.look(WANTED)
            return
        await site.engine.look(WANTED)
        await site.engine.members.open(5.0)
        rows = {row["worker_type"]: row for row in site.router.workers.values()}
        assert rows["prefill"]["bootstrap_port"] == 9123
        assert "bootstrap_port" not in rows["decode"]
        await site.update(V2)
        assert [m.version for m in members] == [V2, V2]
        await members[1].end()
        with pytest.raises(EngineUnavailable, match="can serve"):
            await site.engine.server_info()
    finally:
        await site.end()
