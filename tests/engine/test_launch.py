"""Engine processes: failures at start, deadlines, and leaving nothing behind. And the client against odd servers."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    EngineStartError,
    EngineUnavailable,
    PortTaken,
    UpdateFailed,
)
from miles_disagg.engine import launch
from miles_disagg.engine.inplace import PLUGIN_PATH
from miles_disagg.engine.launch import EngineProcess, LaunchSpec
from miles_disagg.engine.sglang import SGLangEngine


def script(code: str) -> LaunchSpec:
    return LaunchSpec((sys.executable, "-u", "-c", code), "127.0.0.1", free_port(), "model")


async def test_a_server_that_ends_at_start_is_reported_with_the_end_of_its_log(tmp_path: Path):
    process = EngineProcess.start(script("for i in range(99): print('line', i)\nraise SystemExit(3)"), tmp_path / "l")
    with pytest.raises(EngineStartError) as caught:
        await process.wait_ready(30)
    message = str(caught.value)
    assert "status 3" in message
    assert "line 98" in message
    assert "line 48" not in message  # the last 50 lines
    await process.stop()


async def test_a_server_that_never_answers_runs_into_the_deadline_with_a_reason(tmp_path: Path):
    process = EngineProcess.start(script("print('loading'); import time; time.sleep(60)"), tmp_path / "l")
    with pytest.raises(DeadlineExceeded, match="loading"):
        await process.wait_ready(1.0)
    await process.stop()
    assert process.exit_code is not None


async def test_a_server_whose_port_was_taken_is_given_another_one(tmp_path: Path, checkpoints: dict[str, Path]):
    """SGLang prints the reason and then hangs, so waiting for it would take the whole deadline."""
    hangs = "print('ERROR: [Errno 98] address already in use', flush=True); import time; time.sleep(60)"
    asked: list[int] = []
    taken: list[socket.socket] = []

    def spec(port: int) -> LaunchSpec:
        asked.append(port)
        if len(asked) == 1:  # before the engine listens
            taken.append(socket.create_server(("127.0.0.1", port)))
        return launch.embedded(checkpoints["base"], port=port)

    process = await EngineProcess.started(spec, tmp_path / "log", host="127.0.0.1", port=0, timeout=60)
    await process.stop()
    taken.pop().close()
    assert process.url == f"http://127.0.0.1:{asked[1]}"
    assert len(asked) == 2

    async def always(port: int) -> None:
        first = len(asked)
        with pytest.raises(PortTaken, match="in use by another process"):
            await EngineProcess.started(
                lambda p: asked.append(p) or script(hangs), tmp_path / "log", host="127.0.0.1", port=port, timeout=60
            )
        assert len(asked) - first == (1 if port else 3)

    await always(0)
    await always(4321)


async def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path):
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "somebody else's"})

    async with serving({"/health": health, "/model_info": model_info}) as url:
        port = int(url.rpartition(":")[2])
        spec = LaunchSpec((sys.executable, "-c", "import time; time.sleep(60)"), "127.0.0.1", port, "model")
        process = EngineProcess.start(spec, tmp_path / "l")
        with pytest.raises(DeadlineExceeded):
            await process.wait_ready(1.0)
        await process.stop()


async def test_stopping_ends_grandchildren_that_ignore_sigterm(tmp_path: Path):
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", code])
print(child.pid)
time.sleep(99)
"""
    process = EngineProcess.start(script(code), tmp_path / "l")
    while not process.log_tail().strip():
        await asyncio.sleep(0.05)
    grandchild = int(process.log_tail().split()[0])
    await process.stop()
    deadline = time.monotonic() + 5
    while _alive(grandchild) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not _alive(grandchild)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sglang_runs_from_its_own_environment_with_pass_through_arguments_last(tmp_path: Path):
    spec = launch.sglang("/m", port=1, device="cpu", python=sys.executable, args=["--max-running-requests", "3"])
    assert spec.command[0] == sys.executable
    assert spec.command[-2:] == ("--max-running-requests", "3")
    assert spec.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "PYTHONPATH" in spec.unset
    with pytest.raises(ConfigError, match="--sglang-python"):
        launch.sglang("/m", port=1, python=tmp_path / "nope")


