"""Stock SGLang with two tensor parallel ranks (in one node, over two) and with experts: written to in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import raw_bytes
from miles_disagg.publish.broadcast import broadcast_version
from miles_disagg.publish.peer import Route
from miles_disagg.replica.inplace import InPlaceLoader, InPlaceUnavailable, Plugin
from miles_disagg.replica.peer import PeerOptions, PeerReceiver
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.rollout.processes import EngineCommand, EngineProcesses, NodeServer
from miles_disagg.weights.digest import digest
from miles_disagg.weights.transfer.link import arrivals
from miles_disagg.weights.transfer.plan import make_plan
from tests.cluster import processes
from tests.engine import reference, sglang_env
from tests.engine.checkpoints import make_checkpoint
from tests.engine.test_contract import start_stream, tokens_of
from tests.fakes.replica import ref
from tests.fakes.update_target import EngineTarget
from tests.publish.test_broadcast import source, stage_in_buckets
from tests.replica.test_inplace import Staging, attached, fresh, served
from tests.replica.test_peer import BUCKET, World, digests, moved, source_of, tensors_of, update

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
TOLERANCE = 2e-4
PROMPT = [5, 80, 33, 7, 120]


@dataclass(frozen=True)
class Kind:
    """An engine's shape."""

    ranks: int = 1
    nodes: int = 1
    architecture: str = "qwen3"


KINDS = {"tp2": Kind(2), "tp2-two-nodes": Kind(2, 2), "experts": Kind(architecture="qwen3_moe")}


@dataclass
class Running:
    """An engine started as a managed one is, and two checkpoints: what it was started on, and another."""

    kind: Kind
    processes: EngineProcesses
    url: str
    base: Path
    other: Path


