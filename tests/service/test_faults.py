"""Faults of the machines and the network around a service of real processes: clocks, stores, gateways, hung engines."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from miles_disagg.config.machine import free_port
from miles_disagg.store.base import open_store
from tests.fakes.publishing import FakeTrainer, step
from tests.fakes.service import Service, serves
from tests.fakes.tcp_proxy import tcp_proxy
from tests.service.test_service import Load, trainer_of
from tests.store.conftest import BUCKET, CREDENTIALS, weed_endpoint  # noqa: F401 - a fixture

Tensors = dict[str, torch.Tensor]


@pytest.mark.slow
async def test_clocks_that_are_ten_minutes_off_in_both_directions_change_nothing(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("no libfaketime on this machine (apt-get install faketime)")
    fake = {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        service.env = {**fake, "FAKETIME": "+600s"}
        await service.add("ahead", "--relay")
        service.env = {**fake, "FAKETIME": "-600s"}
        await service.add("behind", "--relay")
        service.env = None
        await service.add("right", "--relay")
        names = ("ahead", "behind", "right")
        await service.until(serves("run", 0, *names))
        now = time.time()
        starts = {name: first_stamp(service, name) for name in names}
        assert starts["ahead"] - now > 500
        assert starts["behind"] - now < -500
        load = Load(service, "run")
        for version in range(1, 4):
            tensors = step(tensors, version)
            load.newest = (await trainer.publish(tensors)).ref.version
            await service.until(serves("run", version, *names))
        service.kill("right")
        await service.until(serves("run", 3, "ahead", "behind"))
        seen = await load.end()
    assert len({meta["id"] for meta in seen}) == len(seen) > 0
    assert {meta["replica_id"] for meta in seen} == set(names)


def first_stamp(service: Service, name: str) -> float:
    """Unix time that a replica's process believed it was when it first logged."""
    lines = service.replicas[name].log.read_text().splitlines()
    stamp = next(line[:19] for line in lines if line[:2] == "20" and line[10] == " ")
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))


@pytest.mark.slow
async def test_a_rid_is_answered_once_whichever_gateway_it_comes_through(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        first, port = service.url, free_port()
        other = service.start("gateway", "--port", str(port), "--expiry", "2", log="other-gateway")
        second = await other.ready()
        await asyncio.gather(*(service.add(name, "--gateway", second) for name in "abc"))
        for service.url in (first, second):
            await service.until(serves("run", 0, *"abc"))

        async def ask(url: str, rid: str) -> dict[str, Any]:
            sampling = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
            body = {"input_ids": [1, 2, 3], "rid": rid, "sampling_params": sampling}
            while True:
                try:
                    async with service.client.post(f"{url}/generate", json=body) as response:
                        if response.status == 200:
                            return await response.json()
                        assert response.status in (409, 429, 503), await response.text()
                except aiohttp.ClientError:
                    url = second
                await asyncio.sleep(0.05)

        pairs = await asyncio.gather(*(ask(url, f"r{i}") for i in range(8) for url in (first, second)))
        for i in range(8):
            one, two = pairs[2 * i : 2 * i + 2]
            assert one == two
            assert await ask(second, f"r{i}") == one
        lost = [asyncio.create_task(ask(first, f"s{i}")) for i in range(8)]
        await asyncio.sleep(0.05)
        service.gateway.signal(signal.SIGKILL)  # their connections are lost, and they come again through the other one
        answers = await asyncio.gather(*lost)
        assert [await ask(second, f"s{i}") for i in range(8)] == answers
    assert len({tuple(a["output_ids"]) for a in [*pairs[::2], *answers]}) > 8, "sampled, so equality means something"


@pytest.mark.slow
async def test_an_engine_that_hangs_is_taken_out_and_comes_back(
    tmp_path: Path, checkpoint: Path, tensors: Tensors
) -> None:
    trainer = await trainer_of(tmp_path / "store", checkpoint, "run")
    async with Service(tmp_path / "service", str(tmp_path / "store"), checkpoint) as service:
        await asyncio.gather(service.add("a"), service.add("b"))
        await service.until(serves("run", 0, "a", "b"))
        load = Load(service, "run")
        await asyncio.sleep(0.5)
        service.engines["a"].signal(signal.SIGSTOP)
        await service.until(lambda fleet: not fleet["a"]["ready"] and "does not answer" in fleet["a"]["reason"], 60)
        load.newest = (await trainer.publish(step(tensors, 1))).ref.version
        await service.until(lambda fleet: fleet["b"]["applied"] == 1)
        service.engines["a"].signal(signal.SIGCONT)
        await service.until(serves("run", 1, "a", "b"))
        service.gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(4.0)  # longer than its patience with replicas
        service.gateway.signal(signal.SIGCONT)
        await service.until(serves("run", 1, "a", "b"), 30)
        seen = await load.end()
    assert len({meta["id"] for meta in seen}) == len(seen) > 0


@pytest.mark.slow
@pytest.mark.s3
async def test_a_store_that_is_unreachable_for_thirty_seconds_costs_no_request(
    tmp_path: Path,
    checkpoint: Path,
    tensors: Tensors,
    weed_endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": weed_endpoint}.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    trainer = FakeTrainer(open_store(url), checkpoint, "run", ranks=1)
    for source in trainer.sources:
        source.source._companions = (checkpoint / "config.json", checkpoint / "tokenizer.json")
    await trainer.claim()
    async with tcp_proxy(int(weed_endpoint.rpartition(":")[2])) as proxy:
        env = {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url}
        async with Service(tmp_path / "service", url, checkpoint, env=env) as service:
            await asyncio.gather(service.add("a"), service.add("b"))
            await service.until(serves("run", 0, "a", "b"))
            load = Load(service, "run")
            proxy.fault = lambda n: "refuse"
            proxy.cut_all()
            await trainer.publish(step(tensors, 1))
            await asyncio.sleep(30.0)
            assert serves("run", 0, "a", "b")(await service.fleet()), "they go on serving what they have"
            proxy.fault = lambda n: None
            await service.until(serves("run", 1, "a", "b"), 60)
            load.newest = 1
            await asyncio.sleep(0.5)
            seen = await load.end()
            logs = "".join(service.replicas[name].log.read_text() for name in "ab")
    assert len({meta["id"] for meta in seen}) == len(seen) > 30
    assert {meta["weight_version"] for meta in seen} == {0, 1}
    assert "retry in" in logs, "the reason is logged"
