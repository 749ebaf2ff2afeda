"""The processes of one managed engine: one, or one on each node that the engine spans. Ray-free.

They are started, looked at and ended together: SGLang's ranks cannot go on without one another. When to start them
again, and what they serve then, is `host`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_disagg.config.machine import free_port, on_free_ports
from miles_disagg.domain.errors import EngineStartError, MilesDisaggError, PortTaken
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine import launch
from miles_disagg.engine.launch import NodeRank

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class EngineCommand:
    """The engine's process: kind, checkpoint, device (`cpu`, `cuda`), SGLang's python, further arguments, log file,
    tensor-parallel ranks."""

    kind: Literal["embedded", "sglang"]
    model_path: str
    device: str
    log_path: Path
    python: str | None = None
    args: tuple[str, ...] = ()
    ranks: int = 1

    def spec(
        self, port: int, version: VersionRef | None, host: str = "127.0.0.1", node: NodeRank | None = None
    ) -> launch.LaunchSpec:
        """The command line on `host:port`, stamped `version` (None: of no run). node: its place among several."""
        common: dict[str, Any] = {
            "host": host,
            "port": port,
            "device": self.device,
            "weight_version": "default" if version is None else str(version),
            "args": (*self.args, *(node.args if node else ())),
        }
        if self.kind == "sglang":
            return launch.sglang(self.model_path, python=self.python, ranks=self.ranks, **common)
        return launch.embedded(self.model_path, **common)

    def on_node(self, rank: int) -> EngineCommand:
        """The same for another node, with a log of its own."""
        return replace(self, log_path=self.log_path.with_stem(f"{self.log_path.stem}-node-{rank}"))


class NodeLost(MilesDisaggError):
    """The node of an engine's process, or what starts processes there, is gone: nothing can be started there again."""


class Node(Protocol):
    """Another node of an engine. Every method raises NodeLost if it is gone."""

    async def start(self, command: EngineCommand, version: VersionRef | None, node: NodeRank) -> None:
        """Start its process and return at once."""
        ...

    async def ended(self) -> str | None:
        """How its process ended, with the last lines of its log; None while it runs."""
        ...

    async def port_taken(self) -> str | None:
        """Its process's last lines if they say that a port was in use, which need not end it; None if not."""
        ...

    async def sees(self, path: str) -> bool:
        """True if the file `path` is there too."""
        ...

    async def stop(self) -> None:
        """End its process."""
        ...


class NodeServer:
    """A `Node` in this process."""

    def __init__(self) -> None:
        self._process: launch.EngineProcess | None = None
        self._name = "its process"

    async def start(self, command: EngineCommand, version: VersionRef | None, node: NodeRank) -> None:
        """See `Node`."""
        spec = command.on_node(node.rank).spec(free_port(), version, node=node)
        self._name = f"the process on node {node.rank} of {node.count}"
        self._process = launch.EngineProcess.start(spec, command.on_node(node.rank).log_path)

    async def ended(self) -> str | None:
        """See `Node`."""
        process = self._process
        if process is None or process.exit_code is None:
            return None if process is not None else f"{self._name} was not started"
        return (
            f"{self._name} ended with status {process.exit_code}. Last lines of {process.log_path}:\n"
            f"{process.log_tail()}"
        )

    async def port_taken(self) -> str | None:
        """See `Node`."""
        said = None if self._process is None else self._process.port_taken()
        return None if said is None else f"{self._name} found a port in use. {said}"

    async def sees(self, path: str) -> bool:
        """See `Node`."""
        return Path(path).exists()

    async def stop(self) -> None:
        """See `Node`."""
        if self._process is not None:
            await self._process.stop()


