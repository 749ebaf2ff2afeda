"""Loss formulas and advantages on numbers small enough to check by hand, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.trainer.advantages import group_advantages, grpo_advantages
from miles_disagg.trainer.base import LossSpec, OptimizerSpec, TrainSample
from miles_disagg.trainer.losses import kl_estimate, policy_losses
from miles_disagg.trainer.schedule import learning_rate

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def losses(logprobs: list[float], proximal: list[float], advantages: list[float], spec: LossSpec, **kwargs: object):
    options: dict = {"behaviour": torch.tensor(proximal), "entropy": None, "reference": None} | kwargs
    return policy_losses(
        torch.tensor(logprobs, requires_grad=True), proximal=torch.tensor(proximal),
        advantages=torch.tensor(advantages), spec=spec, **options,
    )  # fmt: skip


def test_a_ratio_of_one_gives_minus_the_advantage() -> None:
    out = losses([-1.0, -2.0], [-1.0, -2.0], [0.5, -3.0], LossSpec())
    assert out.loss.tolist() == [-0.5, 3.0]
    assert out.clipped.tolist() == [0.0, 0.0]


def test_clipping_is_asymmetric_and_only_ever_pessimistic() -> None:
    spec = LossSpec(clip_low=0.2, clip_high=0.5)
    up, down = math.log(2.0), math.log(0.5)
    out = losses([up, up, down, down], [0.0] * 4, [1.0, -1.0, 1.0, -1.0], spec)
    assert out.loss.tolist() == pytest.approx([-1.5, 2.0, -0.5, 0.8])
    assert out.clipped.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(2.0), math.log(2.0)], requires_grad=True)
    zero = torch.zeros(2)
    out = policy_losses(
        logprobs, proximal=zero, behaviour=zero, advantages=torch.tensor([1.0, -1.0]), entropy=None, reference=None,
        spec=LossSpec(tis_cap=None),
    )  # fmt: skip
    out.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_vanish_at_equality_and_k2_k3_are_never_negative(kind: str) -> None:
    logprobs, reference = torch.linspace(-5, 0, 11), torch.full((11,), -2.5)
    estimate = kl_estimate(logprobs, reference, kind)
    assert estimate[5].item() == pytest.approx(0.0, abs=1e-6)
    if kind != "k1":
        assert (estimate >= 0).all()


def test_k1_and_k3_average_to_the_kl_divergence() -> None:
    """E_p[k1] = E_p[k3] = KL(p || q), by summing over the whole distribution."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(exact)


def test_entropy_and_kl_enter_with_their_coefficients() -> None:
    spec = LossSpec(entropy_coef=0.1, kl_coef=0.5, kl_kind="k1")
    out = losses([-1.0], [-1.0], [0.0], spec, entropy=torch.tensor([2.0]), reference=torch.tensor([-1.5]))
    assert out.loss.item() == pytest.approx(-0.2 + 0.25)
    with pytest.raises(ValueError, match="entropy_coef"):
        losses([-1.0], [-1.0], [0.0], LossSpec(entropy_coef=0.1))
    with pytest.raises(ValueError, match="kl_coef"):
        losses([-1.0], [-1.0], [0.0], LossSpec(kl_coef=0.1))


def test_group_advantages_by_hand() -> None:
    assert group_advantages([0.0, 0.0, 1.0, 1.0], eps=0.0) == pytest.approx(
        [-0.8660254, -0.8660254, 0.8660254, 0.8660254]
    )
    assert group_advantages([0.0, 1.0], normalise_std=False) == [-0.5, 0.5]


@pytest.mark.parametrize("group", [[0.1] * 3, [1 / 3] * 7, [5.0], []])
def test_a_group_without_variance_gives_exactly_zero(group: list[float]) -> None:
    assert group_advantages(group) == [0.0] * len(group)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(group: list[float]) -> None:
    advantages = group_advantages(group)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-4)
    for (r1, a1), (r2, a2) in zip(zip(group, advantages), list(zip(group, advantages))[1:]):  # noqa: B905
        assert (r1 > r2) <= (a1 >= a2)


@given(st.lists(rewards, max_size=5))
def test_groups_do_not_see_each_other(groups: list[list[float]]) -> None:
    assert grpo_advantages(groups) == [group_advantages(g) for g in groups]


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, math.nan])


def test_learning_rate_schedules() -> None:
    constant = OptimizerSpec(lr=1.0, warmup_steps=4)
    assert [learning_rate(constant, i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerSpec(lr=1.0, min_lr=0.2, schedule="linear", warmup_steps=2, decay_steps=6)
    assert [learning_rate(linear, i) for i in (2, 4, 6, 100)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = OptimizerSpec(lr=1.0, schedule="cosine", decay_steps=10)
    assert [learning_rate(cosine, i) for i in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptimizerSpec(schedule="cosine"), "decay_steps"),
        (lambda: OptimizerSpec(lr=-1.0), "learning rates"),
        (lambda: LossSpec(temperature=0.0), "temperature"),
        (lambda: LossSpec(clip_low=1.5), "clip_low"),
        (lambda: LossSpec(tis_cap=0.0), "tis_cap"),
        (lambda: LossSpec(tis_low=3.0), "tis_low"),
        (lambda: LossSpec(rs_low=3.0, rs_high=2.0), "rs_low"),
        (lambda: LossSpec(dual_clip=1.0), "dual_clip"),
        (lambda: TrainSample([1, 2], 0, [], 0.0), "prompt_len 0"),
        (lambda: TrainSample([1, 2], 1, [0.0, 0.0], 0.0), "behaviour_logprobs has 2 entries, the response has 1"),
        (lambda: TrainSample([1, 2], 1, [0.0], [1.0, 2.0]), "advantage has 2 entries"),
    ],
)  # fmt: skip
def test_specs_and_samples_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