@pytest.fixture(scope="module", params=list(KINDS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kind, root = KINDS[request.param], tmp_path_factory.mktemp("engine")
    base, other = (make_checkpoint(root / f"v{n}", seed=n, architecture=kind.architecture) for n in range(2))
    args = ("--dtype", "float32")
    command = EngineCommand(
        "sglang", str(base), "cpu", root / "engine.log", str(sglang_env.python()), args, kind.ranks
    )  # fmt: skip
    engine = EngineProcesses(command, ref(0), 240.0, [NodeServer() for _ in range(kind.nodes - 1)])
    try:
        yield Running(kind, engine, asyncio.run(engine.start()), base, other)
        assert asyncio.run(engine.ended()) is None, engine.log_tail()
    finally:
        asyncio.run(engine.stop())


@pytest.fixture
async def engine(running: Running) -> AsyncIterator[SGLangEngine]:
    """A client; the engine is idle and serves version 0."""
    engine = SGLangEngine(running.url)
    await engine.resume()
    await engine.update_from_disk(str(running.base), str(ref(0)), flush_cache=False)
    yield engine
    await engine.abort()
    await engine.close()


def one_node(running: Running) -> None:
    if running.kind.nodes > 1:
        pytest.skip("not offered for engines that span nodes")


async def test_it_writes_what_transformers_does_alone_and_in_a_batch(engine: SGLangEngine, running: Running) -> None:
    params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    prompts = [PROMPT, [9, 9, 200], list(range(30, 60))]
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    answers = await engine.generate({**body, "extra_key": "batch"})
    for prompt, answer in zip(prompts, cast(list[Any], answers), strict=True):
        tokens, logprobs = reference.greedy(running.base, prompt, 16)
        assert answer["output_ids"] == tokens
        got = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(logprobs, abs=TOLERANCE)


async def test_a_request_in_flight_goes_on_with_the_weights_that_were_broadcast(
    engine: SGLangEngine, running: Running
) -> None:
    stream = await start_stream(engine, new=120, at=10, prompt=PROMPT)
    weights, broadcast = list(tensors_of(running.other).items()), source(60.0)
    stage_in_buckets(broadcast, weights, 7)
    target = EngineTarget(engine, running.kind.ranks)
    metrics = await broadcast_version(str(ref(1)), [broadcast.send], [target])
    assert metrics["perf/update_weights_wire_bytes"] == sum(t.nbytes for _, t in weights)
    chunks = await stream
    assert len(chunks[-1]["output_ids"]) == 120
    assert [c["meta_info"]["weight_version"] for c in (chunks[0], chunks[-1])] == [str(ref(0)), str(ref(1))]
    assert await tokens_of(engine, PROMPT, 16, extra_key="new") == reference.greedy(running.other, PROMPT, 16)[0]
    if running.kind.nodes == 1:
        plugin = Plugin(engine)
        await plugin.open(running.base)
        assert await plugin.digests(running.base) == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
        plugin.close()
    await broadcast.close()


async def test_a_hundred_versions_in_place_equal_a_full_reload(
    engine: SGLangEngine, running: Running, tmp_path: Path
) -> None:
    one_node(running)
    staging = Staging(make_checkpoint(tmp_path / "weights", seed=0, architecture=running.kind.architecture))
    replica, loader = await attached(engine, staging, verify_every=10)
    assert len(await loader.plugin.ask("status")) == running.kind.ranks
    for _ in range(100):
        await replica.activate(staging.next())
    assert await served(loader, staging.path) == {}
    assert (loader.scattered, loader.reloaded) == (100, [])
    in_place = await fresh(engine)
    await engine.update_from_disk(str(staging.path), str(ref(100)), flush_cache=False)
    assert in_place == await fresh(engine)
    assert all(answer["same"] for answer in await loader.plugin.ask("verify")), "the reload changed a bit"
    expected = {name: digest(raw_bytes(t), "xxh3-128") for name, t in tensors_of(staging.path).items()}
    assert await loader.plugin.digests(staging.path) == expected
    loader.plugin.close()
    await replica.close()


@pytest.mark.parametrize("staging", ["always", "never"])
async def test_weights_written_peer_to_peer_reach_every_rank_bit_for_bit(
    engine: SGLangEngine, running: Running, staging: str
) -> None:
    one_node(running)
    replica = Replica(ReplicaSettings("engine-0"), engine)
    await replica.attach("run")
    receiver = PeerReceiver("engine-0", engine, replica.activator, running.base, PeerOptions("nixl", staging, BUCKET))
    base = tensors_of(running.base)
    live = {name: tensor.clone() for name, tensor in base.items()}
    trainer = source_of(live, "nixl")
    plan = make_plan([trainer.layout()], await receiver.layout(), bucket=BUCKET)
    trainer.route(Route.of(plan, 0, BUCKET))
    ranks = range(running.kind.ranks)
    receiver.adopt(list(ranks), [arrivals(plan, rank) for rank in ranks])
    world = World(cast(Any, None), replica, receiver, trainer, live, base, plan)
    try:
        for version in (1, 2):
            for name, tensor in moved(base, version).items():
                live[name].copy_(tensor)
            await update(world, version, "nixl")
            assert await receiver.digests() == digests(live)
            assert (await engine.model_info())["weight_version"] == str(ref(version))
    finally:
        receiver.close()
        await replica.close()


async def test_over_two_nodes_in_place_is_refused_by_name_and_one_death_is_the_death_of_all(
    engine: SGLangEngine, running: Running
) -> None:
    if running.kind.nodes == 1:
        pytest.skip("for an engine that spans nodes")
    with pytest.raises(InPlaceUnavailable, match="nnodes 2"):
        await InPlaceLoader(engine, running.base).open(ref(0))
    ours = set(processes.with_text(str(running.base), "cmdline"))
    guards = set(processes.with_text("guard.py", "cmdline"))
    (second,) = (ours - guards) & set(processes.with_text("--node-rank\0001", "cmdline"))
    os.kill(second, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (said := await running.processes.ended()) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert "node 1 of 2 ended with status" in said or "the engine process ended" in said
    await running.processes.stop()
    assert not processes.with_text(str(running.base), "cmdline"), "something was left running"
    assert await running.processes.start() == running.url
    assert await tokens_of(engine, PROMPT, 8) == reference.greedy(running.base, PROMPT, 8)[0]