class EngineProcesses:
    """See the module. version: what the first one is stamped with (None: of no run). nodes: those beside this one;
    address: where they reach this one; host, port: where a single one listens (0: on a free one)."""

    def __init__(
        self,
        command: EngineCommand,
        version: VersionRef | None,
        start_timeout: float,
        nodes: Sequence[Node] = (),
        address: str = "127.0.0.1",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        self._command, self._version, self._timeout = command, version, start_timeout
        self._nodes, self._address, self._host = nodes, address, host
        self._port = port
        self._process: launch.EngineProcess | None = None

    async def start(self) -> str:
        """Start on its port or a free one (the same one at a restart) and wait until it answers; its URL. Where
        somebody else was faster at a free one, others are tried.

        EngineStartError or DeadlineExceeded carry the last lines of the process that failed; nothing is left running.
        """
        command, version = self._command, self._version
        if not self._nodes:
            self._process = await launch.EngineProcess.started(
                lambda port: command.spec(port, version, self._host), command.log_path,
                host=self._host, port=self._port, timeout=self._timeout,
            )  # fmt: skip
            self._port = self._process.spec.port
            return self._process.url
        self._process = await on_free_ports(self._start_all)  # at a restart too: only the first process's is given
        self._port = self._process.spec.port
        return self._process.url

    async def _start_all(self) -> launch.EngineProcess:
        """Every node's process, once they answer as one. All ports are new ones, but at a restart the first one's."""
        try:
            return await self._started()
        except BaseException:
            await self.stop()
            raise

    async def _started(self) -> launch.EngineProcess:
        command, version, count = self._command, self._version, 1 + len(self._nodes)
        first = NodeRank(0, count, f"{self._address}:{free_port(self._address)}")
        spec = command.spec(self._port or free_port(), version, node=first)
        self._process = process = launch.EngineProcess.start(spec, command.log_path)
        places = [replace(first, rank=i) for i in range(1, count)]
        await asyncio.gather(*(n.start(command, version, p) for n, p in zip(self._nodes, places, strict=True)))
        await self._ready(process)
        return process

    async def _ready(self, process: launch.EngineProcess) -> None:
        """Until the first process answers, which it does when all are there; EngineStartError when another ends,
        PortTaken when one of them found a port in use: it would hang, not end."""
        ready = asyncio.create_task(process.wait_ready(self._timeout))
        try:
            while not (await asyncio.wait({ready}, timeout=_LOOK_SECONDS))[0]:
                for taken in await asyncio.gather(*(n.port_taken() for n in self._nodes)):
                    if taken is not None:
                        raise PortTaken(f"engine at {process.url} did not start: {taken}")
                if (ended := await self._another_ended()) is not None:
                    raise EngineStartError(f"engine at {process.url} did not start: {ended}")
            ready.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def ended(self) -> str | None:
        """How one of the processes ended, None while all run. NodeLost."""
        assert self._process is not None
        if (code := self._process.exit_code) is not None:
            return f"the engine process ended with status {code}"
        return await self._another_ended()

    async def _another_ended(self) -> str | None:
        return next((e for e in await asyncio.gather(*(n.ended() for n in self._nodes)) if e is not None), None)

    @property
    def further(self) -> int:
        """Nodes beside this one."""
        return len(self._nodes)

    async def blind_to(self, path: Path) -> list[int]:
        """Ranks of the nodes that do not see `path`."""
        seen = await asyncio.gather(*(n.sees(str(path)) for n in self._nodes))
        return [i for i, sees in enumerate(seen, 1) if not sees]

    def kill(self) -> None:
        """SIGKILL the first process, which `ended` then tells of."""
        if self._process is not None:
            self._process.kill()

    def log_tail(self) -> str:
        """Last lines of the first process."""
        return "" if self._process is None else self._process.log_tail()

    async def stop(self) -> None:
        """End all. Nothing is left running where the node is still there."""

        async def on(node: Node) -> None:
            with suppress(NodeLost):
                await node.stop()

        first = [] if self._process is None else [self._process.stop()]
        await asyncio.gather(*first, *(on(node) for node in self._nodes))
