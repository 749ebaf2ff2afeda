"""`miles-disagg serve` as a process with a Ray of its own: grows with the load, heals, shrinks, ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.cluster import processes
from tests.fakes.publishing import FakeTrainer
from tests.fakes.service import Command
from tests.service.test_service import trainer_of

MARKER = "MILES_DISAGG_TEST_SERVICE"


async def fleet(client: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    """Ready replicas as the gateway there sees them; nobody while it does not answer."""
    try:
        async with client.get(f"{url}/fleet", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
            return {r["replica_id"]: r for r in (await response.json())["replicas"] if r["ready"]}
    except (aiohttp.ClientError, TimeoutError):
        return {}


async def until(client: aiohttp.ClientSession, service: Command, url: str, ready: int, seconds: float = 240.0) -> None:
    """Wait for so many ready replicas."""
    deadline = time.monotonic() + seconds
    while len(await fleet(client, url)) != ready:
        assert service.process.poll() is None, service.log.read_text()
        assert time.monotonic() < deadline, service.log.read_text()
        await asyncio.sleep(0.2)


class Work:
    """Workers that each send one request after the other, and again under its rid what was refused or lost."""

    def __init__(self, client: aiohttp.ClientSession, url: str, workers: int):
        self._client, self._url = client, url
        self._stops = [asyncio.Event() for _ in range(workers)]
        self._tasks = [asyncio.create_task(self._work(i, stop)) for i, stop in enumerate(self._stops)]

    async def _work(self, i: int, stop: asyncio.Event) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        while not stop.is_set():
            body = {"input_ids": [1, 2], "rid": f"w{i}-{len(out)}", "weight_version": {"min_version": 0}}
            body |= {"sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
            try:
                async with self._client.post(f"{self._url}/generate", json=body) as response:
                    if response.status == 200:
                        out.append((await response.json())["meta_info"])
                        continue
                    assert response.status in (409, 429, 503), await response.text()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        return out

    def slow_down(self, workers: int) -> None:
        """Only so many go on."""
        for stop in self._stops[workers:]:
            stop.set()

    async def end(self) -> list[dict[str, Any]]:
        """All answers: each request's once, and whole."""
        self.slow_down(0)
        answers = [meta for part in await asyncio.gather(*self._tasks) for meta in part]
        assert len({meta["id"] for meta in answers}) == len(answers) > 0
        assert {meta["finish_reason"]["type"] for meta in answers} == {"length"}, "nothing was cut short"
        return answers


def processes_of(marker: str, title: str) -> list[int]:
    """Ray workers of this test by the actor they run."""
    return [pid for pid in processes.with_text(marker) if title in title_of(pid)]


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@asynccontextmanager
async def serving(
    root: Path, checkpoint: Path, **settings: Any
) -> AsyncIterator[tuple[Command, list[str], str, FakeTrainer]]:
    """A service that ends in order, its gateways' URLs, its marker and who publishes to its store."""
    trainer = await trainer_of(root / "store", checkpoint, "run")
    marker, config = uuid.uuid4().hex, root / "service.yaml"
    settings = {"min-replicas": 1, "gateway-port": 0, "drain-seconds": 20, **settings}
    settings |= {"version-store": root / "store", "base-checkpoint": checkpoint, "service-dir": root / "service"}
    config.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    env = {MARKER: marker, "RAY_ADDRESS": "", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    service = Command("serve", "--config", str(config), log=root / "serve.log", env=env)
    try:
        await service.ready(240)
        line = next(text for text in service.log.read_text().splitlines() if text.startswith("miles-disagg serve: "))
        yield service, line.split()[2:], marker, trainer
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, 60) == 0, service.log.read_text()
        assert processes.gone(marker, timeout=20) == []
    finally:
        service.stop()
    assert "Traceback" not in service.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_fleet_on_ray_grows_with_its_load_heals_shrinks_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    settings = {
        "max-replicas": 2, "target-requests-per-replica": 4, "scale-up-seconds": 1.5, "scale-down-seconds": 4,
        "num-gateways": 2, "relay": "true", "canary-ids": [3, 4, 5],
    }  # fmt: skip
    async with (
        serving(tmp_path, checkpoint, **settings) as (service, (url, _), marker, trainer),
        aiohttp.ClientSession() as client,
    ):
        await until(client, service, url, 1)
        work = Work(client, url, 16)
        await until(client, service, url, 2)
        ref = (await trainer.publish(tensors)).ref
        os.kill(processes_of(marker, "ray::ServiceReplica")[0], signal.SIGKILL)
        await until(client, service, url, 1)
        await until(client, service, url, 2)
        work.slow_down(2)
        await until(client, service, url, 1)
        await asyncio.sleep(1.0)
        await work.end()
        assert {r["applied"] for r in (await fleet(client, url)).values()} == {ref.version}
    log = service.log.read_text()
    assert "leaves: the load is low" in log
    assert "died and is replaced" in log


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_actors_of_the_fleet_that_die_or_hang_are_replaced_under_load(tmp_path: Path, checkpoint: Path) -> None:
    settings = {"min-replicas": 2, "max-replicas": 2, "num-gateways": 2}
    async with (
        serving(tmp_path, checkpoint, **settings) as (service, urls, marker, _),
        aiohttp.ClientSession() as client,
    ):
        for url in urls:
            await until(client, service, url, 2)
        works = [Work(client, url, 4) for url in urls]
        for title in ("ray::GatewayActor", "ray::ServiceReplica"):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                before = set(processes_of(marker, title))
                victim = min(before)
                os.kill(victim, number)
                await asyncio.sleep(3.0)
                await replaced(service, marker, title, victim, len(before))
                for url in urls:
                    await until(client, service, url, 2)
        for work in works:
            await work.end()
    log = service.log.read_text()
    assert log.count("died and is started again") >= 2  # once more if its port was not free yet
    assert log.count("died and is replaced") == 2
    assert log.count("owes 3 answers in a row") == 2


async def replaced(service: Command, marker: str, title: str, victim: int, count: int, seconds: float = 120.0) -> None:
    """Wait until the victim is gone and there are as many as before."""
    deadline = time.monotonic() + seconds
    while victim in (now := processes_of(marker, title)) or len(now) < count:
        assert time.monotonic() < deadline, f"{victim} of {now}:\n{service.log.read_text()}"
        await asyncio.sleep(0.2)
