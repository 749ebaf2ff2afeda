"""The Megatron trainer against transformers + torch AdamW, at every layout: logits, gradients, steps, export.

One launch of real processes a world size; each test looks at one thing in what came back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_disagg.trainer.base import LossSpec, OptimizerSpec, TrainerSpec
from tests.trainer.models import LLAMA3_ROPE, Reference, checkpoint_names, make_batch, make_checkpoint
from tests.trainer.ranks import Job, run_ranks

VOCAB = 61  # odd: TP2 pads it
OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.01, clip_grad=0.5, adam_beta2=0.95)
LOSS = LossSpec(kl_coef=0.05, entropy_coef=0.01, tis_cap=1.5, temperature=0.8, clip_low=0.02, clip_high=0.03)
BATCH = make_batch(8, VOCAB, versions=True, behaviour=-4.0)
STEPS = 3
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {"tie_word_embeddings": False}),
    "experts-tied": ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": False}),
}
# name: (world, TP, PP, model, distributed optimizer)
LAYOUTS: dict[str, tuple[int, int, int, str, bool]] = {
    "one rank": (1, 1, 1, "qwen3-tied", True),
    "one rank, llama 3 rope": (1, 1, 1, "llama3-rope", False),
    "one rank, experts": (1, 1, 1, "experts", False),
    "TP2": (2, 2, 1, "qwen2", False),
    "TP2, tied": (2, 2, 1, "qwen3-tied", True),
    "PP2": (2, 1, 2, "qwen3", False),
    "PP2, tied": (2, 1, 2, "llama-tied", False),
    "DP2": (2, 1, 1, "qwen3", False),
    "DP2, distributed optimizer": (2, 1, 1, "qwen2", True),
    "EP2": (2, 1, 1, "experts", False),
    "EP2, tied, distributed optimizer": (2, 1, 1, "experts-tied", True),
    "PP2xEP2": (4, 1, 2, "experts-tied", False),
    "EP2xDP2": (4, 1, 1, "experts", True),
    "TP2xPP2": (4, 2, 2, "qwen3-tied", False),
    "TP2xDP2": (4, 2, 1, "qwen3", True),
}


def slow_from_four_ranks(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if LAYOUTS[name][0] > 2 else name


every_layout = pytest.mark.parametrize("layout", [slow_from_four_ranks(name) for name in LAYOUTS])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_checkpoint(root / name, kind, vocab_size=VOCAB, **changes)
        for name, (kind, changes) in MODELS.items()
    }


class Runs:
    """Starts the ranks of a world size when its first result is asked for."""

    def __init__(self, checkpoints: dict[str, Path]):
        self.checkpoints = checkpoints
        self._world = functools.cache(self._launch)

    def _launch(self, world: int) -> dict[str, list[Any]]:
        jobs = {}
        for name, (size, tp, pp, model, distributed) in LAYOUTS.items():
            if size != world:
                continue
            spec = TrainerSpec(
                str(self.checkpoints[model]), tp, pp, "fp32", distributed, "full" if "tied" in name else "none",
                max_tokens_per_micro_batch=60, optimizer=OPTIMIZER, loss=LOSS, expert_parallel=1 + ("EP2" in name),
            )  # fmt: skip
            jobs[name] = Job("sft", {"spec": spec, "batch": BATCH, "steps": STEPS})
            jobs[f"{name}: policy"] = Job(
                "policy", {"spec": spec, "batch": BATCH, "global_batch_size": 4, "version": 1}
            )
        return run_ranks(world, jobs)

    def of(self, layout: str, kind: str = "") -> list[dict[str, Any]]:
        return self._world(LAYOUTS[layout][0])[layout + kind]

    def reference(self, layout: str) -> Reference:
        return Reference(self.checkpoints[LAYOUTS[layout][3]], OPTIMIZER)


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, Path]) -> Iterator[Runs]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runs(checkpoints)
    torch.set_num_threads(threads)


def union(results: list[dict[str, Any]], key: str) -> dict[str, np.ndarray]:
    """Tensors of all sources; no name twice."""
    out: dict[str, np.ndarray] = {}
    for result in results:
        assert bool(result[key]) == result["is_source"] if "is_source" in result else True
        assert not set(result[key]) & set(out)
        out |= result[key]
    return out


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tied = getattr(model.config, "tie_word_embeddings", False)
    return checkpoint_names({k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")})


@every_layout
def test_export_after_import_is_the_checkpoint_bit_for_bit(runs: Runs, layout: str) -> None:
    exported, expected = union(runs.of(layout), "imported"), state_of(runs.reference(layout).model)
    assert set(exported) == set(expected)
    for name, tensor in expected.items():
        assert np.array_equal(exported[name], tensor.flatten().view(torch.uint8).numpy()), name


@every_layout
def test_logits_equal_those_of_transformers(runs: Runs, layout: str) -> None:
    expected = runs.reference(layout).logits(BATCH[0]).detach().numpy()
    found = [r["logits"] for r in runs.of(layout) if r["logits"] is not None]
    assert len(found) == LAYOUTS[layout][0] // LAYOUTS[layout][2], "every rank of the last stage has logits"
    for logits in found:
        np.testing.assert_allclose(logits, expected, atol=2e-5)


@every_layout
def test_every_rank_knows_the_logprobs_of_every_response_token(runs: Runs, layout: str) -> None:
    reference = runs.reference(layout)
    for result in runs.of(layout):
        for sample, logprobs in zip(BATCH, result["logprobs"], strict=True):
            np.testing.assert_allclose(logprobs, reference.score(sample, LOSS.temperature)[0].tolist(), atol=2e-5)


@every_layout
def test_gradients_equal_those_of_transformers(runs: Runs, layout: str) -> None:
    results = runs.of(layout)
    if results[0]["gradients"] is None:
        pytest.skip("the distributed optimizer keeps only a shard of each gradient; its steps are compared instead")
    reference = runs.reference(layout)
    sft_loss(reference).backward()
    found = {k: v for r in results for k, v in r["gradients"].items()}
    assert all(p.grad is not None for p in reference.model.parameters())
    expected = checkpoint_names({k: torch.as_tensor(p.grad) for k, p in reference.model.named_parameters()})
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient.numpy(), atol=2e-6, err_msg=name)


def sft_loss(reference: Reference) -> torch.Tensor:
    return reference.sft_loss(BATCH, LOSS.temperature)


@every_layout
def test_three_steps_give_the_losses_and_weights_of_adamw(runs: Runs, layout: str) -> None:
    results, reference = runs.of(layout), runs.reference(layout)
    for step in range(STEPS):
        loss = sft_loss(reference)
        norm = reference.step(loss)
        for result in results:
            assert result["steps"][step]["train/loss"] == pytest.approx(loss.item(), rel=2e-5)
            assert result["steps"][step]["train/grad_norm"] == pytest.approx(norm, rel=2e-4)
    trained = union(results, "trained")
    for name, tensor in state_of(reference.model).items():
        np.testing.assert_allclose(trained[name].view(np.float32), tensor.flatten().numpy(), atol=1e-4, err_msg=name)


@every_layout
def test_policy_steps_equal_the_formulas_whatever_the_layout(runs: Runs, layout: str) -> None:
    """Two rollout batches of 8, two optimizer steps each, with KL, entropy bonus, TIS, clipping and a temperature."""
    results, reference = runs.of(layout, ": policy"), runs.reference(layout)
    with torch.no_grad():
        base = [reference.score(s, LOSS.temperature)[0] for s in BATCH]
    for rollout in range(2):
        with torch.no_grad():
            proximal = [reference.score(s, LOSS.temperature)[0] for s in BATCH]
        expected: list[dict[str, float]] = []
        for part in (slice(0, 4), slice(4, 8)):
            loss, sums = reference.policy_metrics(BATCH[part], proximal[part], base[part], LOSS)
            expected.append(sums | {"grad_norm": reference.step(loss)})
        for result in results:
            for key in expected[0]:
                mean = (expected[0][key] + expected[1][key]) / 2
                assert result["steps"][rollout][f"train/{key}"] == pytest.approx(mean, rel=1e-3, abs=1e-5), key
    assert results[0]["steps"][1]["train/clip_fraction"] > 0, "the case must exercise clipping"
    assert results[0]["steps"][0]["train/kl"] > 0, "and the KL term"
    assert results[0]["steps"][0]["train/rollout_logprob_abs_diff_on_policy"] > 0
