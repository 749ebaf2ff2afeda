"""`--sglang-config FILE`: which models are served by which engines. Read and checked here; placed by `placement`.

    sglang:
      - name: policy                  # the one that is trained: model_path is the run's checkpoint
        server_groups:
          - {num_engines: 2}          # on CPU
          - num_gpus: 4               # or on GPUs: 2 engines of 2
            num_gpus_per_engine: 2
            overrides: {mem-fraction-static: 0.7}
      - name: reward
        model_path: /models/reward
        update_weights: false         # frozen: never updated, not behind the gateway
        server_groups: [{num_engines: 1}]

The names of the keys are those that miles and slime users know; `num_engines` is ours, for engines without a GPU.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_disagg.config.flags import closest, read_yaml
from miles_disagg.domain.errors import ConfigError

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "num_engines", "overrides")

# Server arguments that the system itself sets.
OWNED_SERVER_ARGS = {
    "model-path": "--hf-checkpoint",
    "tp-size": "--rollout-num-gpus-per-engine",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "host": "--gateway-host",
    "port": "--gateway-port",
    "base-gpu-id": "--rollout-num-gpus",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node-rank": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
    "dist-init-addr": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
}
_INSTEAD = OWNED_SERVER_ARGS | {
    "model-path": "model_path of the model",
    "tp-size": "num_gpus_per_engine",
    "tensor-parallel-size": "num_gpus_per_engine",
}


@dataclass(frozen=True)
class ServerGroup:
    """Engines of one kind. gpus: of one engine, 0 on CPU; ranks: tensor-parallel ones; overrides: server arguments by
    name without `--`."""

    worker_type: Literal["regular", "placeholder"]
    engines: int
    gpus: int
    ranks: int = 1
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """A model and its engines. path: None for the run's checkpoint; updates: it is the policy."""

    name: str
    path: str | None
    updates: bool
    groups: tuple[ServerGroup, ...]


def read_server_groups(path: str, checkpoint: str | None) -> tuple[ServedModel, ...]:
    """The models of a file. checkpoint: `--hf-checkpoint`, to tell the policy. ConfigError with every problem."""
    try:
        body = read_yaml(path)
    except ConfigError as error:
        raise ConfigError([p.replace("--config", "--sglang-config", 1) for p in error.problems]) from None
    models = body.get("sglang")
    if not isinstance(models, list) or not models or not all(isinstance(m, Mapping) for m in models):
        raise ConfigError([f"--sglang-config {path}: must have one key `sglang` with a list of models"])
    problems = [f"--sglang-config {path}: {problem}" for problem in _problems(models)]
    if problems:
        raise ConfigError(problems)
    found = tuple(_model(entry, checkpoint) for entry in models)
    policies = [model.name for model in found if model.updates]
    if len(policies) != 1:
        raise ConfigError(
            [
                f"--sglang-config {path}: {len(policies)} models are updated ({', '.join(policies) or 'none'}), there "
                "must be exactly one, the policy: set `update_weights: false` on the frozen ones"
            ]
        )
    (policy,) = (model for model in found if model.updates)
    if policy.path is not None:
        raise ConfigError(
            [
                f"--sglang-config {path}: {policy.name} is updated, so its model_path must be --hf-checkpoint "
                f"{checkpoint}: drop model_path"
            ]
        )
    return found


def _problems(models: list[Mapping[str, Any]]) -> Iterator[str]:
    seen = set()
    for model in models:
        name = model.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in seen:
            yield f"name {name!r}: every model needs a name of its own, of lower-case letters, digits and _"
        seen.add(name)
        yield from (f"{name}: unknown key {k}{closest(str(k), _MODEL_KEYS)}" for k in model if k not in _MODEL_KEYS)
        path, updates = model.get("model_path"), model.get("update_weights")
        if path is not None and not (isinstance(path, str) and Path(path).expanduser().is_dir()):
            yield f"{name}: model_path {path!r} is no directory"
        if updates is not None and not isinstance(updates, bool):
            yield f"{name}: update_weights must be true or false, not {updates!r}"
        groups = model.get("server_groups")
        if not isinstance(groups, list) or not groups or not all(isinstance(g, Mapping) for g in groups):
            yield f"{name}: server_groups must be a list of groups"
            continue
        for i, group in enumerate(groups):
            yield from (f"{name}, group {i}: {problem}" for problem in _group_problems(group, model))
        if all(group.get("worker_type") == "placeholder" for group in groups):
            yield f"{name}: only placeholders, no engine: add a regular group"


def _group_problems(group: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"unknown key {k}{closest(str(k), _GROUP_KEYS)}" for k in group if k not in _GROUP_KEYS)
    kind = group.get("worker_type", "regular")
    if kind not in WORKER_TYPES:
        yield f"worker_type {kind!r} is not one of {', '.join(WORKER_TYPES)}"
    elif kind in ("prefill", "decode"):
        yield (f"worker_type {kind}: this program does not start prefill/decode groups; make the group regular")
    total, each, engines = group.get("num_gpus", 0), _per_engine(group, model), group.get("num_engines")
    for key, value, low in (("num_gpus", total, 0), ("num_gpus_per_engine", each, 1), ("num_engines", engines, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            yield f"{key} must be a whole number of at least {low}, not {value!r}"
            return
    if total % each:
        yield f"num_gpus {total} is not divisible by num_gpus_per_engine {each}"
    elif total and engines not in (None, total // each):
        yield f"num_engines {engines} contradicts num_gpus {total} / num_gpus_per_engine {each}: drop it"
    elif not total and engines is None:
        yield "num_gpus is missing (or num_engines, for engines on CPU)"
    overrides = group.get("overrides", {})
    if not isinstance(overrides, Mapping):
        yield "overrides must be a mapping of server arguments to values"
        return
    for name in (str(given).replace("_", "-") for given in overrides):
        if name in _INSTEAD:
            yield f"overrides: {name} is set by this program: use {_INSTEAD[name]}"


def _per_engine(group: Mapping[str, Any], model: Mapping[str, Any]) -> Any:
    return group.get("num_gpus_per_engine", model.get("num_gpus_per_engine", 1))


def _model(entry: Mapping[str, Any], checkpoint: str | None) -> ServedModel:
    path = entry.get("model_path")
    same = path is None or path == checkpoint
    return ServedModel(
        entry["name"],
        None if path is None or same else str(Path(path).expanduser().absolute()),
        entry.get("update_weights", same),
        tuple(_group(group, entry) for group in entry["server_groups"]),
    )


def _group(group: Mapping[str, Any], model: Mapping[str, Any]) -> ServerGroup:
    total, each = group.get("num_gpus", 0), _per_engine(group, model)
    engines = total // each if total else group["num_engines"]
    overrides = {str(name).replace("_", "-"): _values(value) for name, value in group.get("overrides", {}).items()}
    given = {name: values for name, values in overrides.items() if values is not None}
    return ServerGroup(group.get("worker_type", "regular"), engines, each if total else 0, each, given)


def _values(value: Any) -> tuple[str, ...] | None:
    """Of a server argument: True is a bare switch, False leaves it out."""
    if isinstance(value, bool):
        return () if value else None
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)
