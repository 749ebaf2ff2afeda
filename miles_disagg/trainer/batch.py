"""From scored groups to what the loss sees: advantages per group, behaviour logprobs and masks per sample.

Pure: how advantages are computed is `advantages`, how samples are split over ranks is `megatron.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from miles_disagg.domain.samples import SampleGroup, flatten
from miles_disagg.trainer.advantages import Advantage
from miles_disagg.trainer.base import TrainSample


def train_samples(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[Advantage]]) -> list[TrainSample]:
    """One TrainSample per sample, in order. advantages[g][i] belongs to sample i of group g."""
    out: list[TrainSample] = []
    for group, values in zip(groups, advantages, strict=True):
        for sample, advantage in zip(group.samples, values, strict=True):
            out.append(
                TrainSample(
                    tokens=(*sample.prompt.tokens, *sample.tokens),
                    prompt_len=len(sample.prompt.tokens),
                    behaviour_logprobs=sample.logprobs if len(sample.logprobs) == len(sample.tokens) else None,
                    advantage=advantage,
                    loss_mask=sample.loss_mask,
                    token_versions=sample.token_versions(),
                    reward=sample.reward or 0.0,
                    teacher_logprobs=sample.teacher_logprobs,
                    reference_logprobs=sample.reference_logprobs,
                )
            )
    return out


def batch_metrics(groups: Sequence[SampleGroup], trainer_version: int) -> dict[str, float]:
    """Rewards, lengths and lags of a consumed batch, by metric name. `trainer_version`: when it was consumed."""
    samples = flatten(groups)
    rewards = [reward for group in groups for reward in group.rewards]
    lags = [sample.lag(trainer_version) for sample in samples]
    return {
        "rollout/reward_mean": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        "rollout/response_length_mean": fmean(len(s.tokens) for s in samples),
        "rollout/truncated_fraction": fmean(s.finish_reason == "length" for s in samples),
        "rollout/zero_variance_groups": float(sum(len(set(g.rewards)) == 1 for g in groups)),
        "rollout/version_lag_mean": fmean(lags),
        "rollout/version_lag_max": float(max(lags)),
    }
