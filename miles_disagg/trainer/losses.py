"""Per-token policy losses and their diagnostics, on flat tensors of response tokens. No Megatron, no reduction.

Objectives, with r = pi / pi_proximal:
* `ppo`: PPO-clip (Schulman et al. 2017, arXiv 1707.06347, eq. 7) with asymmetric bounds (DAPO, arXiv 2503.14476,
  eq. 10) and dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5);
* `gspo`: one ratio a sequence, its geometric mean (Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 7; gradients through
  each token as in eq. 14);
* `cispo`: REINFORCE with a clipped ratio that carries no gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

The proximal policy is the one before the first optimizer step of the rollout batch, recomputed by the trainer, and
apart from the behaviour policy: decoupled PPO (Hilton et al. 2021, arXiv 2110.00641, eq. 4). What makes up for the
behaviour policy is `corrections`. Any other objective is plugged in as a `PolicyLossFunction`. KL estimators k1, k2,
k3: J. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_disagg.config.imports import import_function
from miles_disagg.domain.errors import ConfigError
from miles_disagg.trainer.base import LossSpec
from miles_disagg.trainer.corrections import by_sequence, importance_weights, rejected

_KL_LIMIT = 10.0
CUSTOM_FLAG = "--custom-loss-function-path"


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss is made of: response tokens of whole sequences, one after another. fp32 [n] but `segments`.

    logprobs: current policy, with gradient. proximal: before the first optimizer step of the rollout batch. behaviour:
    of the policy that wrote the token (equal to `proximal` where nobody knows it). entropy: nats, with gradient. mask:
    1 for trained tokens. segments: int64 [n], the sequence of each token. spec: the clips and whatever else flags say.
    """

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    entropy: Tensor | None
    mask: Tensor
    segments: Tensor
    spec: LossSpec


PolicyLossFunction = Callable[[LossInputs], Tensor]
"""What --custom-loss-function-path names: the policy's loss of each token, fp32 [n], with gradient, not reduced.

Importance weights, rejection, entropy, KL and the mean over tokens are applied to it as to a built-in objective.
"""


@dataclass(frozen=True)
class TokenLosses:
    """Per-token fp32 tensors [n]. Only `loss` and `policy` carry gradients.

    clipped: 1 where a clip took effect. tis: importance weight, tis_capped: 1 where its bounds took effect. rejected: 1
    where the policy term was left out. kl: estimate of the KL to the reference.
    """

    loss: Tensor
    policy: Tensor
    clipped: Tensor
    tis: Tensor
    tis_capped: Tensor
    kl: Tensor
    rejected: Tensor


def policy_losses(
    logprobs: Tensor,
    *,
    proximal: Tensor,
    behaviour: Tensor | None,
    advantages: Tensor,
    entropy: Tensor | None,
    reference: Tensor | None,
    spec: LossSpec,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    custom: PolicyLossFunction | None = None,
) -> TokenLosses:
    """loss = (1 - rejected) * tis * objective - entropy_coef * H + kl_coef * KL, token by token.

    All [n]. `logprobs`: current policy, with gradient. `proximal`: before the first optimizer step of this rollout
    batch. `behaviour`: of the policy that wrote the token; ValueError if it is missing and a correction needs it.
    `entropy`: nats, needed if entropy_coef is not 0. `reference`: logprobs of the frozen base, needed if kl_coef is not
    0. `mask`: 1 for trained tokens (None: all). `segments`: int64, the sequence of each token (None: one sequence).
    `custom`: instead of the built-in objective.
    """
    if behaviour is None:
        if spec.needs_behaviour:
            raise ValueError("a correction (tis_cap, rs_level, rs_veto, proximal behaviour) needs behaviour logprobs")
        behaviour = proximal
    proximal, behaviour = proximal.detach(), behaviour.detach()
    if spec.proximal == "behaviour":
        proximal = behaviour
    mask = torch.ones_like(proximal) if mask is None else mask
    segments = torch.zeros(proximal.shape, dtype=torch.int64, device=proximal.device) if segments is None else segments
    if custom is not None:
        inputs = LossInputs(logprobs, proximal, behaviour, advantages, entropy, mask, segments, spec)
        policy, clipped = _plugged(custom, inputs), torch.zeros_like(proximal)
    else:
        policy, clipped = _objective(logprobs, proximal, advantages, mask, segments, spec)
    weight, capped = importance_weights(proximal, behaviour, mask, segments, spec)
    dropped = rejected(proximal, behaviour, mask, segments, spec)
    policy = policy * (weight * (1 - dropped))
    loss, kl = policy, torch.zeros_like(proximal)
    if spec.entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef is set but no entropy was computed")
        loss = loss - spec.entropy_coef * entropy
    if reference is not None:
        estimate = kl_estimate(logprobs, reference.detach(), spec.kl_kind)
        loss, kl = loss + spec.kl_coef * estimate, estimate.detach()
    elif spec.kl_coef:
        raise ValueError("kl_coef is set but no reference logprobs were computed")
    return TokenLosses(loss, policy, clipped, weight, capped, kl, dropped)


