"""How long a complete weight update takes, and how long it pauses the engine: p2p, broadcast, and reload from disk.

A trainer of one rank (this process, fused weights as Megatron has them) updates one engine through its replica: stock
SGLang, on the second GPU where there are two. Prints one JSON object, last line of stdout:
{"results": [{"model", "mode", "seconds", "pause_ms", "gb_per_s", ...}]}. `seconds`: from the start of the copy-out
until the engine serves the version; `gb_per_s`: weights over the time of the transfer alone; `share_of_copy`: of the
rate that one copy between the two devices has in one process; medians. Peer to peer, the first update sends other
values, and the live weights are compared after it and after the last; `phases` says where its seconds went.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang sets it in its own process

import numpy as np
import torch
from bench_activation import SHAPES, make_model

from miles_disagg.config.machine import free_port
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine import launch
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import from_safetensors
from miles_disagg.publish.base import GroupSpec
from miles_disagg.publish.broadcast import BroadcastSource
from miles_disagg.publish.peer import LocalShard, PeerSource, Route
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.peer import PeerOptions, PeerReceiver
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.transfer.layouts import ModelSizes, TrainerParallel, trainer_layouts
from miles_disagg.weights.transfer.link import arrivals
from miles_disagg.weights.transfer.plan import make_plan

MODES = ("p2p", "p2p-direct", "broadcast", "disk")
_BUCKET = 512 << 20


@dataclass(frozen=True)
class Options:
    """trainer: this process's device; engine: `sglang` or `embedded`; rounds: updates that are timed, after one that
    is not; backend: of the broadcast."""

    trainer: torch.device
    engine: str
    device: str
    python: str | None
    rounds: int
    backend: str
    args: tuple[str, ...]


class Weights:
    """The trainer's parameters, filled from a checkpoint."""

    def __init__(self, name: str, directory: Path, device: torch.device):
        hidden, inner, layers, heads, kv, head, tied, vocab = SHAPES[name]
        sizes = ModelSizes(vocab, hidden, inner, layers, heads, kv, head, tied)
        (self.layout,) = trainer_layouts(sizes, TrainerParallel())
        self.parameters = [torch.empty(s.elements, dtype=torch.bfloat16, device=device) for s in self.layout.storages]
        self.named: list[tuple[str, torch.Tensor]] = []  # as a broadcast sends them
        with open_checkpoint(directory) as checkpoint:
            tensors = {
                n: from_safetensors(checkpoint.bytes(n), i.dtype, i.shape).to(device)
                for n, i in checkpoint.tensors.items()
            }
        for block in self.layout.blocks:
            into = self.parameters[block.storage].as_strided(block.shape, block.strides, block.offset)
            into.copy_(tensors[block.tensor].squeeze()[tuple(map(slice, block.lo, block.hi))])
        self.named = list(tensors.items())
        self.nbytes = sum(t.nbytes for t in tensors.values())

    def negate(self) -> None:
        """Other values of the same size; twice is nothing."""
        for parameter in self.parameters:
            parameter.neg_()

    def shards(self) -> list[LocalShard]:
        """For a PeerSource."""
        blocks = self.layout.blocks
        return [
            LocalShard(p, tuple(b for b in blocks if b.storage == i), torch.bfloat16)
            for i, p in enumerate(self.parameters)
        ]


class Engine:
    """The engine's process, its replica and the trainer's weights. Versions go up with every update."""

    def __init__(self, name: str, directory: Path, replica: Replica, weights: Weights, options: Options):
        self.name, self.directory, self.replica = name, directory, replica
        self.weights, self.options, self.version = weights, options, 0

    def next(self) -> VersionRef:
        """The version to be published."""
        self.version += 1
        return VersionRef("bench", self.version)

    async def pushed(self, ref: VersionRef, work: Callable[[], Awaitable[None]]) -> float:
        """An update that is paused for `work`; seconds of the pause."""
        activator = self.replica.activator
        await activator.begin_update(ref)
        try:
            await work()
            return (await activator.finish_update()).pause_seconds
        except BaseException as error:
            await activator.abort_update(str(error))
            raise


class Phases:
    """Seconds of the named parts of each update; parts do not overlap."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body as one part of the update."""
        begun = time.monotonic()
        yield
        self._seconds.setdefault(name, []).append(time.monotonic() - begun)

    def medians(self) -> dict[str, float]:
        """Of all updates but the first."""
        return {name: round(float(np.median(seconds[1:])), 4) for name, seconds in self._seconds.items()}


