"""Corrections for samples that another policy wrote: importance weights and rejection, from logprobs alone.

rho_t = pi_proximal(token) / pi_behaviour(token). Nothing here carries a gradient; where weights enter is `losses`.

Sources: truncated importance sampling, token by token (Yao et al. 2025, "Your efficient RL framework secretly brings
you off-policy RL training"; the truncation is Espeholt et al. 2018, IMPALA, arXiv 1802.01561, section 4.1). Masking
instead of truncating: IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855, section 3) token by token, and
sequence-level masked importance sampling, MIS (Liu et al. 2025, "When speed kills stability"). The geometric mean of
a sequence's ratios is GSPO's (Zheng et al. 2025, arXiv 2507.18071, eq. 7). Level, mode and bound names are miles'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_disagg.trainer.base import LossSpec

_LARGEST = 20.0  # of a log-ratio: exp(20) is far beyond every useful bound, and still a finite float


def by_sequence(values: Tensor, mask: Tensor, segments: Tensor, *, mean: bool) -> Tensor:
    """Sum (or mean) of `values` over the masked tokens of each sequence, given back to each of its tokens.

    values, mask: fp32 [n]. segments: int64 [n], which sequence a token belongs to. A sequence without masked tokens
    gets 0.
    """
    count = int(segments.max()) + 1 if segments.numel() else 0
    sums = values.new_zeros(count).index_add_(0, segments, values * mask)
    if mean:
        sums = sums / values.new_zeros(count).index_add_(0, segments, mask).clamp(min=1.0)
    return sums[segments]


def log_ratios(proximal: Tensor, behaviour: Tensor, mask: Tensor, segments: Tensor, level: str) -> Tensor:
    """log rho of each token: its own (`token`), its sequence's sum (`sequence`) or mean (`geometric`), fp32 [n]."""
    ratio = proximal - behaviour
    if level == "token":
        return ratio
    if level not in ("sequence", "geometric"):
        raise ValueError(f"level {level!r} is not one of token, sequence, geometric")
    return by_sequence(ratio, mask, segments, mean=level == "geometric")


def importance_weights(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, segments: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """(weights, 1 where a bound applied), fp32 [n]; ones and zeros if the spec has no `tis_cap`.

    `truncate`: min(rho, cap). `clip`: rho clipped to [low, cap]. `mask`: rho inside [low, cap], else 0.
    """
    if spec.tis_cap is None:
        return torch.ones_like(proximal), torch.zeros_like(proximal)
    logs = log_ratios(proximal, behaviour, mask, segments, spec.tis_level)
    ratio = torch.exp(logs.clamp(-_LARGEST, _LARGEST))
    above = ratio > spec.tis_cap
    if spec.tis_mode == "truncate":
        return ratio.clamp(max=spec.tis_cap), above.float()
    outside = above | (ratio < spec.tis_low)
    if spec.tis_mode == "clip":
        return ratio.clamp(spec.tis_low, spec.tis_cap), outside.float()
    return torch.where(outside, torch.zeros_like(ratio), ratio), outside.float()


def rejected(proximal: Tensor, behaviour: Tensor, mask: Tensor, segments: Tensor, spec: LossSpec) -> Tensor:
    """1 for tokens without a policy gradient, fp32 [n]: rho outside the bounds at its level, or in a vetoed sequence.

    A sequence is vetoed if any of its masked tokens has rho below `rs_veto`.
    """
    out = torch.zeros_like(proximal)
    if spec.rs_level is not None:
        logs = log_ratios(proximal, behaviour, mask, segments, spec.rs_level)
        ratio = torch.exp(logs.clamp(-_LARGEST, _LARGEST))
        out = ((ratio < spec.rs_low) | (ratio > spec.rs_high)).float()
    if spec.rs_veto is not None:
        low = (torch.exp((proximal - behaviour).clamp(-_LARGEST, _LARGEST)) < spec.rs_veto).to(mask)
        out = torch.maximum(out, (by_sequence(low, mask, segments, mean=False) > 0).float())
    return out
