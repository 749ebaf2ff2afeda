"""Weights between a Hugging Face checkpoint and this rank's shard of the Megatron model, both ways.

Fused and sharded forms (rows; hd = head_dim; r = tensor parallel rank, of tp):
* `linear_qkv`: per KV group `[its q heads | k | v]`; rank r holds whole groups.
* `linear_fc1`: `[gate.chunk(tp)[r] ; up.chunk(tp)[r]]`.
* embedding and output layer: vocabulary rows, padded with zero rows at the end to a multiple of tp.
* experts: each whole on one expert parallel rank, which holds a run of neighbours; `linear_fc1` is `[gate ; up]`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.trainer.base import ExportSink
from miles_disagg.trainer.hf_config import HfModelConfig
from miles_disagg.trainer.megatron.model import ValueHead
from miles_disagg.trainer.megatron.parallel import Layout
from miles_disagg.weights.checkpoint import Checkpoint

Kind = Literal["replicated", "columns", "vocab", "qkv", "gate_up", "expert_gate_up", "expert_down"]
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_WHOLE = ("replicated", "expert_gate_up", "expert_down")  # not cut over tensor parallel ranks
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Slot:
    """One parameter of this rank and the HF tensors it is made of. `copy`: a tied copy, imported but not exported."""

    param: torch.nn.Parameter
    hf_names: tuple[str, ...]
    kind: Kind
    copy: bool = False


def hf_shapes(hf: HfModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must have, with its shape."""
    h, q, kv = hf.hidden_size, hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    out: dict[str, tuple[int, ...]] = {EMBEDDING: (hf.vocab_size, h)}
    for i in range(hf.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        out |= {f"model.layers.{i}.input_layernorm.weight": (h,), f"{attn}o_proj.weight": (h, q)}
        out |= {f"model.layers.{i}.post_attention_layernorm.weight": (h,)}
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{attn}{x}_proj.weight"] = (rows, h)
            if hf.qkv_bias:
                out[f"{attn}{x}_proj.bias"] = (rows,)
        if hf.qk_norm:
            out |= {f"{attn}{x}_norm.weight": (hf.head_dim,) for x in "qk"}
        if hf.experts is not None:
            out[f"{mlp}gate.weight"] = (hf.experts.count, h)
        for at in [f"{mlp}experts.{e}." for e in range(hf.experts.count)] if hf.experts else [mlp]:
            out |= {f"{at}{x}_proj.weight": (hf.ffn_size, h) for x in ("gate", "up")}
            out[f"{at}down_proj.weight"] = (h, hf.ffn_size)
    out["model.norm.weight"] = (h,)
    if not hf.tied:
        out[LM_HEAD] = (hf.vocab_size, h)
    return out


def check_checkpoint(checkpoint: Checkpoint, hf: HfModelConfig) -> None:
    """CheckpointError, naming tensor and file, unless the checkpoint has exactly the tensors the model needs."""
    wanted = hf_shapes(hf)
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of {hf.architecture} are missing, first {missing[0]!r}", file=str(checkpoint.path)
        )
    for name, info in checkpoint.tensors.items():
        if name not in wanted:
            if name.endswith("rotary_emb.inv_freq") or (hf.tied and name == LM_HEAD):
                continue  # left by old writers; derived from the configuration and from the embedding
            raise CheckpointError(f"tensor does not belong to {hf.architecture}", file=info.file, tensor=name)
        if tuple(info.shape) != wanted[name]:
            message = f"shape is {list(info.shape)}, the configuration needs {list(wanted[name])}"
            raise CheckpointError(message, file=info.file, tensor=name)
        if info.dtype not in TORCH_DTYPES:
            message = f"dtype {info.dtype} cannot be trained; supported: {', '.join(TORCH_DTYPES)}"
            raise CheckpointError(message, file=info.file, tensor=name)


