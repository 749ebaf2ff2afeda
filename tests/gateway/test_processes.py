"""Gateway and replicas as processes that are killed and stopped under load: nothing lost, nothing answered twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from miles_disagg.config.machine import free_port
from tests.fakes.replica import at_least, ref
from tests.fakes.serve_role import RoleProcess


class Service:
    """One gateway process and two replica processes."""

    def __init__(self, client: aiohttp.ClientSession, stack: AsyncExitStack):
        self.client, self._stack = client, stack
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.gateway: RoleProcess
        self.replicas: list[RoleProcess] = []
        self.tokens = 40

    def start(self, role: str, *args: str) -> RoleProcess:
        process = RoleProcess(role, *args)
        self._stack.callback(process.stop)
        return process

    async def post(self, rid: str, **fields: Any) -> dict[str, Any]:
        """One request as a trainer sends it: refusals and lost connections are retried under the same rid."""
        sampling = {"max_new_tokens": self.tokens}
        body = {"input_ids": [1, 2], "rid": rid, "sampling_params": sampling, "weight_version": at_least(0), **fields}
        async with asyncio.timeout(60):
            while True:
                try:
                    async with self.client.post(f"{self.url}/generate", json=body) as response:
                        if response.status == 200:
                            return await response.json()
                        assert response.status in (409, 429, 503), await response.text()
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def fleet(self) -> list[dict[str, Any]]:
        async with self.client.get(f"{self.url}/fleet") as response:
            return (await response.json())["replicas"]

    async def until_replicas(self, n: int) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    if len(await self.fleet()) == n:
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        service = Service(client, stack)
        service.gateway = service.start("gateway", str(service.port))
        service.replicas = [service.start("replica", f"replica-{i}", str(ref(3)), service.url) for i in range(2)]
        await asyncio.gather(service.gateway.ready(), *(r.ready() for r in service.replicas))
        await service.until_replicas(2)
        yield service


def complete(answers: list[dict[str, Any]], n: int, tokens: int) -> bool:
    ids = [a["meta_info"]["id"] for a in answers]
    return sorted(ids) == sorted(f"r{i}" for i in range(n)) and all(
        a["meta_info"]["completion_tokens"] == tokens and a["meta_info"]["weight_version_spans"] == [[0, 3]]
        for a in answers
    )


async def test_a_killed_replica_process_loses_nothing(service: Service) -> None:
    work = [asyncio.create_task(service.post(f"r{i}")) for i in range(30)]
    await asyncio.sleep(0.1)
    service.replicas[0].signal(signal.SIGKILL)
    answers = await asyncio.gather(*work)
    assert complete(answers, 30, service.tokens)
    assert any(a["meta_info"]["replica_id"] == "replica-1" for a in answers)
    await service.until_replicas(1)


async def test_a_stopped_replica_process_is_abandoned_and_comes_back(service: Service) -> None:
    work = [asyncio.create_task(service.post(f"r{i}")) for i in range(30)]
    await asyncio.sleep(0.1)
    service.replicas[0].signal(signal.SIGSTOP)
    answers = await asyncio.gather(*work)
    assert complete(answers, 30, service.tokens)
    await service.until_replicas(1)
    service.replicas[0].signal(signal.SIGCONT)
    await service.until_replicas(2)


async def test_a_killed_gateway_process_is_replaced_and_rids_keep_their_answers(service: Service) -> None:
    first = await service.post("r0")
    work = [asyncio.create_task(service.post(f"r{i}")) for i in range(1, 20)]
    await asyncio.sleep(0.1)
    service.gateway.signal(signal.SIGKILL)
    await asyncio.sleep(0.1)
    await service.start("gateway", str(service.port)).ready()
    answers = [first, *await asyncio.gather(*work)]
    assert complete(answers, 20, service.tokens)
    await service.until_replicas(2)
    again = await asyncio.gather(*(service.post("r0") for _ in range(4)))
    assert all(a == first for a in again)
