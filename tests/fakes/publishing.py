"""A trainer without a trainer: tensors that take steps, published by real DiskSources into a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.disk import DiskSource, Published, publish_version
from miles_disagg.store.base import ObjectStore
from miles_disagg.store.ledger import VersionLedger
from miles_disagg.store.lineage import Kind
from miles_disagg.store.publication import Receipt
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import checkpoint_digest, open_checkpoint, write_checkpoint
from miles_disagg.weights.delta import ShardPlan, ShardSummary
from miles_disagg.weights.dtypes import OF_TORCH

Tensors = dict[str, torch.Tensor]


def tiny_tensors(seed: int = 0, size: int = 64) -> Tensors:
    """bf16 weights with every legal oddity: fp32, fp8 with scale, scalar, empty, unicode and long names."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(size, size, generator=g).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(size, size, generator=g).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(size, 2 * size, generator=g).bfloat16(),
        "model.norm.weight": torch.randn(size, generator=g),
        "model.layers.0.fp8": torch.randn(size, 8, generator=g).to(torch.float8_e4m3fn),
        "model.layers.0.fp8_scale": torch.tensor(0.5),
        "empty": torch.empty(0, size, dtype=torch.bfloat16),
        "gewichte.größe.模型": torch.randn(5, generator=g).half(),
        "long." + "x" * 300: torch.randint(-9, 9, (7,), generator=g),
    }


def step(tensors: Tensors, seed: int, density: float = 0.02) -> Tensors:
    """What a small optimizer step does: a share of the elements changes."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        moved = (tensor.float() * 1.01 + 0.01).to(tensor.dtype) if tensor.is_floating_point() else tensor + 1
        out[name] = torch.where(torch.rand(tensor.shape, generator=g) < density, moved.float(), tensor.float()).to(
            tensor.dtype
        )
    return out


def raw(tensors: Tensors) -> dict[str, bytes]:
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def on_disk(path: Path) -> dict[str, bytes]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.bytes(name).tobytes() for name in checkpoint.tensors}


def write_base(path: Path, tensors: Tensors) -> str:
    """An HF checkpoint directory with a config and a tokenizer file; its digest."""
    path.mkdir(parents=True)

    def rows() -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
        for name, t in tensors.items():
            yield name, OF_TORCH[str(t.dtype)], tuple(t.shape), np.frombuffer(raw({name: t})[name], np.uint8)

    write_checkpoint(path, rows(), max_shard_bytes=20_000)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "tokenizer.json").write_text("{}")
    return checkpoint_digest(path)


class LocalSource:
    """A DiskSource behind threads, as a Ray actor would be."""

    def __init__(self, source: DiskSource):
        self.source = source

    async def encode(self, ref: VersionRef, encoding: str | None, kind: Kind = "version") -> ShardSummary:
        return await asyncio.to_thread(self.source.encode, ref, encoding, kind)

    async def write(self, plan: ShardPlan) -> Receipt:
        return await asyncio.to_thread(self.source.write, plan)

    async def settle(self, published: bool) -> None:
        await asyncio.to_thread(self.source.settle, published)


class FakeTrainer:
    """Publishes given tensors from `ranks` source ranks; tensor i belongs to rank i % ranks, `tied` to all of them."""

    def __init__(self, objects: ObjectStore, base: Path, run_id: str, ranks: int = 2, tied: Sequence[str] = ()):
        self.objects, self.base, self.ranks, self.tied = objects, base, ranks, tied
        self.store = VersionStore(objects)
        self.ledger = VersionLedger(run_id, self.store)
        companions = [base / "config.json", base / "tokenizer.json"]
        self.sources = [
            LocalSource(DiskSource(objects, base, companions=companions if rank == 0 else (), workers=1))
            for rank in range(ranks)
        ]

    async def claim(self, **kwargs) -> None:
        await self.ledger.claim(checkpoint_digest(self.base), **kwargs)

    def stage(self, tensors: Tensors) -> None:
        for rank, handle in enumerate(self.sources):
            handle.source.open(timeout=10)
            mine = [(n, t) for i, (n, t) in enumerate(tensors.items()) if i % self.ranks == rank or n in self.tied]
            for begin in range(0, len(mine), 2):
                handle.source.stage(mine[begin : begin + 2])

    async def publish(self, tensors: Tensors, encoding: str | None = "xor") -> Published:
        self.stage(tensors)
        return await publish_version(self.ledger, self.sources, lambda _: encoding)
