"""The Ray shell of one further node of an engine that spans several: it starts that node's process there.

A process dies with its actor, an actor with its node. What is started together is `processes`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError

from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.launch import NodeRank
from miles_disagg.rollout.processes import EngineCommand, NodeLost, NodeServer


@ray.remote(max_restarts=0)
class EngineNode:
    """One node's process of an engine."""

    def __init__(self) -> None:
        self._node = NodeServer()

    async def start(self, command: EngineCommand, version: VersionRef | None, node: NodeRank) -> None:
        await self._node.start(command, version, node)

    async def ended(self) -> str | None:
        return await self._node.ended()

    async def port_taken(self) -> str | None:
        return await self._node.port_taken()

    async def sees(self, path: str) -> bool:
        return await self._node.sees(path)

    async def stop(self) -> None:
        await self._node.stop()


class RemoteNode:
    """`processes.Node` of an EngineNode. deadline: seconds for one answer."""

    def __init__(self, actor: Any, name: str, deadline: float = 60.0):
        self._actor, self._name, self._deadline = actor, name, deadline

    async def start(self, command: EngineCommand, version: VersionRef | None, node: NodeRank) -> None:
        """See `Node`."""
        await self._ask("start", command, version, node)

    async def ended(self) -> str | None:
        """See `Node`."""
        return await self._ask("ended")

    async def port_taken(self) -> str | None:
        """See `Node`."""
        return await self._ask("port_taken")

    async def sees(self, path: str) -> bool:
        """See `Node`."""
        return await self._ask("sees", path)

    async def stop(self) -> None:
        """See `Node`."""
        await self._ask("stop")

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._deadline):
                return await getattr(self._actor, method).remote(*args)
        except RayActorError as error:
            raise NodeLost(f"{self._name}: its process died ({error.__class__.__name__})") from error
        except TimeoutError:
            raise NodeLost(f"{self._name} did not answer `{method}` within {self._deadline:g} s") from None
