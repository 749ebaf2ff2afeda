"""A gateway's process killed or stopped: another one answers at the same URL, or the run ends by name."""

import asyncio
import os
import signal
import socket
import time
import urllib.request

import psutil
import pytest

from miles_disagg.cluster.calls import Lifeline, Pulse
from miles_disagg.cluster.gateway import KeptGateway, Listening
from miles_disagg.config.machine import port_problem
from miles_disagg.domain.errors import PortTaken
from miles_disagg.gateway.actor import GatewayActor
from miles_disagg.gateway.app import GatewaySettings


def process() -> psutil.Process:
    """The one gateway below this process."""
    below = psutil.Process().children(recursive=True)
    (found,) = [p for p in below if p.is_running() and "ray::GatewayActor" in " ".join(p.cmdline())]
    return found


def answers(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/fleet", timeout=10) as response:
        return response.status == 200


async def until_free(port: int) -> None:
    deadline = time.monotonic() + 30
    while port_problem("127.0.0.1", port):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def kept_gateway(said: list[str]) -> KeptGateway:
    return KeptGateway(
        "gateway", lambda: GatewayActor.remote(), Listening("127.0.0.1", 0, "run", GatewaySettings()), said.append
    )


async def until_it_listens_again(said: list[str]) -> None:
    deadline = time.monotonic() + 60
    while not any("listens again" in line for line in said):
        assert time.monotonic() < deadline, said
        await asyncio.sleep(0.1)


def test_a_killed_gateway_is_there_again_under_its_url(local_ray):
    said: list[str] = []
    kept = kept_gateway(said)

    async def go() -> None:
        url = await kept.start()
        keeping = asyncio.create_task(kept.keep())
        process().kill()
        await until_it_listens_again(said)
        assert kept.url == url
        assert await asyncio.to_thread(answers, url)
        keeping.cancel()
        await kept.stop(10.0)
        await until_free(int(url.rpartition(":")[2]))

    asyncio.run(asyncio.wait_for(go(), 150))
    assert kept.deaths == 1
    assert sum("died and is started again" in line for line in said) == 1


@pytest.mark.slow
def test_a_gateway_whose_port_is_taken_meanwhile_is_tried_again_then_ends_the_run_by_name(local_ray, monkeypatch):
    said: list[str] = []
    kept = kept_gateway(said)

    async def go() -> None:
        url = await kept.start()
        port = int(url.rpartition(":")[2])
        process().kill()
        await until_free(port)
        with socket.create_server(("127.0.0.1", port)):  # somebody else was faster
            with pytest.raises(PortTaken, match=f"gateway cannot listen on 127.0.0.1:{port}"):
                await kept.look()
            monkeypatch.setattr("miles_disagg.cluster.gateway.RETURN_SECONDS", 0.0)
            lifeline = Lifeline()
            await asyncio.wait_for(kept.keep(lifeline), 60)
            assert f"gateway at {url} died" in str(lifeline.error)
            assert "cannot listen" in str(lifeline.error)
        await kept.look()
        assert await asyncio.to_thread(answers, url)
        await kept.stop(10.0)

    asyncio.run(asyncio.wait_for(go(), 150))
    assert kept.deaths == 1
    assert sum("died and is started again" in line for line in said) == 1


@pytest.mark.slow
def test_a_gateway_that_hangs_is_replaced_too(local_ray):
    said: list[str] = []
    kept = kept_gateway(said)

    async def go() -> None:
        url = await kept.start()
        kept._pulse = Pulse("gateway", seconds=1.0)
        os.kill(process().pid, signal.SIGSTOP)
        keeping = asyncio.create_task(kept.keep())
        await until_it_listens_again(said)
        assert await asyncio.to_thread(answers, url)
        keeping.cancel()
        await kept.stop(10.0)

    asyncio.run(asyncio.wait_for(go(), 120))
    assert "owes 3 answers in a row" in said[0]
