"""A tiny Hugging Face checkpoint directory with a character tokenizer, written without torch."""

import json
import struct
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 1,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def write_tiny_checkpoint(path: Path, **config: Any) -> Path:
    """A checkpoint of zeros in one shard; keyword arguments change its config.json."""
    path.mkdir(parents=True)
    settings = {**TINY, **config}
    (path / "config.json").write_text(json.dumps(settings))
    write_safetensors(path / "model.safetensors", tensor_shapes(settings))
    write_tokenizer(path)
    return path


def tensor_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Shapes by canonical name of a tied Qwen3; with `num_experts`, each is of the intermediate size."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        shapes |= {
            f"{p}.input_layernorm.weight": [hidden],
            f"{p}.post_attention_layernorm.weight": [hidden],
            f"{p}.self_attn.q_proj.weight": [q, hidden],
            f"{p}.self_attn.k_proj.weight": [kv, hidden],
            f"{p}.self_attn.v_proj.weight": [kv, hidden],
            f"{p}.self_attn.o_proj.weight": [hidden, q],
            f"{p}.self_attn.q_norm.weight": [dim],
            f"{p}.self_attn.k_norm.weight": [dim],
        }
        experts = config.get("num_experts", 0)
        shapes |= {f"{p}.mlp.gate.weight": [experts, hidden]} if experts else {}
        for mlp in [f"{p}.mlp.experts.{e}" for e in range(experts)] or [f"{p}.mlp"]:
            shapes |= {f"{mlp}.gate_proj.weight": [ffn, hidden], f"{mlp}.up_proj.weight": [ffn, hidden]}
            shapes[f"{mlp}.down_proj.weight"] = [hidden, ffn]
    return shapes


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """F32 zeros under the given names."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def write_tokenizer(path: Path, characters: str = CHARACTERS) -> None:
    """One token a character; ids 0 and 1 are padding and end of sequence."""
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(characters)}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": True}
            for t, i in list(vocab.items())[:2]
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )
