"""The batched key/value cache of the embedded engine, and the attention that reads and writes it.

Active requests occupy the first rows of one preallocated tensor, so a decoding batch is a view and never a gather; a
finished row is filled with the last one. Registered with transformers as an attention implementation: model code,
projections and rotary embeddings stay transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "miles_disagg_rows"
_COLUMN_STEP = 64


class KVCache:
    """keys, values: [layers, rows, kv_heads, columns, head_dim]. Row i holds one request; column j its j-th token.

    Columns grow on demand (by at least half), so short requests never pay for the context length. `max_tokens` bounds
    rows * columns of what is in use; the scheduler asks `fits` before it widens a batch.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        max_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.max_tokens = max_tokens
        self.rows = rows
        shape = (layers, rows, kv_heads, _COLUMN_STEP, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def columns(self) -> int:
        """Tokens a row can hold now."""
        return self.keys.shape[3]

    def fits(self, rows: int, columns: int) -> bool:
        """True if `rows` requests of up to `columns` tokens may be held at once."""
        return rows <= self.rows and rows * columns <= self.max_tokens

    def reserve(self, columns: int) -> None:
        """Make every row hold at least `columns` tokens; what is cached stays."""
        if columns <= self.columns:
            return
        wanted = max(columns, self.columns * 3 // 2)
        wanted = -(-wanted // _COLUMN_STEP) * _COLUMN_STEP
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:3], wanted, old.shape[4]))
            new[:, :, :, : old.shape[3]] = old
            setattr(self, name, new)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


@dataclass
class Decode:
    """One token for each of rows [0, n): written at `positions` [n], reading `width` columns under `bias` [n,1,1,w]."""

    cache: KVCache
    rows: torch.Tensor
    positions: torch.Tensor
    width: int
    bias: torch.Tensor

    @classmethod
    def at(cls, cache: KVCache, positions: torch.Tensor, longest: int, dtype: torch.dtype) -> Decode:
        """For tokens at `positions`; `longest` is the largest of them."""
        width = min(-(-(longest + 1) // 16) * 16, cache.columns)
        visible = torch.arange(width, device=positions.device)[None] <= positions[:, None]
        bias = torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, float("-inf"))
        rows = torch.arange(positions.shape[0], device=positions.device)
        return cls(cache, rows, positions, width, bias[:, None, None])

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float):
        """query [n, heads, 1, d], key and value [n, kv_heads, 1, d] -> [n, 1, heads, d]."""
        n, kv_heads = key.shape[:2]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        keys, values = keys[:n, :, : self.width], values[:n, :, : self.width]
        grouped = query.reshape(n, kv_heads, -1, query.shape[-1])
        scores = torch.matmul(grouped, keys.transpose(2, 3)) * scaling + self.bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, values).reshape(n, 1, -1, query.shape[-1])


@dataclass
class Prefill:
    """Columns [start, start + q) of rows [first, first + n), right-padded; each token sees what stands before it."""

    cache: KVCache
    first: int
    start: int

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float):
        """query [n, heads, q, d], key and value [n, kv_heads, q, d] -> [n, q, heads, d]."""
        n, q = query.shape[0], query.shape[2]
        end = self.start + q
        rows = slice(self.first, self.first + n)
        keys, values = self.cache.keys[layer, rows], self.cache.values[layer, rows]
        keys[:, :, self.start : end] = key
        values[:, :, self.start : end] = value
        mask = None
        if self.start:
            columns = torch.arange(end, device=query.device)[None]
            mask = columns <= torch.arange(self.start, end, device=query.device)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            is_causal=mask is None and q > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
):
    step: Decode | Prefill = kwargs["kv_step"]
    return step.attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


def register() -> str:
    """Make the implementation known to transformers; returns its name. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, lambda *args, **kwargs: None)
    return IMPLEMENTATION
