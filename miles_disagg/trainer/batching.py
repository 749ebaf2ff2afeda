"""Which samples share a micro-batch, on which data parallel rank: pure arithmetic that every rank repeats alike.

What a micro-batch looks like as tensors is `megatron/batch.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from miles_disagg.trainer.base import LossSpec, TrainSample


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, dp_size: int) -> list[list[list[int]]]:
    """Sample indices by data parallel rank and micro-batch; deterministic, every sample exactly once.

    Every rank gets the same number of micro-batches, as few as fit `max_tokens` each, balanced by tokens (longest
    first into the lightest). With fewer samples than micro-batches some are empty. ValueError for a sample longer
    than `max_tokens`.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens, more than max_tokens_per_micro_batch {max_tokens}: "
                "raise --max-tokens-per-gpu or shorten --rollout-max-response-len"
            )
    per_rank = max(1, -(-sum(lengths) // (max_tokens * dp_size)))
    while True:
        bins = _fill(lengths, per_rank * dp_size, max_tokens)
        if bins is not None:
            break
        per_rank += 1
    return _deal(bins, lengths, dp_size)


def step_bounds(samples: int, step_size: int) -> list[tuple[int, int]]:
    """[begin, end) of every optimizer step on a batch: as few as fit `step_size` samples each, of even size."""
    steps = -(-samples // step_size)
    return [(samples * i // steps, samples * (i + 1) // steps) for i in range(steps)]


def _fill(lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Longest-processing-time greedy into `count` bins; None if one would overflow."""
    heap = [(0, i) for i in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, lightest = heapq.heappop(heap)
        if load + lengths[index] > max_tokens:
            return None
        bins[lightest].append(index)
        heapq.heappush(heap, (load + lengths[index], lightest))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp_size: int) -> list[list[list[int]]]:
    """Deal the bins to ranks, heaviest first, forth and back, so that the k-th bins of all ranks weigh alike."""
    order = sorted(range(len(bins)), key=lambda b: (-sum(lengths[i] for i in bins[b]), b))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for turn, b in enumerate(order):
        lap, seat = divmod(turn, dp_size)
        ranks[seat if lap % 2 == 0 else dp_size - 1 - seat].append(bins[b])
    return ranks


def sample_weights(batch: Sequence[TrainSample], aggregate: str, constant_length: int | None = None) -> list[float]:
    """Weight of every trained token of each sample in the loss of the global batch.

    `token-mean`: 1 / trained tokens of the batch (DAPO, arXiv 2503.14476, eq. 8). `sequence-mean`: 1 / (samples with
    trained tokens x own trained tokens) (GRPO, arXiv 2402.03300, eq. 3). All weights sum to 1 in both. `constant`: 1 /
    (samples x constant_length), so that no length is favoured (Dr. GRPO, arXiv 2503.20783, section 3.1). ValueError if
    nothing is trained on.
    """
    counts = [sample.trained_tokens for sample in batch]
    total, samples = sum(counts), sum(1 for c in counts if c)
    if not total:
        raise ValueError("the batch has no token to train on: every loss mask is zero")
    if aggregate == "token-mean":
        return [1.0 / total] * len(batch)
    if aggregate == "constant" and constant_length:
        return [1.0 / (len(batch) * constant_length)] * len(batch)
    if aggregate != "sequence-mean":
        raise ValueError(f"aggregate {aggregate!r} is not one of {LossSpec.__annotations__['aggregate']}")
    return [1.0 / (samples * c) if c else 0.0 for c in counts]
