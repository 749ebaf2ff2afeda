"""A gateway's actor as its owner holds it: one that dies or hangs is replaced, under the same URL.

Nothing is lost with it: replicas register again with their next heartbeat, and whoever waited for an answer asks again
under the same request id. Routing and HTTP are `miles_disagg.gateway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from miles_disagg.cluster.calls import ActorLost, Lifeline, Pulse, call
from miles_disagg.config.machine import free_port, on_free_ports
from miles_disagg.domain.errors import EngineUnavailable, MilesDisaggError, PortTaken
from miles_disagg.gateway.app import GatewaySettings
from miles_disagg.replica.listen import TlsFiles

RETURN_SECONDS = 60.0  # for one that was lost to listen again, before its owner gives up
_START_SECONDS = 60.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Listening:
    """Where and how a gateway listens. port 0: one that nobody is given unasked, kept from then on."""

    host: str
    port: int
    run_id: str | None
    settings: GatewaySettings
    token: str | None = None
    tls: TlsFiles | None = None


class KeptGateway:
    """See the module. make: creates an actor. `start`, then `look` now and then (or `keep`), then `stop`."""

    def __init__(self, name: str, make: Callable[[], Any], listening: Listening, say: Callable[[str], None]):
        self.name, self._make, self._listening, self._say = name, make, listening, say
        self._actor: Any = None
        self._port = listening.port
        self._pulse = Pulse(name)
        self._lost_since: float | None = None
        self._told = ""  # why it could not be started again, last
        self.url = ""
        self.deaths = 0

    async def start(self) -> str:
        """Start it; its URL. PortTaken, DeadlineExceeded."""
        host, port = self._listening.host, self._port
        await on_free_ports(lambda: self._listen(port or free_port(host)), given=port != 0)
        return self.url

    async def _listen(self, port: int) -> None:
        wanted, actor = self._listening, self._make()
        try:
            start = actor.start.remote(wanted.host, port, wanted.run_id, wanted.settings, wanted.token, wanted.tls)
            self.url = await call(start, f"{self.name}: start", _START_SECONDS)
        except OSError as error:
            ray.kill(actor)
            why = getattr(error, "cause", error)  # without Ray's traceback
            raise PortTaken(f"{self.name} cannot listen on {wanted.host}:{port}: {why}") from None
        except BaseException:
            ray.kill(actor)
            raise
        self._actor, self._port, self._pulse, self._lost_since = actor, port, Pulse(self.name), None

    async def look(self) -> None:
        """See that it lives, else start another one. MilesDisaggError while there is none, or it may only be slow."""
        try:
            await self._pulse.ask(self._actor.alive.remote(), "alive")
        except ActorLost as error:
            if self._lost_since is None:
                self._lost_since = time.monotonic()
                self.deaths += 1
                self._say(f"{self.name} died and is started again: {error}")
            ray.kill(self._actor)  # one that hangs still listens
            await self._listen(self._port)
            self._say(f"{self.name} listens again at {self.url}")

    async def keep(self, lifeline: Lifeline | None = None) -> None:
        """Look after it until cancelled, or until `lifeline` is cut: it cannot be brought back for a minute."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look()
            except MilesDisaggError as error:
                if self._lost_since is None:  # it is only slow
                    continue
                if str(error) != self._told:
                    self._told = str(error)
                    self._say(f"{self.name} could not be started again yet: {error}")
                if lifeline is not None and time.monotonic() - self._lost_since > RETURN_SECONDS:
                    lifeline.cut(self._lost(error))
                    return

    def _lost(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(
            f"{self.name} at {self.url} died, could not be started again in {RETURN_SECONDS:.0f} s, and nothing can be "
            f"generated without it: {error}"
        )

    async def stop(self, timeout: float) -> None:
        """End it."""
        if self._actor is None:
            return
        with contextlib.suppress(MilesDisaggError):  # it is gone, or hangs
            await call(self._actor.stop.remote(), f"{self.name}: stop", timeout)
        ray.kill(self._actor)
