"""A replica on real engines over HTTP (embedded, stock SGLang): what is attributed is what the weights wrote."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import UpdateFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine import launch
from miles_disagg.engine.base import PauseMode
from miles_disagg.engine.launch import EngineProcess
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.replica.activation import ActivationFailed
from miles_disagg.replica.app import serve
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.replica import Replica, ReplicaSettings
from tests.engine import sglang_env
from tests.engine.checkpoints import make_checkpoint
from tests.fakes.replica import exact, ref, request

PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(root / f"v{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine_url(
    request: pytest.FixtureRequest, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    where: dict[str, Any] = {"port": free_port(), "device": "cpu", "weight_version": str(ref(0))}
    if request.param == "sglang":
        python = sglang_env.python()
        spec = launch.sglang(checkpoints[0], python=python, args=["--dtype", "float32"], **where)
    else:
        spec = launch.embedded(checkpoints[0], **where)
    process = EngineProcess.start(spec, tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        asyncio.run(process.wait_ready(240.0))
        yield process.url
    finally:
        asyncio.run(process.stop())


@pytest.fixture
async def engine(engine_url: str, checkpoints: list[Path]) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(engine_url)
    await engine.resume()
    await engine.update_from_disk(str(checkpoints[0]), str(ref(0)), flush_cache=False)
    yield engine
    await engine.abort()
    await engine.close()


async def attach(engine: SGLangEngine, mode: PauseMode = "in_place") -> Replica:
    replica = Replica(ReplicaSettings("replica-0", mode), engine)
    assert await replica.attach("run") == ref(0)
    return replica


def version(checkpoints: list[Path], number: int) -> Materialized:
    return Materialized(VersionRef("run", number), checkpoints[number % 2])


def greedy(rid: str, n: int, prompt: list[int] = PROMPT, **fields: Any) -> Any:
    params = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True}
    # tokens are looked at while they come, so the engine must say them
    return request(rid, input_ids=prompt, sampling_params=params, return_logprob=True, stream=True, **fields)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


async def fresh(engine: SGLangEngine, n: int, prompt: list[int] = PROMPT) -> Any:
    """What the engine's weights write now, without any cached prefix."""
    return await engine.generate({**greedy("fresh", n, prompt).body, "extra_key": uuid.uuid4().hex, "stream": False})


def tokens_in_flight(replica: Replica) -> int:
    return max((f.tokens for f in replica.gate.flights()), default=0)


async def test_under_retract_each_span_is_what_its_version_writes_after_what_stood_there(
    engine: SGLangEngine, checkpoints: list[Path]
) -> None:
    replica = await attach(engine, "retract")
    work = asyncio.create_task(replica.sessions.result(greedy("straddler", 120)))
    await until(lambda: tokens_in_flight(replica) >= 20)
    await replica.activate(version(checkpoints, 1))
    answer = await work
    meta, tokens = answer["meta_info"], answer["output_ids"]
    (_, first), (boundary, second) = meta["weight_version_spans"]
    assert (first, second) == (0, 1)
    assert 20 <= boundary < 120
    after = await fresh(engine, 120 - boundary, PROMPT + tokens[:boundary])
    assert tokens[boundary:] == after["output_ids"]
    await engine.update_from_disk(str(checkpoints[0]), str(ref(0)), flush_cache=False)
    before = await fresh(engine, boundary)
    assert tokens[:boundary] == before["output_ids"]
    written = [lp for lp, _, _ in meta["output_token_logprobs"]]
    expected = [lp for a in (before, after) for lp, _, _ in a["meta_info"]["output_token_logprobs"]]
    assert written == pytest.approx(expected, abs=1e-4)


async def test_in_place_spans_agree_with_the_engines_own_stamps(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    replica = await attach(engine)
    work = [asyncio.create_task(replica.sessions.result(greedy(f"r{i}", 150, [i + 1, 2, 3]))) for i in range(4)]
    boundaries: list[dict[str, int]] = []
    for number in (1, 2):
        await until(lambda n=number: sum(f.tokens >= 30 * n for f in replica.gate.flights()) == 4)
        await replica.activate(version(checkpoints, number))
        boundaries.append({f.rid: f.tokens for f in replica.gate.flights()})
    for i, answer in enumerate(await asyncio.gather(*work)):
        rid = f"r{i}"
        assert answer["meta_info"]["weight_version_spans"] == [[0, 0], [boundaries[0][rid], 1], [boundaries[1][rid], 2]]
        assert answer["meta_info"]["completion_tokens"] == 150


async def test_prefixes_never_cross_versions(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    replica = await attach(engine)
    await replica.sessions.result(greedy("warm", 40))
    await replica.activate(version(checkpoints, 1))
    after = await replica.sessions.result(greedy("after", 40))
    assert after["output_ids"] == (await fresh(engine, 40))["output_ids"]
    assert after["meta_info"]["weight_version"] == 1


async def test_an_exact_pin_finishes_on_its_version(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    replica = await attach(engine)
    work = asyncio.create_task(replica.sessions.result(greedy("pin", 60, weight_version=exact(0))))
    await until(lambda: tokens_in_flight(replica) >= 5)
    await replica.activate(version(checkpoints, 1))
    meta = (await work)["meta_info"]
    assert (meta["completion_tokens"], meta["weight_version_spans"]) == (60, [[0, 0]])


async def test_a_checkpoint_that_cannot_be_loaded_leaves_the_old_version_serving(
    engine: SGLangEngine, checkpoints: list[Path], tmp_path: Path
) -> None:
    replica = await attach(engine)
    work = asyncio.create_task(replica.sessions.result(greedy("held", 100)))
    await until(lambda: tokens_in_flight(replica) >= 5)
    with pytest.raises(ActivationFailed) as caught:
        await replica.activate(Materialized(ref(1), tmp_path))
    assert isinstance(caught.value.cause, UpdateFailed)
    assert caught.value.healed
    assert replica.applied == ref(0)
    answer = await work
    assert answer["meta_info"]["weight_version_spans"] == [[0, 0]]
    assert answer["output_ids"] == (await fresh(engine, 100))["output_ids"]


async def test_completions_and_disconnects_over_http(engine: SGLangEngine, checkpoints: list[Path]) -> None:
    replica = await attach(engine)
    server = await serve(replica)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    try:
        async with aiohttp.ClientSession() as client:

            async def post(**fields: Any) -> dict[str, Any]:
                async with client.post(f"{server.url}/v1/completions", json={**body, **fields}) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            work = asyncio.create_task(post(rid="v1"))
            await until(lambda: work.done() or tokens_in_flight(replica) >= 10)
            await replica.activate(version(checkpoints, 1))
            boundary = tokens_in_flight(replica)
            answer = await work
            assert answer["weight_version_spans"] == [[0, 0], [boundary, 1]]
            assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 100
            assert (answer["replica_id"], answer["weight_version"]) == ("replica-0", 1)

            gone = asyncio.create_task(post(rid="gone", max_tokens=400))
            await until(lambda: tokens_in_flight(replica) >= 5)
            gone.cancel()
            await until(lambda: replica.gate.active == 0)
            await asyncio.sleep(0.5)
            await engine.flush_cache()  # refused while anything runs
    finally:
        await server.stop()
