"""Builds this rank's part of a Hugging Face model as a Megatron-core model. Weights come from `convert.py`.

A critic is the same model with a value head in place of the output layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from miles_disagg.trainer.base import TrainerSpec
from miles_disagg.trainer.hf_config import HfModelConfig
from miles_disagg.trainer.megatron.attention import PackedAttention
from miles_disagg.trainer.megatron.parallel import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(hf: HfModelConfig, spec: TrainerSpec, layout: Layout) -> TransformerConfig:
    """Megatron's configuration; every fusion that needs Transformer Engine, apex or a compiler is off."""
    dtype = DTYPES[spec.dtype]
    experts: dict[str, Any] = {}
    if hf.experts is not None:
        experts = {
            "num_moe_experts": hf.experts.count,
            "moe_router_topk": hf.experts.active,
            "moe_ffn_hidden_size": hf.experts.ffn_size,
            "moe_router_pre_softmax": not hf.experts.normalised,
            "moe_router_load_balancing_type": "none",  # the loss is the policy's alone
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.ep_size,
        }
    recompute: dict[str, Any] = {}
    if spec.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif spec.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.ffn_size,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_kv_heads,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_eps,
        qk_layernorm=hf.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        variable_seq_lengths=layout.pp_size > 1,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, of a dense model too
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=spec.dtype == "bf16",
        use_cpu_initialization=layout.device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **recompute,
        **experts,
    )


class ValueHead(torch.nn.Module):
    """A value for each position: weight [1, hidden] and bias [1], whole on every tensor parallel rank.

    They begin at 0, so that the first values are 0. It is called, and answers, as Megatron's output layer does.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """hidden [t, 1, h] to values [t, 1, 1], fp32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def build_critic(hf: HfModelConfig, config: TransformerConfig, layout: Layout) -> GPTModel:
    """`build_model` with a value head: forward gives values [1, t, 1] on the last stage."""
    model = build_model(replace(hf, tied=False), config, layout)
    if layout.last_stage:
        head: Any = ValueHead(hf.hidden_size).to(device=layout.device, dtype=config.params_dtype)
        model.output_layer = head
    return model


def build_model(hf: HfModelConfig, config: TransformerConfig, layout: Layout) -> GPTModel:
    """This rank's pipeline stage and tensor shard, with uninitialised weights, on the layout's device.

    The one place that names Megatron's model class. forward(tokens [1, t], positions [1, t], None,
    packed_seq_params=PackedSequences) gives logits [1, t, padded vocab / tp] on the last stage.
    """
    experts = hf.experts.count if hf.experts else None
    if experts and not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks whether it is None, and does not define it
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - unknown to the type checker
    layer: Any = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=hf.qk_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=hf.padded_vocab_size(layout.tp_size),
        max_sequence_length=hf.max_positions,
        pre_process=layout.first_stage,
        post_process=layout.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=hf.tied,
        position_embedding_type="rope",
        rotary_base=int(hf.rope.theta),
    )
    inverse = torch.tensor(hf.rope.inverse_frequencies(hf.head_dim), dtype=torch.float32)
    model.rotary_pos_emb.inv_freq = inverse.to(layout.device)
    return model.to(device=layout.device, dtype=config.params_dtype)
