"""Policy loss: no clipping, but a penalty that grows with the distance from the proximal policy.

`--custom-loss-function-path examples.loss.penalised`

-A r + beta KL(proximal || policy), per token, with the k3 estimate r - 1 - log r of the KL: the penalised form of PPO
(Schulman et al. 2017, arXiv 1707.06347, eq. 8) with a fixed beta.
"""

import torch

from miles_disagg.trainer.losses import LossInputs

BETA = 0.5


def penalised(inputs: LossInputs) -> torch.Tensor:
    """The loss of each token [n]; what the flags say about importance weights, KL and entropy is added to it."""
    log_ratio = inputs.logprobs - inputs.proximal
    ratio = log_ratio.exp()
    return -inputs.advantages * ratio + BETA * (ratio - 1 - log_ratio)
