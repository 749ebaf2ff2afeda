"""Saves and restores the trainer's own state through Megatron's `dist_checkpointing`, across layouts.

Model, optimizer and the step count. There is no random number in a step (no dropout), so no RNG state is kept. How
what was copied out gets to disk is `saving`.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.trainer.megatron.saving import HostCopies, PendingCheckpoint, PendingSave


def begin(
    directory: str, model: Any, optimizer: Any, common: dict[str, Any], distributed_optimizer: bool, host: HostCopies
) -> PendingSave:
    """Copy everything out to `host`; the model may change as soon as this returns. Collective.

    Nothing is called `directory` before the save is finished. FileExistsError on every rank if it exists;
    CheckpointError while what `host` holds is still being written. `common`: small picklable values, equal on all
    ranks.
    """
    if not host.idle.is_set():
        raise CheckpointError("the checkpoint before this one is still being written", file=directory)
    target = Path(directory)
    chosen = [None if target.exists() else f".{target.name}.{secrets.token_hex(4)}.partial"]
    dist.broadcast_object_list(chosen, src=0)
    if chosen[0] is None:
        raise FileExistsError(f"{target} exists: a checkpoint is never overwritten")
    partial = target.parent / chosen[0]
    if dist.get_rank() == 0:
        partial.mkdir(parents=True)
    dist.barrier()
    pending = PendingSave(partial, target, host)
    try:
        with host.receiving():
            dist_checkpointing.save(
                _sharded(model, optimizer, common, distributed_optimizer, loading=False), str(partial)
            )
    except BaseException:
        host.idle.set()
        if dist.get_rank() == 0:
            pending.abandon()
        raise
    return pending


def complete(pending: PendingCheckpoint) -> None:
    """Write what was copied out and let it appear. Collective; CheckpointError on every rank if one cannot write."""
    written, problem = None, None
    try:
        written = pending.write()
    except CheckpointError as error:
        problem = f"trainer rank {dist.get_rank()}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (written, problem))
    problems = [problem for _, problem in found if problem]
    if dist.get_rank() == 0:
        if problems:
            pending.abandon()
        else:
            pending.finish([written for written, _ in found])
    dist.barrier()
    if problems:
        raise CheckpointError("; ".join(problems))


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
    before, now = saved.get("expert_parallel", 1), common["expert_parallel"]
    if (before > 1) != (now > 1):  # experts that are spread have an optimizer of their own
        message = (
            f"was saved with --expert-model-parallel-size {before}: {now} cannot continue it, only sizes above 1 can"
        )
        if before == 1:
            message = f"was saved with --expert-model-parallel-size 1, and {now} cannot continue it"
        raise CheckpointError(message, file=directory)
    if distributed_optimizer:
        for one in _parts(optimizer):
            _make_adam_states(one.optimizer)
    state: Any = dist_checkpointing.load(
        _sharded(model, optimizer, common, distributed_optimizer, loading=True), directory
    )
    model.load_state_dict(state["model"])
    if distributed_optimizer:
        for one in _parts(optimizer):
            _keep_adam_steps(one)
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    for one in _parts(optimizer):  # restored, every parameter of a group has the same tensor as its step counter
        for adam in one.optimizer.state.values():
            if torch.is_tensor(adam.get("step")):
                adam["step"] = adam["step"].clone()
    return saved


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _make_adam_states(adam: Any) -> None:
    """Give torch's Adam the states that its first step would make: Megatron asks a fresh one for its step count."""
    if not isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
        return
    for parameter in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[parameter]:
            adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }


def _keep_adam_steps(optimizer: Any) -> None:
    """Torch's AdamW, used where apex and Transformer Engine are absent, has a `step` for each parameter.

    The fully reshardable format does not: it is restored with the parameter groups, before the parameters' states are
    copied. Megatron looks for it among those states, so hand it what is there already.
    """
    copy_states = type(optimizer)._set_main_param_and_optimizer_states

    def copy_all_but_step(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        copy_states(optimizer, model_param, ({"step": state["step"]} if "step" in state else {}) | tensors)

    optimizer._set_main_param_and_optimizer_states = copy_all_but_step


def _count_padding(optimizer: Any) -> None:
    """Have Megatron gather its state buffers with their padding.

    Without it, it packs the buckets of a buffer tightly but slices parameters at their padded offsets: where a bucket
    ends in padding (tied embeddings under PP have one of their own), states of later parameters come out shifted.
    """
    for buffer in optimizer.buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def _sharded(model: Any, optimizer: Any, common: dict[str, Any], distributed: bool, *, loading: bool) -> dict[str, Any]:
    shards = model.sharded_state_dict()
    kwargs = {}
    if distributed:
        kwargs = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
        for one in _parts(optimizer):
            _count_padding(one)
    return {
        "model": shards,
        "optimizer": optimizer.sharded_state_dict(shards, is_loading=loading, **kwargs),
        "common": common,
    }
