"""One rank of the Megatron-core trainer: builds the model, takes optimizer steps, exports weights.

Plain and Ray-free; every method except the properties is collective. Ray actors around it are `trainer/actor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.publish.peer import LocalShard
from miles_disagg.trainer.base import ExportSink, RankSpec, TrainerSpec, TrainSample
from miles_disagg.trainer.batching import plan_micro_batches, step_bounds
from miles_disagg.trainer.hf_config import read_hf_config
from miles_disagg.trainer.megatron import convert, parallel
from miles_disagg.trainer.megatron.batch import (
    Columns,
    MicroBatch,
    pack,
    policy_columns,
    response_offsets,
    with_teacher_baseline,
    with_weights,
)
from miles_disagg.trainer.megatron.checkpoint import complete
from miles_disagg.trainer.megatron.critic import (
    VALUE_SUMS,
    critic_metrics,
    value_loss,
    value_scores,
    whitened,
    with_gae,
)
from miles_disagg.trainer.megatron.model import build_critic, build_model, transformer_config
from miles_disagg.trainer.megatron.optimized import OptimizedModel
from miles_disagg.trainer.megatron.saving import PendingCheckpoint
from miles_disagg.trainer.megatron.shards import local_shards
from miles_disagg.trainer.megatron.step import (
    POLICY_SUMS,
    Loss,
    ScoreFunction,
    Scorer,
    cross_entropy_loss,
    policy_loss,
    score_pass,
)
from miles_disagg.weights.checkpoint import Checkpoint, open_checkpoint

_CRITIC = ".critic"


class MegatronTrainer:
    """See `trainer.base.Trainer`. The constructor joins the other ranks and loads the Hugging Face checkpoint.

    Raises CheckpointError for a model that cannot be trained, ValueError for a layout that does not fit it, and
    DeadlineExceeded naming the ranks that did not come.
    """

    def __init__(self, spec: TrainerSpec, rank: RankSpec):
        self.spec = spec
        self.hf = read_hf_config(spec.hf_checkpoint)
        problems = self.hf.layout_problems(spec.tensor_parallel, spec.pipeline_parallel, spec.expert_parallel)
        if problems:
            raise ValueError("; ".join(problems))
        self.rollout_steps = 0
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
        """The models with their weights: the policy, and the frozen base and the critic if the algorithm needs them."""
        self.config = transformer_config(self.hf, self.spec, self.layout)
        self.model = build_model(self.hf, self.config, self.layout)
        convert.import_weights(self.model, checkpoint, self.hf, self.layout)
        self._base: torch.nn.Module | None = None
        if self.spec.loss.kl_coef and self.spec.loss.kl_reference == "local":
            self._base = build_model(self.hf, self.config, self.layout).eval().requires_grad_(False)
            convert.import_weights(self._base, checkpoint, self.hf, self.layout)
        self._policy = OptimizedModel(self.model, self.spec, self.spec.optimizer, self.layout)
        self._critic: OptimizedModel | None = None
        if self.spec.critic is not None:
            # A configuration of its own: the schedules find the optimizer's hooks there.
            critic = build_critic(self.hf, transformer_config(self.hf, self.spec, self.layout), self.layout)
            convert.import_weights(critic, checkpoint, self.hf, self.layout)
            self._critic = OptimizedModel(critic, self.spec, self.spec.critic.optimizer, self.layout)
        self._policy_loss = policy_loss(self.spec.loss)

    # --- training ---------------------------------------------------------------------------------

    def train_step(
        self, batch: Sequence[TrainSample], *, global_batch_size: int | None = None, version: int | None = None
    ) -> Mapping[str, float]:
        """See `trainer.base.Trainer.train_step`. ValueError for an empty batch."""
        if not batch:
            raise ValueError("a batch without samples cannot be trained on")
        parts = step_bounds(len(batch), global_batch_size or len(batch))
        columns = policy_columns(batch, version)
        if self.spec.loss.needs_behaviour and "behaviour" not in columns.values:
            missing = sum(sample.behaviour_logprobs is None for sample in batch)
            raise ValueError(
                f"{missing} of {len(batch)} samples have no behaviour logprobs, which --use-tis, --use-rs and "
                "--use-rollout-logprobs need: have the generate function return them, or turn these off"
            )
        if self.spec.loss.distill_coef and "teacher" not in columns.values:
            missing = sum(sample.teacher_logprobs is None for sample in batch)
            raise ValueError(f"{missing} of {len(batch)} samples have no teacher logprobs, which --use-opd needs")
        if self.spec.loss.kl_coef and self._base is None and "reference" not in columns.values:
            missing = sum(sample.reference_logprobs is None for sample in batch)
            raise ValueError(f"{missing} of {len(batch)} samples have no logprobs of --kl-reference")
        out: dict[str, float] = {"train/tokens": float(sum(len(sample.tokens) for sample in batch))}
        if self._critic is not None and self.spec.critic is not None:
            values = self._score(self._critic.model, batch, value_scores)
            columns = with_gae(columns, batch, values, self.spec.critic)
            out |= self._train_critic(batch, columns, parts)
        self.rollout_steps += 1
        if self.spec.critic is not None and self.rollout_steps <= self.spec.critic.only_steps:
            return out
        if self.spec.advantages.whiten:
            columns = whitened(columns)
        if self.spec.loss.distill_coef:
            columns = with_teacher_baseline(columns, self.spec.loss.distill_coef)
        if len(parts) > 1 and self.spec.loss.proximal == "recomputed":
            columns = columns.with_column("proximal", self._score(self.model, batch))
        if self._base is not None:
            columns = columns.with_column("reference", self._score(self._base, batch))
        steps = []
        for begin, end in parts:
            part = batch[begin:end]
            weighted = self._weighted(columns.samples(begin, end), part)
            steps.append(self._optimizer_step(part, weighted, self._policy_loss, POLICY_SUMS))
        out |= {key: math.fsum(s[key] for s in steps) / len(steps) for key in steps[0]}
        if "teacher" not in columns.values:
            del out["train/opd_reverse_kl"]
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
        out = self._policy.step(self._micro_batches(batch, columns), self._scorer(), loss, names)
        return {f"train/{name}": value for name, value in out.items()}

    def _train_critic(
        self, batch: Sequence[TrainSample], columns: Columns, parts: Sequence[tuple[int, int]]
    ) -> dict[str, float]:
        """One optimizer step of the critic for each part of the batch, on columns `value` and `return`."""
        assert self._critic is not None
        assert self.spec.critic is not None
        steps, loss = [], value_loss(self.spec.critic.value_clip)
        for begin, end in parts:
            part = batch[begin:end]
            weighted = self._weighted(columns.samples(begin, end), part)
            steps.append(self._critic.step(self._micro_batches(part, weighted), value_scores, loss, VALUE_SUMS))
        return critic_metrics(steps)

    def values(self, batch: Sequence[TrainSample]) -> list[list[float]]:
        """The critic's value of the state before every response token, per sample; the same on every rank."""
        if self._critic is None:
            raise ValueError("this trainer has no critic: give TrainerSpec.critic")
        flat, offsets = self._score(self._critic.model, batch, value_scores), response_offsets(batch)
        return [flat[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]

    def _score(
        self, model: torch.nn.Module, batch: Sequence[TrainSample], scorer: ScoreFunction | None = None
    ) -> torch.Tensor:
        offsets = response_offsets(batch)
        model.eval()
        micros = self._micro_batches(batch, Columns(offsets, {}))
        return score_pass(model, micros, scorer or self._scorer(), offsets, self.layout)

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
        if self.layout.exports:
            named = convert.gather_weights(self.model, self.hf, self.layout, self._dtypes)
            convert.export_buckets(named, sink, bucket_bytes)

    def shards(self) -> list[LocalShard]:
        """See `trainer.base.Trainer.shards`."""
        return local_shards(self.model, self.hf, self.layout, self._dtypes)

    def check_copies(self) -> None:
        """See `trainer.base.Trainer.check_copies`."""
        convert.check_tied_copies(self.model, self.hf, self.layout)

    def begin_checkpoint(self, directory: str) -> PendingCheckpoint:
        """See `trainer.base.Trainer.begin_checkpoint`. FileExistsError if `directory` exists.

        The critic, if there is one, is complete in `<directory>.critic` before the policy is: a checkpoint is whole
        when `directory` is there.
        """
        parts = []
        if self._critic is not None:
            parts.append(self._critic.begin_save(f"{directory}{_CRITIC}", self._common_state()))
        parts.append(self._policy.begin_save(directory, self._common_state()))
        return PendingCheckpoint(parts)

    def save_checkpoint(self, directory: str) -> None:
        """See `trainer.base.Trainer.save_checkpoint`."""
        complete(self.begin_checkpoint(directory))

    def load_checkpoint(self, directory: str) -> None:
        """See `trainer.base.Trainer.load_checkpoint`. CheckpointError if it is not one of this model and its critic."""
        if self._critic is not None:
            if not Path(f"{directory}{_CRITIC}").is_dir():
                raise CheckpointError(
                    "has no critic: it is of a run without --advantage-estimator ppo; start a new run", file=directory
                )
            self._critic.load(f"{directory}{_CRITIC}", self._common_state())
        state = self._policy.load(directory, self._common_state())
        self.rollout_steps = state.get("rollout_steps", 0)

    def close(self) -> None:
        """See `trainer.base.Trainer.close`."""
        parallel.shutdown()

    def _common_state(self) -> dict[str, Any]:
        return {
            "rollout_steps": self.rollout_steps,
            "architecture": self.hf.architecture,
            "expert_parallel": self.layout.ep_size,
        }
