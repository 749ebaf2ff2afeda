"""Engines that only evaluate: placed for themselves, behind a gateway of their own, each at one version until told.

Rollouts never reach them, training never waits for them, and they read a version from the store when it is evaluated
(`EngineHost.pin`). When that is, and where the result goes, is `evaluation`.
"""

from __future__ import annotations

import asyncio
import time

from miles_disagg.cluster.calls import ActorLost, call
from miles_disagg.cluster.fleet import Fleet, Member
from miles_disagg.domain.errors import EngineError, EngineUnavailable, MilesDisaggError
from miles_disagg.observe.events import Event

_ANSWER_SECONDS = 10.0


class EvaluationReplicas:
    """The fleet of them. timeout: seconds for a version to be published and then served by them; pause: between two
    tries while an engine is started anew."""

    def __init__(self, fleet: Fleet, timeout: float, *, pause: float = 1.0):
        self.fleet, self._timeout, self._pause = fleet, timeout, pause

    async def pin(self, version: int) -> float:
        """Have them serve exactly `version` from now on; the seconds that took.

        One that fails is named and left out, since requests for a version go to who serves it; if all do, the first
        one's error is raised. One that was given up is not waited for.
        """
        begun = time.monotonic()
        members = self.fleet.members
        errors = await asyncio.gather(*(self._pin(member, version) for member in members))
        for member, error in zip(members, errors, strict=True):
            if error is not None:
                self.fleet.say(f"{member.spec.replica_id} does not evaluate version {version}: {error}")
        if all(errors):
            raise next(error for error in errors if error is not None)
        return time.monotonic() - begun

    async def _pin(self, member: Member, version: int) -> MilesDisaggError | None:
        what = f"{member.spec.replica_id}: serve version {version} for an evaluation"
        deadline = time.monotonic() + self._timeout
        while True:
            if member.given_up:
                return EngineUnavailable(member.given_up)
            left = max(0.0, deadline - time.monotonic())
            try:
                await call(member.actor.pin.remote(version, left), what, left + _ANSWER_SECONDS)
                return None
            except (ActorLost, EngineError) as error:  # it is being started anew
                if left < self._pause:
                    return error
                await asyncio.sleep(self._pause)
            except MilesDisaggError as error:
                return error

    async def events(self) -> list[Event]:
        """Events recorded by the engines since the last call."""
        return await self.fleet.events()
