"""Log-probability of a token and entropy of its distribution, where each tensor parallel rank has some of the logits.

One autograd function for both. It leaves its logits as they are and needs nothing but all-reduce, so it runs on gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_NEVER = -1e30  # a logit that has no probability, finite so that 0 * logit stays 0


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, *, first: int, vocab_size: int, group: Any, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-probability of `targets`, entropy in nats), both fp32 [n], of softmax(logits / temperature).

    logits: [n, v] of any float dtype, this rank's columns `first` .. `first + v` of the vocabulary; columns at or above
    `vocab_size` are padding and get no probability. targets: int64 [n], in [0, vocab_size). group: the tensor parallel
    group (None: the logits are whole). Both outputs are differentiable.
    """
    return _LogprobsAndEntropy.apply(logits, targets, first, vocab_size, group, temperature)  # type: ignore[no-any-return]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, targets: Tensor, first: int, vocab_size: int, group: Any, temperature: float
    ) -> tuple[Tensor, Tensor]:
        z = logits.float() / temperature
        if first + z.shape[1] > vocab_size:
            z = z.index_fill(1, torch.arange(max(vocab_size - first, 0), z.shape[1], device=z.device), _NEVER)
        top = z.amax(dim=1)
        _all_reduce(top, dist.ReduceOp.MAX, group)
        z = z - top[:, None]
        local = targets - first
        here = (local >= 0) & (local < z.shape[1])
        local = local.clamp(0, z.shape[1] - 1)
        exp = z.exp()
        sums = torch.stack(
            [exp.sum(1), (exp * z).sum(1), torch.where(here, z.gather(1, local[:, None])[:, 0], torch.zeros_like(top))]
        )
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(z.sub_(log_total[:, None]), local, here, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return sums[2] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """d logprob / dz = onehot - p;  d H / dz = -p (log p + H)."""
        grad_logprobs, grad_entropy = grad_outputs
        logp, local, here, entropy = ctx.saved_tensors
        grad = -logp.exp() * (grad_logprobs[:, None] + grad_entropy[:, None] * (logp + entropy[:, None]))
        grad.scatter_add_(1, local[:, None], torch.where(here, grad_logprobs, torch.zeros_like(grad_logprobs))[:, None])
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op, group=group)
