"""The rollout side of a training job as one object: gateway, one actor per engine, their supervision and their end.

Managed engines get a placement group each; attached ones none. A gateway or engine actor that died or hangs is
replaced; under broadcast, an engine that is not at the newest version is sent it again. An attached engine that does
not answer is not waited for until it serves a version again, one that was given up never.
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
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_disagg.cluster.calls import ActorLost, Lifeline, Pulse, call
from miles_disagg.cluster.connect import incarnation, reserve
from miles_disagg.cluster.gateway import KeptGateway
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
_FAILED = (MilesDisaggError, ray.exceptions.RayError)  # what an actor raised, ours or not


@dataclass
class Member:
    """One engine of the fleet. `actor` is None before the start; `nodes`: those of further nodes. given_up: why no
    actor or process of it is started any more."""

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
    given_up: str | None = None
    pulse: Pulse = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.pulse = Pulse(self.spec.replica_id, seconds=_CONTROL_SECONDS)


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
    counted: their acknowledgements are waited for after a publication (False: they only evaluate). lifeline: cut when
    the gateway or all engines are lost for good (None: the run goes on without them)."""

    members: list[Member]
    gateway: KeptGateway
    ledger: RemoteLedger
    timeouts: FleetTimeouts
    say: Callable[[str], None]
    repair: Callable[[Member, VersionRef], Awaitable[None]] | None = None
    counted: bool = True
    lifeline: Lifeline | None = None
    _watches: list[asyncio.Task[None]] = field(default_factory=list, repr=False)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def gateway_url(self) -> str:
        """Where samples are asked for."""
        return self.gateway.url

    async def start(self) -> None:
        """Place and start every engine, at once; the first failure is raised with the engine's last log lines."""
        self._watches.append(asyncio.create_task(self.gateway.keep(self.lifeline), name="look after the gateway"))
        for member in self.members:
            await self._book("register", member)
            if member.plan is not None:
                bundles = [b.resources() for b in member.plan.bundles]
                member.placement = await asyncio.to_thread(
                    reserve, member.plan.name, bundles, member.plan.strategy, self.timeouts.placement
                )
        await asyncio.gather(*(self._start(member) for member in self.members))
        self._watches.append(asyncio.create_task(self._supervise(), name="supervise engines"))

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
            for member in (m for m in self.members if not m.given_up):
                try:
                    await self._look_after(member)
                except _FAILED as error:
                    log.warning("%s: %s", member.spec.replica_id, error)
            if self.lifeline is not None and self.members and all(m.given_up for m in self.members):
                why = "; ".join(f"{m.spec.replica_id}: {m.given_up}" for m in self.members)
                self.lifeline.cut(EngineUnavailable(f"no engine is left: {why}"))
                return

    async def _look_after(self, member: Member) -> None:
        name = member.spec.replica_id
        try:
            status = await member.pulse.ask(member.actor.status.remote(), "status")
            if status["node_lost"]:
                raise ActorLost(name, status["node_lost"])
        except ActorLost as error:
            await self._replace(member, error)
            return
        if status["failure"] and status["failure"] != member.failure:
            member.failure = status["failure"]
            self.say(f"{name} is out: {member.failure}")
            if member.spec.command is not None:  # somebody else's may come back
                member.given_up = member.failure
        await self._count(member, status)
        busy = status["state"] == "activating" or self._updating.locked()
        if self.repair is None or busy or not status["process_up"]:
            return
        latest = await self.ledger.latest()
        if latest is not None and status["applied"] != latest.version:
            await self.repair(member, latest)

    async def _replace(self, member: Member, error: ActorLost) -> None:
        """A new actor for one that died; one that does not start is taken for dead, and replaced at the next look."""
        name, limit = member.spec.replica_id, member.spec.restart_limit
        member.failures += 1
        await self._end_actors(member)
        if member.failures > limit:
            member.given_up, member.lost = f"given up after {limit} replacements of its actor: {error}", True
            await self._book("forget", member)
            self.say(f"{name} is out: {member.given_up}")
            return
        self.say(f"{name} died ({error}); starting a new one")
        member.pulse = Pulse(name, seconds=_CONTROL_SECONDS)
        try:
            await self._start(member)
        except _FAILED as failed:
            self.say(f"{name} could not be started again yet: {failed}")
            await self._end_actors(member)

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
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(self._stop(member) for member in self.members))
        await self.gateway.stop(self.timeouts.shutdown)

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
