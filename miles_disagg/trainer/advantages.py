"""Advantages from groups of rewards: pure arithmetic, no torch. How they enter the loss is `losses.py`.

A group is the rewards of one prompt's samples; a batch is the groups of one training step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_disagg.trainer.base import AdvantageSpec

Groups = Sequence[Sequence[float]]


def advantages(groups: Groups, spec: AdvantageSpec) -> list[list[float]]:
    """The estimator's advantage of every sample, in the groups' form. ValueError for a reward that is not finite."""
    if spec.estimator == "grpo":
        return grpo_advantages(groups, normalise_std=spec.normalise_std)
    if spec.estimator == "rloo":
        return [rloo_advantages(group) for group in groups]
    return reinforce_plus_plus_baseline(groups)


def group_advantages(rewards: Sequence[float], *, normalise_std: bool = True, eps: float = 1e-6) -> list[float]:
    """One group's advantages, (r - mean) / (std + eps), with the sample standard deviation (n - 1).

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); `normalise_std=False` is Dr. GRPO (arXiv 2503.20783,
    section 3.1): r - mean. A group whose rewards are all equal, or of one sample, says nothing: zeros, exactly.
    """
    centred = _centred(rewards)
    if not normalise_std or not any(centred):
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]


def grpo_advantages(groups: Groups, *, normalise_std: bool = True) -> list[list[float]]:
    """`group_advantages` of every group; a group may have any size."""
    return [group_advantages(group, normalise_std=normalise_std) for group in groups]


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """Leave-one-out: r_i minus the mean of the other samples' rewards, which is n / (n - 1) * (r_i - mean).

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.1; Kool et al. 2019).
    """
    n = len(rewards)
    return [c * n / (n - 1) for c in _centred(rewards)] if n > 1 else _centred(rewards)


def reinforce_plus_plus_baseline(groups: Groups, *, eps: float = 1e-6) -> list[list[float]]:
    """r minus the group's mean, then (a - mean) / (std + eps) over all samples of the batch, std with n.

    REINFORCE++ with baseline (Hu 2025, arXiv 2501.03262, section 3.2). A batch in which every group is constant: zeros.
    """
    centred = [_centred(group) for group in groups]
    flat = [c for group in centred for c in group]
    if not any(flat):
        return centred
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((c - mean) ** 2 for c in flat) / len(flat))
    return [[(c - mean) / (std + eps) for c in group] for group in centred]


def _centred(rewards: Sequence[float]) -> list[float]:
    """r - mean; zeros, exactly, where all rewards are equal."""
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]