def test_ranks_on_a_cpu_are_dealt_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch):
    assert launch.cores_of_ranks(2, [0, 2, 5]) == "0,5|2"
    assert launch.cores_of_ranks(3, [4, 6]) == "4|6|4"
    bind = "SGLANG_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(bind, raising=False)
    spec = launch.sglang("/m", port=1, device="cpu", ranks=2)
    assert spec.command[spec.command.index("--tp-size") + 1] == "2"
    assert spec.env[bind].count("|") == 1
    monkeypatch.setenv(bind, "7|9")
    assert launch.sglang("/m", port=1, device="cpu", ranks=2).env[bind] == "7|9"
    assert bind not in launch.sglang("/m", port=1, device="cpu").env
    assert bind not in launch.sglang("/m", port=1, device="cuda", ranks=2).env


def test_what_a_server_loads_of_ours_imports_torch_numpy_and_the_standard_library_only():
    allowed = {*sys.stdlib_module_names, "torch", "numpy"}
    files = list((PLUGIN_PATH / "miles_inplace").glob("*.py"))
    assert len(files) > 4
    for file in files:
        for node in ast.parse(file.read_text()).body:  # what is imported when it is needed (NIXL) may be absent
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert {name.partition(".")[0] for name in names} <= allowed, file.name


def test_the_environment_of_this_process_is_not_changed_by_a_launch():
    before = dict(os.environ)
    launch.embedded("/m", port=1, env={"A": "b"})
    assert dict(os.environ) == before


# --- the client against servers that misbehave ----------------------------------------------------------


class serving:
    """A loopback server with the given routes, for any method."""

    def __init__(self, routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]):
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_route("*", path, handler)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[Callable[[str], SGLangEngine]]:
    made: list[SGLangEngine] = []

    def make(url: str) -> SGLangEngine:
        made.append(SGLangEngine(url, control_timeout=5, update_timeout=5))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


async def test_older_servers_are_asked_under_the_older_names(client: Callable[[str], SGLangEngine]):
    async def old(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.4", "disable_radix_cache": True})

    async with serving({"/get_server_info": old, "/get_model_info": old}) as url:
        engine = client(url)
        assert (await engine.server_info())["version"] == "0.4"
        assert (await engine.model_info())["version"] == "0.4"
        await engine.health(5)


async def test_a_stream_that_breaks_off_is_an_engine_that_is_gone(client: Callable[[str], SGLangEngine]):
    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"text": "a"}\n\n')
        if request.path == "/generate":
            assert request.transport is not None
            request.transport.close()
        return response

    async with serving({"/generate": broken, "/v1/completions": broken}) as url:
        for path in ("/generate", "/v1/completions"):
            chunks = client(url).stream({}, path=path)
            assert await anext(chunks) == {"text": "a"}
            with pytest.raises(EngineUnavailable):
                await anext(chunks)


async def test_an_error_inside_a_stream_is_raised(client: Callable[[str], SGLangEngine]):
    async def failing(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n')
        return response

    async with serving({"/generate": failing}) as url:
        with pytest.raises(EngineError, match="too long") as caught:
            await anext(client(url).stream({}))
        assert caught.value.status == 400


async def test_nothing_listening_is_unavailable_and_a_refused_update_says_why(client: Callable[[str], SGLangEngine]):
    with pytest.raises(EngineUnavailable):
        await client(f"http://127.0.0.1:{free_port()}").health(5)

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such file"}, status=400)

    async with serving({"/update_weights_from_disk": refuse}) as url:
        with pytest.raises(UpdateFailed, match="no such file"):
            await client(url).update_from_disk("/x", "r/weight_v000001", flush_cache=False)


async def test_health_gives_up_in_time(client: Callable[[str], SGLangEngine]):
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.Response()

    async with serving({"/server_info": slow}) as url:
        with pytest.raises(EngineUnavailable, match=r"0\.2 s"):
            await client(url).health(0.2)
