"""The rollout side of a training job as one object: gateway, one actor per engine, their supervision and their end.

Managed engines get a placement group each; attached ones none. A dead engine actor is replaced; under broadcast, an
engine that is not at the newest version is sent it again. An attached engine that does not answer, or a managed one
that was given up, is not waited for; it counts again once it serves a version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_disagg.cluster.calls import ActorLost, call
from miles_disagg.cluster.connect import incarnation, reserve
from miles_disagg.config.placement import GroupPlan
from miles_disagg.domain.errors import DeadlineExceeded, EngineUnavailable, MilesDisaggError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Event
from miles_disagg.rollout.actor import RolloutEngine, StagingSpec
from miles_disagg.rollout.host import HostSpec
from miles_disagg.rollout.node_actor import EngineNode
from miles_disagg.store.actor import RemoteLedger

log = logging.getLogger(__name__)
_CONTROL_SECONDS = 30.0


@dataclass
class Member:
    """One engine of the fleet. `actor` is None while it is being replaced; `nodes`: those of further nodes."""

    spec: HostSpec
    staging: StagingSpec | None
    plan: GroupPlan | None
    placement: PlacementGroup | None = None
    actor: Any = None
    nodes: list[Any] = field(default_factory=list)
    url: str | None = None
    num_ranks: int = 1
    failures: int = 0
    lost: bool = False
    failure: str | None = None


@dataclass(frozen=True)
class FleetTimeouts:
    """Seconds: for Ray to place an engine, for it to answer, for one weight update, for an orderly end."""

    placement: float
    start: float
    update: float
    shutdown: float


@dataclass
class Fleet:
    """Engines in the order of their names. `repair` re-sends the newest version to a target (broadcast only).
    counted: their acknowledgements are waited for after a publication (False: they only evaluate)."""

    members: list[Member]
    gateway: Any
    gateway_url: str
    ledger: RemoteLedger
    timeouts: FleetTimeouts
    say: Callable[[str], None]
    repair: Callable[[Member, VersionRef], Awaitable[None]] | None = None
    counted: bool = True
    _watch: asyncio.Task[None] | None = field(default=None, repr=False)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def start(self) -> None:
        """Place and start every engine, at once; the first failure is raised with the engine's last log lines."""
        for member in self.members:
            await self._book("register", member)
            if member.plan is not None:
                bundles = [b.resources() for b in member.plan.bundles]
                member.placement = await asyncio.to_thread(
                    reserve, member.plan.name, bundles, member.plan.strategy, self.timeouts.placement
                )
        await asyncio.gather(*(self._start(member) for member in self.members))
        self._watch = asyncio.create_task(self._supervise(), name="supervise engines")

    async def _start(self, member: Member) -> None:
        engine, node = cast(Any, RolloutEngine), cast(Any, EngineNode)
        further = range(1, len(member.plan.bundles)) if member.plan is not None else ()
        member.nodes = [node.options(**self._place(member, i)).remote() for i in further]
        place = self._place(member, 0)
        member.actor = engine.options(**place).remote(member.spec, member.staging, self.ledger.actor, member.nodes)
        timeout = self.timeouts.start + 30
        member.url = await call(member.actor.start.remote(), f"{member.spec.replica_id}: start its engine", timeout)
        status = await call(member.actor.status.remote(), f"{member.spec.replica_id}: status", _CONTROL_SECONDS)
        if status["engine"] is not None:
            member.num_ranks = status["engine"]["ranks"]
            self.say(f"{member.spec.replica_id}: {member.spec.engine_url}: {status['engine']['description']}")
        if member.spec.activation != "reload":
            self.say(f"{member.spec.replica_id}: activation {status['activation']}")

    @staticmethod
    def _place(member: Member, index: int) -> dict[str, Any]:
        """Name and place of the actor in the engine's bundle `index`."""
        part = f"-node-{index}" if index else ""
        options: dict[str, Any] = {"name": incarnation(f"{member.spec.replica_id}{part}"), "num_cpus": 0}
        options["namespace"] = member.spec.run_id
        if member.placement is not None and member.plan is not None:
            bundle = member.plan.bundles[index]
            options |= {
                "num_cpus": bundle.cpus,
                "num_gpus": bundle.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(member.placement, index),
            }
        return options

    # --- supervision ----------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Replace engine actors that died; bring stragglers up to date under broadcast."""
        while True:
            await asyncio.sleep(1.0)
            for member in self.members:
                try:
                    await self._look_after(member)
                except MilesDisaggError as error:
                    log.warning("%s: %s", member.spec.replica_id, error)

    async def _look_after(self, member: Member) -> None:
        name = member.spec.replica_id
        try:
            status = await call(member.actor.status.remote(), f"{name}: status", _CONTROL_SECONDS)
            if status["node_lost"]:
                raise ActorLost(name, status["node_lost"])
        except ActorLost as error:
            member.failures += 1
            if member.failures > member.spec.restart_limit:
                return
            self.say(f"{name} died ({error}); starting a new one")
            await self._end_actors(member)
            await self._start(member)
            return
        await self._count(member, status)
        if status["failure"] and status["failure"] != member.failure:
            member.failure = status["failure"]
            self.say(f"{name} is out: {member.failure}")
        busy = status["state"] == "activating" or self._updating.locked()
        if self.repair is None or busy or not status["process_up"]:
            return
        latest = await self.ledger.latest()
        if latest is not None and status["applied"] != latest.version:
            await self.repair(member, latest)

    async def _count(self, member: Member, status: dict[str, Any]) -> None:
        """Stop or start waiting for an engine that is not ours to restart, or not any more."""
        name = member.spec.replica_id
        lost = bool(status["failure"]) or (member.spec.command is None and not status["process_up"])
        if lost and not member.lost:
            await self._book("forget", member)
            self.say(f"{name} ({status['engine_url']}) is out of rotation: {status['reason']}")
        elif member.lost and not lost and status["ready"]:
            await self._book("register", member)
            self.say(f"{name} ({status['engine_url']}) is back, at version {status['applied']}")
        elif member.lost and not lost:
            return  # until it serves
        member.lost = lost

    async def _book(self, method: str, member: Member) -> None:
        if self.counted:
            await getattr(self.ledger, method)(member.spec.replica_id)

    # --- updates by broadcast -------------------------------------------------------------------

    @asynccontextmanager
    async def update(self, ref: VersionRef, only: Sequence[Member] | None = None) -> AsyncIterator[list[Member]]:
        """Pause every reachable engine (of `only`) for an update, yield those that paused, then let them serve `ref`.

        An engine that fails leaves the update fenced and is repaired later; EngineUnavailable if none is left.
        """
        async with self._updating:
            targets = [m for m in self.members if not m.lost] if only is None else list(only)
            begun = await self._tell(targets, "begin_update", ref)
            if not begun:
                raise EngineUnavailable(f"no engine could be paused for {ref}")
            for member in begun:
                if member.spec.members:  # those of them that answer now
                    what = f"{member.spec.replica_id}: status"
                    status = await call(member.actor.status.remote(), what, _CONTROL_SECONDS)
                    member.num_ranks = status["engine"]["ranks"]
            try:
                yield begun
            except BaseException as error:
                await self._tell(begun, "abort_update", f"the trainer gave up: {error}")
                raise
            if not await self._tell(begun, "finish_update"):
                raise EngineUnavailable(f"no engine serves {ref} after the update")

    async def _tell(self, members: Sequence[Member], method: str, *args: Any) -> list[Member]:
        """Call a method on all; those that answered without an error."""

        async def one(member: Member) -> Member | None:
            what = f"{member.spec.replica_id}: {method}"
            try:
                await call(getattr(member.actor, method).remote(*args), what, self.timeouts.update)
            except MilesDisaggError as error:
                self.say(f"{what} failed: {error}")
                return None
            return member

        return [m for m in await asyncio.gather(*(one(m) for m in members)) if m is not None]

    # --- status ---------------------------------------------------------------------------------

    async def _collect(self, method: str) -> list[Any]:
        """The method's results on every engine that answers."""
        out = []
        for member in (m for m in self.members if m.actor is not None):
            with contextlib.suppress(MilesDisaggError):
                what = f"{member.spec.replica_id}: {method}"
                out.append(await call(getattr(member.actor, method).remote(), what, _CONTROL_SECONDS))
        return out

    async def wait_converged(self, ref: VersionRef, timeout: float) -> float:
        """Seconds from the publication of `ref` until every engine serves it or newer; DeadlineExceeded."""
        seconds = await self.ledger.wait_converged(ref, timeout)
        if seconds is None:
            replicas = await self.ledger.replicas()
            raise DeadlineExceeded(f"every replica to serve {ref}", timeout, f"replicas: {replicas}")
        return seconds

    async def status(self) -> list[dict[str, Any]]:
        """What every engine's replica says of itself."""
        return await self._collect("status")

    async def served(self) -> dict[str, int | None]:
        """The version that every replica that answers serves."""
        return {row["replica_id"]: row["applied"] for row in await self.status()}

    async def applied(self, member: Member) -> int | None:
        """The version that one engine serves."""
        status = await call(member.actor.status.remote(), f"{member.spec.replica_id}: status", _CONTROL_SECONDS)
        return status["applied"]

    async def without_version(self) -> list[str]:
        """Engines that must be sent a version before they serve: attached ones under broadcast that hold another."""
        if self.repair is None:
            return []
        return [row["replica_id"] for row in await self.status() if row["applied"] is None]

    async def phase_metrics(self) -> dict[str, float]:
        """`replica/*_seconds` of the last activations (the slowest replica's) and `fleet/replicas_ready`."""
        rows = await self.status()
        out = {"fleet/replicas_ready": float(sum(bool(row["ready"]) for row in rows))}
        for phase in ("fetch", "materialize", "stage", "pause"):
            values = [row["timings"][f"{phase}_seconds"] for row in rows if f"{phase}_seconds" in row["timings"]]
            if values:
                out[f"replica/{phase}_seconds"] = max(values)
        return out

    async def statuses(self) -> list[dict[str, Any]]:
        """What every engine's host says of itself."""
        return await self._collect("status")

    async def digests(self) -> list[dict[str, str]]:
        """What every engine serves, tensor by tensor (managed engines)."""
        return await self._collect("digests")

    async def events(self) -> list[Event]:
        """Events recorded by the engines since the last call."""
        return [event for row in await self._collect("events") for event in row]

    async def stop(self) -> None:
        """End engines, then the gateway; give the placement groups back."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(*(self._stop(member) for member in self.members))
        with contextlib.suppress(MilesDisaggError):
            await call(self.gateway.stop.remote(), "gateway: stop", self.timeouts.shutdown)
        ray.kill(self.gateway)

    async def _end_actors(self, member: Member) -> None:
        """Those of its actors that are left, and what they run."""
        if member.actor is not None:
            with contextlib.suppress(MilesDisaggError):
                await call(member.actor.stop.remote(), f"{member.spec.replica_id}: stop", self.timeouts.shutdown)
            ray.kill(member.actor)
        for node in member.nodes:
            with contextlib.suppress(MilesDisaggError):
                await call(node.stop.remote(), f"{member.spec.replica_id}: stop", self.timeouts.shutdown)
            ray.kill(node)

    async def _stop(self, member: Member) -> None:
        await self._end_actors(member)
        if member.placement is not None:
            remove_placement_group(member.placement)