def _objective(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """(loss per token, 1 where a clip took effect)."""
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    if spec.objective == "cispo":
        ratio = torch.exp(logprobs.detach() - proximal)
        return -ratio.clamp(low, high) * advantages * logprobs, ((ratio < low) | (ratio > high)).float()
    if spec.objective == "gspo":
        mean = by_sequence(logprobs.detach() - proximal, mask, segments, mean=True)
        ratio = torch.exp(mean + logprobs - logprobs.detach())  # the sequence's ratio, differentiable token by token
    else:
        ratio = torch.exp(logprobs - proximal)
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(low, high)
    policy, clipped = torch.maximum(plain, bounded), bounded > plain
    if spec.dual_clip is not None:
        most = -spec.dual_clip * advantages
        too_much = (advantages < 0) & (policy > most)
        policy, clipped = torch.where(too_much, most, policy), clipped | too_much
    return policy, clipped.float()


def _plugged(function: PolicyLossFunction, inputs: LossInputs) -> Tensor:
    """The plugged-in loss, checked: [n] and differentiable. ConfigError names the flag."""
    policy = function(inputs)
    wanted = tuple(inputs.logprobs.shape)
    if not isinstance(policy, Tensor) or tuple(policy.shape) != wanted:
        got = f"shape {list(policy.shape)}" if isinstance(policy, Tensor) else type(policy).__name__
        raise ConfigError(
            [f"{CUSTOM_FLAG} {inputs.spec.custom}: must return one loss a token, {list(wanted)}, not {got}"]
        )
    if policy.numel() and inputs.logprobs.requires_grad and not policy.requires_grad:
        raise ConfigError([f"{CUSTOM_FLAG} {inputs.spec.custom}: its result has no gradient; use inputs.logprobs"])
    return policy


def load_policy_loss(spec: LossSpec) -> PolicyLossFunction | None:
    """The plugged-in loss of a spec, None if it has none. ConfigError for a path that leads nowhere."""
    return None if spec.custom is None else import_function(spec.custom, CUSTOM_FLAG)


def distilled(advantages: Tensor, proximal: Tensor, teacher: Tensor, coef: float) -> Tensor:
    """Advantages with the teacher's: A_t - coef * (log pi_proximal(t) - log pi_teacher(t)), no gradient, [n].

    The difference is a one-sample estimate of the reverse KL(policy || teacher) at that token, so its expected policy
    gradient, token by token without a return, is that of the reverse KL: on-policy distillation (Agarwal et al. 2024,
    "On-policy distillation of language models", arXiv 2306.13649, with the reverse KL; Gu et al. 2024, MiniLLM, arXiv
    2306.08543; as a per-token advantage: K. Lu et al. 2025, "On-policy distillation", Thinking Machines).
    """
    return advantages - coef * (proximal - teacher).detach()


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, nats.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; low_var_kl is k3 clipped to [-10, 10].
    """
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    if kind == "low_var_kl":
        return (torch.exp(-d) - 1 + d).clamp(-_KL_LIMIT, _KL_LIMIT)
    raise ValueError(f"kl_kind {kind!r} is not one of k1, k2, k3, low_var_kl")
