"""Every advantage, objective, correction and normalisation against a plain reference: loops over Python floats."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from miles_disagg.trainer.advantages import advantages, reinforce_plus_plus_baseline, rloo_advantages
from miles_disagg.trainer.base import AdvantageSpec, LossSpec, TrainSample
from miles_disagg.trainer.batching import sample_weights
from miles_disagg.trainer.losses import kl_estimate, policy_losses

LENGTHS = [1, 4, 3, 6]
SEGMENTS = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
PLAIN = LossSpec(tis_cap=None, clip_low=0.1, clip_high=0.3)


class Case:
    """Random logprobs near each other, with a mask that drops some tokens, as fp64 lists."""

    def __init__(self, seed: int, spread: float = 0.5):
        rng, n = random.Random(seed), len(SEGMENTS)
        self.proximal = [-rng.uniform(0.1, 3) for _ in range(n)]
        self.logprobs = [p + rng.gauss(0, spread) for p in self.proximal]
        self.behaviour = [p + rng.gauss(0, spread) for p in self.proximal]
        self.advantages = [rng.choice([-1.5, -0.2, 0.7, 2.0]) for _ in LENGTHS]
        self.mask = [0.0 if rng.random() < 0.25 else 1.0 for _ in range(n)]

    def run(self, spec: LossSpec, **changes: object):
        double = {
            name: torch.tensor(value, dtype=torch.float64) for name, value in vars(self).items() if name != "leaf"
        }
        self.leaf = double["logprobs"].requires_grad_()
        options: dict = {
            "proximal": double["proximal"], "behaviour": double["behaviour"], "mask": double["mask"],
            "advantages": double["advantages"][torch.tensor(SEGMENTS)], "segments": torch.tensor(SEGMENTS),
            "entropy": None, "reference": None,
        } | changes  # fmt: skip
        return policy_losses(self.leaf, spec=spec, **options)

    def sequence(self, values: Sequence[float], token: int, *, mean: bool) -> float:
        chosen = [v for v, s, m in zip(values, SEGMENTS, self.mask, strict=True) if s == SEGMENTS[token] and m]
        return sum(chosen) / (max(1, len(chosen)) if mean else 1)

    def rho(self, token: int, level: str) -> float:
        logs = [p - b for p, b in zip(self.proximal, self.behaviour, strict=True)]
        if level == "token":
            return math.exp(logs[token])
        return math.exp(self.sequence(logs, token, mean=level == "geometric"))


def ppo_clip(ratio: float, advantage: float, spec: LossSpec) -> float:
    """max of the two losses; with dual clip never above c * |A| where A < 0."""
    clipped = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if spec.dual_clip is not None and advantage < 0:
        loss = min(loss, -spec.dual_clip * advantage)
    return loss


seeds = pytest.mark.parametrize("seed", range(5))


@seeds
@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_with_asymmetric_and_dual_clip(seed: int, dual: float | None) -> None:
    case, spec = Case(seed, 1.0), replace(PLAIN, dual_clip=dual)
    out = case.run(spec)
    expected = [
        ppo_clip(math.exp(case.logprobs[t] - case.proximal[t]), case.advantages[SEGMENTS[t]], spec)
        for t in range(len(SEGMENTS))
    ]
    assert out.policy.tolist() == pytest.approx(expected)


def test_dual_clip_takes_the_gradient_of_a_token_that_became_far_too_likely() -> None:
    case = Case(0)
    case.logprobs = [p + math.log(10) for p in case.proximal]
    case.advantages = [-1.0] * len(LENGTHS)
    case.run(replace(PLAIN, dual_clip=3.0)).policy.sum().backward()
    assert case.leaf.grad is not None
    assert case.leaf.grad.abs().max() == 0
    case.run(PLAIN).policy.sum().backward()
    assert case.leaf.grad.tolist() == pytest.approx([10.0] * len(SEGMENTS))


@seeds
def test_gspo_clips_the_geometric_mean_of_the_sequence_and_reaches_every_token(seed: int) -> None:
    case = Case(seed)
    spec = replace(PLAIN, objective="gspo")
    out = case.run(spec)
    logs = [a - b for a, b in zip(case.logprobs, case.proximal, strict=True)]
    ratios = [math.exp(case.sequence(logs, t, mean=True)) for t in range(len(SEGMENTS))]
    wanted = [ppo_clip(r, case.advantages[SEGMENTS[t]], spec) for t, r in enumerate(ratios)]
    assert out.policy.tolist() == pytest.approx(wanted)
    out.policy.sum().backward()
    assert case.leaf.grad is not None
    for t, ratio in enumerate(ratios):
        advantage = case.advantages[SEGMENTS[t]]
        clipped = ratio > 1 + spec.clip_high if advantage > 0 else ratio < 1 - spec.clip_low
        assert case.leaf.grad[t].item() == pytest.approx(0.0 if clipped else -advantage * ratio)


@seeds
def test_cispo_clips_the_weight_and_keeps_every_gradient(seed: int) -> None:
    case = Case(seed, 1.0)
    spec = replace(PLAIN, objective="cispo")
    out = case.run(spec)
    out.policy.sum().backward()
    assert case.leaf.grad is not None
    for t, segment in enumerate(SEGMENTS):
        weight = min(max(math.exp(case.logprobs[t] - case.proximal[t]), 0.9), 1.3)
        assert out.policy[t].item() == pytest.approx(-weight * case.advantages[segment] * case.logprobs[t])
        assert case.leaf.grad[t].item() == pytest.approx(-weight * case.advantages[segment])


@seeds
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_importance_weights_at_every_level_and_in_every_mode(seed: int, level, mode) -> None:
    case = Case(seed)
    spec = replace(PLAIN, tis_cap=1.4, tis_low=0.0 if mode == "truncate" else 0.6, tis_level=level, tis_mode=mode)
    out = case.run(spec)
    for t in range(len(SEGMENTS)):
        rho = case.rho(t, level)
        bounded = {
            "truncate": min(rho, 1.4),
            "clip": min(max(rho, 0.6), 1.4),
            "mask": rho if 0.6 <= rho <= 1.4 else 0.0,
        }[mode]
        assert out.tis[t].item() == pytest.approx(bounded)
        ratio = math.exp(case.logprobs[t] - case.proximal[t])
        assert out.policy[t].item() == pytest.approx(bounded * ppo_clip(ratio, case.advantages[SEGMENTS[t]], spec))
    assert not out.tis.requires_grad


@seeds
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rejection_leaves_the_policy_term_out_and_nothing_else(seed: int, level) -> None:
    case, kl = Case(seed), {"reference": torch.tensor(Case(seed + 1).proximal, dtype=torch.float64)}
    spec = replace(PLAIN, rs_level=level, rs_low=0.8, rs_high=1.25, kl_coef=0.1)
    out, kept = case.run(spec, **kl), case.run(replace(spec, rs_level=None), **kl)
    for t in range(len(SEGMENTS)):
        reject = not 0.8 <= case.rho(t, level) <= 1.25
        assert bool(out.rejected[t]) is reject
        assert out.policy[t].item() == (0.0 if reject else kept.policy[t].item())
        assert out.loss[t].item() == pytest.approx(out.policy[t].item() + 0.1 * kept.kl[t].item())


def test_a_veto_rejects_the_whole_sequence_of_one_impossible_token_unless_it_is_masked() -> None:
    case = Case(3)
    case.mask = [1.0] * len(SEGMENTS)
    case.behaviour = list(case.proximal)
    case.behaviour[2] = case.proximal[2] + 12  # in the second sequence
    spec = replace(PLAIN, rs_veto=1e-4)
    assert case.run(spec).rejected.tolist() == [float(s == 1) for s in SEGMENTS]
    case.mask[2] = 0.0
    assert not case.run(spec).rejected.any()


def test_clipping_against_the_behaviour_policy_is_plain_ppo_on_the_engines_logprobs() -> None:
    case = Case(7)
    out = case.run(replace(PLAIN, proximal="behaviour"))
    expected = [
        ppo_clip(math.exp(case.logprobs[t] - case.behaviour[t]), case.advantages[s], PLAIN)
        for t, s in enumerate(SEGMENTS)
    ]
    assert out.policy.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "spec",
    [
        replace(PLAIN, tis_cap=2.0),
        replace(PLAIN, rs_level="token"),
        replace(PLAIN, rs_veto=1e-4),
        replace(PLAIN, proximal="behaviour"),
    ],
)
def test_missing_behaviour_logprobs_are_an_error_only_where_they_are_needed(spec: LossSpec) -> None:
    case = Case(1)
    assert case.run(PLAIN, behaviour=None).loss.isfinite().all()
    with pytest.raises(ValueError, match="behaviour logprobs"):
        case.run(spec, behaviour=None)


def test_kl_estimators() -> None:
    a, b = [-1.0, -2.0, -0.5, -30.0], [-1.5, -1.0, -0.5, -1.0]
    reference = {
        "k1": [x - y for x, y in zip(a, b, strict=True)],
        "k2": [(x - y) ** 2 / 2 for x, y in zip(a, b, strict=True)],
        "k3": [math.exp(y - x) - 1 + x - y for x, y in zip(a, b, strict=True)],
    }
    reference["low_var_kl"] = [max(-10.0, min(10.0, v)) for v in reference["k3"]]
    for kind, expected in reference.items():
        got = kl_estimate(torch.tensor(a).double(), torch.tensor(b).double(), kind).tolist()
        assert got == pytest.approx(expected), kind


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = [0.0, 1.0, 0.5, 3.0]
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert rloo_advantages(rewards) == pytest.approx(expected)
    assert rloo_advantages([2.0, 2.0, 2.0]) == [0.0] * 3
    assert rloo_advantages([1.0]) == [0.0]


def test_reinforce_plus_plus_baseline_normalises_over_the_batch() -> None:
    groups = [[0.0, 1.0, 1.0], [5.0, 5.0], [-2.0, 4.0]]
    centred = [[r - statistics.fmean(g) for r in g] for g in groups]
    flat = [c for g in centred for c in g]
    std = statistics.pstdev(flat)
    got = reinforce_plus_plus_baseline(groups, eps=0.0)
    for g, c in zip(got, centred, strict=True):
        assert g == pytest.approx([(x - statistics.fmean(flat)) / std for x in c])
    assert reinforce_plus_plus_baseline([[1.0, 1.0], [2.0, 2.0]]) == [[0.0, 0.0], [0.0, 0.0]]


def test_the_estimator_is_chosen_by_name() -> None:
    groups = [[0.0, 1.0], [0.0, 4.0]]
    assert advantages(groups, AdvantageSpec("grpo", normalise_std=False)) == [[-0.5, 0.5], [-2.0, 2.0]]
    assert advantages(groups, AdvantageSpec("rloo")) == [[-1.0, 1.0], [-4.0, 4.0]]
    assert advantages(groups, AdvantageSpec("reinforce_plus_plus_baseline"))[1][1] > 1
    for estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ValueError, match="finite"):
            advantages([[0.0, math.inf]], AdvantageSpec(estimator))


def test_three_normalisations_of_the_same_batch() -> None:
    batch = [
        TrainSample([1] * (2 + n), 2, [0.0] * n, 1.0, loss_mask=mask)
        for n, mask in ((4, None), (2, [1, 0]), (3, [0, 0, 0]))
    ]
    assert sample_weights(batch, "token-mean") == [1 / 5] * 3
    assert sample_weights(batch, "sequence-mean") == [1 / 8, 1 / 2, 0.0]
    assert sample_weights(batch, "constant", 100) == [1 / 300] * 3
    with pytest.raises(ValueError, match="constant_length"):
        LossSpec(aggregate="constant")
