"""A generate function whose lengths have a long tail: what makes a synchronous schedule wait, without a large model.

Every sample keeps its engine busy for a lognormal number of tokens (sigma 1, median a tenth of
--rollout-max-response-len, cut off there), drawn from the sample's own seed. What follows the policy's own end is
thrown away, so the samples that are trained on, and what can be learned from them, are those of an ordinary run.

    --custom-generate-function-path examples.long_tail.generate --rollout-max-response-len 160
"""

import math
import random

from miles_disagg.rollout.trajectory import Trajectory

SIGMA = 1.0
LEAST = 8  # tokens: an answer must fit


def length(seed: int | None, longest: int) -> int:
    """How many tokens a sample with this seed takes: LEAST to `longest`."""
    drawn = random.Random(seed).lognormvariate(math.log(longest / 10), SIGMA)
    return min(longest, max(LEAST, round(drawn)))


async def generate(trajectory: Trajectory) -> None:
    """One turn of the drawn length, cut where the policy ended it."""
    tokens = length(trajectory.seed, trajectory.sampling.max_new_tokens)
    turn = await trajectory.generate(max_new_tokens=tokens, ignore_eos=True)
    end = trajectory.tokenizer.eos_token_id
    if end in turn.tokens:
        trajectory.cut(turn.tokens.index(end) + 1)
