"""The trainer ranks as one object: every call goes to all ranks, with a deadline and the rank's name in any error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_disagg.cluster.calls import ActorLost, Lifeline, call, call_all
from miles_disagg.cluster.connect import incarnation
from miles_disagg.config.placement import GroupPlan
from miles_disagg.domain.errors import DeadlineExceeded
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Event
from miles_disagg.store.lineage import Kind
from miles_disagg.trainer.actor import PublicationSpec, TrainerActor
from miles_disagg.trainer.advantages import batch_advantages
from miles_disagg.trainer.base import AdvantageSpec, RankSpec, TrainerSpec

_LOOK_SECONDS = 2.0
_ALIVE_SECONDS = 60.0


@dataclass(frozen=True)
class RemoteSource:
    """`publish.disk.SourceHandle` of a source rank."""

    actor: Any
    name: str
    timeout: float

    async def encode(self, ref: VersionRef, encoding: str | None, kind: Kind = "version") -> Any:
        """Diff, encode and digest what was staged."""
        return await call(self.actor.encode.remote(ref, encoding, kind), f"{self.name}: encode {ref}", self.timeout)

    async def write(self, plan: Any) -> Any:
        """Write the shard; its receipt."""
        return await call(self.actor.write.remote(plan), f"{self.name}: write its shard", self.timeout)

    async def settle(self, published: bool) -> None:
        """The publication ended."""
        await call(self.actor.settle.remote(published), f"{self.name}: settle", self.timeout)


@dataclass
class TrainerGroup:
    """Handles of all ranks, rank 0 first; `sources` are the ranks that hold the tensors to publish."""

    ranks: list[Any]
    step_timeout: float
    update_timeout: float
    sources: list[int] = field(default_factory=list)
    learning_rate: float = 0.0
    """Of the last optimizer step."""
    advantages: AdvantageSpec = field(default_factory=AdvantageSpec)

    @classmethod
    async def start(
        cls,
        spec: TrainerSpec,
        publication: PublicationSpec,
        plan: GroupPlan,
        placement: PlacementGroup,
        *,
        run_id: str,
        env: Mapping[str, str],
        global_batch_size: int,
        start_timeout: float,
        step_timeout: float,
        update_timeout: float,
    ) -> TrainerGroup:
        """Start the ranks in their bundles, let them meet and load the model."""
        world = len(plan.bundles) * plan.slots
        ranks = [_rank_actor(plan, placement, rank, run_id, env) for rank in range(world)]
        group = cls(ranks, step_timeout, update_timeout, advantages=spec.advantages)
        try:
            places = await call_all(
                [(actor.place.remote(), f"trainer rank {i}: start its process") for i, actor in enumerate(ranks)],
                start_timeout,
            )
            address, port = places[0][0], places[0][1]
            specs = [
                RankSpec(rank=i, world_size=world, master_address=address, master_port=port, local_rank=0)
                for i in range(world)
            ]
            await call_all(
                [
                    (
                        actor.setup.remote(spec, rank, publication, global_batch_size),
                        f"trainer rank {i}: load the model",
                    )
                    for i, (actor, rank) in enumerate(zip(ranks, specs, strict=True))
                ],
                start_timeout,
            )
            indices = await group._each("source_index", start_timeout, "report its source index")
            group.sources = sorted((i for i, s in enumerate(indices) if s is not None), key=lambda i: indices[i])
        except BaseException:
            group.kill()
            raise
        return group

    async def _each(self, method: str, timeout: float, what: str, *args: Any) -> list[Any]:
        refs = [(getattr(a, method).remote(*args), f"trainer rank {i}: {what}") for i, a in enumerate(self.ranks)]
        return await call_all(refs, timeout)

    async def train(self, groups: Sequence[Any], version: int) -> dict[str, float]:
        """Optimizer steps on one consumed batch of groups; rank 0's metrics.

        Advantages are computed once, here: a plugged-in function need not give every rank the same.
        """
        values = await asyncio.to_thread(batch_advantages, groups, self.advantages)
        batch, given = ray.put(list(groups)), ray.put(values)
        what = f"train at version {version}"
        metrics = (await self._each("train", self.step_timeout, what, batch, given, version))[0]
        self.learning_rate = metrics.get("train/lr", 0.0)
        return metrics

    async def stage(self, ref: VersionRef) -> None:
        """Copy the weights out on all ranks: the only part of a publication that stalls the trainer."""
        await self._each("stage", self.update_timeout, f"copy out the weights of {ref}", ref)

    def disk_sources(self) -> list[RemoteSource]:
        """The sources as `publish.disk` sees them, in source order."""
        return [RemoteSource(self.ranks[i], f"trainer rank {i}", self.update_timeout) for i in self.sources]

    async def prepare(self, ref: VersionRef) -> None:
        """Work out what a broadcast of `ref` sends, while engines still serve."""
        await call_all(
            [(self.ranks[i].prepare.remote(ref), f"trainer rank {i}: prepare {ref}") for i in self.sources],
            self.update_timeout,
        )

    async def send(
        self, ref: VersionRef, targets: Sequence[tuple[Any, str, int]], *, whole: bool = False
    ) -> dict[str, float]:
        """Broadcast what was staged, from one source after another: an engine is in each one's group in turn."""
        total: dict[str, float] = {}
        for i in self.sources:
            what = f"trainer rank {i}: send {ref} to {', '.join(name for _, name, _ in targets)}"
            for key, value in (
                await call(self.ranks[i].send.remote(ref, targets, whole), what, self.update_timeout)
            ).items():
                total[key] = total.get(key, 0.0) + value
        return total

    async def discard(self) -> None:
        """Drop a staged broadcast."""
        await call_all(
            [(self.ranks[i].discard.remote(), f"trainer rank {i}: drop a publication") for i in self.sources], 30.0
        )

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of every exported tensor, by HF name: what engines must serve, bit for bit."""
        rows = await self._each("digests", self.update_timeout, "digest its weights")
        return {name: digest for row in rows for name, digest in row.items()}

    async def begin_save(self, directory: str) -> None:
        """Copy out a training checkpoint on all ranks: the only part of it that stalls them."""
        await self._each("begin_save", self.step_timeout, f"copy out {directory}", directory)

    async def write_save(self, directory: str, timeout: float) -> dict[str, tuple[int, str]]:
        """Write what was copied out, behind the steps; size and xxh3-128 of every tensor file as it was written."""
        ranks = await self._each("write_save", timeout, f"write its part of {directory}")
        await call(self.ranks[0].finish_save.remote(ranks), f"trainer rank 0: finish {directory}", timeout)
        return {name: facts for rank in ranks for name, facts in rank.files.items()}

    async def load(self, directory: str) -> None:
        """Restore a training checkpoint (all ranks)."""
        await self._each("load", self.step_timeout, f"load {directory}", directory)

    async def keep(self, lifeline: Lifeline) -> None:
        """Cut the line when a rank dies, also while nothing is asked of the ranks. Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._each("alive", _ALIVE_SECONDS, "be there")
            except DeadlineExceeded:
                continue  # in a long step
            except ActorLost as error:
                lifeline.cut(error)
                return

    async def events(self) -> list[Event]:
        """Events recorded by all ranks since the last call."""
        return [event for row in await self._each("events", 10.0, "hand over its events") for event in row]

    async def close(self, timeout: float) -> None:
        """Leave the process groups in order, then end the processes."""
        try:
            await self._each("close", timeout, "leave its process groups")
        finally:
            self.kill()

    def kill(self) -> None:
        """End every rank's process now."""
        for actor in self.ranks:
            ray.kill(actor, no_restart=True)


def _rank_actor(plan: GroupPlan, placement: PlacementGroup, rank: int, run_id: str, env: Mapping[str, str]) -> Any:
    index = plan.bundle_of(rank)
    bundle = plan.bundles[index]
    actor_class: Any = TrainerActor
    return actor_class.options(
        name=incarnation(f"trainer-{rank}"),
        namespace=run_id,
        num_cpus=bundle.cpus / plan.slots,
        num_gpus=bundle.gpus / plan.slots,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
        runtime_env={"env_vars": dict(env)},
    ).remote(f"trainer-{rank}", run_id)
