"""A small model whose answers tell tokens apart, and servers of either kind that score with it."""

from __future__ import annotations

from pathlib import Path

import torch

from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
from tests.engine import sglang_env


def sharp_model(path: Path, *, seed: int, factor: float) -> Path:
    """A random model of the quickstart's shape with every weight `factor` times as large, with its tokenizer."""
    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    torch.manual_seed(seed)
    whole = make_model(Recipe(hidden_size=64, layers=2))
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(factor)
    whole.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def server_of(kind: str, model: Path) -> launch.LaunchSpec:
    """`embedded` or `sglang`, in float32 on the CPU."""
    if kind == "sglang":
        args = ["--dtype", "float32"]
        return launch.sglang(model, port=free_port(), device="cpu", python=sglang_env.python(), args=args)
    return launch.embedded(model, port=free_port())