async def peer_mode(
    engine: Engine, staging: str, phases: Phases
) -> tuple[Callable[[], Awaitable[tuple[float, float]]], PeerReceiver]:
    """One update's pause and transfer seconds, with everything registered before."""
    replica = engine.replica
    settings = PeerOptions("nixl", staging, _BUCKET)
    receiver = PeerReceiver("engine", replica.engine, replica.activator, engine.directory, settings)
    source = PeerSource(engine.weights.shards(), name="trainer rank 0", transport="nixl", timeout=120.0)
    plan = make_plan([source.layout()], await receiver.layout(), bucket=_BUCKET)
    source.route(Route.of(plan, 0, _BUCKET))
    ranks = range(len(plan.targets))
    receiver.adopt(ranks, [arrivals(plan, t) for t in ranks])
    print(f"{engine.name}: {receiver.describes or (await receiver.links_and_choice())[1]}", file=sys.stderr, flush=True)

    async def update() -> tuple[float, float]:
        ref, moved = engine.next(), 0.0
        source.open(1.0)
        with phases.part("pack"):
            await asyncio.to_thread(source.stage)
        with phases.part("links"):
            links = await receiver.links()

        async def send() -> None:
            nonlocal moved
            with phases.part("send"):
                sent = await asyncio.to_thread(source.send, str(ref), links)
            if sent.errors:
                raise RuntimeError(str(sent.errors))
            moved = sent.wire_seconds
            with phases.part("verify"):
                await receiver.verify([sent.sums[link.target] for link in links])

        async def land() -> None:
            with phases.part("land"):
                await receiver.land()

        async def direct() -> None:
            await receiver.expect()
            await send()
            await land()

        if links[0].mode == "staging":
            await send()
            return await engine.pushed(ref, land), moved
        return await engine.pushed(ref, direct), moved

    return update, receiver


class Target:
    """`publish.base.BucketTarget` of the bench's replica."""

    name, num_ranks = "engine", 1

    def __init__(self, replica: Replica):
        self._activator = replica.activator
        self._joined: str | None = None

    async def in_group(self, group_name: str) -> bool:
        """True from joining to leaving."""
        return self._joined == group_name

    async def init_group(self, group: GroupSpec) -> None:
        """Let the engine join."""
        await self._activator.init_group(
            master_address=group.master_address, master_port=group.master_port, rank_offset=group.rank_offset,
            world_size=group.world_size, group_name=group.name, backend=group.backend,
        )  # fmt: skip
        self._joined = group.name

    async def destroy_group(self, group_name: str) -> None:
        """Let the engine leave."""
        self._joined = None
        await self._activator.destroy_group(group_name)

    async def receive_bucket(
        self, names: Any, dtypes: Any, shapes: Any, group_name: str, version: str, load_format: str | None
    ) -> None:
        """Let the engine receive one bucket."""
        await self._activator.receive_bucket(
            names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format
        )


def broadcast_mode(engine: Engine, source: BroadcastSource) -> Callable[[], Awaitable[tuple[float, float]]]:
    """The trainer's own broadcast: staged in host memory, in buckets, through a group that is formed at the first."""
    target = Target(engine.replica)

    async def update() -> tuple[float, float]:
        ref, moved = engine.next(), 0.0
        source.open(1.0)
        bucket: list[tuple[str, torch.Tensor]] = []
        for name, tensor in engine.weights.named:
            if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > _BUCKET:
                await asyncio.to_thread(source.stage, bucket)
                bucket = []
            bucket.append((name, tensor))
        await asyncio.to_thread(source.stage, bucket)
        await asyncio.to_thread(source.prepare, str(ref))

        async def send() -> None:
            nonlocal moved
            moved = (await source.send(str(ref), [target]))["perf/update_weights_write_seconds"]

        return await engine.pushed(ref, send), moved

    return update


def disk_mode(engine: Engine) -> Callable[[], Awaitable[tuple[float, float]]]:
    """`update_weights_from_disk` of a checkpoint that is in memory already (writing it is not counted)."""

    async def update() -> tuple[float, float]:
        ref = engine.next()
        report = await engine.replica.activate(Materialized(ref, engine.directory))
        return report.pause_seconds, report.pause_seconds

    return update


async def differing(receiver: PeerReceiver, directory: Path) -> int:
    """Live elements that are not the checkpoint's; all are compared."""
    answers = await receiver.plugin.call("compare", directory=str(directory))
    return sum(n for rank in answers for n in rank["wrong"].values())


