"""A rollout service without Ray, made of the real commands as processes: gateway, embedded engines, replicas."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from miles_disagg.config.machine import free_port

ROOT = Path(__file__).parents[2]


class Command:
    """`miles-disagg NAME ...` in a process group of its own. `url` is the first one it prints."""

    def __init__(self, name: str, *args: str, log: Path, env: dict[str, str] | None = None):
        self.name, self.log = name, log
        command = [sys.executable, "-m", "miles_disagg.cli", name, *args]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._mark = f"miles-disagg {name}: "

    async def ready(self, seconds: float = 60.0) -> str:
        """Wait for the line that says where it listens."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.log.read_text()
            for line in text.splitlines():
                if line.startswith(self._mark):
                    return line.removeprefix(self._mark).split()[0]
            assert self.process.poll() is None, f"{self.name} ended:\n{text}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{text}"
            await asyncio.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send it a signal (it alone)."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGKILL the group and reap it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Service:
    """A gateway and members, each an engine and a replica. Use as an async context manager."""

    def __init__(self, root: Path, store: str, base: Path, *, gateway_flags: tuple[str, ...] = (), env=None):
        self.root, self.store, self.base, self.env = root, store, base, env
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.gateway_flags = gateway_flags
        self.engines: dict[str, Command] = {}
        self.replicas: dict[str, Command] = {}
        self._all: list[Command] = []

    async def __aenter__(self) -> Service:
        root = self.root
        root.mkdir(parents=True, exist_ok=True)
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        await self.start_gateway()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for command in reversed(self._all):
            command.stop()

    def start(self, name: str, *args: str, log: str) -> Command:
        command = Command(name, *args, log=self.root / f"{log}.log", env=self.env)
        self._all.append(command)
        return command

    async def start_gateway(self) -> None:
        flags = ("--port", str(self.port), "--expiry", "2", "--verbose", *self.gateway_flags)
        self.gateway = self.start("gateway", *flags, log=f"gateway-{len(self._all)}")
        await self.gateway.ready()

    async def add(self, name: str, *flags: str) -> None:
        """An engine and its replica."""
        port = free_port()
        engine = ("--model-path", str(self.base), "--port", str(port), "--max-running-requests", "32")
        self.engines[name] = self.start("engine", *engine, log=f"{name}-engine")
        self.engine_urls = {**getattr(self, "engine_urls", {}), name: f"http://127.0.0.1:{port}"}
        self.replicas[name] = self.start(
            "replica", "--engine", self.engine_urls[name], "--store", self.store, "--gateway", self.url,
            "--base-checkpoint", str(self.base), "--local-checkpoint-dir", str(self.root / name),
            "--replica-id", name, "--verbose", *flags, log=f"{name}-replica",
        )  # fmt: skip
        await self.replicas[name].ready()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """A host is gone: its engine and its replica at once."""
        for command in (self.replicas.pop(name), self.engines.pop(name)):
            command.signal(number)

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """What the gateway says of its replicas, by name."""
        try:
            async with self.client.get(f"{self.url}/fleet") as response:
                return {r["replica_id"]: r for r in (await response.json())["replicas"]}
        except aiohttp.ClientError:
            return {}

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool], seconds: float = 60.0) -> None:
        """Wait for the fleet to be as described."""
        deadline = time.monotonic() + seconds
        while not condition(fleet := await self.fleet()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"== {c.log.name}\n{c.log.read_text()[-2000:]}" for c in self._all)
                raise AssertionError(f"the fleet is {fleet}\n{logs}")
            await asyncio.sleep(0.1)

    async def generate(self, rid: str, run_id: str, **fields: Any) -> dict[str, Any]:
        """One request as the trainer sends it: refusals and lost connections are retried under the same rid."""
        body = {"input_ids": [1, 2, 3], "rid": rid, "return_logprob": True, **fields}
        body.setdefault("sampling_params", {"max_new_tokens": 16, "temperature": 1.0})
        async with asyncio.timeout(90):
            while True:
                try:
                    headers = {"x-run-id": run_id}
                    async with self.client.post(f"{self.url}/generate", json=body, headers=headers) as response:
                        if response.status == 200:
                            return await response.json()
                        assert response.status in (409, 429, 503), await response.text()
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


def serves(run_id: str, version: int, *names: str) -> Callable[[dict[str, dict[str, Any]]], bool]:
    """True for a fleet of exactly these members, all ready at this version."""

    def check(fleet: dict[str, dict[str, Any]]) -> bool:
        return sorted(fleet) == sorted(names) and all(
            r["ready"] and (r["run_id"], r["applied"]) == (run_id, version) for r in fleet.values()
        )

    return check


async def steadily(work: Callable[[int], Awaitable[Any]], stop: asyncio.Event, in_flight: int = 8) -> list[Any]:
    """`work(i)` for i = 0, 1, ... with so many at a time, until `stop`; all results."""
    numbers, results = iter(range(10**9)), []

    async def worker() -> None:
        while not stop.is_set():
            results.append(await work(next(numbers)))

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return results
