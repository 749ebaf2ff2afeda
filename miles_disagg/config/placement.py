"""Which placement groups a run needs: a pure plan, printed by --dry-run and carried out by `cluster`.

One group for the trainer, one for each managed engine (frozen models', placeholders and engines that only evaluate
included). Reserving them on Ray is `cluster.placement`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_disagg.config.run import RunConfig
from miles_disagg.config.server_groups import ServedModel, ServerGroup, read_server_groups

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
class EngineUnit:
    """One engine to launch. model: its name in the file; path: its checkpoint, None: the run's; gpus: 0 on CPU; ranks:
    tensor-parallel ones, a GPU each or all on the CPU."""

    name: str
    model: str
    path: str | None
    updates: bool
    gpus: int
    ranks: int = 1
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupPlan:
    """One placement group. `slots` processes (ranks or server nodes) live in each bundle."""

    name: str
    role: Literal["trainer", "engine", "evaluation replica", "frozen engine", "placeholder"]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
    bundles: tuple[Bundle, ...]
    slots: int
    unit: EngineUnit | None = None

    def bundle_of(self, rank: int) -> int:
        """Index of the bundle that `rank` lives in."""
        return rank // self.slots


@dataclass(frozen=True)
class PlacementPlan:
    """All placement groups of a run; `engines` is empty in the attached and service topologies.

    evaluators: engines of the policy that only evaluate. frozen: engines of models that are never updated;
    placeholders: reserved for others, nothing is started there.
    """

    trainer: GroupPlan
    engines: tuple[GroupPlan, ...]
    device: Literal["cpu", "cuda", "auto"]
    frozen: tuple[GroupPlan, ...] = ()
    placeholders: tuple[GroupPlan, ...] = ()
    evaluators: tuple[GroupPlan, ...] = ()

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """Trainer first, then engines."""
        return (self.trainer, *self.engines, *self.evaluators, *self.frozen, *self.placeholders)

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
        alike: dict[str, list[GroupPlan]] = {}
        for group in self.groups[1:]:
            alike.setdefault(f"{group.role}, {group.unit and group.unit.model}, {group.bundles}", []).append(group)
        for groups in alike.values():
            unit = groups[0].unit
            of = "" if unit is None or unit.updates else f" of {unit.model}"
            lines.append(_describe(groups[0], len(groups), f"{len(groups)} engine(s){of}"))
        total = ", ".join(f"{amount:g} {name}" for name, amount in self.total().items() if amount >= 0.01)
        return "\n".join([*lines, f"in all: {total}"])


def plan_placement(config: RunConfig) -> PlacementPlan:
    """The placement groups of a resolved configuration.

    Trainer: one bundle a node with all its ranks' GPUs (or cores) and a core for each GPU rank, nodes spread strictly.
    Engine: one bundle, or one a node when it is larger than --num-gpus-per-node.
    """
    trainer, cluster = config.trainer, config.cluster
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
    plans: dict[str, list[GroupPlan]] = {"engine": [], "frozen engine": [], "placeholder": []}
    for role, unit in _units(config):
        plans[role].append(_engine_group(config, role, unit))
    return PlacementPlan(
        trainer_group,
        tuple(plans["engine"]),
        trainer.trainer_device,
        frozen=tuple(plans["frozen engine"]),
        placeholders=tuple(plans["placeholder"]),
        evaluators=tuple(_engine_group(config, "evaluation replica", unit) for unit in _evaluators(config)),
    )


def policy_engines(config: RunConfig) -> list[EngineUnit]:
    """The managed engines that serve the policy."""
    return [unit for role, unit in _units(config) if role == "engine"]


def _evaluators(config: RunConfig) -> Iterator[EngineUnit]:
    """Engines that only evaluate; as the policy's, without what a file of server groups adds."""
    ranks = config.engines.rollout_num_gpus_per_engine
    gpus = ranks if config.evaluation.eval_num_gpus else 0
    for i in range(config.num_eval_replicas):
        yield EngineUnit(f"eval-{i}", "policy", None, True, gpus, ranks)


def _units(config: RunConfig) -> Iterator[tuple[Literal["engine", "frozen engine", "placeholder"], EngineUnit]]:
    """Every engine of the run with its role, named by number (the policy's) or by model and number."""
    engines = config.engines
    if engines.sglang_config is None:
        ranks = engines.rollout_num_gpus_per_engine
        group = ServerGroup("regular", engines.num_managed_engines, ranks if engines.rollout_num_gpus else 0, ranks)
        models = (ServedModel("policy", None, True, (group,)),)
    else:
        models = read_server_groups(engines.sglang_config, config.model.hf_checkpoint)
    for model in models:
        count, places = 0, 0
        prefix = "engine" if model.updates else model.name
        for group in model.groups:
            for _ in range(group.engines):
                if group.worker_type == "placeholder":
                    name, places = f"{prefix}-placeholder-{places}", places + 1
                    yield "placeholder", EngineUnit(name, model.name, model.path, False, group.gpus)
                    continue
                role = "engine" if model.updates else "frozen engine"
                unit = EngineUnit(
                    f"{prefix}-{count}", model.name, model.path, model.updates, group.gpus, group.ranks, group.overrides
                )
                yield role, unit
                count += 1


def _engine_group(config: RunConfig, role: Any, unit: EngineUnit) -> GroupPlan:
    engines, cluster = config.engines, config.cluster
    nodes = max(1, -(-unit.gpus // cluster.num_gpus_per_node))
    bundle = Bundle(
        cpus=engines.rollout_cpus_per_engine,
        gpus=unit.gpus / nodes * engines.rollout_gpu_fraction,
        custom=_mark(cluster.rollout_node_resource),
    )
    return GroupPlan(
        name=f"{config.output.run_id}-{unit.name}",
        role=role,
        strategy="STRICT_PACK" if nodes == 1 else "STRICT_SPREAD",
        bundles=(bundle,) * nodes,
        slots=1,
        unit=unit,
    )


def _mark(resource: str | None) -> dict[str, float]:
    return {resource: _MARK} if resource else {}


def _describe(group: GroupPlan, copies: int, holds: str) -> str:
    bundle = ", ".join(f"{amount:g} {name}" for name, amount in group.bundles[0].resources().items())
    groups = "1 placement group" if copies == 1 else f"{copies} placement groups"
    shape = f"{len(group.bundles)} bundle(s) of {{{bundle}}}, {group.strategy}"
    return f"{group.role}: {holds} in {groups}: {shape}"
