"""Advantage function: the reward against the group's mean, discounted towards the end of the answer.

`--custom-advantage-function-path examples.advantage.discounted`

A token far from the end gets less of what the end earned: A_t = gamma^(n - 1 - t) (r - mean of the group's rewards).
"""

from collections.abc import Sequence
from statistics import fmean

from miles_disagg.domain.samples import SampleGroup

GAMMA = 0.99


def discounted(groups: Sequence[SampleGroup]) -> list[list[list[float]]]:
    """One list a group, in it one list a sample, in it one advantage a token."""
    out = []
    for group in groups:
        mean = fmean(group.rewards)
        row = []
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            last = len(sample.tokens) - 1
            row.append([GAMMA ** (last - t) * (reward - mean) for t in range(last + 1)])
        out.append(row)
    return out
