"""The sandboxed Python tool: what programs may do, what ends them, and its turns within a sample."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from pathlib import Path

import pytest

from examples import python_tool
from examples.sandbox import Limits, isolation, run_python
from miles_disagg.domain.versions import Constraint
from miles_disagg.rollout.base import SamplingOptions
from tests.examples.test_examples import PROMPT, SAMPLING, Scripted, generate

isolated = pytest.mark.skipif(not isolation(), reason="this kernel gives no namespaces to its users")


def running(marker: str) -> list[str]:
    """Command lines of processes that carry the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


async def gone(marker: str) -> bool:
    deadline = time.monotonic() + 10
    while running(marker):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


async def test_what_a_program_prints_comes_back():
    result = await run_python("import math\nprint(math.factorial(10))")
    assert (result.status, result.text) == ("ok", "3628800\n")
    result = await run_python("1/0")
    assert result.status == "error"
    assert "ZeroDivisionError" in result.text
    result = await run_python("def f(:")
    assert (result.status, "SyntaxError" in result.text) == ("error", True)


async def test_an_infinite_loop_is_ended_by_its_cpu_time_and_a_sleeper_by_the_clock():
    result = await run_python("while True: pass", Limits(cpu=1, wall=60))
    assert (result.status, result.text) == ("error", "")
    begin = time.monotonic()
    result = await run_python("import time\nprint('here', flush=True)\ntime.sleep(600)", Limits(wall=3))
    assert (result.status, result.text) == ("timeout", "here\n")
    assert time.monotonic() - begin < 60


async def test_a_memory_hog_gets_no_memory():
    result = await run_python("x = bytearray(10 ** 10)", Limits(wall=30))
    assert result.status == "error"
    assert "MemoryError" in result.text


async def test_a_fork_bomb_dies_with_all_its_children():
    marker = f"bomb-{uuid.uuid4().hex}"
    bomb = f"# {marker}\nimport os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await run_python(bomb, Limits(wall=3, cpu=1))
    assert result.status in ("timeout", "error")
    assert await gone(marker), running(marker)


@isolated
async def test_a_child_that_leaves_the_process_group_dies_too():
    marker = f"daemon-{uuid.uuid4().hex}"
    code = f"# {marker}\nimport os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('parent')"
    result = await run_python(code, Limits(wall=5))
    assert "parent" in result.text
    assert await gone(marker), running(marker)


async def test_files_are_small_and_gone_afterwards():
    result = await run_python("import os\nopen('a', 'w').write('x' * 100)\nprint(os.getcwd(), os.listdir('.'))")
    assert result.status == "ok"
    directory, names = result.text.split(maxsplit=1)
    assert names == "['a']\n", "an empty directory to begin with"
    assert not Path(directory).exists()
    result = await run_python("f = open('a', 'wb', 0)\nwhile True: f.write(b'x' * 65536)", Limits(wall=30))
    assert result.status == "error"
    result = await run_python("print('x' * 1000000)", Limits(output=1000))
    assert (result.status, len(result.text)) == ("ok", 1000)


async def test_the_environment_tells_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = await run_python("import os\nprint(dict(os.environ))")
    assert "hunter2" not in result.text


@isolated
async def test_there_is_no_network():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = await run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 3)")
    assert result.status == "error"
    assert "OSError" in result.text or "Error" in result.text
    assert "unreachable" in result.text or "refused" in result.text


async def test_a_cancelled_caller_leaves_nothing_behind():
    marker = f"cancelled-{uuid.uuid4().hex}"
    task = asyncio.create_task(run_python(f"# {marker}\nimport time\ntime.sleep(600)", Limits(wall=600)))
    while not running(marker):
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(marker), running(marker)


async def test_a_program_runs_within_the_sample_and_its_result_is_not_trained_on():
    program, answer = "<python>print(12*7)</python>", "84"
    gateway = Scripted(program, answer, versions=(2, 3))
    gateway.version = 2
    sample = await generate(
        gateway, python_tool.generate, SamplingOptions(max_new_tokens=80), Constraint(min_version=2)
    )
    call, result = [ord(c) for c in program], [ord(c) for c in "<result>84</result>"]
    assert gateway.requests[1]["input_ids"] == [*PROMPT.tokens, *call, *result], "the policy's own ids, never again"
    assert list(sample.tokens) == [*call, *result, *(ord(c) for c in answer)]
    assert sample.loss_mask == (1,) * len(call) + (0,) * len(result) + (1,) * len(answer)
    assert sample.metadata["programs"] == ["ok"]
    assert sample.token_versions() == [2] * (len(call) + len(result)) + [3] * len(answer)


async def test_a_result_that_leaves_no_room_ends_the_sample():
    sample = await generate(Scripted("<python>1/0</python>"), python_tool.generate)
    assert sample.metadata["programs"] == ["error"]
    assert len(sample.tokens) == len("<python>1/0</python>") < SAMPLING.max_new_tokens
