"""Advantages from groups of rewards: pure arithmetic, no torch. How they enter the loss is `losses.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], *, normalise_std: bool = True, eps: float = 1e-6) -> list[float]:
    """One group's advantages, (r - mean) / (std + eps), with the sample standard deviation (n - 1).

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); `normalise_std=False` is Dr. GRPO (arXiv 2503.20783,
    section 3.1): r - mean. A group whose rewards are all equal, or of one sample, says nothing: zeros, exactly.
    ValueError for a reward that is not finite.
    """
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalise_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]


def grpo_advantages(groups: Sequence[Sequence[float]], *, normalise_std: bool = True) -> list[list[float]]:
    """`group_advantages` of every group; a group may have any size."""
    return [group_advantages(group, normalise_std=normalise_std) for group in groups]
