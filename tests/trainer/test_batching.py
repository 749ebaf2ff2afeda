"""Micro-batch planning: properties that every data parallel rank relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.trainer.base import TrainSample
from miles_disagg.trainer.batching import plan_micro_batches, sample_weights, step_bounds

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=40)


@given(lengths, st.integers(100, 400), st.integers(1, 4))
def test_every_sample_is_in_exactly_one_micro_batch_and_none_is_too_large(
    sizes: list[int], max_tokens: int, dp_size: int
) -> None:
    plan = plan_micro_batches(sizes, max_tokens, dp_size)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1, "every rank must take part in the same number of collectives"
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in micro) <= max_tokens for rank in plan for micro in rank)


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_batch_that_shrank_is_split_into_even_steps_of_at_most_the_global_batch_size(samples: int, size: int) -> None:
    bounds = step_bounds(samples, size)
    assert [i for begin, end in bounds for i in range(begin, end)] == list(range(samples))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-samples // size)
    if samples % size == 0:
        assert set(sizes) == {size}


@given(lengths, st.integers(1, 4))
def test_ranks_differ_by_at_most_one_longest_sample_when_all_fits_in_one_micro_batch(
    sizes: list[int], dp_size: int
) -> None:
    plan = plan_micro_batches(sizes, 10_000, dp_size)
    loads = [sum(sizes[i] for micro in rank for i in micro) for rank in plan]
    assert max(loads) - min(loads) <= max(sizes)
    assert all(len(rank) == 1 for rank in plan)


def test_as_few_micro_batches_as_fit() -> None:
    assert len(plan_micro_batches([10] * 8, 20, 2)[0]) == 2
    assert len(plan_micro_batches([10] * 9, 20, 2)[0]) == 3


def test_more_ranks_than_samples_leaves_some_without_work() -> None:
    plan = plan_micro_batches([5], 10, 3)
    assert sorted(plan) == [[[]], [[]], [[0]]]


def test_a_sample_that_cannot_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sample 1 has 11 tokens, more than max_tokens_per_micro_batch 10"):
        plan_micro_batches([3, 11], 10, 1)


def sample(response: int, mask: list[int] | None = None) -> TrainSample:
    return TrainSample([0] * (response + 1), 1, [0.0] * response, 1.0, mask)


@pytest.mark.parametrize("aggregate", ["token-mean", "sequence-mean"])
def test_weights_of_all_trained_tokens_sum_to_one(aggregate: str) -> None:
    batch = [sample(4), sample(2, [1, 0]), sample(3, [0, 0, 0]), sample(0)]
    weights = sample_weights(batch, aggregate)
    assert sum(w * s.trained_tokens for w, s in zip(weights, batch, strict=True)) == pytest.approx(1.0)


def test_token_mean_and_sequence_mean_differ_as_they_should() -> None:
    batch = [sample(4), sample(1)]
    assert sample_weights(batch, "token-mean") == [0.2, 0.2]
    assert sample_weights(batch, "sequence-mean") == [0.125, 0.5]


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token to train on"):
        sample_weights([sample(2, [0, 0])], "token-mean")
