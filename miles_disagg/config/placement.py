"""Which placement groups a run needs: a pure plan, printed by --dry-run and carried out by `cluster`.

One group for the trainer, one for each managed engine. Reserving them on Ray is `cluster.placement`.
"""

from dataclasses import dataclass, field
from typing import Literal

from miles_disagg.config.run import RunConfig

# Enough to tie a bundle to marked nodes without ever using the mark up.
_MARK = 0.001
_CPUS_PER_GPU_RANK = 1.0


@dataclass(frozen=True)
class Bundle:
    """Resources reserved together on one node."""

    cpus: float
    gpus: float = 0.0
    custom: dict[str, float] = field(default_factory=dict)

    def resources(self) -> dict[str, float]:
        """The bundle in Ray's form."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {}), **self.custom}


@dataclass(frozen=True)
class GroupPlan:
    """One placement group. `slots` processes (ranks or server nodes) live in each bundle."""

    name: str
    role: Literal["trainer", "engine"]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
    bundles: tuple[Bundle, ...]
    slots: int

    def bundle_of(self, rank: int) -> int:
        """Index of the bundle that `rank` lives in."""
        return rank // self.slots


@dataclass(frozen=True)
class PlacementPlan:
    """All placement groups of a run; `engines` is empty in the attached and service topologies."""

    trainer: GroupPlan
    engines: tuple[GroupPlan, ...]
    device: Literal["cpu", "cuda", "auto"]

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """Trainer first, then engines."""
        return (self.trainer, *self.engines)

    def total(self) -> dict[str, float]:
        """Resources of all groups together."""
        out: dict[str, float] = {}
        for group in self.groups:
            for bundle in group.bundles:
                for name, amount in bundle.resources().items():
                    out[name] = out.get(name, 0.0) + amount
        return out

    def describe(self) -> str:
        """One line a kind of group, for people."""
        lines = [_describe(self.trainer, 1, f"{len(self.trainer.bundles) * self.trainer.slots} rank(s)")]
        if self.engines:
            lines.append(_describe(self.engines[0], len(self.engines), f"{len(self.engines)} engine(s)"))
        total = ", ".join(f"{amount:g} {name}" for name, amount in self.total().items() if amount >= 0.01)
        return "\n".join([*lines, f"in all: {total}"])


def plan_placement(config: RunConfig) -> PlacementPlan:
    """The placement groups of a resolved configuration.

    Trainer: one bundle a node with all its ranks' GPUs (or cores) and a core for each GPU rank, nodes spread strictly.
    Engine: one bundle, or one a node when it is larger than --num-gpus-per-node.
    """
    trainer, engines, cluster = config.trainer, config.engines, config.cluster
    ranks = trainer.actor_num_gpus_per_node
    on_gpu = trainer.trainer_device == "cuda"
    node = Bundle(
        cpus=ranks * max(trainer.actor_cpus_per_rank, _CPUS_PER_GPU_RANK if on_gpu else 0.0),
        gpus=ranks * trainer.actor_gpu_fraction if on_gpu else 0.0,
        custom=_mark(cluster.actor_node_resource),
    )
    trainer_group = GroupPlan(
        name=f"{config.output.run_id}-trainer",
        role="trainer",
        strategy="STRICT_PACK" if trainer.actor_num_nodes == 1 else "STRICT_SPREAD",
        bundles=(node,) * trainer.actor_num_nodes,
        slots=ranks,
    )
    per_engine = engines.rollout_num_gpus_per_engine if engines.rollout_num_gpus else 0
    nodes = max(1, -(-per_engine // cluster.num_gpus_per_node))
    bundle = Bundle(
        cpus=engines.rollout_cpus_per_engine,
        gpus=per_engine / nodes * engines.rollout_gpu_fraction,
        custom=_mark(cluster.rollout_node_resource),
    )
    groups = tuple(
        GroupPlan(
            name=f"{config.output.run_id}-engine-{index}",
            role="engine",
            strategy="STRICT_PACK" if nodes == 1 else "STRICT_SPREAD",
            bundles=(bundle,) * nodes,
            slots=1,
        )
        for index in range(engines.num_managed_engines)
    )
    return PlacementPlan(trainer_group, groups, trainer.trainer_device)


def _mark(resource: str | None) -> dict[str, float]:
    return {resource: _MARK} if resource else {}


def _describe(group: GroupPlan, copies: int, holds: str) -> str:
    bundle = ", ".join(f"{amount:g} {name}" for name, amount in group.bundles[0].resources().items())
    groups = "1 placement group" if copies == 1 else f"{copies} placement groups"
    shape = f"{len(group.bundles)} bundle(s) of {{{bundle}}}, {group.strategy}"
    return f"{group.role}: {holds} in {groups}: {shape}"
