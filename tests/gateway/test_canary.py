"""Whose answer to the canary prompt is the odd one, and what becomes of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from miles_disagg.gateway import app as gateway_app
from miles_disagg.gateway.app import GatewaySettings
from miles_disagg.gateway.canary import CanarySettings, Song, odd_ones_out
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.replica import Replica, ReplicaSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import ref


def song(*tokens: int, shift: float = 0.0) -> Song:
    return Song("run", 1, tokens, tuple(-0.5 - i / 10 - shift for i in range(len(tokens))))


@pytest.mark.parametrize(
    ("songs", "odd"),
    [
        ([song(1, 2, 3)], [False]),
        ([song(1, 2, 3), song(1, 2, 3), song(1, 9, 9, shift=0.3)], [False, False, True]),
        ([song(1, 2, 3), song(1, 2, 3, shift=0.3), song(1, 2, 3)], [False, True, False]),
        ([song(1, 2, 3), song(1, 2, 4, shift=0.001), song(1, 2, 3)], [False, False, False]),  # a tie
        ([song(1, 2, 3), song(5, 6, 7, shift=0.3)], None),
    ],
)
def test_the_odd_one_out_answers_unlike_the_majority(songs: list[Song], odd: list[bool] | None) -> None:
    assert odd_ones_out(songs, 0.05) == odd


async def test_a_replica_that_sings_another_song_is_refused_until_it_sings_ours() -> None:
    engines = [FakeEngine(str(ref(3)), script=[7, 8, 9]) for _ in range(3)]
    settings = GatewaySettings(wait=0.1, expiry=60.0, canary=CanarySettings((1, 2), interval=0.2, tokens=3))
    gateway = await gateway_app.serve(settings=settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.stop)
        for i, engine in enumerate(engines):
            replica = Replica(ReplicaSettings(f"replica-{i}"), engine)
            await replica.attach()
            server = await replica_app.serve(replica, gateways=(gateway.url,), heartbeat_seconds=0.1)
            stack.push_async_callback(server.stop)

        async def until_ready(*names: str) -> None:
            async with asyncio.timeout(20):
                while {m.replica_id for m in gateway.router.members if m.ready} != set(names):
                    await asyncio.sleep(0.02)

        everybody = ("replica-0", "replica-1", "replica-2")
        await until_ready(*everybody)
        engines[1].logprob_shift = 1.0
        await until_ready("replica-0", "replica-2")
        wrong = next(m for m in gateway.router.members if not m.ready)
        assert "canary prompt at version 3" in wrong.reason
        engines[1].logprob_shift = 0.0
        await until_ready(*everybody)
    asked = [b for engine in engines for b in engine.bodies]
    assert all(b["sampling_params"]["temperature"] == 0.0 and b["input_ids"] == [1, 2] for b in asked)
