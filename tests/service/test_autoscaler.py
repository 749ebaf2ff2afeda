"""`miles-disagg serve` on a Ray cluster that has no room: Ray's autoscaler adds a node a replica and takes it back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
import torch

from tests.fakes.autoscaling import autoscaling_ray
from tests.fakes.service import Command
from tests.service.test_serve import Work, fleet, until
from tests.service.test_service import trainer_of


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nodes_are_added_for_the_replicas_that_the_load_asks_for_and_taken_back(
    tmp_path: Path, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    config = tmp_path / "service.yaml"
    config.write_text(
        f"version-store: {tmp_path / 'store'}\nbase-checkpoint: {checkpoint}\nservice-dir: {tmp_path / 'service'}\n"
        "min-replicas: 1\nmax-replicas: 2\ntarget-requests-per-replica: 4\nscale-up-seconds: 1.5\n"
        "scale-down-seconds: 3\ndrain-seconds: 30\ngateway-port: 0\nrollout-node-resource: rollout\n"
        "placement-timeout: 120\n"
    )
    with autoscaling_ray(tmp_path, {"CPU": 1, "rollout": 1}, most=2, idle_seconds=3.0) as ray:
        assert ray.nodes() == 0
        flags = ("--config", str(config), "--ray-address", ray.address)
        service = Command("serve", *flags, log=tmp_path / "serve.log", env=ray.env)
        try:
            url = await service.ready(120)
            async with aiohttp.ClientSession() as client:
                await until(client, service, url, 1)
                assert ray.nodes() == 1, "the head has no room for a replica"
                work = Work(client, url, 12)
                await until(client, service, url, 2)
                assert ray.nodes() == 2
                ref = (await trainer.publish(tensors)).ref
                await asyncio.sleep(2.0)
                work.slow_down(2)
                await until(client, service, url, 1)
                await asyncio.to_thread(ray.until, 1, 90.0)
                answers = await work.end()
                assert len({meta["replica_id"] for meta in answers}) == 2
                assert {r["applied"] for r in (await fleet(client, url)).values()} == {ref.version}
            service.signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.process.wait, 60) == 0, service.log.read_text()
            await asyncio.to_thread(ray.until, 0, 90.0)
        finally:
            service.stop()
    log = service.log.read_text()
    assert "leaves: the load is low" in log
    assert "Traceback" not in log
