"""A sharded trainer and a sharded engine of one random model, in this process, laid out as real ranks are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from miles_disagg.engine.inplace.miles_inplace.peer import Peer
from miles_disagg.engine.inplace.miles_inplace.weights import LiveWeights
from miles_disagg.publish.peer import LocalShard, PeerSource, Route
from miles_disagg.weights.transfer.blocks import Block, RankLayout
from miles_disagg.weights.transfer.layouts import ModelSizes, weights
from miles_disagg.weights.transfer.link import Link, arrivals, parse_layout
from miles_disagg.weights.transfer.plan import MAIL_SHARE, Plan, aligned, make_plan

Tensors = dict[str, torch.Tensor]


def random_tensors(model: ModelSizes, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Every checkpoint tensor."""
    g = torch.Generator().manual_seed(seed)
    shapes = {name: shape for _, _, tensors in weights(model) for name, shape in tensors}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def box(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """The part of a checkpoint tensor that a block holds, as a view."""
    whole = tensor.reshape([s for s in tensor.shape if s != 1])
    return whole[tuple(slice(lo, hi) for lo, hi in zip(block.lo, block.hi, strict=True))]


def place(storage: torch.Tensor, block: Block) -> torch.Tensor:
    """Where a block lies in a flat storage, as a view."""
    return storage.as_strided(block.shape, block.strides, block.offset)


class Rank:
    """One trainer rank: fp32 parameters in Megatron's layout, sent as the checkpoint's bf16."""

    def __init__(self, layout: RankLayout, transport: str, timeout: float = 30.0, delta: bool = False):
        self.layout = layout
        self.parameters = [torch.zeros(s.elements) for s in layout.storages]
        shards = [
            LocalShard(p, tuple(b for b in layout.blocks if b.storage == i), torch.bfloat16)
            for i, p in enumerate(self.parameters)
        ]
        self.source = PeerSource(shards, name=layout.name, transport=transport, timeout=timeout, delta=delta)

    def hold(self, tensors: Tensors) -> None:
        """As after an optimizer step."""
        for block in self.layout.blocks:
            place(self.parameters[block.storage], block).copy_(box(tensors[block.tensor], block))


class FusedModel:
    """One engine rank with a loader that views and copies, as SGLang's do."""

    def __init__(self, layout: RankLayout):
        self.layout = layout
        self.storages = [torch.full((s.elements,), 7.0, dtype=getattr(torch, s.dtype)) for s in layout.storages]

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [(f"p{i}", s) for i, s in enumerate(self.storages)]

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        return []

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            for block in self.layout.blocks:
                if block.tensor == name:
                    place(self.storages[block.storage], block).copy_(box(tensor, block))


class Pair:
    """Trainer ranks and engine ranks with a plan between them. options: of `Peer.prepare`."""

    def __init__(
        self, root: Path, model: ModelSizes, sources: list[RankLayout], targets: list[RankLayout],
        *, transport: str = "nixl", staging: str = "always", bucket: int = 1 << 20,
        delta: bool = False,
    ):  # fmt: skip
        self.model, self.bucket, self.transport, self.staging = model, bucket, transport, staging
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        save_file(random_tensors(model, 0), root / "model.safetensors")
        self.engines = [FusedModel(layout) for layout in targets]
        self.peers = [Peer(LiveWeights(engine, str(root)), f"peer-{i}") for i, engine in enumerate(self.engines)]
        recorded = [parse_layout(t.name, p.layout()) for t, p in zip(targets, self.peers, strict=True)]
        self.plan: Plan = make_plan(sources, recorded, bucket=bucket)
        self.delta = delta
        self.ranks = [Rank(layout, transport, delta=delta) for layout in sources]
        for i, rank in enumerate(self.ranks):
            rank.source.route(Route.of(self.plan, i, bucket))
        self.answers: list[dict[str, Any]] = [{} for _ in self.peers]
        for target in range(len(self.peers)):
            self.prepare(target)

    def prepare(self, target: int, spare: int = 0) -> None:
        """Register (again) the memory of an engine rank, which keeps `spare` bytes free."""
        pieces = self.root / f"pieces-{target}.json"
        pieces.write_text(json.dumps(arrivals(self.plan, target)))
        self.answers[target] = self.peers[target].prepare(
            str(pieces), self.transport, self.staging, bucket=self.bucket, spare=spare,
            mail=aligned(self.plan.staged_bytes[target] // MAIL_SHARE) if self.delta else 0,
        )  # fmt: skip

    @property
    def links(self) -> list[Link]:
        return [Link.parse(i, answer) for i, answer in enumerate(self.answers)]

    def stage(self, tensors: Tensors) -> None:
        for rank in self.ranks:
            rank.hold(tensors)
            rank.source.open(1.0)
            rank.source.stage()
            for parameter in rank.parameters:
                parameter.fill_(float("nan"))  # the next optimizer step

    def wrong(self, tensors: Tensors) -> list[str]:
        """Blocks of engine ranks that do not hold `tensors`, and storages written beside their blocks."""
        out = []
        for engine in self.engines:
            wanted = [torch.full_like(s, 7.0) for s in engine.storages]
            for block in engine.layout.blocks:
                place(wanted[block.storage], block).copy_(box(tensors[block.tensor], block))
                if not torch.equal(place(engine.storages[block.storage], block), box(tensors[block.tensor], block)):
                    out.append(f"{engine.layout.name}: {block.tensor} {block.lo}")
            if not all(torch.equal(a, b) for a, b in zip(wanted, engine.storages, strict=True)):
                out.append(engine.layout.name)
        return out

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
