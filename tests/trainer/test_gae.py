"""Generalized advantage estimation against the sum it abbreviates, and the columns that the trainer makes of it."""

import random

import pytest
import torch

from miles_disagg.trainer.advantages import gae
from miles_disagg.trainer.base import CriticSpec, TrainSample


def by_definition(rewards, values, gamma, lambd):
    """A_t = sum over k of (gamma lambd)^(k - t) delta_k (eq. 16)."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lambd) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (1.0, 0.3), (0.0, 0.7)])
@pytest.mark.parametrize("n", [1, 2, 17])
def test_the_recursion_is_the_sum(gamma: float, lambd: float, n: int):
    rng = random.Random(n)
    rewards, values = [rng.gauss(0, 1) for _ in range(n)], [rng.gauss(0, 1) for _ in range(n)]
    advantages, returns = gae(rewards, values, gamma, lambd)
    assert advantages == pytest.approx(by_definition(rewards, values, gamma, lambd))
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])


def test_with_lambda_one_the_return_is_the_discounted_reward_whatever_the_values():
    _, returns = gae([0.0, 0.0, 2.0], [5.0, -1.0, 3.0], 0.5, 1.0)
    assert returns == pytest.approx([0.5, 1.0, 2.0])


def test_what_the_environment_wrote_is_no_step_of_the_policy():
    from miles_disagg.trainer.megatron.batch import policy_columns
    from miles_disagg.trainer.megatron.critic import whitened, with_gae

    told = TrainSample([1, 2, 3, 4, 5, 6], 1, [0.0] * 5, 0.0, loss_mask=[1, 1, 0, 1, 0], reward=2.0)
    plain = TrainSample([1, 2, 3, 4], 1, [0.0] * 3, 0.0, reward=-1.0)
    values = torch.tensor([0.1, 0.2, 9.0, 0.4, 9.0, 0.5, 0.6, 0.7])
    columns = with_gae(policy_columns([told, plain], None), [told, plain], values, CriticSpec(gamma=0.9, lambd=0.8))
    first = by_definition([0.0, 0.0, 2.0], [0.1, 0.2, 0.4], 0.9, 0.8)
    second = by_definition([0.0, 0.0, -1.0], [0.5, 0.6, 0.7], 0.9, 0.8)
    expected = [first[0], first[1], 0.0, first[2], 0.0, *second]
    assert columns.values["advantage"].tolist() == pytest.approx(expected, abs=1e-6)
    kept = [0, 1, 3, 5, 6, 7]
    returns = columns.values["return"]
    assert returns[kept].tolist() == pytest.approx([expected[i] + values[i].item() for i in kept], abs=1e-6)
    white = whitened(columns).values["advantage"]
    assert white[kept].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert white[kept].std().item() == pytest.approx(1.0, abs=1e-5)
    assert white[[2, 4]].tolist() == [0.0, 0.0]


def test_the_teachers_part_of_the_advantages_has_mean_zero_over_trained_tokens():
    from miles_disagg.trainer.losses import distilled
    from miles_disagg.trainer.megatron.batch import policy_columns, with_teacher_baseline

    sample = TrainSample(
        [1, 2, 3, 4, 5],
        1,
        [-1.0, -2.0, -9.0, -3.0],
        0.5,
        loss_mask=[1, 1, 0, 1],
        teacher_logprobs=[-4.0, -1.0, -7.0, -2.0],
    )
    values = with_teacher_baseline(policy_columns([sample], None), 2.0).values
    kept = values["mask"] > 0
    found = distilled(values["advantage"], values["behaviour"], values["teacher"], 2.0)[kept]
    assert found.mean().item() == pytest.approx(0.5)
    assert (found[0] - found[1]).item() == pytest.approx(2.0 * (-3.0 - 1.0))
