"""What one client can cost the others: sizes, times, bodies that never come, answers that nobody reads, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from miles_disagg.replica.activation import ActivationLimits
from tests.fakes.replica import checkpoint, exact, ref
from tests.gateway.test_gateway import Fleet, make_fleet


@asynccontextmanager
async def fleet_of(replicas: int = 1, **settings: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = await make_fleet(stack, **settings)
        for _ in range(replicas):
            await fleet.add()
        yield fleet


async def test_above_its_own_limit_a_gateway_says_429_and_then_serves_again() -> None:
    async with fleet_of(max_in_flight=2) as fleet:
        work = [asyncio.create_task(fleet.post(n=100)) for _ in range(2)]
        await fleet.until(lambda: fleet.replicas[0].gate.active == 2)
        status, body, headers = await fleet.post()
        assert (status, body["error"]["type"]) == (429, "Overloaded")
        assert int(headers["Retry-After"]) >= 1
        assert [a[0] for a in await asyncio.gather(*work)] == [200, 200]
        assert (await fleet.post())[0] == 200


async def test_an_answer_that_takes_too_long_is_504_and_frees_the_engine() -> None:
    async with fleet_of(request=0.3) as fleet:
        status, body, _ = await fleet.post(n=4000)
        assert (status, body["error"]["type"]) == (504, "DeadlineExceeded")
        await fleet.until(lambda: not fleet.engines[0].requests)
        assert fleet.replicas[0].gate.active == 0


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async with fleet_of(request=0.3) as fleet:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4000}, "stream": True}
        async with fleet.client.post(fleet.gateway.url + "/generate", json=body) as response:
            events = [line async for line in response.content if line.startswith(b"data: ")]
        assert len(events) > 3
        assert json.loads(events[-2][6:])["error"]["type"] == "DeadlineExceeded"
        assert events[-1] == b"data: [DONE]\n"
        await fleet.until(lambda: not fleet.engines[0].requests)


async def test_a_body_that_never_comes_is_408() -> None:
    async with fleet_of(receive=0.2) as fleet:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "did not arrive in 0.2 s" in json.loads(await reader.readuntil(b"}}"))["error"]["message"]
        writer.close()
        assert (await fleet.post())[0] == 200


async def test_a_client_that_reads_nothing_holds_neither_an_activation_nor_its_place() -> None:
    async with fleet_of(0, request=4.0) as fleet:
        replica = await fleet.add(activation=ActivationLimits(drain=0.2))
        fleet.engines[0].token_delay = 0.0
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4000}, "stream": True}
        raw = json.dumps({**body, "weight_version": exact(0)}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            where = ("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2]))
            await asyncio.get_running_loop().sock_connect(client, where)
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(client, head + raw)
            member = fleet.gateway.router.members[0]
            await fleet.until(lambda: any(f.tokens > 1500 for f in replica.gate.flights()))  # more than sockets hold
            fleet.engines[0].token_delay = 0.01  # it would go on for half a minute
            async with asyncio.timeout(2.0):
                await replica.activate(checkpoint(1))
            assert replica.applied == ref(1)
            assert replica.gate.active == 0
            assert len(member.outstanding) == 1, "the gateway still has bytes for it"
            await fleet.until(lambda: not member.outstanding, seconds=10.0)


SECRET = "what-the-user-wrote"


@pytest.mark.parametrize("replicas", [0, 2])
async def test_no_text_of_a_request_is_logged_whatever_becomes_of_it(
    replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "miles_disagg")
    async with fleet_of(replicas, wait=0.1) as fleet:
        for body in (
            {"text": SECRET},
            {"text": SECRET, "sampling_params": {"max_new_tokens": 10**6}},
            {"text": SECRET, "weight_version": SECRET},
            {"text": SECRET, "weight_version": {"min_version": 7}},
            {"text": SECRET, "weight_version": {"min_version": SECRET}},
            {"text": SECRET, "rid": f"{SECRET} {SECRET}"},
            {"text": SECRET, "stream": SECRET},
            {"text": [SECRET, 3]},
            {"text": SECRET, "sampling_params": SECRET},
            {SECRET: SECRET},
        ):
            async with fleet.client.post(fleet.gateway.url + "/generate", json=body) as response:
                await response.read()
        for path in ("/generate", "/replicas", "/hold"):
            async with fleet.client.post(fleet.gateway.url + path, data=f'{{"text": {SECRET}') as response:
                assert response.status == 400
        if replicas:
            work = asyncio.create_task(fleet.post(n=1500, text=SECRET, input_ids=None))
            await fleet.until(lambda: any(engine.requests for engine in fleet.engines))
            at = next(i for i, engine in enumerate(fleet.engines) if engine.requests)
            fleet.engines[1 - at].token_delay = 0.0
            heart = fleet.servers[at]._heart
            assert heart is not None
            for task in heart._tasks:  # it falls silent, and the request goes elsewhere
                task.cancel()
            assert (await work)[0] == 200
            assert "replica-" in caplog.text
    assert SECRET not in caplog.text
