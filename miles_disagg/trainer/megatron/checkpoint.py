"""Saves and restores the trainer's own state through Megatron's `dist_checkpointing`, across layouts.

Model, optimizer and the step count. There is no random number in a step (no dropout), so no RNG state is kept.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from miles_disagg.domain.errors import CheckpointError


def save(directory: str, model: Any, optimizer: Any, common: dict[str, Any], distributed_optimizer: bool) -> None:
    """Write beside `directory`, then rename: it appears complete or not at all. Collective.

    FileExistsError on every rank if it exists. `common`: small picklable values, equal on all ranks.
    """
    target = Path(directory)
    chosen = [None if target.exists() else f".{target.name}.{secrets.token_hex(4)}.partial"]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        raise FileExistsError(f"{target} exists: a checkpoint is never overwritten")
    partial = target.parent / chosen[0]
    if dist.get_rank() == 0:
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        dist_checkpointing.save(_sharded(model, optimizer, common, distributed_optimizer, loading=False), str(partial))
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(partial, target)
        dist.barrier()
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(
    directory: str, model: Any, optimizer: Any, common: dict[str, Any], distributed_optimizer: bool
) -> dict[str, Any]:
    """Restore model and optimizer in place, also from another TP x PP x DP layout; returns the saved `common`.

    CheckpointError if `directory` is no checkpoint, or one of another architecture. Collective.
    """
    if not (Path(directory) / "metadata.json").is_file():
        raise CheckpointError("is not a trainer checkpoint: no metadata.json", file=directory)
    saved = dist_checkpointing.load_common_state_dict(directory)["common"]
    if saved["architecture"] != common["architecture"]:
        message = f"holds a {saved['architecture']}, this trainer has a {common['architecture']}"
        raise CheckpointError(message, file=directory)
    state: Any = dist_checkpointing.load(
        _sharded(model, optimizer, common, distributed_optimizer, loading=True), directory
    )
    model.load_state_dict(state["model"])
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    return saved


def _sharded(model: Any, optimizer: Any, common: dict[str, Any], distributed: bool, *, loading: bool) -> dict[str, Any]:
    shards = model.sharded_state_dict()
    kwargs = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}} if distributed else {}
    return {
        "model": shards,
        "optimizer": optimizer.sharded_state_dict(shards, is_loading=loading, **kwargs),
        "common": common,
    }
