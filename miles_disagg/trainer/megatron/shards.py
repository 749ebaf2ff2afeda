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
from miles_disagg.weights.transfer.layouts import Kind, shard_blocks


def local_shards(
    model: torch.nn.Module, hf: HfModelConfig, layout: Layout, dtypes: dict[str, torch.dtype]
) -> list[LocalShard]:
    """Every parameter of this rank that is published, one after another; storage numbers are positions in the list."""
    shapes, sizes = hf_shapes(hf), hf.sizes()
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
