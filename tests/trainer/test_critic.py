"""PPO's critic on real ranks: its values and steps against transformers with a value head, at every layout; resumed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_disagg.trainer.advantages import gae
from miles_disagg.trainer.base import AdvantageSpec, CriticSpec, LossSpec, OptimizerSpec, TrainerSpec
from tests.trainer.models import Reference, ValueReference, make_batch, make_checkpoint, mask_of
from tests.trainer.ranks import Job, run_ranks

VOCAB = 61
ADAM = OptimizerSpec(lr=1e-3, weight_decay=0.01, clip_grad=0.5)
CRITIC = CriticSpec(OptimizerSpec(lr=2e-3, weight_decay=0.01, clip_grad=0.5), gamma=0.95, lambd=0.9, value_clip=0.005)
LOSS = LossSpec(tis_cap=None, clip_low=0.02, clip_high=0.03, kl_coef=0.0)
BATCH = [
    dataclasses.replace(sample, advantage=0.0, reward=float((7 * i) % 5 - 1))
    for i, sample in enumerate(make_batch(8, VOCAB, seed=4))
]
# name: (world, TP, PP, model, distributed optimizer)
LAYOUTS: dict[str, tuple[int, int, int, str, bool]] = {
    "one rank, tied": (1, 1, 1, "qwen3-tied", True),
    "TP2": (2, 2, 1, "llama", False),
    "PP2, tied": (2, 1, 2, "qwen3-tied", False),
    "DP2, distributed optimizer": (2, 1, 1, "llama", True),
    "TP2xPP2": (4, 2, 2, "qwen3-tied", True),
}
every_layout = pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.slow) if LAYOUTS[n][0] > 2 else n for n in LAYOUTS]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3-tied": make_checkpoint(root / "q", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True),
        "llama": make_checkpoint(root / "l", "llama", vocab_size=VOCAB),
    }


class Runs:
    """Starts the ranks of a world size when its first result is asked for."""

    def __init__(self, models: dict[str, Path], root: Path):
        self.models, self.saved = models, str(root / "saved")
        self.of_world = functools.cache(self._launch)

    def spec(self, tp: int, pp: int, model: str, distributed: bool, **changes: Any) -> TrainerSpec:
        options: dict[str, Any] = {"critic": CRITIC, "loss": LOSS, "advantages": AdvantageSpec("ppo")} | changes
        return TrainerSpec(
            str(self.models[model]),
            tp,
            pp,
            "fp32",
            distributed,
            max_tokens_per_micro_batch=60,
            optimizer=ADAM,
            **options,
        )

    def _launch(self, world: int) -> dict[str, list[Any]]:
        jobs = {
            name: Job("ppo", {"spec": self.spec(*rest), "batch": BATCH, "global_batch_size": 4})
            for name, (size, *rest) in LAYOUTS.items()
            if size == world
        }
        one = self.spec(1, 1, "qwen3-tied", True)
        plain = dataclasses.replace(one, critic=None, advantages=AdvantageSpec())
        alone = dataclasses.replace(one, critic=dataclasses.replace(CRITIC, only_steps=2, value_clip=10.0, lambd=1.0))
        again = {"batch": BATCH, "directory": self.saved}
        if world == 1:
            jobs["alone"] = Job("ppo", {"spec": alone, "batch": BATCH, "global_batch_size": 8, "steps": 2})
            jobs["falls"] = Job("ppo", {"spec": alone, "batch": BATCH, "global_batch_size": 8, "steps": 12})
            jobs["saved"] = Job("ppo_saved", again | {"spec": one})
            jobs["plain, saved"] = Job("save_and_go_on", {"spec": plain, "batch": BATCH, "directory": self.plain})
            jobs["no critic"] = Job("ppo_loaded", {"spec": one, "batch": BATCH, "directory": self.plain})
        if world == 2:
            self.of_world(1)
            for name, tp, pp in (("loaded at TP2", 2, 1), ("loaded at PP2", 1, 2), ("loaded at DP2", 1, 1)):
                jobs[name] = Job("ppo_loaded", again | {"spec": self.spec(tp, pp, "qwen3-tied", True)})
        return run_ranks(world, jobs)

    @property
    def plain(self) -> str:
        return self.saved + "-plain"


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runs(models, tmp_path_factory.mktemp("checkpoints"))
    torch.set_num_threads(threads)


def estimated(values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(advantages, returns) of BATCH per response token, from values per response token."""
    advantages, returns = [], []
    for sample, value in zip(BATCH, values, strict=True):
        kept = [t for t, m in enumerate(mask_of(sample).tolist()) if m]
        a, r = gae([0.0] * (len(kept) - 1) + [sample.reward], value[kept].tolist(), CRITIC.gamma, CRITIC.lambd)
        advantage, target = torch.zeros_like(value), value.clone()
        advantage[kept], target[kept] = torch.tensor(a), torch.tensor(r)
        advantages.append(advantage)
        returns.append(target)
    return advantages, returns


