"""A small untrained checkpoint, and tensors to publish in its shape."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """An untrained Qwen3 with the quickstart's tokenizer."""
    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(Recipe(hidden_size=64, layers=2)).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")
