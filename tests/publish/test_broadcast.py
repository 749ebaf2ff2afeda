"""Broadcasting into a real engine process over gloo, and what happens when engines do not play along."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import ConfigError, DeadlineExceeded, PublicationFailed, UpdateFailed
from miles_disagg.engine.launch import EngineProcess, embedded
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import raw_bytes
from miles_disagg.publish.broadcast import MOVED, BroadcastSource, broadcast_version
from miles_disagg.weights.digest import digest
from tests.engine.checkpoints import make_checkpoint
from tests.fakes.update_target import AbsentTarget, EngineTarget


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("engine")
    model = make_checkpoint(root / "model", dtype=torch.bfloat16)
    process = EngineProcess.start(embedded(model, port=free_port()), root / "engine.log")
    try:
        asyncio.run(process.wait_ready(120))
        yield process.url
    finally:
        asyncio.run(process.stop())


def new_weights(tmp_path: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path / str(seed), seed=seed, dtype=torch.bfloat16, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return list(model.state_dict().items())


def source(timeout: float = 30.0, flattened: bool = True, delta: bool = False) -> BroadcastSource:
    return BroadcastSource(address="127.0.0.1", backend="gloo", timeout=timeout, flattened=flattened, delta=delta)


def stage_in_buckets(broadcast: BroadcastSource, weights: list[tuple[str, torch.Tensor]], size: int) -> None:
    broadcast.open(1.0)
    for i in range(0, len(weights), size):
        broadcast.stage(weights[i : i + size])


@pytest.mark.parametrize("flattened", [True, False])
async def test_the_engine_serves_what_was_staged_bit_for_bit_even_if_the_trainer_moved_on(
    engine_url: str, tmp_path: Path, flattened: bool
) -> None:
    engine, weights, broadcast = SGLangEngine(engine_url), new_weights(tmp_path, 7 + flattened), source(30, flattened)
    expected = {name: digest(raw_bytes(tensor), "xxh3-128") for name, tensor in weights}
    stage_in_buckets(broadcast, weights, 5)
    for _, tensor in weights:
        tensor.zero_()  # the next optimizer step
    target = EngineTarget(engine)
    metrics = await broadcast_version("run/weight_v000001", [broadcast.send], [target])
    assert await engine.weights_digest() == expected
    assert (await engine.model_info())["weight_version"] == "run/weight_v000001"
    assert metrics["perf/update_weights_wire_bytes"] == sum(t.nbytes for _, t in weights)
    assert target.events[:3] == ["begin run/weight_v000001", "init", "bucket"]
    assert target.events[-2:] == ["bucket", "finish run/weight_v000001"]
    await broadcast.close()
    assert target.events[-1] == "destroy"
    await engine.close()


async def test_a_group_is_kept_until_an_engine_is_not_in_it_any_more(engine_url: str, tmp_path: Path) -> None:
    engine, broadcast = SGLangEngine(engine_url), source()
    target = EngineTarget(engine)
    for version in (2, 3, 4, 5):
        weights = new_weights(tmp_path, 20 + version)
        stage_in_buckets(broadcast, weights, 100)
        if version == 4:
            target.groups.clear()  # as after a restart of its process
        if version == 5:
            target = EngineTarget(engine)  # another member in its place
        await broadcast_version(f"run/weight_v{version:06d}", [broadcast.send], [target])
        assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
        joins = target.events.count("init")
        assert joins == {2: 1, 3: 1, 4: 2, 5: 1}[version]
    await broadcast.close()
    await engine.close()


async def test_two_sources_send_their_stages_one_after_the_other(engine_url: str, tmp_path: Path) -> None:
    engine, weights, sources = SGLangEngine(engine_url), new_weights(tmp_path, 31), (source(), source())
    half = len(weights) // 2
    for broadcast, part in zip(sources, (weights[:half], weights[half:]), strict=True):
        stage_in_buckets(broadcast, part, 4)
    await broadcast_version("run/weight_v000004", [s.send for s in sources], [EngineTarget(engine)])
    assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
    await engine.close()


def moved(weights: list[tuple[str, torch.Tensor]], seed: int, density: float) -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(n, torch.where(torch.rand(t.shape, generator=g) < density, t + 0.5, t)) for n, t in weights]


async def test_changed_elements_are_scattered_and_the_engine_is_equal_after_each_update(
    engine_url: str, tmp_path: Path
) -> None:
    engine, broadcast, weights = SGLangEngine(engine_url), source(delta=True), new_weights(tmp_path, 51)
    target, wire, changes = EngineTarget(engine), [], []
    for i, density in enumerate((0.0, 0.01, 0.9, 0.0, 0.003)):  # whole, sparse, dense, nothing at all, sparse again
        weights = moved(weights, i, density)
        stage_in_buckets(broadcast, weights, 6)
        if i % 2:
            broadcast.prepare(f"run/weight_v{100 + i:06d}")  # ahead of the pause, or within `send`
        metrics = await broadcast_version(f"run/weight_v{100 + i:06d}", [broadcast.send], [target])
        wire.append(metrics["perf/update_weights_wire_bytes"])
        changes.append(metrics[MOVED])
        assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
        assert (await engine.model_info())["weight_version"] == f"run/weight_v{100 + i:06d}"
    full = sum(t.nbytes for _, t in weights)
    assert wire[0] == full
    assert wire[1] < full / 10
    assert wire[2] <= full
    assert wire[3] < 10
    assert changes[3] == 0
    assert changes[1] > changes[4] > 0
    await engine.close()


async def test_changes_on_a_version_that_the_engine_does_not_hold_are_refused_and_a_whole_send_repairs(
    engine_url: str, tmp_path: Path
) -> None:
    engine, broadcast, weights = SGLangEngine(engine_url), source(delta=True), new_weights(tmp_path, 61)
    target = EngineTarget(engine)
    stage_in_buckets(broadcast, weights, 100)
    await broadcast_version("run/weight_v000200", [broadcast.send], [target])
    stranger = source()
    stage_in_buckets(stranger, new_weights(tmp_path, 62), 100)
    await broadcast_version("run/weight_v000150", [stranger.send], [target])
    held = await engine.weights_digest()
    weights = moved(weights, 9, 0.01)
    stage_in_buckets(broadcast, weights, 100)
    with pytest.raises(PublicationFailed, match="changes on run/weight_v000200, but run/weight_v000150 is served"):
        await broadcast_version("run/weight_v000201", [broadcast.send], [target])
    assert await engine.weights_digest() == held
    await broadcast_version("run/weight_v000201", [partial(broadcast.send, whole=True)], [target])
    assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
    await engine.close()


async def test_an_unknown_tensor_is_refused_in_the_engines_words_and_the_next_update_works(
    engine_url: str, tmp_path: Path
) -> None:
    engine, broadcast = SGLangEngine(engine_url), source(10.0)
    target = EngineTarget(engine)
    stage_in_buckets(broadcast, [("model.nowhere.weight", torch.zeros(3, dtype=torch.bfloat16))], 1)
    with pytest.raises(PublicationFailed, match=r"model\.nowhere\.weight"):
        await broadcast_version("run/weight_v000005", [broadcast.send], [target])
    assert target.events[-1].startswith("abort: broadcast of run/weight_v000005 failed")
    weights = new_weights(tmp_path, 41)
    stage_in_buckets(broadcast, weights, 100)
    await broadcast_version("run/weight_v000006", [broadcast.send], [target])
    assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in weights}
    await engine.close()


async def test_engines_that_do_not_come_end_the_meeting_at_its_deadline_and_are_told() -> None:
    broadcast, target = source(timeout=1.0), AbsentTarget()
    stage_in_buckets(broadcast, [("x", torch.ones(2))], 1)
    said = (
        r"waited 1.0 s for 2 engine ranks \(absent\) to join group weights-.* which their hosts must reach .*disk-delta"
        r".*1/3 clients joined"
    )
    with pytest.raises(PublicationFailed, match=said) as e:
        await broadcast_version("v1", [broadcast.send], [target])
    assert isinstance(e.value.__cause__, DeadlineExceeded)
    assert target.events == ["begin", "init", "destroy", "abort"]


async def test_an_engine_that_refuses_to_join_ends_the_meeting_at_once() -> None:
    broadcast, targets = source(timeout=600.0), [AbsentTarget("init"), AbsentTarget()]
    stage_in_buckets(broadcast, [("x", torch.ones(2))], 1)
    with pytest.raises(PublicationFailed, match="no init today") as e:
        await asyncio.wait_for(broadcast_version("v1", [broadcast.send], targets), 30)
    assert isinstance(e.value.__cause__, UpdateFailed)
    assert [t.events[-1] for t in targets] == ["abort", "abort"]


async def test_nothing_is_sent_if_one_engine_cannot_begin() -> None:
    broadcast, targets = source(), [AbsentTarget("begin"), AbsentTarget()]
    stage_in_buckets(broadcast, [("x", torch.ones(2))], 1)
    with pytest.raises(PublicationFailed, match="no begin today"):
        await broadcast_version("v1", [broadcast.send], targets)
    assert [t.events for t in targets] == [["begin", "abort"], ["begin", "abort"]]
    broadcast.discard()
    assert broadcast.open(0.1) < 0.1


def test_staging_waits_for_the_previous_send_and_says_so() -> None:
    broadcast = source()
    broadcast.open(0.1)
    with pytest.raises(DeadlineExceeded, match="previous weight broadcast"):
        broadcast.open(0.05)
    broadcast.discard()
    with pytest.raises(PublicationFailed, match="without open"):
        broadcast.stage([("x", torch.ones(1))])


def test_nccl_without_its_environment_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE=0"):
        BroadcastSource(address="127.0.0.1", backend="nccl", timeout=1.0)
