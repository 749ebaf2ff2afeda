"""The embedded engine on a CUDA device: the same tokens as transformers, updates, and the cache under load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine import reference
from tests.engine.checkpoints import make_checkpoint
from tests.engine.test_scheduler import NEW, PROMPTS, Harness, start  # noqa: F401

pytestmark = pytest.mark.gpu


def test_greedy_tokens_on_the_gpu_are_those_of_transformers(
    start: Callable[..., Harness],  # noqa: F811
    checkpoints: dict[str, Path],
):
    harness = start(checkpoints["base"], device="cuda")
    requests = harness.submit(PROMPTS)
    assert harness.wait(requests) == [reference.greedy(checkpoints["base"], p, 10)[0] for p in PROMPTS]
    harness.update(checkpoints["other"], NEW)
    again = harness.submit(PROMPTS, rid="again")
    assert harness.wait(again) == [reference.greedy(checkpoints["other"], p, 10)[0] for p in PROMPTS]
    assert again[0].logprobs == pytest.approx(reference.greedy(checkpoints["other"], PROMPTS[0], 10)[1], abs=1e-3)


def test_bfloat16_requests_of_all_lengths_run_together_on_the_gpu(
    start: Callable[..., Harness],  # noqa: F811
    tmp_path: Path,
):
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    harness = start(path, device="cuda", max_running_requests=64, max_prefill_tokens=64)
    prompts = [[i % 250 + 1] * (1 + 3 * i) for i in range(60)]
    requests = harness.submit(prompts, max_new_tokens=30, temperature=1.0, sampling_seed=3, top_p=0.9)
    harness.wait(requests)
    for request in requests[::7]:
        want = reference.logprobs_of(path, request.prompt + request.output)[len(request.prompt) - 1 :]
        assert request.logprobs == pytest.approx(want, abs=0.08)
