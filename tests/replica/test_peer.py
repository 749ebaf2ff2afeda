"""Peer-to-peer updates of a real engine process through its replica: whole, torn, given by another engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import EngineError, UpdateFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.launch import EngineProcess, embedded
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import raw_bytes
from miles_disagg.publish.peer import LocalShard, PeerSource, Route, Sent
from miles_disagg.replica.peer import PeerOptions, PeerReceiver
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.weights.digest import digest
from miles_disagg.weights.transfer.blocks import blocks_of
from miles_disagg.weights.transfer.link import GroupSeat, Link, arrivals
from miles_disagg.weights.transfer.plan import Plan, make_plan
from tests.engine.checkpoints import make_checkpoint

BUCKET = 1 << 20


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: (t.float() + 0.01 * torch.randn(t.shape, generator=g)).to(t.dtype) for n, t in tensors.items()}


def source_of(tensors: dict[str, torch.Tensor], transport: str) -> PeerSource:
    """A trainer of one rank that holds complete tensors."""
    shards = []
    for i, (name, tensor) in enumerate(tensors.items()):
        count = tensor.numel()
        shards.append(LocalShard(tensor, tuple(blocks_of(name, tensor.shape, ((count, 1, 1),), 0, i, 0)), tensor.dtype))
    return PeerSource(shards, name="trainer rank 0", transport=transport, timeout=30.0)


@dataclass
class World:
    """One trainer rank, one engine with its replica, and a plan between them."""

    process: EngineProcess
    replica: Replica
    receiver: PeerReceiver
    source: PeerSource
    live: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]
    plan: Plan

    async def send(self, version: int, transport: str, links: list[Link]) -> Sent:
        """Stage and send the tensors that `live` holds."""
        self.source.open(10.0)
        self.source.stage()
        if transport == "nixl":
            sent = await asyncio.to_thread(self.source.send, f"v{version}", links)
        else:
            seat = GroupSeat("127.0.0.1", free_port(), 2, f"p2p-{os.getpid()}-{version}", "gloo", 30.0, (1,))
            writes = [[[w.source, w.staged, w.nbytes] for w in self.plan.writes(BUCKET)]]
            sent, _ = await asyncio.gather(
                asyncio.to_thread(self.source.send, f"v{version}", links, seat), self.receiver.receive(seat, writes)
            )
        return sent

    async def served(self) -> dict[str, str]:
        return await self.replica.engine.weights_digest()


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(raw_bytes(tensor), "xxh3-128") for name, tensor in tensors.items()}


@asynccontextmanager
async def world(root: Path, model: Path, options: PeerOptions, name: str = "engine-0") -> AsyncIterator[World]:
    process = EngineProcess.start(embedded(model, port=free_port(), weight_version="run/weight_v000000"), root / name)
    receiver = None
    try:
        await process.wait_ready(120)
        engine = SGLangEngine(process.url)
        replica = Replica(ReplicaSettings(name), engine)
        await replica.attach("run")
        receiver = PeerReceiver(name, engine, replica.activator, model, options)
        base = tensors_of(model)
        live = {n: t.clone() for n, t in base.items()}
        source = source_of(live, options.transport)
        plan = make_plan([source.layout()], await receiver.layout(), bucket=options.bucket)
        source.route(Route.of(plan, 0, BUCKET))
        receiver.adopt([0], [arrivals(plan, 0)])
        yield World(process, replica, receiver, source, live, base, plan)
        await engine.close()
    finally:
        if receiver is not None:
            receiver.close()
        await process.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("p2p") / "model", dtype=torch.bfloat16)


async def update(w: World, version: int, transport: str) -> None:
    """One whole update as the driver runs it."""
    ref = VersionRef("run", version)
    activator = w.replica.activator
    links = await w.receiver.links()
    direct = links[0].mode == "direct"
    if direct:
        await activator.begin_update(ref)
        await w.receiver.expect()
    sent = await w.send(version, transport, links)
    assert not sent.errors
    await w.receiver.verify([sent.sums[target] for target in sorted(sent.sums)])
    if not direct:
        await activator.begin_update(ref)
    await w.receiver.land()
    await activator.finish_update()


@pytest.mark.parametrize(
    ("transport", "staging"),
    [
        ("nixl", "always"),
        ("torch", "never"),
        pytest.param("nixl", "never", marks=pytest.mark.slow),
        pytest.param("torch", "auto", marks=pytest.mark.slow),
    ],
)
async def test_an_engine_serves_what_was_sent_bit_for_bit_and_heals_after_half_an_update(
    tmp_path, model, transport, staging
):
    async with world(tmp_path, model, PeerOptions(transport, staging, BUCKET)) as w:
        _, chosen = await w.receiver.links_and_choice()
        how = "straight into the live weights, under the pause" if staging == "never" else "into a staging area"
        assert chosen.startswith(f"{transport}, {how}")
        for version in (1, 2):
            for name, tensor in moved(w.base, version).items():
                w.live[name].copy_(tensor)
            await update(w, version, transport)
            assert await w.served() == digests(w.live)
            assert (await w.replica.engine.model_info())["weight_version"] == f"run/weight_v{version:06d}"
        good = digests(w.live)
        for name, tensor in moved(w.base, 3).items():
            w.live[name].copy_(tensor)
        await torn(w, transport, good)
        await update(w, 4, transport)
        assert w.replica.ready
        assert await w.served() == digests(w.live)


async def torn(w: World, transport: str, good: dict[str, str]) -> None:
    """Version 3 breaks off: staged, it leaves version 2 serving; in the live weights, it leaves the replica fenced."""
    activator = w.replica.activator
    links = await w.receiver.links()
    direct = links[0].mode == "direct"
    if direct:
        await activator.begin_update(VersionRef("run", 3))
        await w.receiver.expect()
    sent = await w.send(3, transport, links)
    wrong = [[[at, n, value + 1] for at, n, value in sent.sums[0]]]
    if direct:  # verified where it is landed, under the pause
        await w.receiver.verify(wrong)
        with pytest.raises(EngineError, match="not what was sent"):
            await w.receiver.land()
    else:
        with pytest.raises(UpdateFailed, match="not what was sent"):
            await w.receiver.verify(wrong)
        with pytest.raises(UpdateFailed, match="nothing that was sent has been verified"):
            await w.receiver.land()
    await activator.abort_update("the trainer gave up")
    assert w.replica.ready is not direct
    if not direct:
        assert await w.served() == good
        return
    with pytest.raises(EngineError, match="half an update"):
        await activator.adopt(VersionRef("run", 2))


@pytest.mark.slow
async def test_an_engine_that_was_started_anew_registers_again_and_another_one_gives_it_the_weights(tmp_path, model):
    options = PeerOptions("nixl", "auto", BUCKET)
    async with world(tmp_path, model, options) as w, world(tmp_path, model, options, "engine-1") as other:
        for name, tensor in moved(w.base, 1).items():
            w.live[name].copy_(tensor)
        await update(w, 1, "nixl")
        before = (await other.receiver.links())[0]
        os.kill(_child(other.process.pid), signal.SIGKILL)
        await asyncio.to_thread(other.process._process.wait, 20)
        spec = replace(other.process.spec)
        again = EngineProcess.start(spec, tmp_path / "again")
        try:
            await again.wait_ready(120)
            other.replica.activator.fence("its process ended", whole=True)
            await other.replica.attach("run")
            links = await other.receiver.links()
            assert links[0].token != before.token
            await other.replica.activator.begin_update(VersionRef("run", 1))
            await other.receiver.expect()
            sums = await w.receiver.give(links, 30.0)
            await other.receiver.verify(sums, True)
            await other.receiver.land()
            await other.replica.activator.finish_update()
            assert other.replica.applied == VersionRef("run", 1)
            assert await other.served() == await w.served() == digests(w.live)
        finally:
            await again.stop()


def _child(guard: int) -> int:
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return int(children[0])


async def test_a_source_killed_in_the_middle_of_writing_leaves_the_replica_fenced_until_a_whole_update(tmp_path, model):
    async with world(tmp_path, model, PeerOptions("nixl", "never", BUCKET)) as w:
        link = (await w.receiver.links())[0]
        await w.replica.activator.begin_update(VersionRef("run", 1))
        await w.receiver.expect()
        address = min(link.slots.values())
        script = _WRITER.format(metadata=link.metadata, address=address)
        writer = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True)
        assert writer.returncode == -signal.SIGKILL, writer.stderr
        await w.replica.activator.abort_update("a trainer rank died")
        assert not w.replica.ready
        assert w.replica.state == "fenced"
        for name, tensor in moved(w.base, 2).items():
            w.live[name].copy_(tensor)
        await update(w, 2, "nixl")
        assert w.replica.ready
        assert await w.served() == digests(w.live)


_WRITER = """
import os, signal, torch
from miles_disagg.engine.inplace.miles_inplace.transport import Job, Nixl, region
here = Nixl("doomed")
junk = torch.full((32,), 255, dtype=torch.uint8)
here.register([region(junk)], cuda=False)
job = Job(("x",), {metadata!r}, [region(junk)], [({address}, 32, 0)], False)
assert here.write([job], 20.0) == [None]
os.kill(os.getpid(), signal.SIGKILL)
"""
