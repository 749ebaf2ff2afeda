"""PPO's critic: a second model on the same ranks, split as the policy is, that learns the value of every state.

It has the policy's backbone, with the base checkpoint's weights, and a value head (`model.ValueHead`) instead of the
vocabulary's. The value of a state is read where the next token is predicted. The recursion over values is
`trainer.advantages.gae`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from miles_disagg.trainer.advantages import gae
from miles_disagg.trainer.base import CriticSpec, TrainSample
from miles_disagg.trainer.megatron.batch import Columns, MicroBatch
from miles_disagg.trainer.megatron.step import Loss

VALUE_SUMS = ("value_loss", "value_clip_fraction", "value_mean", "return_mean", "square_error", "return_square")
"""Names of the entries of the vector that `value_loss` reports."""


def value_scores(values: Tensor, micro: MicroBatch) -> tuple[Tensor]:
    """The value head's output [1, t, 1] to the value of the state before each response token, fp32 [n]."""
    return (values[0, :, 0].index_select(0, micro.predictors).float(),)


def value_loss(clip: float) -> Loss:
    """Half the squared error to the return, at least that of the value clipped to `clip` around the old one.

    max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, weighted as the policy's loss is. The clip is that of
    Schulman's PPO code (Engstrom et al. 2020, "Implementation matters in deep policy gradients", arXiv 2005.12729, 3).
    """

    def loss(values: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        column = micro.columns
        old, target, share = column["value"], column["return"], column["share"]
        plain = (values - target).square()
        bounded = (torch.clamp(values, old - clip, old + clip) - target).square()
        total = (0.5 * torch.maximum(plain, bounded) * column["weight"]).sum()
        with torch.no_grad():
            sums = [total, ((bounded > plain).float() * share).sum(), (values * share).sum(), (target * share).sum()]
            sums += [(plain * share).sum(), (target.square() * share).sum()]
        return total, torch.stack([s.detach() for s in sums])

    return loss


def with_gae(columns: Columns, batch: Sequence[TrainSample], values: Tensor, spec: CriticSpec) -> Columns:
    """Columns `value`, `return` and `advantage` from the critic's values, fp32 [n].

    The reward of a sample belongs to the last token that the policy wrote; what the environment wrote (mask 0) is no
    step of the policy's, so it has neither an advantage nor an error.
    """
    mask = columns.values["mask"]
    advantage, returns = torch.zeros_like(values), values.clone()
    for sample, begin, end in zip(batch, columns.offsets, columns.offsets[1:], strict=False):
        places = (mask[begin:end] > 0).nonzero()[:, 0] + begin
        if len(places) == 0:
            continue
        rewards = [0.0] * (len(places) - 1) + [sample.reward]
        a, r = gae(rewards, values[places].tolist(), spec.gamma, spec.lambd)
        advantage[places], returns[places] = torch.tensor(a), torch.tensor(r)
    columns = columns.with_column("value", values).with_column("return", returns)
    return columns.with_column("advantage", advantage)


def whitened(columns: Columns, eps: float = 1e-8) -> Columns:
    """Advantages with mean 0 and standard deviation 1 (n - 1) over the trained tokens."""
    mask, values = columns.values["mask"], columns.values["advantage"]
    kept = values[mask > 0].double()
    if len(kept) < 2:
        return columns
    out = (values.double() - kept.mean()) / (kept.std() + eps)
    return columns.with_column("advantage", (out * mask).float())


def critic_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a batch, by metric name.

    `train/value_explained_variance`: 1 - E[(V - R)^2] / Var[R], at most 1; left out where all returns are equal.
    """
    mean = {key: math.fsum(s[key] for s in steps) / len(steps) for key in steps[0]}
    error, square = mean.pop("square_error"), mean.pop("return_square")
    del mean["micro_batches"]
    out = {f"train/{key}": value for key, value in mean.items() if key not in ("grad_norm", "lr")}
    out |= {"train/critic_grad_norm": mean["grad_norm"], "train/critic_lr": mean["lr"]}
    variance = square - mean["return_mean"] ** 2
    if variance > 1e-9:
        out["train/value_explained_variance"] = 1.0 - error / variance
    return out
