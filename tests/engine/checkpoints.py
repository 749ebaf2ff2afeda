"""Tiny random checkpoints with a byte-level tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

BOS, EOS, PAD = 256, 257, 258
VOCAB = 512
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}


def make_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "qwen3",
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **shape: int,
) -> Path:
    """Write a random model; larger than usual initial weights, so that tokens differ between seeds."""
    extra: dict[str, int] = {"head_dim": 16} if architecture.startswith("qwen3") else {}
    if architecture == "qwen3_moe":
        extra |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = _CONFIGS[architecture](**{**_SHAPE, **extra, **shape}, tie_word_embeddings=tied, initializer_range=0.1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(path)
    if tokenizer:
        make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Token i < 256 is byte i; then bos, eos, pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: value for value, symbol in _byte_symbols().items()}
    vocab |= {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return tokenizer


def _byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out = {b: chr(b) for b in printable}
    out |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in out)}
    return out
