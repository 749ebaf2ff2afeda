"""One rank of the Megatron-core trainer: builds the model, takes optimizer steps, exports weights.

Plain and Ray-free; every method except the properties is collective. Ray actors around it are `trainer/actor.py`.
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from miles_disagg.publish.peer import LocalShard
from miles_disagg.trainer.base import ExportSink, RankSpec, TrainerSpec, TrainSample
from miles_disagg.trainer.batching import plan_micro_batches
from miles_disagg.trainer.hf_config import read_hf_config
from miles_disagg.trainer.megatron import checkpoint as checkpoints
from miles_disagg.trainer.megatron import convert, parallel
from miles_disagg.trainer.megatron.batch import (
    Columns,
    MicroBatch,
    pack,
    policy_columns,
    response_offsets,
    with_weights,
)
from miles_disagg.trainer.megatron.model import DTYPES, build_model, transformer_config
from miles_disagg.trainer.megatron.shards import local_shards
from miles_disagg.trainer.megatron.step import (
    POLICY_SUMS,
    Loss,
    Scorer,
    cross_entropy_loss,
    policy_loss,
    score_pass,
    train_pass,
)
from miles_disagg.trainer.schedule import learning_rate
from miles_disagg.weights.checkpoint import Checkpoint, open_checkpoint


class MegatronTrainer:
    """See `trainer.base.Trainer`. The constructor joins the other ranks and loads the Hugging Face checkpoint.

    Raises CheckpointError for a model that cannot be trained, ValueError for a layout that does not fit it, and
    DeadlineExceeded naming the ranks that did not come.
    """

    def __init__(self, spec: TrainerSpec, rank: RankSpec):
        self.spec = spec
        self.hf = read_hf_config(spec.hf_checkpoint)
        problems = self.hf.layout_problems(spec.tensor_parallel, spec.pipeline_parallel)
        if problems:
            raise ValueError("; ".join(problems))
        self.optimizer_steps = 0
        with open_checkpoint(spec.hf_checkpoint) as checkpoint:
            convert.check_checkpoint(checkpoint, self.hf)
            self._dtypes = {n: convert.TORCH_DTYPES[checkpoint.tensors[n].dtype] for n in convert.hf_shapes(self.hf)}
            self.layout = parallel.initialize(spec, rank)
            try:
                self._build(checkpoint)
            except BaseException:
                parallel.shutdown()
                raise

    def _build(self, checkpoint: Checkpoint) -> None:
        """The model with its weights, the frozen base if the loss needs one, gradient buffers and optimizer."""
        self.config = transformer_config(self.hf, self.spec, self.layout)
        self.model = build_model(self.hf, self.config, self.layout)
        convert.import_weights(self.model, checkpoint, self.hf, self.layout)
        self._base: torch.nn.Module | None = None
        if self.spec.loss.kl_coef:
            self._base = build_model(self.hf, self.config, self.layout).eval().requires_grad_(False)
            convert.import_weights(self._base, checkpoint, self.hf, self.layout)
        self._ddp = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=self.spec.use_distributed_optimizer,
            ),
            self.model,
        )
        self._optimizer: Any = get_megatron_optimizer(_optimizer_config(self.spec), [self._ddp])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self._optimizer.scale_loss

    # --- training ---------------------------------------------------------------------------------

    def train_step(
        self, batch: Sequence[TrainSample], *, global_batch_size: int | None = None, version: int | None = None
    ) -> Mapping[str, float]:
        """See `trainer.base.Trainer.train_step`. ValueError if `global_batch_size` does not divide the batch."""
        size = global_batch_size or len(batch)
        if not batch or len(batch) % size:
            raise ValueError(f"--global-batch-size {size} does not divide the rollout batch of {len(batch)} samples")
        columns = policy_columns(batch, version)
        if self.spec.loss.needs_behaviour and "behaviour" not in columns.values:
            missing = sum(sample.behaviour_logprobs is None for sample in batch)
            raise ValueError(
                f"{missing} of {len(batch)} samples have no behaviour logprobs, which --use-tis, --use-rs and "
                "--use-rollout-logprobs need: have the generate function return them, or turn these off"
            )
        if size < len(batch) and self.spec.loss.proximal == "recomputed":
            columns = columns.with_column("proximal", self._score(self.model, batch))
        if self._base is not None:
            columns = columns.with_column("reference", self._score(self._base, batch))
        steps = []
        for begin in range(0, len(batch), size):
            part = batch[begin : begin + size]
            weighted = self._weighted(columns.samples(begin, begin + size), part)
            steps.append(self._optimizer_step(part, weighted, policy_loss(self.spec.loss), POLICY_SUMS))
        out = {key: math.fsum(s[key] for s in steps) / len(steps) for key in steps[0]}
        out["train/tokens"] = float(sum(len(sample.tokens) for sample in batch))
        on_policy, share = out.pop("train/on_policy_abs_diff"), out.pop("train/on_policy_share")
        if share > 0:
            out["train/rollout_logprob_abs_diff_on_policy"] = on_policy / share
        return out

    def sft_step(self, batch: Sequence[TrainSample]) -> Mapping[str, float]:
        """See `trainer.base.Trainer.sft_step`."""
        columns = self._weighted(policy_columns(batch, None), batch)
        return self._optimizer_step(batch, columns, cross_entropy_loss, ("loss", "entropy"))

    def logprobs(self, batch: Sequence[TrainSample]) -> list[list[float]]:
        """See `trainer.base.Trainer.logprobs`."""
        flat, offsets = self._score(self.model, batch), response_offsets(batch)
        return [flat[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]

    def _weighted(self, columns: Columns, batch: Sequence[TrainSample]) -> Columns:
        return with_weights(columns, batch, self.spec.loss.aggregate, self.spec.loss.constant_length)

    def _optimizer_step(
        self, batch: Sequence[TrainSample], columns: Columns, loss: Loss, names: Sequence[str]
    ) -> dict[str, float]:
        micros = self._micro_batches(batch, columns)
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = train_pass(self._ddp, micros, self._scorer(), loss, len(names), self.layout).tolist()
        self._check_finite(dict(zip(names, sums, strict=True)))
        lr = learning_rate(self.spec.optimizer, self.optimizer_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self._optimizer.step()
        self.optimizer_steps += 1
        out = {f"train/{name}": value for name, value in zip(names, sums, strict=True)}
        return out | {
            "train/grad_norm": float(grad_norm or 0.0),
            "train/lr": lr,
            "train/micro_batches": float(len(micros)),
        }

    def _check_finite(self, sums: Mapping[str, float]) -> None:
        """FloatingPointError on every rank alike, before anything is updated."""
        gradients = torch.stack([buffer.grad_data.sum() for buffer in getattr(self._ddp, "buffers")])  # noqa: B009
        total = gradients.sum()
        dist.all_reduce(total)
        bad = [name for name, value in ({**sums, "gradient": total.item()}).items() if not math.isfinite(value)]
        if bad:
            raise FloatingPointError(
                f"{', '.join(bad)} not finite in optimizer step {self.optimizer_steps}: the step was not applied"
            )

    def _score(self, model: torch.nn.Module, batch: Sequence[TrainSample]) -> torch.Tensor:
        offsets = response_offsets(batch)
        model.eval()
        return score_pass(model, self._micro_batches(batch, Columns(offsets, {})), self._scorer(), offsets, self.layout)

    def _micro_batches(self, batch: Sequence[TrainSample], columns: Columns) -> list[MicroBatch]:
        lengths = [len(sample.tokens) for sample in batch]
        longest = max(lengths)
        if longest > self.hf.max_positions:
            raise ValueError(
                f"a sample has {longest} tokens, the model's max_position_embeddings is {self.hf.max_positions}"
            )
        plan = plan_micro_batches(lengths, self.spec.max_tokens_per_micro_batch, self.layout.dp_size)
        return [pack(batch, indices, columns, self.layout.device) for indices in plan[self.layout.dp]]

    def _scorer(self) -> Scorer:
        return Scorer(self.layout, self.hf.vocab_size, self.spec.loss.temperature)

    # --- weights ----------------------------------------------------------------------------------

    @property
    def is_source(self) -> bool:
        """See `trainer.base.Trainer.is_source`."""
        return self.layout.is_source

    @property
    def source_index(self) -> int | None:
        """See `trainer.base.Trainer.source_index`."""
        return self.layout.pp if self.layout.is_source else None

    @property
    def num_sources(self) -> int:
        """See `trainer.base.Trainer.num_sources`."""
        return self.layout.pp_size

    def export(self, sink: ExportSink, bucket_bytes: int = 256 << 20) -> None:
        """See `trainer.base.Trainer.export`. RuntimeError if tied embeddings came apart between pipeline stages."""
        self.check_copies()
        if self.layout.dp == 0:
            named = convert.gather_weights(self.model, self.hf, self.layout, self._dtypes)
            convert.export_buckets(named, sink, bucket_bytes)

    def shards(self) -> list[LocalShard]:
        """See `trainer.base.Trainer.shards`."""
        return local_shards(self.model, self.hf, self.layout, self._dtypes)

    def check_copies(self) -> None:
        """See `trainer.base.Trainer.check_copies`."""
        convert.check_tied_copies(self.model, self.hf, self.layout)

    def save_checkpoint(self, directory: str) -> None:
        """See `trainer.base.Trainer.save_checkpoint`. FileExistsError if `directory` exists."""
        checkpoints.save(directory, self.model, self._optimizer, self._common_state(), self._distributed_optimizer)

    def load_checkpoint(self, directory: str) -> None:
        """See `trainer.base.Trainer.load_checkpoint`. CheckpointError if it is not one of this model."""
        state = checkpoints.load(
            directory, self.model, self._optimizer, self._common_state(), self._distributed_optimizer
        )
        self.optimizer_steps = state["optimizer_steps"]

    def close(self) -> None:
        """See `trainer.base.Trainer.close`."""
        parallel.shutdown()

    @property
    def _distributed_optimizer(self) -> bool:
        return self.spec.use_distributed_optimizer

    def _common_state(self) -> dict[str, Any]:
        return {"optimizer_steps": self.optimizer_steps, "architecture": self.hf.architecture}


def _optimizer_config(spec: TrainerSpec) -> OptimizerConfig:
    adam = spec.optimizer
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
