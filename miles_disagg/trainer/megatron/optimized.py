"""A model with its gradient buffers and its optimizer: one step on micro-batches, and both saved and restored.

Which model, which loss and in which order is `trainer.py` (the policy) and `critic.py` (its critic).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from miles_disagg.trainer.base import OptimizerSpec, TrainerSpec
from miles_disagg.trainer.megatron import checkpoint as checkpoints
from miles_disagg.trainer.megatron.batch import MicroBatch
from miles_disagg.trainer.megatron.model import DTYPES
from miles_disagg.trainer.megatron.parallel import Layout
from miles_disagg.trainer.megatron.saving import HostCopies, PendingSave
from miles_disagg.trainer.megatron.step import Loss, ScoreFunction, train_pass
from miles_disagg.trainer.schedule import learning_rate


class OptimizedModel:
    """`model` of a TransformerConfig of its own, which gets this optimizer's hooks. Methods are collective."""

    def __init__(self, model: GPTModel, spec: TrainerSpec, optimizer: OptimizerSpec, layout: Layout):
        self.model, self.optimizer_steps = model, 0
        self._adam, self._layout, self._distributed = optimizer, layout, spec.use_distributed_optimizer
        self._host = HostCopies()
        config = model.config
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=spec.use_distributed_optimizer,
            ),
            model,
        )
        self._optimizer: Any = get_megatron_optimizer(_optimizer_config(spec, optimizer), [self.ddp])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss

    def step(
        self, micros: Sequence[MicroBatch], scorer: ScoreFunction, loss: Loss, names: Sequence[str]
    ) -> dict[str, float]:
        """One optimizer step. The loss's sums by `names`, and grad_norm, lr and micro_batches.

        FloatingPointError on every rank alike, before anything is updated, for a loss or gradient that is not finite.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = train_pass(self.ddp, micros, scorer, loss, len(names), self._layout).tolist()
        out = dict(zip(names, sums, strict=True))
        self._check_finite(out)
        lr = learning_rate(self._adam, self.optimizer_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self._optimizer.step()
        self.optimizer_steps += 1
        return out | {"grad_norm": float(grad_norm or 0.0), "lr": lr, "micro_batches": float(len(micros))}

    def _check_finite(self, sums: Mapping[str, float]) -> None:
        buffers = [*getattr(self.ddp, "buffers"), *self.ddp.expert_parallel_buffers]  # noqa: B009
        gradients = torch.stack([buffer.grad_data.sum() for buffer in buffers])
        total = gradients.sum()
        dist.all_reduce(total)
        bad = [name for name, value in ({**sums, "gradient": total.item()}).items() if not math.isfinite(value)]
        if bad:
            raise FloatingPointError(
                f"{', '.join(bad)} not finite in optimizer step {self.optimizer_steps}: the step was not applied"
            )

    def begin_save(self, directory: str, common: Mapping[str, Any]) -> PendingSave:
        """Copy out model, optimizer and step count. `common`: small values that are the same on all ranks."""
        state = {**common, "optimizer_steps": self.optimizer_steps}
        return checkpoints.begin(directory, self.model, self._optimizer, state, self._distributed, self._host)

    def load(self, directory: str, common: Mapping[str, Any]) -> dict[str, Any]:
        """Restore what was saved, also under another layout; the saved `common`."""
        state = checkpoints.load(directory, self.model, self._optimizer, dict(common), self._distributed)
        self.optimizer_steps = state["optimizer_steps"]
        return state


def _optimizer_config(spec: TrainerSpec, adam: OptimizerSpec) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=adam.min_lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.adam_beta1,
        adam_beta2=adam.adam_beta2,
        adam_eps=adam.adam_eps,
        clip_grad=adam.clip_grad or math.inf,  # the norm is computed, and reported, either way
        params_dtype=DTYPES[spec.dtype],
        bf16=spec.dtype == "bf16",
        use_distributed_optimizer=spec.use_distributed_optimizer,
    )