def slots(model: torch.nn.Module, hf: HfModelConfig) -> list[Slot]:
    """This rank's parameters with their HF tensors, in the order of the layers; a critic's value head has none."""
    params = dict(model.named_parameters())
    if isinstance(getattr(model, "output_layer", None), ValueHead):
        params = {name: p for name, p in params.items() if not name.startswith("output_layer.")}
    out: list[Slot] = []

    def take(name: str, kind: Kind, *hf_names: str, copy: bool = False) -> None:
        out.append(Slot(params.pop(name), hf_names, kind, copy))

    has_embedding = "embedding.word_embeddings.weight" in params
    if has_embedding:
        take("embedding.word_embeddings.weight", "vocab", EMBEDDING)
    for local, layer in enumerate(getattr(model.decoder, "layers")):  # noqa: B009 - torch types submodules as Tensor
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer.layer_number - 1}."
        attn = theirs + "self_attn."
        take(f"{ours}input_layernorm.weight", "replicated", theirs + "input_layernorm.weight")
        take(f"{ours}self_attention.linear_qkv.weight", "qkv", *(f"{attn}{x}_proj.weight" for x in "qkv"))
        if hf.qkv_bias:
            take(f"{ours}self_attention.linear_qkv.bias", "qkv", *(f"{attn}{x}_proj.bias" for x in "qkv"))
        if hf.qk_norm:
            take(f"{ours}self_attention.q_layernorm.weight", "replicated", attn + "q_norm.weight")
            take(f"{ours}self_attention.k_layernorm.weight", "replicated", attn + "k_norm.weight")
        take(f"{ours}self_attention.linear_proj.weight", "columns", attn + "o_proj.weight")
        take(f"{ours}pre_mlp_layernorm.weight", "replicated", theirs + "post_attention_layernorm.weight")
        if hf.experts is None:
            take(f"{ours}mlp.linear_fc1.weight", "gate_up", *(f"{theirs}mlp.{x}_proj.weight" for x in ("gate", "up")))
            take(f"{ours}mlp.linear_fc2.weight", "columns", theirs + "mlp.down_proj.weight")
            continue
        take(f"{ours}mlp.router.weight", "replicated", theirs + "mlp.gate.weight")
        for i, expert in enumerate(layer.mlp.local_expert_indices):
            fc, to = f"{ours}mlp.experts.local_experts.{i}.linear_fc", f"{theirs}mlp.experts.{expert}."
            take(f"{fc}1.weight", "expert_gate_up", *(f"{to}{x}_proj.weight" for x in ("gate", "up")))
            take(f"{fc}2.weight", "expert_down", to + "down_proj.weight")
    if "decoder.final_layernorm.weight" in params:
        take("decoder.final_layernorm.weight", "replicated", "model.norm.weight")
    if "output_layer.weight" in params:  # with tied embeddings only where the last stage is not also the first
        take("output_layer.weight", "vocab", EMBEDDING if hf.tied else LM_HEAD, copy=hf.tied)
    if params:
        raise RuntimeError(f"parameters without a Hugging Face name: {sorted(params)}")
    return out


