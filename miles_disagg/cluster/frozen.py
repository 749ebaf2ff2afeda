"""The frozen models of a run: their engines in placement groups of their own, and the names under which they are found.

`served_models` is what reward and generate functions see: `MILES_DISAGG_MODELS` holds model name -> URLs as JSON.
Placeholders are reserved here too: their resources are kept for others while the run lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_disagg.cluster.calls import ActorLost, Lifeline, Pulse, call
from miles_disagg.cluster.connect import incarnation, reserve
from miles_disagg.config.placement import GroupPlan
from miles_disagg.domain.errors import EngineUnavailable, MilesDisaggError
from miles_disagg.rollout.frozen import FrozenEngine, FrozenSpec

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class FrozenMember:
    """One engine of the frozen `model`."""

    model: str
    spec: FrozenSpec
    plan: GroupPlan


@dataclass
class _Running:
    """One that was started: where it answers is what its users were told, for as long as the run lasts."""

    member: FrozenMember
    placement: PlacementGroup
    actor: Any
    pulse: Pulse
    url: str = ""
    deaths: int = 0


@contextlib.asynccontextmanager
async def serving(
    members: Sequence[FrozenMember],
    placeholders: Sequence[GroupPlan],
    *,
    run_id: str,
    placement_timeout: float,
    shutdown_timeout: float,
    lifeline: Lifeline,
    say: Callable[[str], None],
) -> AsyncIterator[Mapping[str, tuple[str, ...]]]:
    """URLs by model, while the engines run and the placeholders are reserved; everything is given back at the end.

    An actor that dies or hangs is replaced at the same URL. lifeline: cut when one cannot be kept running.
    """
    placements: list[PlacementGroup] = []
    engines: list[_Running] = []
    keeping: asyncio.Task[None] | None = None
    try:
        for plan in [*placeholders, *(member.plan for member in members)]:
            bundles = [bundle.resources() for bundle in plan.bundles]
            placements.append(await asyncio.to_thread(reserve, plan.name, bundles, plan.strategy, placement_timeout))
        for member, placement in zip(members, placements[len(placeholders) :], strict=True):
            actor = _actor(member, placement, run_id)
            engines.append(_Running(member, placement, actor, Pulse(member.spec.name)))
        await asyncio.gather(*(_start(engine) for engine in engines))
        served: dict[str, tuple[str, ...]] = {}
        for engine in engines:
            served[engine.member.model] = (*served.get(engine.member.model, ()), engine.url)
        keeping = asyncio.create_task(_keep(engines, run_id, lifeline, say), name="look after frozen engines")
        yield served
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        for engine in engines:
            with contextlib.suppress(MilesDisaggError):
                await call(engine.actor.stop.remote(), f"{engine.member.spec.name}: stop", shutdown_timeout)
            ray.kill(engine.actor)
        for placement in placements:
            remove_placement_group(placement)


async def _start(engine: _Running) -> None:
    """Start its process; EngineUnavailable if it answers somewhere else than it did."""
    spec, known = engine.member.spec, engine.url
    engine.url = await call(engine.actor.start.remote(), f"{spec.name}: start its engine", spec.start_timeout + 30)
    if known not in ("", engine.url):
        raise EngineUnavailable(f"{spec.name} answers at {engine.url}, and its users know {known}")


async def _keep(engines: Sequence[_Running], run_id: str, lifeline: Lifeline, say: Callable[[str], None]) -> None:
    """Look after all until cancelled, or until one cannot be kept running."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for engine in engines:
            name = engine.member.spec.name
            try:
                await _look_after(engine, run_id, say)
            except EngineUnavailable as error:
                lifeline.cut(EngineUnavailable(f"frozen engine {name} is lost: {error}"))
                return
            except MilesDisaggError as error:
                log.warning("%s: %s", name, error)


async def _look_after(engine: _Running, run_id: str, say: Callable[[str], None]) -> None:
    """Replace its actor if that died or hangs. EngineUnavailable once it is lost for good."""
    spec = engine.member.spec
    try:
        status = await engine.pulse.ask(engine.actor.status.remote(), "status")
    except ActorLost as error:
        engine.deaths += 1
        if engine.deaths > spec.restart_limit:
            raise EngineUnavailable(f"given up after {spec.restart_limit} deaths: {error}") from None
        say(f"{spec.name} died ({error}); starting a new one at {engine.url}")
        ray.kill(engine.actor)
        again = replace(engine.member, spec=replace(spec, port=int(engine.url.rpartition(":")[2])))
        engine.actor, engine.pulse = _actor(again, engine.placement, run_id), Pulse(spec.name)
        try:
            await _start(engine)
        except EngineUnavailable:
            raise
        except MilesDisaggError as failed:
            ray.kill(engine.actor)  # another try at the next look
            say(f"{spec.name} could not be started again yet: {failed}")
    else:
        if status["failure"]:
            raise EngineUnavailable(str(status["failure"]))


def _actor(member: FrozenMember, placement: PlacementGroup, run_id: str) -> Any:
    bundle = member.plan.bundles[0]
    options = {
        "name": incarnation(member.spec.name),
        "namespace": run_id,
        "num_cpus": bundle.cpus,
        "num_gpus": bundle.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement, 0),
    }
    actor_class: Any = FrozenEngine
    return actor_class.options(**options).remote(member.spec)
