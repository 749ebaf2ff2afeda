"""Reading `config.json`: what is understood, and that everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.trainer.hf_config import ExpertsConfig, parse_hf_config, read_hf_config
from tests.trainer.models import LLAMA3_ROPE

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip


def test_sizes_defaults_and_the_old_and_new_forms_of_rope() -> None:
    hf = parse_hf_config(QWEN3)
    assert (hf.num_kv_heads, hf.head_dim, hf.qk_norm, hf.qkv_bias, hf.tied, hf.rope.theta) == (
        2,
        32,
        True,
        False,
        False,
        1e6,
    )
    new = parse_hf_config(QWEN3 | {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert new.rope.theta == 5e5
    llama = parse_hf_config(
        QWEN3 | {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_key_value_heads": None}
    )
    assert (llama.head_dim, llama.num_kv_heads, llama.qk_norm) == (16, 4, False)
    assert parse_hf_config(QWEN3 | {"architectures": ["Qwen2ForCausalLM"]}).qkv_bias


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip


def test_a_mixture_of_experts_and_how_it_can_be_split() -> None:
    hf = parse_hf_config(QWEN3 | EXPERTS)
    assert hf.experts == ExpertsConfig(count=8, active=2, ffn_size=24, normalised=True)
    assert (hf.ffn_size, hf.qk_norm, hf.sizes().experts, hf.sizes().expert_ffn) == (24, True, 8, 24)
    renamed = {k: v for k, v in EXPERTS.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert parse_hf_config(QWEN3 | renamed) == hf
    assert hf.layout_problems(1, 2, 4) == []
    assert "--expert-model-parallel-size 3 does not divide the model's num_experts 8" in hf.layout_problems(1, 1, 3)[0]
    assert "--tensor-model-parallel-size 2: a mixture of experts is trained without" in hf.layout_problems(2, 1)[0]
    assert "Qwen3ForCausalLM has no experts" in parse_hf_config(QWEN3).layout_problems(1, 1, 2)[0]


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("rope", [DEFAULT_ROPE, DEFAULT_ROPE | {"rope_type": "linear", "factor": 3.0}, LLAMA3_ROPE])
def test_inverse_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}
    expected = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope))).inv_freq
    found = parse_hf_config(QWEN3 | {"rope_parameters": rope}).rope.inverse_frequencies(32)
    assert torch.allclose(torch.tensor(found), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM.*supported: Qwen3ForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "supported: Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "needs low_freq_factor"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        (EXPERTS | {"mlp_only_layers": [0]}, "mlp_only_layers.*supported: experts in every layer"),
        (EXPERTS | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        (EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1}, "norm_topk_prob with num_experts_per_tok 1"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_local_experts must be a positive integer, got None"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | change))
    with pytest.raises(CheckpointError, match=words) as e:
        read_hf_config(tmp_path)
    assert "config.json" in str(e.value)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_hf_config(tmp_path)


def test_layouts_that_do_not_divide_the_model_name_the_flag() -> None:
    hf = parse_hf_config(QWEN3)
    assert hf.layout_problems(2, 2) == []
    problems = "\n".join(hf.layout_problems(4, 3))
    assert "--tensor-model-parallel-size 4 does not divide the model's num_key_value_heads 2" in problems
    assert "--pipeline-model-parallel-size 3" in problems
    assert [hf.padded_vocab_size(t) for t in (1, 2, 4)] == [61, 62, 64]
