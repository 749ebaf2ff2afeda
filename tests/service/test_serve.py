"""`miles-disagg serve` as a process with a Ray of its own: grows with the load, heals, shrinks, ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.cluster import processes
from tests.fakes.service import Command
from tests.service.test_service import trainer_of

MARKER = "MILES_DISAGG_TEST_SERVICE"


async def fleet(client: aiohttp.ClientSession, url: str) -> dict[str, dict[str, Any]]:
    async with client.get(f"{url}/fleet") as response:
        return {r["replica_id"]: r for r in (await response.json())["replicas"] if r["ready"]}


async def until(client: aiohttp.ClientSession, service: Command, url: str, ready: int, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while len(await fleet(client, url)) != ready:
        assert service.process.poll() is None, service.log.read_text()
        assert time.monotonic() < deadline, service.log.read_text()
        await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_fleet_on_ray_grows_with_its_load_heals_shrinks_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    marker = uuid.uuid4().hex
    config = tmp_path / "service.yaml"
    config.write_text(
        f"version-store: {tmp_path / 'store'}\nbase-checkpoint: {checkpoint}\nservice-dir: {tmp_path / 'service'}\n"
        "min-replicas: 1\nmax-replicas: 2\ntarget-requests-per-replica: 4\nscale-up-seconds: 1.5\n"
        "scale-down-seconds: 4\ndrain-seconds: 20\ngateway-port: 0\nnum-gateways: 2\nrelay: true\n"
        "canary-ids: [3, 4, 5]\n"
    )
    env = {MARKER: marker, "RAY_ADDRESS": "", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    service = Command("serve", "--config", str(config), log=tmp_path / "serve.log", env=env)
    try:
        url = await service.ready(240)
        async with aiohttp.ClientSession() as client:
            await until(client, service, url, 1)

            async def ask(i: int) -> dict[str, Any]:
                body = {"input_ids": [1, 2], "rid": f"r{i}", "weight_version": {"min_version": 0}}
                body |= {"sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
                while True:
                    async with client.post(f"{url}/generate", json=body) as response:
                        if response.status == 200:
                            return (await response.json())["meta_info"]
                        assert response.status in (409, 429, 503), await response.text()
                    await asyncio.sleep(0.1)

            busy, numbers = True, iter(range(10**6))

            async def worker() -> list[dict[str, Any]]:
                out = []
                while busy:
                    out.append(await ask(next(numbers)))
                return out

            workers = [asyncio.create_task(worker()) for _ in range(16)]
            await until(client, service, url, 2)
            ref = (await trainer.publish(tensors)).ref
            victim = next(pid for pid in processes.with_text(marker) if "ServiceReplica" in title(pid))
            os.kill(victim, signal.SIGKILL)
            await until(client, service, url, 1)
            await until(client, service, url, 2)
            busy = False
            answers = [meta for part in await asyncio.gather(*workers) for meta in part]
            assert len({meta["id"] for meta in answers}) == len(answers)
            await until(client, service, url, 1)
            assert {r["applied"] for r in (await fleet(client, url)).values()} == {ref.version}
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, 60) == 0, service.log.read_text()
        assert processes.gone(marker, timeout=20) == []
    finally:
        service.stop()
    log = service.log.read_text()
    assert "leaves: the load is low" in log
    assert "died and is replaced" in log
    assert "Traceback" not in log


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
