"""What transformers says: greedy continuations and logprobs of one sequence, no cache, no batching."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=16)
def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@torch.inference_mode()
def greedy(path: Path, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The `new` most likely tokens and their logprobs."""
    ids, logprobs = list(prompt), []
    for _ in range(new):
        row = torch.log_softmax(_model(path)(torch.tensor([ids])).logits[0, -1].float(), -1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs


@torch.inference_mode()
def logprobs_of(path: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Logprob of ids[1:], each given what stands before it; length len(ids) - 1."""
    logits = _model(path)(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
