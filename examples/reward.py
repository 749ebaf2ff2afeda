"""Reward function: how close the last number of the response is to the label.

`--custom-rm-path examples.reward.closeness` (an `async def` works as well; it runs on the event loop).
"""

import re

from miles_disagg.domain.samples import Sample


def closeness(sample: Sample) -> float:
    """1 for the right number, less the further away it is, 0 without a number."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", sample.text)
    if not numbers or sample.prompt.label is None:
        return 0.0
    return 1.0 / (1.0 + abs(float(numbers[-1]) - float(sample.prompt.label)))
