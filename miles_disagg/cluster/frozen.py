"""The frozen models of a run: their engines in placement groups of their own, and the names under which they are found.

`served_models` is what reward and generate functions see: `MILES_DISAGG_MODELS` holds model name -> URLs as JSON.
Placeholders are reserved here too: their resources are kept for others while the run lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_disagg.cluster.calls import call
from miles_disagg.cluster.connect import incarnation, reserve
from miles_disagg.config.placement import GroupPlan
from miles_disagg.domain.errors import MilesDisaggError
from miles_disagg.rollout.frozen import FrozenEngine, FrozenSpec


@dataclass(frozen=True)
class FrozenMember:
    """One engine of the frozen `model`."""

    model: str
    spec: FrozenSpec
    plan: GroupPlan


@contextlib.asynccontextmanager
async def serving(
    members: Sequence[FrozenMember],
    placeholders: Sequence[GroupPlan],
    *,
    run_id: str,
    placement_timeout: float,
    shutdown_timeout: float,
) -> AsyncIterator[Mapping[str, tuple[str, ...]]]:
    """URLs by model, while the engines run and the placeholders are reserved; everything is given back at the end."""
    placements: list[PlacementGroup] = []
    actors: list[Any] = []
    try:
        for plan in [*placeholders, *(member.plan for member in members)]:
            bundles = [bundle.resources() for bundle in plan.bundles]
            placements.append(await asyncio.to_thread(reserve, plan.name, bundles, plan.strategy, placement_timeout))
        for member, placement in zip(members, placements[len(placeholders) :], strict=True):
            actors.append(_actor(member, placement, run_id))
        urls = await asyncio.gather(
            *(
                call(actor.start.remote(), f"{member.spec.name}: start its engine", member.spec.start_timeout + 30)
                for actor, member in zip(actors, members, strict=True)
            )
        )
        served: dict[str, tuple[str, ...]] = {}
        for member, url in zip(members, urls, strict=True):
            served[member.model] = (*served.get(member.model, ()), url)
        yield served
    finally:
        for actor, member in zip(actors, members, strict=False):
            with contextlib.suppress(MilesDisaggError):
                await call(actor.stop.remote(), f"{member.spec.name}: stop", shutdown_timeout)
            ray.kill(actor)
        for placement in placements:
            remove_placement_group(placement)


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
