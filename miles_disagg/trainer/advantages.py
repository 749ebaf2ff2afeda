"""Advantages from groups of rewards: pure arithmetic, no torch. How they enter the loss is `losses.py`.

A group is the rewards of one prompt's samples; a batch is the groups of one training step. What a critic's values are
and how it learns is `megatron.critic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from miles_disagg.config.imports import import_function
from miles_disagg.domain.errors import ConfigError
from miles_disagg.domain.samples import Sample, SampleGroup
from miles_disagg.trainer.base import AdvantageSpec

Groups = Sequence[Sequence[float]]
Advantage = float | Sequence[float]
"""Of a sample: one number for all of its response tokens, or one for each."""
AdvantageFunction = Callable[[Sequence[SampleGroup]], Sequence[Sequence[Advantage]]]
"""What --custom-advantage-function-path names: called once a step with the whole batch, in the driver."""

CUSTOM_FLAG = "--custom-advantage-function-path"


def batch_advantages(groups: Sequence[SampleGroup], spec: AdvantageSpec) -> Sequence[Sequence[Advantage]]:
    """The advantage of every sample of a batch, by the estimator or by the plugged-in function.

    ConfigError, naming the flag and the sample, for a plugged-in function whose result does not fit the batch.
    """
    if spec.custom is None:
        return advantages([group.rewards for group in groups], spec)
    values = import_function(spec.custom, CUSTOM_FLAG)(groups)
    name = f"{CUSTOM_FLAG} {spec.custom}"
    if len(values) != len(groups):
        raise ConfigError([f"{name} gave {len(values)} lists of advantages for {len(groups)} groups"])
    for group, row in zip(groups, values, strict=True):
        if len(row) != len(group.samples):
            raise ConfigError([f"{name} gave {len(row)} advantages for a group of {len(group.samples)} samples"])
    return [
        [_checked(value, sample, name) for sample, value in zip(group.samples, row, strict=True)]
        for group, row in zip(groups, values, strict=True)
    ]


def _checked(value: Advantage, sample: Sample, name: str) -> Advantage:
    """A plugged-in advantage of a sample as plain floats: one, or one a token, all finite."""
    scalar = isinstance(value, int | float)
    numbers = [float(number) for number in ([value] if scalar else value)]  # pyright: ignore[reportGeneralTypeIssues]
    if not scalar and len(numbers) != len(sample.tokens):
        raise ConfigError(
            [f"{name} gave {len(numbers)} advantages for the {len(sample.tokens)} tokens of {sample.sample_id}"]
        )
    if not all(math.isfinite(number) for number in numbers):
        raise ConfigError([f"{name} gave an advantage that is not finite for {sample.sample_id}"])
    return numbers[0] if scalar else numbers


def advantages(groups: Groups, spec: AdvantageSpec) -> list[list[float]]:
    """The estimator's advantage of every sample, in the groups' form. ValueError for a reward that is not finite."""
    if spec.estimator == "grpo":
        return grpo_advantages(groups, normalise_std=spec.normalise_std)
    if spec.estimator == "rloo":
        return [rloo_advantages(group) for group in groups]
    if spec.estimator == "ppo":
        return [[0.0] * len(group) for group in groups]  # the trainer's, from its critic
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


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one finished sequence; returns are advantages + values, what the critic learns.

    A_t = delta_t + gamma lambd A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, V and A 0 after the last token
    (generalized advantage estimation, Schulman et al. 2016, arXiv 1506.02438, eq. 11, 12 and 16).
    rewards, values: one a token that the policy wrote; the value is that of the state before the token.
    """
    out: list[float] = []
    following = advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lambd * advantage
        following = value
        out.append(advantage)
    out.reverse()
    return out, [a + v for a, v in zip(out, values, strict=True)]


def _centred(rewards: Sequence[float]) -> list[float]:
    """r - mean; zeros, exactly, where all rewards are equal."""
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]