async def measure(engine: Engine, mode: str, copy_rate: float) -> dict[str, Any]:
    """One mode's medians."""
    receiver, phases = None, Phases()
    source = BroadcastSource(address="127.0.0.1", backend=engine.options.backend, timeout=120.0)
    if mode.startswith("p2p"):
        update, receiver = await peer_mode(engine, "never" if mode == "p2p-direct" else "always", phases)
    else:
        update = broadcast_mode(engine, source) if mode == "broadcast" else disk_mode(engine)
    seconds, pauses, moves = [], [], []
    scrambled = 0
    for number in range(1 + engine.options.rounds):
        if receiver is not None and number < 2:  # there and back
            engine.weights.negate()
        if receiver is not None and number == 1:
            scrambled = await differing(receiver, engine.directory)
        begun = time.monotonic()
        pause, moved = await update()
        seconds.append(time.monotonic() - begun)
        pauses.append(pause * 1e3)
        moves.append(moved)
    rate = engine.weights.nbytes / float(np.median(moves[1:])) / 1e9
    row: dict[str, Any] = {
        "model": engine.name,
        "mode": f"broadcast-{engine.options.backend}" if mode == "broadcast" else mode,
        "seconds": round(float(np.median(seconds[1:])), 4),
        "pause_ms": round(float(np.median(pauses[1:])), 2),
        "gb_per_s": round(rate, 2),
        "share_of_copy": round(rate / copy_rate, 3),
        "transfer_seconds": round(float(np.median(moves[1:])), 4),
        "first_seconds": round(seconds[0], 4),
        "gigabytes": round(engine.weights.nbytes / 1e9, 3),
        "copy_gb_per_s": round(copy_rate, 1),
    }
    await source.close()
    if receiver is not None:
        row["phases"] = phases.medians()
        row["elements_sent_first"] = scrambled
        row["elements_that_differ"] = await differing(receiver, engine.directory)
        receiver.close()
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measured_copy(source: torch.device, target: torch.device) -> float:
    """GB/s of one large copy from device to device in one process, the best of several."""
    size = 2 << 30 if source.type == "cuda" else 256 << 20
    a, b = (torch.empty(size, dtype=torch.uint8, device=d) for d in (source, target))

    def wait() -> None:
        for device in {source, target}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(6):
        wait()
        begun = time.monotonic()
        b.copy_(a)
        wait()
        best = min(best, time.monotonic() - begun)
    return size / best / 1e9


async def run(name: str, directory: Path, modes: list[str], options: Options, copy_rate: float) -> list[dict[str, Any]]:
    """All modes of one model on one engine."""
    common: dict[str, Any] = {
        "port": free_port(),
        "device": options.device,
        "weight_version": "bench/weight_v000000",
    }
    if options.engine == "sglang":
        args = ["--skip-tokenizer-init", *options.args]
        spec = launch.sglang(directory, python=options.python, args=args, **common)
    else:
        spec = launch.embedded(directory, args=options.args, **common)
    process = launch.EngineProcess.start(spec, directory.parent / "engine.log")
    client = SGLangEngine(spec.url)
    try:
        weights = await asyncio.to_thread(Weights, name, directory, options.trainer)
        await process.wait_ready(400.0)
        replica = Replica(ReplicaSettings("bench"), client)
        await replica.attach("bench")
        engine = Engine(name, directory, replica, weights, options)
        return [await measure(engine, mode, copy_rate) for mode in modes]
    except BaseException:
        print(process.log_tail(), file=sys.stderr)
        raise
    finally:
        await client.close()
        await process.stop()


def main() -> None:
    """Command line."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object (always done)")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["tiny"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates per mode, after one that is not timed")
    parser.add_argument("--sglang-python", default=None)
    parser.add_argument("--scratch", default="/dev/shm", help="where checkpoints are made")
    parser.add_argument("server_args", nargs="*", help="after --: further arguments of the server")
    args = parser.parse_args()
    trainer = torch.device("cuda", 0) if gpus else torch.device("cpu")
    other = torch.device("cuda", 1) if gpus > 1 else trainer
    extra = ["--base-gpu-id", "1"] if gpus > 1 and args.engine == "sglang" else []
    device = "cpu" if not gpus else "cuda:1" if args.engine == "embedded" and gpus > 1 else "cuda"
    backend = "nccl" if gpus > 1 else "gloo"  # NCCL refuses two ranks on one GPU
    options = Options(
        trainer, args.engine, device, args.sglang_python, args.rounds, backend, (*extra, *args.server_args)
    )
    copy_rate = measured_copy(trainer, other)
    print(f"{trainer} -> {other}: {copy_rate:.1f} GB/s in one copy", file=sys.stderr, flush=True)
    if gpus:
        torch.cuda.empty_cache()
    results: list[dict[str, Any]] = []
    for name in args.models:
        work = Path(tempfile.mkdtemp(prefix="bench-weights-", dir=args.scratch))
        try:
            make_model(name, work / "model", str(trainer))
            results += asyncio.run(run(name, work / "model", args.modes, options, copy_rate))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