@every_layout
def test_critic_and_policy_step_as_in_plain_torch_whatever_the_layout(runs: Runs, layout: str) -> None:
    """Two rollout batches of two optimizer steps each: values, value losses, gradient norms, and the policy's loss."""
    world, _, _, model, _ = LAYOUTS[layout]
    results = runs.of_world(world)[layout]
    critic, policy = ValueReference(runs.models[model], CRITIC.optimizer), Reference(runs.models[model], ADAM)
    clipped = False
    for rollout in range(2):
        with torch.no_grad():
            old = [critic.values(s) for s in BATCH]
            proximal = [policy.score(s)[0] for s in BATCH]
        advantages, returns = estimated(old)
        if rollout == 0:
            assert all(np.allclose(found, 0.0) for r in results for found in r["before"]), "the head begins at 0"
        expected: dict[str, list[float]] = {"value_loss": [], "critic_grad_norm": [], "loss": []}
        for part in (slice(0, 4), slice(4, 8)):
            loss, norm = critic.step(BATCH[part], old[part], returns[part], CRITIC.value_clip)
            expected["value_loss"].append(loss)
            expected["critic_grad_norm"].append(norm)
        for part in (slice(0, 4), slice(4, 8)):
            given = [
                dataclasses.replace(s, advantage=a.tolist(), behaviour_logprobs=p.tolist())
                for s, a, p in zip(BATCH[part], advantages[part], proximal[part], strict=True)
            ]
            total, sums = policy.policy_metrics(
                given, proximal[part], proximal[part], dataclasses.replace(LOSS, tis_cap=1.0)
            )
            policy.step(total)
            expected["loss"].append(sums["loss"])
        for result in results:
            step = result["steps"][rollout]
            for key, pair in expected.items():
                assert step[f"train/{key}"] == pytest.approx(sum(pair) / 2, rel=2e-3, abs=1e-5), (rollout, key)
            clipped = clipped or step["train/value_clip_fraction"] > 0
    assert clipped, "the case must exercise the clip"
    with torch.no_grad():
        values = [critic.values(s).tolist() for s in BATCH]
    for result in results:
        for found, wanted in zip(result["values"], values, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-4)
    for name, tensor in policy.model.state_dict().items():
        for result in results:
            if name in result["trained"]:
                np.testing.assert_allclose(
                    result["trained"][name].view(np.float32), tensor.flatten().numpy(), atol=1e-4, err_msg=name
                )


def test_the_policy_stands_still_while_the_critic_trains_alone(runs: Runs) -> None:
    (result,) = runs.of_world(1)["alone"]
    assert all(np.array_equal(result["imported"][name], result["trained"][name]) for name in result["imported"])
    assert all("train/loss" not in step and step["train/value_loss"] > 0 for step in result["steps"])
    (longer,) = runs.of_world(1)["falls"]
    assert ["train/loss" in step for step in longer["steps"]] == [False] * 2 + [True] * 10
    assert any(not np.array_equal(longer["imported"][n], longer["trained"][n]) for n in longer["imported"])


def test_the_critic_learns_the_returns(runs: Runs) -> None:
    (result,) = runs.of_world(1)["falls"]
    first, last = result["steps"][0], result["steps"][-1]
    assert last["train/value_loss"] < 0.5 * first["train/value_loss"]
    assert last["train/value_explained_variance"] > first["train/value_explained_variance"] + 0.3


@pytest.mark.parametrize("layout", ["TP2", "PP2", "DP2"])
def test_a_resumed_critic_goes_on_as_if_nothing_had_happened(runs: Runs, layout: str) -> None:
    (saved,) = runs.of_world(1)["saved"]
    for loaded in runs.of_world(2)[f"loaded at {layout}"]:
        for key in ("train/value_loss", "train/critic_grad_norm", "train/loss", "train/grad_norm"):
            assert loaded["steps"][0][key] == pytest.approx(saved["steps"][0][key], rel=1e-3, abs=1e-6), key
        for found, wanted in zip(loaded["values"], saved["values"], strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_a_checkpoint_without_a_critic_is_refused(runs: Runs) -> None:
    (message,) = runs.of_world(1)["no critic"]
    assert "CheckpointError" in message
    assert "has no critic" in message
