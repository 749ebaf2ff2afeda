"""One server of each kind for the whole session, and a client per test that finds it at the base checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_disagg.engine import launch
from miles_disagg.engine.sglang import SGLangEngine
from tests.engine import sglang_env
from tests.engine.checkpoints import make_checkpoint

BASE = "run/weight_v000000"
READY_SECONDS = 240


@dataclass(frozen=True)
class Server:
    """A running engine. `kind` is embedded, sglang or sglang-no-cache."""

    kind: str
    process: launch.EngineProcess


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`base` and `other`: two random fp32 Qwen3 of one shape."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, seed=seed) for seed, name in enumerate(("base", "other"))}


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("sglang-no-cache", marks=pytest.mark.sglang),
    ],
)
def server(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind, port = request.param, launch.free_port()
    if kind == "embedded":
        spec = launch.embedded(checkpoints["base"], port=port, weight_version=BASE)
    else:
        args = ["--dtype", "float32", *(["--disable-radix-cache"] if kind == "sglang-no-cache" else [])]
        spec = launch.sglang(
            checkpoints["base"], port=port, device="cpu", python=sglang_env.python(), weight_version=BASE, args=args
        )
    process = launch.EngineProcess.start(spec, tmp_path_factory.mktemp("logs") / f"{kind}.log")
    try:
        asyncio.run(process.wait_ready(READY_SECONDS))
        yield Server(kind, process)
    finally:
        asyncio.run(process.stop())


@pytest.fixture
async def engine(server: Server, checkpoints: dict[str, Path]) -> AsyncIterator[SGLangEngine]:
    """A client; the engine is idle, resumed, and serves the base checkpoint as `BASE`."""
    client = SGLangEngine(server.process.url, update_timeout=120)
    await client.update_from_disk(str(checkpoints["base"]), BASE, flush_cache=True)
    yield client
    assert server.process.exit_code is None, server.process.log_tail()
    await client.abort()
    await client.resume()
    await client.close()
