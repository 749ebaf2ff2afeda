"""Engines that somebody else runs: real server processes on fixed ports, started, killed and started again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_disagg.cluster.reach import port_open
from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
from miles_disagg.engine.launch import EngineProcess, LaunchSpec
from tests.engine import sglang_env


class OutsideEngine:
    """One server. kind: `embedded` (`miles-disagg engine`) or `sglang`; args: of its command line; env: beside ours."""

    def __init__(self, kind: str, checkpoint: Path, log: Path, *args: str, env: Mapping[str, str] | None = None):
        self.kind, self.checkpoint, self.log, self.args, self.env = kind, checkpoint, log, args, env
        self.port = free_port()
        self.process: EngineProcess | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def spec(self) -> LaunchSpec:
        """Its command line."""
        if self.kind == "sglang":
            args = ("--dtype", "float32", *self.args)
            where = {"port": self.port, "device": "cpu", "python": sglang_env.python()}
            return launch.sglang(self.checkpoint, **where, args=args, env=self.env)
        command = [sys.executable, "-m", "miles_disagg.cli", "engine", "--model-path", str(self.checkpoint)]
        command += ["--port", str(self.port), *self.args]
        return LaunchSpec(tuple(command), "127.0.0.1", self.port, str(self.checkpoint), {"OMP_NUM_THREADS": "1"})

    async def start(self, timeout: float = 240.0, command: Sequence[str] = (), *, wait: bool = True) -> None:
        """Start it (by another command, if given) and wait until it answers as what it was started with."""
        spec = self.spec()
        self.process = EngineProcess.start(replace(spec, command=tuple(command) or spec.command), self.log)
        if wait:
            await self.process.wait_ready(timeout)

    async def answers(self, api_key: str, timeout: float = 60.0) -> None:
        """Wait until it answers to its key."""
        assert self.process is not None
        self.process.spec = replace(self.process.spec, api_key=api_key)
        await self.process.wait_ready(timeout)

    async def kill(self) -> None:
        """SIGKILL, at once."""
        assert self.process is not None
        self.process.kill()
        await self.process.stop()


class OutsideRouter:
    """A real sglang-router, in regular or prefill/decode mode, with no worker at first."""

    def __init__(self, log: Path, *args: str):
        self.port, self.log, self.args = free_port(), log, args
        self.process: EngineProcess | None = None

    async def start(self, timeout: float = 60.0) -> None:
        """Start it and wait until it answers."""
        # it dies of a metrics port that is taken
        ports = ("--port", str(self.port), "--prometheus-port", str(free_port()))
        command = (str(sglang_env.router()), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", *ports)
        checks = ("--policy", "round_robin", "--health-check-interval-secs", "1")
        spec = LaunchSpec((*command, *checks, *self.args), "127.0.0.1", self.port, "", {}, ("PYTHONPATH",))
        self.process = EngineProcess.start(spec, self.log)
        deadline = time.monotonic() + timeout
        while not await port_open("127.0.0.1", self.port):
            assert self.process.exit_code is None, self.process.log_tail()
            assert time.monotonic() < deadline, self.process.log_tail()
            await asyncio.sleep(0.1)


async def started(engines: list[OutsideEngine]) -> None:
    """All of them."""
    await asyncio.gather(*(engine.start() for engine in engines))


async def ended(engines: Sequence[OutsideEngine | OutsideRouter]) -> None:
    """All that run."""
    await asyncio.gather(*(engine.process.stop() for engine in engines if engine.process is not None))
