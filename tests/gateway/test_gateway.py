"""Gateway and replicas over real HTTP: constraints, failures, streams, limits. Engines are fakes in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from miles_disagg.gateway import app as gateway_app
from miles_disagg.gateway.app import GatewayServer, GatewaySettings
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.app import ReplicaServer
from miles_disagg.replica.replica import Replica, ReplicaSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import at_least, checkpoint, exact, ref


class Fleet:
    """A gateway, replicas that register with it, and a client."""

    def __init__(self, gateway: GatewayServer, client: aiohttp.ClientSession, token: str | None):
        self.gateway, self.client, self.token = gateway, client, token
        self.engines: list[FakeEngine] = []
        self.replicas: list[Replica] = []
        self.servers: list[ReplicaServer] = []

    async def add(self, version: int = 0, **settings: Any) -> Replica:
        engine = FakeEngine(str(ref(version)), token_delay=0.002)
        replica = Replica(ReplicaSettings(f"replica-{len(self.replicas)}", **settings), engine)
        await replica.attach()
        server = await replica_app.serve(
            replica, gateways=(self.gateway.url,), heartbeat_seconds=0.1, token=self.token, max_body_bytes=2**20
        )
        self.engines.append(engine)
        self.replicas.append(replica)
        self.servers.append(server)
        await self.until(lambda: any(m.replica_id == replica.replica_id for m in self.gateway.router.members))
        return replica

    async def post(self, path: str = "/generate", n: int = 4, headers: Any = None, **body: Any):
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": n}, **body}
        async with self.client.post(self.gateway.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, url: str | None = None):
        async with self.client.get((url or self.gateway.url) + path) as response:
            return response.status, await response.text()

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0.005)


async def make_fleet(stack: AsyncExitStack, token: str | None = None, **settings: Any) -> Fleet:
    settings = {"wait": 0.5, "expiry": 1.0, "max_body_bytes": 2**20, **settings}
    gateway = await gateway_app.serve(settings=GatewaySettings(**settings), token=token)
    stack.push_async_callback(gateway.stop)
    client = await stack.enter_async_context(aiohttp.ClientSession())
    fleet = Fleet(gateway, client, token)

    async def stop() -> None:
        for server in fleet.servers:
            await server.stop()

    stack.push_async_callback(stop)
    return fleet


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield await make_fleet(stack)


async def test_a_request_is_answered_with_its_attribution_and_replica(fleet: Fleet) -> None:
    await fleet.add(3)
    status, body, headers = await fleet.post(weight_version=at_least(2))
    assert status == 200
    assert body["meta_info"]["weight_version_spans"] == [[0, 3]]
    assert headers["x-replica-id"] == body["meta_info"]["replica_id"] == "replica-0"


async def test_a_version_that_is_not_here_yet_is_409_and_served_after_its_publication(fleet: Fleet) -> None:
    replica = await fleet.add(0)
    status, body, headers = await fleet.post(weight_version=at_least(1))
    assert (status, body["error"]["type"]) == (409, "WeightVersionNotReady")
    assert (body["error"]["served"], body["error"]["requested"]) == (0, "version >= 1")
    assert int(headers["Retry-After"]) >= 1
    waiting = asyncio.create_task(fleet.post(weight_version=at_least(1)))
    await asyncio.sleep(0.1)
    await replica.activate(checkpoint(1))
    status, body, _ = await waiting
    assert (status, body["meta_info"]["weight_version"]) == (200, 1)


async def test_an_exact_version_that_everybody_left_behind_is_410(fleet: Fleet) -> None:
    await fleet.add(5)
    status, body, headers = await fleet.post(weight_version=exact(2))
    assert (status, body["error"]["type"]) == (410, "WeightVersionGone")
    assert "Retry-After" not in headers


async def test_a_killed_replica_loses_no_request(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.add()
    work = [asyncio.create_task(fleet.post(n=60, rid=f"r{i}")) for i in range(12)]
    await fleet.until(lambda: all(r.gate.active >= 4 for r in fleet.replicas))
    await fleet.servers[0]._http.stop()  # no goodbye: connections break
    fleet.engines[0].kill()
    answers = await asyncio.gather(*work)
    assert [a[0] for a in answers] == [200] * 12
    assert all(a[1]["meta_info"]["completion_tokens"] == 60 for a in answers)
    assert {a[1]["meta_info"]["id"] for a in answers} == {f"r{i}" for i in range(12)}


async def test_a_replica_whose_engine_died_is_passed_over(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.add()
    fleet.engines[0].kill()
    answers = [await fleet.post() for _ in range(8)]
    assert [a[0] for a in answers] == [200] * 8
    assert {a[1]["meta_info"]["replica_id"] for a in answers} == {"replica-1"}


async def test_a_replica_that_falls_silent_is_abandoned_and_its_requests_go_elsewhere(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.add()
    await fleet.engines[0].pause("in_place")  # answers nothing any more
    await fleet.engines[1].pause("in_place")
    work = [asyncio.create_task(fleet.post()) for _ in range(6)]
    await fleet.until(lambda: all(r.gate.active >= 2 for r in fleet.replicas))
    await fleet.engines[1].resume()
    heart = fleet.servers[0]._heart
    assert heart is not None
    for task in heart._tasks:
        task.cancel()
    answers = await asyncio.gather(*work)
    assert [a[0] for a in answers] == [200] * 6


async def test_no_replica_at_all_is_503(fleet: Fleet) -> None:
    status, body, headers = await fleet.post()
    assert (status, body["error"]["type"]) == (503, "EngineUnavailable")
    assert "Retry-After" in headers
    assert (await fleet.get("/health"))[0] == 503


async def test_an_overloaded_fleet_says_429_and_another_replica_is_tried_first(fleet: Fleet) -> None:
    await fleet.add(max_in_flight=1)
    await fleet.add(max_in_flight=1)
    work = [asyncio.create_task(fleet.post(n=100)) for _ in range(2)]
    await fleet.until(lambda: all(r.gate.active == 1 for r in fleet.replicas))
    status, body, headers = await fleet.post()
    assert (status, body["error"]["type"]) == (429, "Overloaded")
    assert "Retry-After" in headers
    assert [a[0] for a in await asyncio.gather(*work)] == [200, 200]


async def test_a_stream_passes_through_with_exact_spans_across_an_activation(fleet: Fleet) -> None:
    replica = await fleet.add()
    chunks, body = [], {"input_ids": [1], "sampling_params": {"max_new_tokens": 40}, "stream": True}
    async with fleet.client.post(fleet.gateway.url + "/generate", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        boundary = None
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunks.append(json.loads(line[6:]))
            if len(chunks) == 5:
                await replica.activate(checkpoint(1))
                boundary = next(replica.gate.flights()).tokens
    last = chunks[-1]["meta_info"]
    assert last["weight_version_spans"] == [[0, 0], [boundary, 1]]
    assert len(chunks[-1]["output_ids"]) == 40
    assert chunks[0]["meta_info"]["weight_version_spans"] == [[0, 0]]


async def test_a_stream_whose_replica_dies_ends_with_an_error_event(fleet: Fleet) -> None:
    await fleet.add()
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4000}, "stream": True}
    async with fleet.client.post(fleet.gateway.url + "/generate", json=body) as response:
        lines, killed = [], False
        async for line in response.content:
            lines.append(line)
            if not killed:
                fleet.engines[0].kill()
                killed = True
    events = [line for line in lines if line.startswith(b"data: ")]
    assert json.loads(events[-2][6:])["error"]["type"] == "EngineUnavailable"
    assert events[-1] == b"data: [DONE]\n"


async def test_a_client_that_disconnects_frees_the_engine_through_the_gateway(fleet: Fleet) -> None:
    await fleet.add()
    for stream in (False, True):
        work = asyncio.create_task(fleet.post(n=4000, stream=stream))
        await fleet.until(lambda: bool(fleet.engines[0].requests))
        work.cancel()
        await fleet.until(lambda: not fleet.engines[0].requests)
    assert fleet.replicas[0].gate.active == 0


async def test_a_rid_sent_again_after_a_lost_connection_is_answered_from_memory(fleet: Fleet) -> None:
    await fleet.add()
    answers = [await fleet.post(rid="same") for _ in range(3)]
    assert answers[0][1] == answers[1][1] == answers[2][1]
    assert len(fleet.engines[0].bodies) == 1


async def test_a_batch_is_answered_in_order_and_streams_with_an_index(fleet: Fleet) -> None:
    await fleet.add()
    status, body, _ = await fleet.post(input_ids=[[1], [2, 3], [4]], rid="batch")
    assert status == 200
    assert [a["meta_info"]["prompt_tokens"] for a in body] == [1, 2, 1]
    assert [a["meta_info"]["id"] for a in body] == ["batch-0", "batch-1", "batch-2"]
    request = {"input_ids": [[1], [2, 3]], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    async with fleet.client.post(fleet.gateway.url + "/generate", json=request) as response:
        chunks = [
            json.loads(line[6:]) for line in (await response.read()).split(b"\n\n") if line.startswith(b"data: {")
        ]
    finished = {c["index"]: len(c["output_ids"]) for c in chunks if c["meta_info"]["finish_reason"]}
    assert finished == {0: 3, 1: 3}


async def test_a_session_stays_and_its_rebinding_is_reported(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.add()
    headers = {"x-session-id": "conversation"}
    seen = [await fleet.post(headers=headers) for _ in range(5)]
    names = {a[2]["x-replica-id"] for a in seen}
    assert len(names) == 1
    assert not any("x-session-rebound" in a[2] for a in seen)
    home = names.pop()
    fleet.engines[int(home[-1])].kill()
    moved = await fleet.post(headers=headers)
    assert moved[0] == 200
    assert moved[2]["x-session-rebound"] == home
    again = await fleet.post(headers=headers)
    assert again[2]["x-replica-id"] == moved[2]["x-replica-id"]
    assert "x-session-rebound" not in again[2]


@pytest.mark.parametrize("route", ["pause_generation", "update_weights_from_disk", "flush_cache", "abort_request"])
async def test_engine_control_routes_are_blocked_at_gateway_and_replica(fleet: Fleet, route: str) -> None:
    await fleet.add()
    for url in (fleet.gateway.url, fleet.servers[0].url):
        async with fleet.client.post(f"{url}/{route}", json={}) as response:
            assert response.status == 403
            assert (await response.json())["error"]["type"] == "RouteBlocked"


@pytest.mark.parametrize(
    ("body", "kind", "word"),
    [
        (b"{", "InvalidRequest", "JSON"),
        (b"[1]", "InvalidRequest", "object"),
        (b"{}", "InvalidRequest", "input_ids"),
        (b'{"text": "a", "weight_version": 3}', "InvalidConstraint", "weight_version"),
        (b'{"text": "a", "weight_version": {"min_version": -1}}', "InvalidConstraint", "min_version"),
        (b'{"text": "a", "weight_version": {"min_version": 1, "exact_version": 1}}', "InvalidConstraint", "not both"),
        (b'{"text": "a", "rid": 7}', "InvalidRequest", "rid"),
        (b'{"text": "a", "stream": "yes"}', "InvalidRequest", "stream"),
        (b'{"input_ids": [1, "b"]}', "InvalidRequest", "input_ids"),
        (b'{"input_ids": [[1], [2]], "rid": ["x"]}', "InvalidRequest", "rid"),
        (b'{"text": "a", "sampling_params": 3}', "InvalidRequest", "sampling_params"),
    ],
)
async def test_a_malformed_request_is_400_and_names_the_field(fleet: Fleet, body: bytes, kind: str, word: str) -> None:
    await fleet.add()
    for url in (fleet.gateway.url, fleet.servers[0].url):
        async with fleet.client.post(url + "/generate", data=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (400, kind)
            assert word in error["message"]


async def test_a_request_longer_than_the_context_is_400_with_the_engines_words(fleet: Fleet) -> None:
    await fleet.add()
    status, body, _ = await fleet.post(n=100_000)
    assert (status, body["error"]["type"]) == (400, "InvalidRequest")
    assert "context length" in body["error"]["message"]


async def test_a_body_that_is_too_large_is_413(fleet: Fleet) -> None:
    await fleet.add()
    for url in (fleet.gateway.url, fleet.servers[0].url):
        async with fleet.client.post(url + "/generate", data=b" " * (2**20 + 1)) as response:
            assert response.status == 413
            assert "larger" in (await response.json())["error"]["message"]


async def test_without_the_token_only_health_answers() -> None:
    async with AsyncExitStack() as stack:
        fleet = await make_fleet(stack, token="secret")
        await fleet.add()
        for url in (fleet.gateway.url, fleet.servers[0].url):
            for path in ("/server_info", "/metrics"):
                async with fleet.client.get(url + path) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["type"] == "Unauthorized"
            assert (await fleet.get("/health", url))[0] == 200
        status, _, _ = await fleet.post(headers={"Authorization": "Bearer secret"})
        assert status == 200
        assert (await fleet.post(headers={"Authorization": "Bearer Secret"}))[0] == 401


async def test_status_pages_tell_who_serves_what(fleet: Fleet) -> None:
    replica = await fleet.add(1)
    await replica.activate(checkpoint(2))
    await fleet.post()
    await fleet.until(lambda: fleet.gateway.router.members[0].applied == 2)
    state = json.loads((await fleet.get("/fleet"))[1])
    assert state["replicas"][0]["applied"] == 2
    assert state["replicas"][0]["phase_timings"]["pause_seconds"] > 0
    info = json.loads((await fleet.get("/server_info", fleet.servers[0].url))[1])
    assert {"replica_id", "run_id", "applied", "state", "phase_timings", "active_requests"} <= set(info)
    assert info["engine"]["version"] == "fake"
    assert 'miles_gateway_answers_total{status="200"} 1' in (await fleet.get("/metrics"))[1]
    assert (
        'miles_replica_weight_version{replica_id="replica-0"} 2'
        in (await fleet.get("/metrics", fleet.servers[0].url))[1]
    )


async def test_a_replica_that_says_goodbye_is_out_of_rotation_at_once(fleet: Fleet) -> None:
    await fleet.add()
    await fleet.servers.pop().stop()
    assert fleet.gateway.router.members == []


async def test_a_replica_that_drains_before_it_leaves_finishes_what_it_has(fleet: Fleet) -> None:
    await fleet.add()
    work = asyncio.create_task(fleet.post(n=60))
    await fleet.until(lambda: fleet.replicas[0].gate.active == 1)
    await fleet.servers.pop().stop(drain_seconds=10.0)
    assert (await work)[0] == 200
    assert fleet.engines[0].bodies[-1]["sampling_params"]["max_new_tokens"] == 60
    assert fleet.gateway.router.members == []


async def test_a_restarted_gateway_learns_its_replicas_from_their_heartbeats(fleet: Fleet) -> None:
    await fleet.add()
    port = int(fleet.gateway.url.rsplit(":", 1)[1])
    await fleet.gateway.stop()
    fleet.gateway = await gateway_app.serve(settings=GatewaySettings(wait=5.0), port=port)
    try:
        assert (await fleet.post())[0] == 200
    finally:
        await fleet.gateway.stop()


async def test_a_batch_in_flight_over_an_activation_says_for_each_of_its_members_who_wrote_what(fleet: Fleet) -> None:
    replica = await fleet.add()
    work = asyncio.create_task(fleet.post(n=60, input_ids=[[1], [2], [3]]))
    await fleet.until(lambda: sum(f.tokens > 5 for f in replica.gate.flights()) == 3)
    await replica.activate(checkpoint(1))
    boundaries = sorted(f.tokens for f in replica.gate.flights())
    spans = [answer["meta_info"]["weight_version_spans"] for answer in (await work)[1]]
    assert all(len(span) == 2 and [version for _, version in span] == [0, 1] for span in spans)
    assert sorted(span[1][0] for span in spans) == boundaries


@pytest.mark.parametrize("busy", ["overloaded", "activating"])
async def test_a_session_waits_for_its_replica_when_that_is_only_busy(fleet: Fleet, busy: str) -> None:
    for _ in range(2):
        await fleet.add(max_in_flight=1)
    headers = {"x-session-id": "conversation"}
    home = (await fleet.post(headers=headers))[2]["x-replica-id"]
    i = int(home[-1])
    wanted = {}
    if busy == "overloaded":
        fleet.replicas[i].gate.max_in_flight = 0
        asyncio.get_running_loop().call_later(0.2, setattr, fleet.replicas[i].gate, "max_in_flight", 1)
    else:  # the gateway has not heard yet that it is on its way: the replica itself says 409
        wanted = {"weight_version": exact(0)}
        fleet.replicas[i].gate.begin_drain(ref(1))
        asyncio.get_running_loop().call_later(0.2, fleet.replicas[i].gate.cancel_drain)
    status, _, answered = await fleet.post(headers=headers, **wanted)
    assert (status, answered["x-replica-id"]) == (200, home)
    assert "x-session-rebound" not in answered
