"""Engines that somebody else runs: real server processes on fixed ports, started, killed and started again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from miles_disagg.engine import launch
from miles_disagg.engine.launch import EngineProcess, LaunchSpec
from tests.engine import sglang_env


class OutsideEngine:
    """One server. kind: `embedded` (`miles-disagg engine`) or `sglang`; args: of its command line."""

    def __init__(self, kind: str, checkpoint: Path, log: Path, *args: str):
        self.kind, self.checkpoint, self.log, self.args = kind, checkpoint, log, args
        self.port = launch.free_port()
        self.process: EngineProcess | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def _spec(self) -> LaunchSpec:
        if self.kind == "sglang":
            args = ("--dtype", "float32", *self.args)
            return launch.sglang(self.checkpoint, port=self.port, device="cpu", python=sglang_env.python(), args=args)
        command = [sys.executable, "-m", "miles_disagg.cli", "engine", "--model-path", str(self.checkpoint)]
        command += ["--port", str(self.port), *self.args]
        return LaunchSpec(tuple(command), "127.0.0.1", self.port, str(self.checkpoint), {"OMP_NUM_THREADS": "1"})

    async def start(self, timeout: float = 240.0) -> None:
        """Start it and wait until it answers."""
        self.process = EngineProcess.start(self._spec(), self.log)
        await self.process.wait_ready(timeout)

    async def kill(self) -> None:
        """SIGKILL, at once."""
        assert self.process is not None
        self.process.kill()
        await self.process.stop()


async def started(engines: list[OutsideEngine]) -> None:
    """All of them."""
    await asyncio.gather(*(engine.start() for engine in engines))


async def ended(engines: list[OutsideEngine]) -> None:
    """All that run."""
    await asyncio.gather(*(engine.process.stop() for engine in engines if engine.process is not None))