@torch.no_grad()
def import_weights(model: torch.nn.Module, checkpoint: Checkpoint, hf: HfModelConfig, layout: Layout) -> None:
    """Fill this rank's parameters, reading only the slices it needs, and mark how each is split over TP ranks.

    The checkpoint has passed `check_checkpoint`.
    """
    for slot in slots(model, hf):
        tensors = [_read(checkpoint, name) for name in slot.hf_names]
        slot.param.copy_(_shard(tensors, slot.kind, hf, layout.tp, layout.tp_size, slot.param.shape))
        if slot.kind not in _WHOLE:  # Megatron's gradient norm counts what is not marked on TP rank 0 only
            vars(slot.param)["tensor_model_parallel"] = True
            vars(slot.param)["partition_dim"] = 1 if slot.kind == "columns" else 0
            vars(slot.param)["partition_stride"] = 1


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A read-only view of the mapped file."""
    info = checkpoint.tensors[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(checkpoint.bytes(name)).view(TORCH_DTYPES[info.dtype]).view(info.shape)


def _shard(tensors: list[Tensor], kind: Kind, hf: HfModelConfig, tp: int, tp_size: int, shape: torch.Size) -> Tensor:
    if kind in ("replicated", "expert_down"):
        return tensors[0]
    if kind == "expert_gate_up":
        return torch.cat(tensors)
    if kind == "columns":
        return tensors[0].chunk(tp_size, 1)[tp]
    if kind == "vocab":
        rows = tensors[0][tp * shape[0] : (tp + 1) * shape[0]]
        return torch.cat([rows, rows.new_zeros(shape[0] - rows.shape[0], shape[1])])
    parts = [t.chunk(tp_size, 0)[tp] for t in tensors]
    if kind == "qkv":
        groups = hf.num_kv_heads // tp_size
        parts = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)
    return torch.cat(parts)


def _unshard(parts: list[Tensor], kind: Kind, hf: HfModelConfig) -> list[Tensor]:
    """Full HF tensors of one slot from all TP ranks' shards; of an expert's, from the one rank that has it."""
    if kind in ("replicated", "expert_down"):
        return parts[:1]
    if kind == "expert_gate_up":
        return list(parts[0].chunk(2, 0))
    if kind == "columns":
        return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)]
    if kind == "vocab":
        return [(parts[0] if len(parts) == 1 else torch.cat(parts))[: hf.vocab_size]]
    if kind == "gate_up":
        halves = [p.chunk(2, 0) for p in parts]
        return [torch.cat([h[i] for h in halves]) for i in (0, 1)]
    groups, q = hf.num_kv_heads // len(parts), hf.num_heads // hf.num_kv_heads * hf.head_dim
    fused = [p.view(groups, -1, *p.shape[1:]) for p in parts]
    sizes = (q, hf.head_dim, hf.head_dim)
    split = [f.split(sizes, dim=1) for f in fused]
    return [torch.cat([s[i].flatten(0, 1) for s in split]) for i in range(3)]


@torch.no_grad()
def gather_weights(
    model: torch.nn.Module,
    hf: HfModelConfig,
    layout: Layout,
    dtypes: dict[str, torch.dtype],
    value: Callable[[torch.nn.Parameter], Tensor] = lambda p: p.data,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of this stage under HF names, one at a time, on the source rank; the other ranks yield nothing.

    Collective over the tensor and expert parallel groups, called only where `layout.exports`. `dtypes` gives each
    tensor's dtype.
    """
    for slot in slots(model, hf):
        of_expert = slot.kind.startswith("expert")
        if slot.copy or (layout.dp and not of_expert):
            continue
        local = value(slot.param).contiguous()
        named = [(slot.hf_names, [local])]
        if of_expert and layout.ep_size > 1:
            per_rank = hf.sizes().experts // layout.ep_size
            parts = _gathered(local, layout.ep_group, layout.ep_size, layout.is_source)
            named = [(_of_rank(slot.hf_names, e, per_rank), [part]) for e, part in enumerate(parts)]
        elif layout.tp_size > 1 and slot.kind not in _WHOLE:
            named = [(slot.hf_names, _gathered(local, layout.tp_group, layout.tp_size, layout.is_source))]
        if layout.is_source:
            for names, parts in named:
                for name, tensor in zip(names, _unshard(parts, slot.kind, hf), strict=True):
                    yield name, tensor.to(dtypes.get(name, tensor.dtype))


def _gathered(local: Tensor, group: Any, size: int, here: bool) -> list[Tensor]:
    """Every rank's part, on the group's first rank; nothing elsewhere."""
    parts = [torch.empty_like(local) for _ in range(size)] if here else []
    dist.gather(local, parts or None, dst=dist.get_global_rank(group, 0), group=group)
    return parts


def _of_rank(names: tuple[str, ...], rank: int, per_rank: int) -> tuple[str, ...]:
    """Names of the expert in the same place on expert parallel rank `rank`; `names` are those of rank 0."""

    def moved(match: re.Match[str]) -> str:
        return f".experts.{int(match[1]) + rank * per_rank}."

    return tuple(re.sub(r"\.experts\.(\d+)\.", moved, name) for name in names)


def export_buckets(named: Iterator[tuple[str, Tensor]], sink: ExportSink, bucket_bytes: int) -> None:
    """Hand `named` to `sink` in buckets of at most `bucket_bytes`; a larger tensor travels alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > bucket_bytes:
            sink(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        sink(bucket)


@torch.no_grad()
def check_tied_copies(model: torch.nn.Module, hf: HfModelConfig, layout: Layout) -> None:
    """With tied embeddings under PP, first and last stage hold a copy each: RuntimeError if any bit differs.

    Collective over the embedding group (first and last stage of this TP and DP coordinate).
    """
    if not hf.tied or layout.pp_size == 1 or not (layout.first_stage or layout.last_stage):
        return
    from megatron.core import parallel_state as ps

    weight = next(s.param for s in slots(model, hf) if s.kind == "vocab").data.contiguous()
    bits = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32).flatten().to(torch.int64)
    places = torch.arange(bits.numel(), device=bits.device)
    mine = torch.stack([bits.sum(), (bits * (2 * places + 1)).sum()])  # wraps modulo 2^64
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=ps.get_embedding_group())
    if not torch.equal(both[0], both[1]):
        raise RuntimeError(
            "tied embeddings differ between the first and the last pipeline stage: the trainer's state is corrupt; "
            "restart it from its last checkpoint"
        )
