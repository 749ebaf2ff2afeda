"""Core attention on torch's `scaled_dot_product_attention`, for packed sequences, without Transformer Engine.

A packed micro-batch is one row of tokens, `[t, ...]`. Its sequences are ordered by length, so that those of similar
length are neighbours: each such run is padded to its longest and attended in one call (at most half is padding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences attended together: tokens [begin, end) of the pack, `count` rows of `longest` slots.

    slots: int64 [end - begin], each token's place in the flattened [count * longest] grid; None without padding.
    """

    begin: int
    end: int
    count: int
    longest: int
    slots: Tensor | None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's THD parameters, plus the runs that the attention below works on."""

    runs: tuple[Run, ...] = ()


def pack_lengths(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Parameters for sequences of ascending `lengths` packed one after another."""
    if any(a > b for a, b in zip(lengths, lengths[1:], strict=False)) or not lengths or lengths[0] < 1:
        raise ValueError(
            f"packed sequences must be non-empty and in ascending order of length, got {list(lengths)[:8]}"
        )
    runs, first, begin = [], 0, 0
    while first < len(lengths):
        last = first
        while last + 1 < len(lengths) and lengths[last + 1] <= 2 * lengths[first]:
            last += 1
        members = lengths[first : last + 1]
        runs.append(_run(begin, members, device))
        begin, first = begin + sum(members), last + 1
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return PackedSequences("thd", cu, cu, max_seqlen_q=lengths[-1], max_seqlen_kv=lengths[-1], runs=tuple(runs))


def _run(begin: int, lengths: Sequence[int], device: torch.device) -> Run:
    longest, total = lengths[-1], sum(lengths)
    slots = None
    if total != len(lengths) * longest:
        slots = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)]).to(device)
    return Run(begin, begin + total, len(lengths), longest, slots)


class PackedAttention(DotProductAttention):
    """Causal attention within each packed sequence; query [t, heads, d], key and value [t, kv heads, d]."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention output [t, heads * d]."""
        if not isinstance(packed_seq_params, PackedSequences) or attention_bias is not None:
            raise ValueError("PackedAttention needs PackedSequences and takes no attention bias")
        outputs = [self._attend(run, query, key, value) for run in packed_seq_params.runs]
        return torch.cat(outputs).reshape(query.shape[0], -1)

    def _attend(self, run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def grid(x: Tensor) -> Tensor:  # [t, heads, d] -> [count, heads, longest, d]
            x = x[run.begin : run.end]
            if run.slots is not None:
                x = x.new_zeros(run.count * run.longest, *x.shape[1:]).index_copy(0, run.slots, x)
            return x.view(run.count, run.longest, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            grid(query),
            grid(key),
            grid(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out = out.transpose(1, 2).reshape(run.count * run.longest, *query.shape[1:])
        return out if run.slots is None else out[run.slots]
