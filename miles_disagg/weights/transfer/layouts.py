"""Where Megatron ranks and SGLang ranks hold the tensors of a decoder, from its sizes alone. Pure.

The trainer's shards are cut by these formulas; an engine's real layout is recorded from its loader, and the formula
for it serves plans and simulations before anything runs (a test compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from miles_disagg.weights.transfer.blocks import Block, RankLayout, Storage, blocks_of

Kind = Literal["replicated", "columns", "vocab", "qkv", "gate_up", "expert_gate_up", "expert_down"]
ITEMSIZE = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
Dim = tuple[int, int, int]


@dataclass(frozen=True)
class ModelSizes:
    """A decoder with grouped-query attention and SwiGLU. experts: per layer, 0 for a dense model, of `expert_ffn`."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True
    experts: int = 0
    expert_ffn: int = 0

    @property
    def q_rows(self) -> int:
        """Rows of the query projection that belong to one KV head."""
        return self.heads // self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for _, _, tensors in weights(self) for _, shape in tensors)


@dataclass(frozen=True)
class TrainerParallel:
    """Sizes of the trainer's parallel groups. expert: ranks that the experts of a layer are spread over, neighbours on
    the same rank."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class EngineParallel:
    """Ranks of one engine, and over how many of them its experts are spread (the rest cut each expert)."""

    tensor: int = 1
    expert: int = 1


Tensors = tuple[tuple[str, tuple[int, ...]], ...]


def weights(model: ModelSizes) -> Iterator[tuple[int, Kind, Tensors]]:
    """Every parameter of the model: (layer, kind, its tensors); layer -1 is the embedding's, `layers` the head's."""
    h, kv = model.hidden, model.kv_heads * model.head_dim
    yield -1, "vocab", (("model.embed_tokens.weight", (model.vocab, h)),)
    for i in range(model.layers):
        at, attn = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        yield i, "replicated", ((at + "input_layernorm.weight", (h,)),)
        qkv = (("q", model.heads * model.head_dim), ("k", kv), ("v", kv))
        yield i, "qkv", tuple((f"{attn}{x}_proj.weight", (rows, h)) for x, rows in qkv)
        if model.qkv_bias:
            yield i, "qkv", tuple((f"{attn}{x}_proj.bias", (rows,)) for x, rows in qkv)
        if model.qk_norm:
            for x in "qk":
                yield i, "replicated", ((f"{attn}{x}_norm.weight", (model.head_dim,)),)
        yield i, "columns", ((attn + "o_proj.weight", (h, model.heads * model.head_dim)),)
        yield i, "replicated", ((at + "post_attention_layernorm.weight", (h,)),)
        if not model.experts:
            yield i, "gate_up", tuple((f"{at}mlp.{x}_proj.weight", (model.ffn, h)) for x in ("gate", "up"))
            yield i, "columns", ((at + "mlp.down_proj.weight", (h, model.ffn)),)
            continue
        yield i, "replicated", ((at + "mlp.gate.weight", (model.experts, h)),)
        for e in range(model.experts):
            expert = f"{at}mlp.experts.{e}."
            pair = tuple((f"{expert}{x}_proj.weight", (model.expert_ffn, h)) for x in ("gate", "up"))
            yield i, "expert_gate_up", pair
            yield i, "expert_down", ((expert + "down_proj.weight", (h, model.expert_ffn)),)
    yield model.layers, "replicated", (("model.norm.weight", (h,)),)
    if not model.tied:
        yield model.layers, "vocab", (("lm_head.weight", (model.vocab, h)),)


def shard_blocks(
    kind: Kind, tensors: Tensors, model: ModelSizes, rank: int, size: int, storage: int
) -> tuple[int, list[Block]]:
    """(elements, blocks) of Megatron rank `rank` of `size` of one parameter; fused and sharded as `convert` does it."""
    name, shape = tensors[0]
    if kind in ("replicated", "expert_down"):
        count = math.prod(shape)
        return count, blocks_of(name, shape, ((count, 1, 1),), 0, storage, 0)
    if kind == "columns":
        rows, columns = shape[0], shape[1] // size
        dims = ((rows, shape[1], columns), (columns, 1, 1))
        return rows * columns, blocks_of(name, shape, dims, rank * columns, storage, 0)
    if kind == "vocab":
        padded = -(-shape[0] // size)
        rows = max(0, min(padded, shape[0] - rank * padded))
        count = rows * shape[1]
        blocks = blocks_of(name, shape, ((count, 1, 1),), rank * padded * shape[1], storage, 0) if count else []
        return padded * shape[1], blocks
    if kind == "qkv":
        return _fused_qkv(tensors, model, rank, size, storage)
    return _stacked(tensors, rank, size, storage) if kind == "gate_up" else _stacked(tensors, 0, 1, storage)


def _fused_qkv(tensors: Tensors, model: ModelSizes, rank: int, size: int, storage: int) -> tuple[int, list[Block]]:
    groups = model.kv_heads // size
    inner = math.prod(tensors[0][1][1:])
    step = (model.q_rows + 2 * model.head_dim) * inner
    out: list[Block] = []
    at = 0
    for (name, shape), rows in zip(tensors, (model.q_rows, model.head_dim, model.head_dim), strict=True):
        part = rows * inner
        dims = ((groups, part, step), (part, 1, 1))
        out += blocks_of(name, shape, dims, rank * groups * part, storage, at)
        at += part
    return groups * step, out


def _stacked(tensors: Tensors, rank: int, size: int, storage: int) -> tuple[int, list[Block]]:
    """Each tensor's rows of `rank`, one tensor below the other."""
    out: list[Block] = []
    at = 0
    for name, shape in tensors:
        part = math.prod(shape) // size
        out += blocks_of(name, shape, ((part, 1, 1),), rank * part, storage, at)
        at += part
    return at, out


