"""Digests of what an engine serves, tensor by tensor, wherever they can be had.

The embedded engine is asked; out of SGLang the plugin copies the live weights, one session for each engine.
"""

from __future__ import annotations

from pathlib import Path

from miles_disagg.engine.base import Engine
from miles_disagg.engine.group import RoutedEngine, same_digests
from miles_disagg.replica.activation import Activator
from miles_disagg.replica.inplace import InPlaceLoader, InPlaceUnavailable, Plugin
from miles_disagg.replica.proof import CannotLook


class Exports:
    """Of one replica's engine. checkpoint: the run's base, for names and shapes; loader: whose session is used, if
    there is one."""

    def __init__(self, engine: Engine, activator: Activator, checkpoint: Path | None, loader: InPlaceLoader | None):
        self._engine, self._activator, self._checkpoint, self._loader = engine, activator, checkpoint, loader
        self._plugin: Plugin | None = None

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor as it is served; CannotLook if the plugin is not in the engine.

        EngineError where the engines behind a router do not hold the same.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise CannotLook("the run's base checkpoint is not known here")
        async with self._activator.undisturbed():
            if isinstance(self._engine, RoutedEngine):
                return await self._of_each(self._engine, checkpoint)
            if self._loader is not None:
                return await self._loader.plugin.digests(checkpoint)
            if self._plugin is None:
                self._plugin = await _opened(self._engine, checkpoint)
            try:
                return await self._plugin.digests(checkpoint)
            except InPlaceUnavailable:  # the engine was started anew: another session next time
                self.close()
                raise

    async def _of_each(self, group: RoutedEngine, checkpoint: Path) -> dict[str, str]:
        seen = {}
        for member in group.members.present:
            plugin = await _opened(member.engine, checkpoint)
            try:
                seen[member.url] = await plugin.digests(checkpoint)
            finally:
                plugin.close()
        return same_digests(group.url, seen)

    def close(self) -> None:
        """Forget the session of its own."""
        if self._plugin is not None:
            self._plugin.close()
            self._plugin = None


async def _opened(engine: Engine, checkpoint: Path) -> Plugin:
    plugin = Plugin(engine)
    await engine.pause("in_place")  # else it waits for every running request
    try:
        await plugin.open(checkpoint)
    except InPlaceUnavailable as error:
        raise CannotLook(str(error)) from error
    finally:
        await engine.resume()
    return plugin
