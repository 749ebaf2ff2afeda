"""Per-token policy loss and its diagnostics, on tensors of any shape. No Megatron, no reduction over ranks.

Formulas: PPO-clip (arXiv 1707.06347, eq. 7) with asymmetric bounds (DAPO, arXiv 2503.14476, eq. 10); decoupled
proximal and behaviour policies (arXiv 2110.00641, eq. 4); truncated importance sampling (TIS) of the behaviour policy,
per token; KL estimators k1, k2, k3 (J. Schulman, "Approximating KL divergence", 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_disagg.trainer.base import LossSpec


@dataclass(frozen=True)
class TokenLosses:
    """Per-token tensors of the inputs' shape, fp32. Only `loss` and `policy` carry gradients."""

    loss: Tensor
    policy: Tensor
    clipped: Tensor
    tis: Tensor
    tis_capped: Tensor
    kl: Tensor


def policy_losses(
    logprobs: Tensor,
    *,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    entropy: Tensor | None,
    reference: Tensor | None,
    spec: LossSpec,
) -> TokenLosses:
    """loss = tis * max(-A r, -A clip(r, 1 - low, 1 + high)) - entropy_coef * H + kl_coef * KL, token by token.

    r = exp(logprobs - proximal); tis = min(exp(proximal - behaviour), tis_cap), without gradient. `logprobs` is the
    current policy with gradient; `proximal` the policy before the first optimizer step of this rollout batch;
    `behaviour` the one that wrote the token. `entropy`: nats, needed only if entropy_coef is not 0. `reference`:
    logprobs of the frozen base, needed only if kl_coef is not 0.
    """
    proximal, behaviour = proximal.detach(), behaviour.detach()
    ratio = torch.exp(logprobs - proximal)
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    policy = torch.maximum(plain, bounded)
    weight, capped = importance_weights(proximal, behaviour, spec.tis_cap)
    policy = policy * weight
    loss, kl = policy, torch.zeros_like(logprobs)
    if spec.entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef is set but no entropy was computed")
        loss = loss - spec.entropy_coef * entropy
    if reference is not None:
        estimate = kl_estimate(logprobs, reference.detach(), spec.kl_kind)
        loss, kl = loss + spec.kl_coef * estimate, estimate.detach()
    elif spec.kl_coef:
        raise ValueError("kl_coef is set but no reference logprobs were computed")
    return TokenLosses(loss, policy, (bounded > plain).float(), weight, capped, kl)


def importance_weights(proximal: Tensor, behaviour: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """(weights, 1 where the cap applied): min(exp(proximal - behaviour), cap); ones where `cap` is None."""
    if cap is None:
        return torch.ones_like(proximal), torch.zeros_like(proximal)
    ratio = torch.exp((proximal - behaviour).clamp(max=20.0))
    return ratio.clamp(max=cap), (ratio > cap).float()


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, nats.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    """
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"kl_kind {kind!r} is not one of k1, k2, k3")
