"""Reward function for many samples at once: how short an answer is among those that are scored with it.

`--custom-rm-path examples.batched_reward.brevity --reward-workers 64`

In the place of the arithmetic here stands what pays off in batches: a reward model, a database, a remote service.
"""

from collections.abc import Sequence

from miles_disagg.domain.samples import Sample
from miles_disagg.prompts.batched import batched


@batched(most=64, wait=0.05)
def brevity(samples: Sequence[Sample]) -> list[float]:
    """1 for an answer without tokens, 0 for one as long as the longest of this call; wrong answers get 0."""
    longest = max(1, *(len(sample.tokens) for sample in samples))
    return [
        1.0 - len(sample.tokens) / longest if (sample.prompt.label or "") in sample.text else 0.0 for sample in samples
    ]
