"""Advantages and policy losses by import path: what they get, what is done with it, and what is refused."""

import pytest
import torch

from examples import advantage, loss
from miles_disagg.domain.errors import ConfigError
from miles_disagg.domain.samples import SampleGroup
from miles_disagg.trainer.advantages import batch_advantages
from miles_disagg.trainer.base import AdvantageSpec, LossSpec
from miles_disagg.trainer.batch import train_samples
from miles_disagg.trainer.losses import LossInputs, load_policy_loss, policy_losses
from tests.fakes.samples import make_group

HERE = "tests.trainer.test_plugged_in"
PLUGGED = LossSpec(tis_cap=2.0, custom="examples.loss.penalised")


def too_few(groups):
    return [[0.0] * len(groups[0].samples)]


def wrong_length(groups):
    return [[[1.0] * (len(s.tokens) + 1) for s in g.samples] for g in groups]


def infinite(groups):
    return [[float("inf") for _ in g.samples] for g in groups]


def one_number_a_sample(groups):
    return [list(g.rewards) for g in groups]


def reduced(inputs: LossInputs) -> torch.Tensor:
    return (inputs.logprobs * inputs.advantages).mean()


def detached(inputs: LossInputs) -> torch.Tensor:
    return inputs.proximal * inputs.advantages


def spec(name: str) -> AdvantageSpec:
    return AdvantageSpec(custom=f"{HERE}.{name}")


def groups() -> list[SampleGroup]:
    return [make_group(index) for index in range(2)]


def test_a_plugged_in_advantage_reaches_every_token_of_the_loss():
    batch = groups()
    values = batch_advantages(batch, AdvantageSpec(custom="examples.advantage.discounted"))
    rows = train_samples(batch, values)
    assert len(rows) == sum(len(g.samples) for g in batch)
    place = 0
    for group in batch:
        mean = sum(group.rewards) / len(group.rewards)
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            expected = [
                advantage.GAMMA ** (len(sample.tokens) - 1 - t) * (reward - mean) for t in range(len(sample.tokens))
            ]
            assert rows[place].advantage == pytest.approx(expected)
            place += 1
    assert [r.advantage for r in train_samples(batch, batch_advantages(batch, spec("one_number_a_sample")))] == [
        r for g in batch for r in g.rewards
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_few", "gave 1 lists of advantages for 2 groups"),
        ("wrong_length", "tokens of"),
        ("infinite", "not finite for"),
        ("nowhere", "give package.module.function"),
    ],
)
def test_advantages_that_do_not_fit_the_batch_are_refused_by_name(name: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        batch_advantages(groups(), spec(name))
    assert "--custom-advantage-function-path" in str(caught.value)


def tokens(n: int = 6):
    generator = torch.Generator().manual_seed(3)
    proximal, behaviour, moved, advantages = (torch.randn(n, generator=generator) * 0.3 for _ in range(4))
    return (proximal - 1 + moved).requires_grad_(), proximal - 1, behaviour - 1, advantages


def run(custom, plugged: LossSpec = PLUGGED):
    logprobs, proximal, behaviour, advantages = tokens()
    out = policy_losses(
        logprobs, proximal=proximal, behaviour=behaviour, advantages=advantages, entropy=None, reference=None,
        spec=plugged, custom=custom,
    )  # fmt: skip
    return out, (logprobs, proximal, behaviour, advantages)


def test_a_plugged_in_loss_is_weighted_as_a_built_in_one():
    out, (logprobs, proximal, behaviour, advantages) = run(load_policy_loss(PLUGGED))
    for t in range(len(proximal)):
        log_ratio = (logprobs[t] - proximal[t]).item()
        ratio = 2.718281828459045**log_ratio
        weight = min(2.718281828459045 ** (proximal[t] - behaviour[t]).item(), 2.0)
        expected = weight * (-advantages[t].item() * ratio + loss.BETA * (ratio - 1 - log_ratio))
        assert out.loss[t].item() == pytest.approx(expected, rel=1e-5)
    out.loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).all()


def test_a_plugged_in_loss_that_is_reduced_or_has_no_gradient_is_refused():
    for function, words in ((reduced, r"one loss a token, \[6\], not shape \[\]"), (detached, "no gradient")):
        with pytest.raises(ConfigError, match=words):
            run(function)
    with pytest.raises(ConfigError, match="--custom-loss-function-path"):
        load_policy_loss(LossSpec(custom=f"{HERE}.nowhere"))
