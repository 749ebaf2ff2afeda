"""One pass of a model over micro-batches through Megatron's schedules, and the loss that it applies on the last stage.

The order of passes within a training step is `trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miles_disagg.trainer.base import LossSpec
from miles_disagg.trainer.losses import distilled, load_policy_loss, policy_losses
from miles_disagg.trainer.megatron.batch import MicroBatch
from miles_disagg.trainer.megatron.parallel import Layout
from miles_disagg.trainer.vocab_parallel import logprobs_and_entropy

POLICY_SUMS = (
    "loss", "pg_loss", "entropy", "kl", "clip_fraction", "tis_mean", "tis_capped_fraction", "rejected_fraction",
    "rollout_logprob_abs_diff", "on_policy_abs_diff", "on_policy_share", "opd_reverse_kl",
)  # fmt: skip
"""Names of the entries of the vector that `policy_loss` reports: sums over this micro-batch's tokens of share * x."""

Loss = Callable[..., tuple[Tensor, Tensor]]
"""(what the scorer gives, the micro-batch) to (the loss to minimize, the sums to report)."""
ScoreFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
"""The model's output [1, t, v] to fp32 [n] tensors, one entry a response token."""


@dataclass(frozen=True)
class Scorer:
    """Logits [1, t, v] to (log-probability, entropy) of each response token, fp32 [n]."""

    layout: Layout
    vocab_size: int
    temperature: float

    def __call__(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        selected = logits[0].index_select(0, micro.predictors)
        return logprobs_and_entropy(
            selected,
            micro.targets,
            first=self.layout.tp * logits.shape[-1],
            vocab_size=self.vocab_size,
            group=self.layout.tp_group,
            temperature=self.temperature,
        )


def policy_loss(spec: LossSpec) -> Loss:
    """The GRPO loss of a micro-batch, summed with its tokens' weights, and the sums named in POLICY_SUMS.

    Without a `proximal` column the current policy is the proximal one: the first and only optimizer step of its batch.
    """

    custom = load_policy_loss(spec)

    def loss(logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        column = micro.columns
        proximal, advantages = column.get("proximal", logprobs.detach()), column["advantage"]
        if spec.distill_coef:
            advantages = distilled(advantages, proximal, column["teacher"], spec.distill_coef)
        terms = policy_losses(
            logprobs,
            proximal=proximal,
            behaviour=column.get("behaviour"),
            advantages=advantages,
            entropy=entropy,
            reference=column.get("reference"),
            spec=spec,
            mask=column["mask"],
            segments=micro.segments,
            custom=custom,
        )
        total = (terms.loss * column["weight"]).sum()
        with torch.no_grad():
            share, weight = column["share"], column["weight"]
            difference = (logprobs - column.get("behaviour", logprobs)).abs() * share
            sums = [total, (terms.policy * weight).sum()]
            sums += [
                (x * share).sum()
                for x in (entropy, terms.kl, terms.clipped, terms.tis, terms.tis_capped, terms.rejected)
            ]
            sums += [difference.sum(), (difference * column["on_policy"]).sum(), (share * column["on_policy"]).sum()]
            sums += [((logprobs - column.get("teacher", logprobs)) * share).sum()]
        return total, torch.stack([s.detach() for s in sums])

    return loss


def cross_entropy_loss(logprobs: Tensor, entropy: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Supervised loss: weighted sum of -logprob. Reports [loss, entropy]."""
    total = -(logprobs * micro.columns["weight"]).sum()
    return total, torch.stack([total.detach(), (entropy.detach() * micro.columns["share"]).sum()])


def train_pass(
    model: Any, micros: Sequence[MicroBatch], scorer: ScoreFunction, loss: Loss, sums: int, layout: Layout
) -> Tensor:
    """Forward and backward over all micro-batches; gradients of the weighted sum over all DP ranks accumulate.

    Megatron divides a loss by the number of micro-batches, and averages gradients over DP ranks: both are undone here,
    since the weights already add up to 1 over the global batch. Returns the loss's `sums` added up over the global
    batch, fp32 on every rank. Collective.
    """
    undo = len(micros) * layout.dp_size

    def forward(data: Any, stage: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro: MicroBatch = next(data)

        def on_last_stage(logits: Tensor) -> tuple[Tensor, Tensor]:
            total, report = loss(*scorer(logits, micro), micro)
            return total * undo, report

        return _forward(stage, micro), on_last_stage

    reports = _schedule(forward, model, micros, forward_only=False)
    total = torch.stack(reports).sum(0) if reports else torch.zeros(sums, device=layout.device)
    return _from_last_stage(total.float(), layout)


@torch.no_grad()
def score_pass(
    model: Any, micros: Sequence[MicroBatch], scorer: ScoreFunction, offsets: Sequence[int], layout: Layout
) -> Tensor:
    """The scorer's first output of every response token of the batch, fp32 [offsets[-1]], on the CPU of every rank.

    Forward only. Collective.
    """

    def forward(data: Any, stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro: MicroBatch = next(data)

        def on_last_stage(logits: Tensor, non_loss_data: bool = True) -> tuple[MicroBatch, Tensor]:
            return micro, scorer(logits, micro)[0]

        return _forward(stage, micro), on_last_stage

    flat = torch.zeros(offsets[-1], device=layout.device)
    for micro, logprobs in _schedule(forward, model, micros, forward_only=True, collect_non_loss_data=True):
        lengths = [offsets[i + 1] - offsets[i] for i in micro.indices]
        for i, part in zip(micro.indices, logprobs.split(lengths), strict=True):
            flat[offsets[i] : offsets[i + 1]] = part
    return _from_last_stage(flat, layout).cpu()


def _forward(stage: Any, micro: MicroBatch) -> Tensor:
    return stage(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)


def _schedule(forward: Any, model: Any, micros: Sequence[MicroBatch], **options: Any) -> list[Any]:
    longest = max(m.tokens.shape[1] for m in micros)
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=len(micros),
        seq_length=longest,  # with several stages only a hint: shapes travel with the tensors
        micro_batch_size=1,
        **options,
    )


def _from_last_stage(tensor: Tensor, layout: Layout) -> Tensor:
    """Add up over DP ranks on the last stage, then give every stage a copy."""
    if layout.last_stage:
        dist.all_reduce(tensor, group=layout.dp_group)
    if layout.pp_size > 1:
        dist.broadcast(tensor, dist.get_global_rank(layout.pp_group, layout.pp_size - 1), group=layout.pp_group)
    return tensor
