"""One server of each kind for the whole session, and a client per test that finds it at the base checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
from miles_disagg.engine.sglang import SGLangEngine
from tests.engine import sglang_env
from tests.engine.checkpoints import make_checkpoint

BASE = "run/weight_v000000"
READY_SECONDS = 240


@dataclass(frozen=True)
class Server:
    """A running engine. `kind` is embedded, sglang or sglang_no_cache."""

    kind: str
    process: launch.EngineProcess


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`base` and `other`: two random fp32 Qwen3 of one shape."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, seed=seed) for seed, name in enumerate(("base", "other"))}


def _running(spec: launch.LaunchSpec, log: Path) -> Iterator[launch.EngineProcess]:
    process = launch.EngineProcess.start(spec, log)
    try:
        asyncio.run(process.wait_ready(READY_SECONDS))
        yield process
    finally:
        asyncio.run(process.stop())


@pytest.fixture(scope="session")
def embedded(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.EngineProcess]:
    """The embedded engine on `base`."""
    spec = launch.embedded(checkpoints["base"], port=free_port(), weight_version=BASE)
    yield from _running(spec, tmp_path_factory.mktemp("logs") / "embedded.log")


def _sglang(checkpoint: Path, log: Path, *args: str) -> Iterator[launch.EngineProcess]:
    spec = launch.sglang(
        checkpoint,
        port=free_port(),
        device="cpu",
        python=sglang_env.python(),
        weight_version=BASE,
        args=["--dtype", "float32", *args],
    )
    yield from _running(spec, log)


@pytest.fixture(scope="session")
def sglang(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.EngineProcess]:
    """Stock SGLang on `base`, prefix cache on."""
    yield from _sglang(checkpoints["base"], tmp_path_factory.mktemp("logs") / "sglang.log")


@pytest.fixture(scope="session")
def sglang_no_cache(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[launch.EngineProcess]:
    """Stock SGLang on `base` without a prefix cache, which `retract` needs."""
    yield from _sglang(checkpoints["base"], tmp_path_factory.mktemp("logs") / "sglang.log", "--disable-radix-cache")


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("sglang_no_cache", marks=pytest.mark.sglang),
    ],
)
def server(request: pytest.FixtureRequest) -> Server:
    """Each kind of server in turn."""
    return Server(request.param, request.getfixturevalue(request.param))


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