def trainer_layouts(model: ModelSizes, parallel: TrainerParallel, dtype: str = "bfloat16") -> list[RankLayout]:
    """All Megatron ranks in order: tensor parallel fastest, then data, then pipeline. Layers are split evenly."""
    out = []
    stage = -(-model.layers // parallel.pipeline)
    for rank in range(parallel.world):
        tp, pp = rank % parallel.tensor, rank // (parallel.tensor * parallel.data)
        expert = rank % (parallel.tensor * parallel.data) % parallel.expert
        layers = range(pp * stage, min(model.layers, (pp + 1) * stage))
        storages: list[Storage] = []
        blocks: list[Block] = []
        for layer, kind, tensors in weights(model):
            own = pp == 0 if layer < 0 else pp == parallel.pipeline - 1 if layer == model.layers else layer in layers
            if not own or (kind.startswith("expert") and _home(tensors, model, parallel.expert) != expert):
                continue
            count, found = shard_blocks(kind, tensors, model, tp, parallel.tensor, len(storages))
            storages.append(Storage(count, ITEMSIZE[dtype], dtype))
            blocks += found
        out.append(RankLayout(f"trainer rank {rank}", tuple(storages), tuple(blocks)))
    return out


def engine_layouts(
    model: ModelSizes, parallel: EngineParallel, *, name: str, dtype: str = "bfloat16"
) -> list[RankLayout]:
    """All ranks of one SGLang engine: `[q | k | v]` and `[gate ; up]` fused, experts stacked, KV heads repeated."""
    out = []
    size = parallel.tensor
    for rank in range(size):
        storages: list[Storage] = []
        blocks: list[Block] = []

        def add(elements: int, found: list[Block]) -> None:
            storages.append(Storage(elements, ITEMSIZE[dtype], dtype))  # noqa: B023
            blocks.extend(found)  # noqa: B023

        for _, kind, tensors in weights(model):
            at = len(storages)
            if kind == "qkv":
                add(*_engine_qkv(tensors, model, rank, size, at))
            elif kind == "vocab":
                add(*_engine_vocab(tensors, rank, size, at))
            elif kind.startswith("expert"):
                found = _engine_expert(kind, tensors, model, parallel, rank, at)
                if found is not None:
                    add(*found)
            else:
                add(*shard_blocks(kind, tensors, model, rank, size, at))
        out.append(RankLayout(f"{name} rank {rank}", tuple(storages), tuple(blocks)))
    return out


def embedded_layout(model: ModelSizes, *, name: str, dtype: str = "bfloat16") -> RankLayout:
    """The embedded engine: every tensor as it stands in the checkpoint, but a layer's experts stacked."""
    storages: list[Storage] = []
    blocks: list[Block] = []
    stacks: dict[tuple[int, Kind], int] = {}
    for layer, kind, tensors in weights(model):
        if kind.startswith("expert"):
            elements = sum(math.prod(shape) for _, shape in tensors)
            if (layer, kind) not in stacks:
                stacks[layer, kind] = len(storages)
                storages.append(Storage(elements * model.experts, ITEMSIZE[dtype], dtype))
            at = _number(tensors) * elements
            for tensor, shape in tensors:
                count = math.prod(shape)
                blocks += blocks_of(tensor, shape, ((count, 1, 1),), 0, stacks[layer, kind], at)
                at += count
            continue
        for tensor, shape in tensors:
            count = math.prod(shape)
            blocks += blocks_of(tensor, shape, ((count, 1, 1),), 0, len(storages), 0)
            storages.append(Storage(count, ITEMSIZE[dtype], dtype))
    return RankLayout(f"{name} rank 0", tuple(storages), tuple(blocks))


def _engine_qkv(tensors: Tensors, model: ModelSizes, rank: int, size: int, storage: int) -> tuple[int, list[Block]]:
    inner = math.prod(tensors[0][1][1:])
    out: list[Block] = []
    at = 0
    for (name, shape), heads in zip(tensors, (model.heads, model.kv_heads, model.kv_heads), strict=True):
        copies = max(1, size // heads)  # a KV head on several ranks
        rows = max(1, heads // size) * model.head_dim
        part = rows * inner
        out += blocks_of(name, shape, ((part, 1, 1),), rank // copies * part, storage, at)
        at += part
    return at, out


def _engine_vocab(tensors: Tensors, rank: int, size: int, storage: int) -> tuple[int, list[Block]]:
    ((name, shape),) = tensors
    whole = -(-shape[0] // 64) * 64  # SGLang pads the vocabulary to a multiple of 64, or of 64 a rank
    padded = (whole if whole % size == 0 else -(-shape[0] // (64 * size)) * 64 * size) // size
    rows = max(0, min(padded, shape[0] - rank * padded))
    dims = ((rows * shape[1], 1, 1),)
    return padded * shape[1], blocks_of(name, shape, dims, rank * padded * shape[1], storage, 0) if rows else []


def _engine_expert(
    kind: Kind, tensors: Tensors, model: ModelSizes, parallel: EngineParallel, rank: int, storage: int
) -> tuple[int, list[Block]] | None:
    """One expert's part on `rank`; None if another rank has it."""
    cut = parallel.tensor // parallel.expert
    if _home(tensors, model, parallel.expert) != rank // cut:
        return None
    if kind == "expert_gate_up":
        return _stacked(tensors, rank % cut, cut, storage)
    ((name, shape),) = tensors
    columns = shape[1] // cut
    dims = ((shape[0], shape[1], columns), (columns, 1, 1))
    return shape[0] * columns, blocks_of(name, shape, dims, rank % cut * columns, storage, 0)


def _home(tensors: Tensors, model: ModelSizes, ranks: int) -> int:
    """Which of `ranks` has this expert: each has a run of neighbours, as Megatron and SGLang spread them."""
    return _number(tensors) * ranks // model.experts


def _number(tensors: Tensors) -> int:
    return int(tensors[0][0].split(".experts.")[1].split(".")[0])
