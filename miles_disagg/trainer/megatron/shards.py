"""This rank's parameters as boxes of checkpoint tensors, for transfers that gather nothing.

The cuts are `weights.transfer.layouts`' formulas; what is fused how is `convert`'s. Tied copies are left out: the first
stage's embedding is sent.
"""

from __future__ import annotations

from typing import cast

import torch

from miles_disagg.publish.peer import LocalShard
from miles_disagg.trainer.hf_config import HfModelConfig
from miles_disagg.trainer.megatron.convert import hf_shapes, slots
from miles_disagg.trainer.megatron.parallel import Layout
from miles_disagg.weights.transfer.layouts import Kind, ModelSizes, shard_blocks


def model_sizes(hf: HfModelConfig) -> ModelSizes:
    """The sizes that layouts are computed from."""
    return ModelSizes(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        ffn=hf.ffn_size,
        layers=hf.num_layers,
        heads=hf.num_heads,
        kv_heads=hf.num_kv_heads,
        head_dim=hf.head_dim,
        tied=hf.tied,
        qkv_bias=hf.qkv_bias,
        qk_norm=hf.qk_norm,
    )


def local_shards(
    model: torch.nn.Module, hf: HfModelConfig, layout: Layout, dtypes: dict[str, torch.dtype]
) -> list[LocalShard]:
    """Every parameter of this rank that is published, one after another; storage numbers are positions in the list."""
    shapes, sizes = hf_shapes(hf), model_sizes(hf)
    out: list[LocalShard] = []
    for slot in slots(model, hf):
        if slot.copy:
            continue
        tensors = tuple((name, shapes[name]) for name in slot.hf_names)
        elements, blocks = shard_blocks(cast(Kind, slot.kind), tensors, sizes, layout.tp, layout.tp_size, len(out))
        if elements != slot.param.numel():
            raise RuntimeError(f"{slot.hf_names[0]}: {slot.param.numel()} elements here, {elements} by its formula")
        out.append(LocalShard(slot.param, tuple(blocks), dtypes[slot.hf_names[0]]))
    return out
