"""Joining or starting a Ray cluster, and reserving placement groups with deadlines.

What is wanted comes from `config.placement`; nothing here knows what will run in a bundle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from miles_disagg.domain.errors import PlacementError

_FORWARDED = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "OPENBLAS_CORETYPE")


@contextlib.contextmanager
def cluster(
    *, address: str | None, namespace: str, dashboard: bool, num_cpus: float | None, num_gpus: int | None
) -> Iterator[None]:
    """Connect to the cluster at `address` (or of the surrounding Ray job), else start a local one; leave it at the end.

    A local cluster has at least `num_cpus` logical CPUs, since rollout engines and trainer ranks on a laptop share
    cores. An already initialised Ray (a test session's) is used and left alone.
    """
    if ray.is_initialized():
        yield
        return
    env = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    runtime_env = {"env_vars": {**env, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONUNBUFFERED": "1"}}
    common: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "runtime_env": runtime_env,
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **common)
    else:
        cpus = max(num_cpus or 0, os.cpu_count() or 1)
        ray.init(
            num_cpus=int(-(-cpus // 1)), num_gpus=num_gpus, include_dashboard=dashboard,
            object_store_memory=512 * 1024 * 1024, **common,
        )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def incarnation(name: str) -> str:
    """A name for an actor or placement group that one of an earlier start, which Ray may still be ending, never has."""
    return f"{name}-{secrets.token_hex(3)}"


def available() -> Mapping[str, float]:
    """Free resources of the cluster, CPU and GPU only."""
    return {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}


@contextlib.contextmanager
def reserved(
    name: str, bundles: Sequence[Mapping[str, float]], strategy: str, timeout: float
) -> Iterator[PlacementGroup]:
    """A placement group, removed at the end.

    Raises PlacementError after `timeout` seconds, printing what was wanted and what is there.
    """
    group = reserve(name, bundles, strategy, timeout)
    try:
        yield group
    finally:
        remove_placement_group(group)


def reserve(name: str, bundles: Sequence[Mapping[str, float]], strategy: str, timeout: float) -> PlacementGroup:
    """Create a placement group and wait for it; the caller removes it. See `reserved`."""
    group = placement_group([dict(b) for b in bundles], strategy=strategy, name=incarnation(name))
    begin = time.monotonic()
    if group.wait(timeout_seconds=timeout):
        return group
    free, total = available(), ray.cluster_resources()
    remove_placement_group(group)
    wanted = ", ".join(str({k: v for k, v in b.items() if v}) for b in bundles)
    raise PlacementError(
        f"placement group {name} could not be placed in {time.monotonic() - begin:.0f} s: wanted {strategy} bundles "
        f"[{wanted}]; available CPU {free.get('CPU', 0):g} of {total.get('CPU', 0):g}, GPU {free.get('GPU', 0):g} of "
        f"{total.get('GPU', 0):g} on {len([n for n in ray.nodes() if n['Alive']])} node(s). Ask for less "
        "(--actor-num-gpus-per-node, --rollout-num-gpus) or add nodes."
    )
