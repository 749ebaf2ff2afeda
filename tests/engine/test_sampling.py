"""Parsing sampling parameters, and drawing tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.embedded.sampling import SamplingParams, make_generator, sample

LOGITS = torch.tensor([[1.0, 3.0, 0.5, 2.0, -1.0, 2.5]])


def params(**raw: object) -> SamplingParams:
    return SamplingParams.parse(raw)


def draw(p: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    generator = make_generator(0)
    uniforms = [generator.random() for _ in range(count)]
    return sample(logits.expand(count, -1), [p] * count, uniforms)[0].tolist()


def test_tokens_are_drawn_with_their_probabilities():
    count = 20000
    drawn = torch.bincount(torch.tensor(draw(params(temperature=0.8), count)), minlength=6) / count
    wanted = torch.softmax(LOGITS[0] / 0.8, -1)
    error = (wanted * (1 - wanted) / count).sqrt()
    assert bool(((drawn - wanted).abs() < 5 * error).all())


@pytest.mark.parametrize(
    ("raw", "support"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 5, 3}),
        ({"top_p": 0.5}, {1, 5}),  # p = .45, .27, ...: as in SGLang, the token that crosses top_p stays
        ({"min_p": 0.5}, {1, 5}),
        ({"temperature": 0}, {1}),
        ({}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_truncation_keeps_exactly_the_likely_tokens(raw: dict[str, float], support: set[int]):
    assert set(draw(params(**raw), 3000)) == support


def test_logprobs_are_those_before_truncation_at_the_temperature():
    _, logprobs = sample(LOGITS, [params(temperature=0.5, top_k=2)], [0.3])
    assert torch.allclose(logprobs, torch.log_softmax(LOGITS / 0.5, -1))
    _, greedy = sample(LOGITS, [params(temperature=0)], [0.0])
    assert torch.allclose(greedy, torch.log_softmax(LOGITS, -1))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}, {"temperature": 0}, {"temperature": 3.0}]),
)
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(logits: list[float], uniform: float, raw: dict[str, float]):
    row = torch.tensor([logits])
    alone = int(sample(row, [params(**raw)], [uniform])[0])
    others = [params(top_p=0.3), params(**raw), params(temperature=0)]
    assert int(sample(row.expand(3, -1), others, [0.9, uniform, 0.1])[0][1]) == alone


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 29), st.sampled_from([0.0, 0.5, math.nextafter(1, 0)]))
def test_a_forbidden_token_is_never_drawn(size: int, forbidden: int, uniform: float):
    logits = torch.zeros(1, size)
    logits[0, forbidden % size] = float("-inf")
    for raw in ({}, {"top_p": 0.99}):
        assert int(sample(logits, [params(**raw)], [uniform])[0]) != forbidden % size


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": "8"}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"n": 0}, "n must"),
        ({"stop": [""]}, "stop"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(raw: dict[str, object], names: str):
    with pytest.raises(InvalidRequest, match=names):
        SamplingParams.parse(raw)


def test_neutral_values_and_nulls_are_accepted():
    p = params(top_k=-1, frequency_penalty=0.0, repetition_penalty=1.0, regex=None, temperature=None, stop="x")
    assert (p.top_k, p.temperature, p.stop) == (1 << 30, 1.0, ("x",))
