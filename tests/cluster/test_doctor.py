"""`miles-disagg doctor` on real engines: what is sound, and each thing that is not, with what to do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_disagg import cli
from miles_disagg.cluster.doctor import _room, examine
from miles_disagg.config.flags import parse_run
from miles_disagg.config.machine import free_port
from miles_disagg.config.resolve import resolve
from miles_disagg.engine import launch
from miles_disagg.engine.router import RouterControl
from tests.cluster.attached import OutsideEngine, OutsideRouter, ended, started
from tests.fakes.router import FakeMember, FakeRouter

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory) -> Iterator[OutsideEngine]:
    outside = OutsideEngine(request.param, tiny_checkpoint, tmp_path_factory.mktemp("engine") / "engine.log")
    asyncio.run(outside.start())
    yield outside
    assert outside.process is not None
    assert outside.process.exit_code is None, outside.process.log_tail()
    asyncio.run(outside.process.stop())


def run_in(tmp_path: Path, checkpoint: Path, *flags: str) -> list[str]:
    """Flags of a run in `tmp_path`."""
    argv = ["--hf-checkpoint", str(checkpoint), "--task", "addition", "--task-size", "64"]
    argv += ["--num-rollout", "2", "--rollout-max-response-len", "6", "--rollout-batch-size", "4"]
    return [*argv, "--trainer-device", "cpu", "--run-dir", str(tmp_path / "run"), *flags]


def examined(capsys, checkpoint: Path, tmp_path: Path, *flags: str) -> tuple[int, list[str]]:
    """Exit status and lines of the command, for a run in `tmp_path`."""
    status = cli.main(["doctor", *run_in(tmp_path, checkpoint, *flags)])
    out = capsys.readouterr()
    assert not out.err, out.err
    return status, out.out.splitlines()


def attach(*addresses: str) -> tuple[str, ...]:
    return ("--rollout-external", "--rollout-external-engine-addrs", *addresses)


def test_a_sound_deployment_is_found_sound_and_left_as_it_was(capsys, engine, tiny_checkpoint, tmp_path):
    flags = (*attach(engine.address), "--update-weight-transfer-mode", "disk-delta")
    status, lines = examined(capsys, tiny_checkpoint, tmp_path, *flags)
    assert status == 0, lines
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
    assert any(line.endswith("written here, seen there") for line in lines), lines
    assert any("publication path" in line and "written and read back" in line for line in lines), lines
    assert any(line.startswith("ok      disk at") for line in lines), lines
    assert any(line.startswith("ok      memory") for line in lines), lines
    assert list(tmp_path.iterdir()) == []


def test_a_process_group_is_formed_and_left(capsys, engine, tiny_checkpoint, tmp_path):
    flags = (*attach(engine.address), "--update-weight-transfer-mode", "broadcast")
    for _ in range(2):
        status, lines = examined(capsys, tiny_checkpoint, tmp_path, *flags)
        assert status == 0, lines
        assert any("process group: 1 rank(s) joined over gloo" in line for line in lines), lines


def test_an_engine_that_is_not_there_or_wants_another_key_is_named_with_the_remedy(capsys, tiny_checkpoint, tmp_path):
    locked = OutsideEngine("embedded", tiny_checkpoint, tmp_path / "engine.log", "--api-key", "secret-key")
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("secret-key")
    wrong.write_text("another-key")
    absent = f"127.0.0.1:{free_port()}"
    flags = (*attach(locked.address, absent), "--update-weight-transfer-mode", "disk-full")
    locked.process = launch.EngineProcess.start(locked.spec(), locked.log)
    try:
        asyncio.run(locked.answers("secret-key"))
        for token in ((), ("--rollout-auth-token-file", str(wrong))):
            status, lines = examined(capsys, tiny_checkpoint, tmp_path, *flags, *token)
            assert status == 1
            (refused,) = (line for line in lines if locked.address in line)
            assert "give its API key with --rollout-auth-token-file" in refused
        status, lines = examined(capsys, tiny_checkpoint, tmp_path, *flags, "--rollout-auth-token-file", str(key))
        assert status == 1
        assert any(line.startswith(f"ok      engine-0 at {locked.address}") for line in lines), lines
        (unreachable,) = (line for line in lines if absent in line)
        assert unreachable.startswith("bad")
        assert "correct --rollout-external-engine-addrs" in unreachable
    finally:
        asyncio.run(locked.process.stop())


def test_settings_that_do_not_fit_are_named(capsys, engine, tiny_checkpoint, tmp_path):
    flags = (*attach(engine.address), "--update-weight-transfer-mode", "disk-delta", "--rollout-dtype", "bf16")
    status, lines = examined(capsys, tiny_checkpoint, tmp_path, *flags)
    assert status == 1
    assert any("dtype is float32, the run's is bfloat16" in line for line in lines), lines


def test_a_configuration_that_is_not_sound_is_told_first(capsys, tiny_checkpoint, tmp_path):
    status, lines = examined(capsys, tiny_checkpoint, tmp_path, "--global-batch-size", "7")
    assert status == 1
    assert any(line.startswith("bad     configuration: --global-batch-size 7") for line in lines), lines


def test_too_little_disk_and_memory_say_what_to_free_or_move(tiny_checkpoint, tmp_path):
    config = resolve(
        parse_run(run_in(tmp_path, tiny_checkpoint, "--update-weight-transfer-mode", "disk-delta")), gpus=0
    )
    lines = [str(line) for line in _room(config, size=10**16)]
    assert all(line.startswith("bad") for line in lines), lines
    assert any("wanted for 1e+07 GB of weights; free some, or move --update-weight-disk-dir" in line for line in lines)
    assert any("a run keeps two copies: free some" in line for line in lines)


async def looked_at(tmp_path: Path, checkpoint: Path, *flags: str) -> list[str]:
    """The command's findings, in this event loop, where the fakes are."""
    return [str(line) async for line in examine(parse_run(run_in(tmp_path, checkpoint, *flags)))]


def behind(router_port: int, *addresses: str) -> tuple[str, ...]:
    router = ("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(router_port))
    return (*attach(*addresses), *router, "--update-weight-transfer-mode", "disk-delta")


@pytest.mark.sglang
async def test_engines_behind_a_real_router_are_found_sound_and_each_fault_is_named(tiny_checkpoint, tmp_path):
    router = OutsideRouter(tmp_path / "router.log")
    engines = [OutsideEngine("embedded", tiny_checkpoint, tmp_path / f"outside-{i}.log") for i in range(2)]
    addresses = [engine.address for engine in engines]
    flags = behind(router.port, *addresses)
    try:
        await started(engines)
        (line,) = (found for found in await looked_at(tmp_path, tiny_checkpoint, *flags) if found.startswith("bad"))
        assert "start it, or correct --sglang-router-ip and --sglang-router-port" in line
        await router.start()
        found = await looked_at(tmp_path, tiny_checkpoint, *flags)
        assert {line.split()[0] for line in found} == {"ok"}, found
        assert any(f":{router.port}: has 0 of the 2 engines; the run registers the others" in line for line in found)
        assert sum(line.endswith("written here, seen there") for line in found) == 2, "both are asked"
        control = RouterControl(f"http://127.0.0.1:{router.port}")
        await control.add(f"http://{addresses[1]}", "regular", None)
        while not await control.workers():
            await asyncio.sleep(0.1)
        await control.close()
        found = await looked_at(tmp_path, tiny_checkpoint, *flags)
        assert any("has 1 of the 2 engines" in line for line in found), found
        (line,) = (
            found
            for found in await looked_at(tmp_path, tiny_checkpoint, *behind(router.port, addresses[0]))
            if found.startswith("bad")
        )
        assert f"also sends requests to http://{addresses[1]}: add it to --rollout-external-engine-addrs" in line
    finally:
        await ended([router, *engines])


@pytest.mark.parametrize(
    ("kinds", "fault"),
    [
        (("prefill", "decode", "decode"), None),
        (("prefill",), "without any decode worker: add its address"),
        (("prefill", "decode", "null"), "beside prefill/decode workers"),
    ],
)
async def test_a_prefill_decode_group_is_looked_at_member_by_member_and_as_one(
    tiny_checkpoint, tmp_path, kinds: tuple[str, ...], fault: str | None
):
    members = [FakeMember("default", dtype="float32", device="cpu", disaggregation_mode=kind) for kind in kinds]
    router = FakeRouter()
    for member in members:
        member.refuses, member.refusal = True, "Cannot find any model weights with `/x`"
        await member.start()
    await router.start()
    addresses = [member.url.removeprefix("http://") for member in members]
    try:
        found = await looked_at(tmp_path, tiny_checkpoint, *behind(router.port, *addresses))
        assert sum(line.endswith("written here, seen there") for line in found) == len(members), found
        assert [line for line in found if line.startswith("ok") and ", prefill, " in line]
        bad = [line for line in found if line.startswith("bad")]
        assert (bad == []) if fault is None else (len(bad) == 1 and fault in bad[0]), found
        flags = (*attach(*addresses), "--update-weight-transfer-mode", "disk-delta")
        bad = [line for line in await looked_at(tmp_path, tiny_checkpoint, *flags) if line.startswith("bad")]
        assert len(bad) == sum(kind != "null" for kind in kinds), "none can answer alone"
        assert all("--sglang-router-ip and --sglang-router-port" in line for line in bad)
    finally:
        for part in (router, *members):
            await part.end()


def may_mount() -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif("not may_mount()", reason="needs a mount namespace of its own (root)")
def test_an_engine_that_sees_another_file_system_under_the_same_path_is_found_out(capsys, tiny_checkpoint, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    apart = OutsideEngine("embedded", tiny_checkpoint, tmp_path / "engine.log")
    mounted = f"mount -t tmpfs none {shared} && exec {sys.executable} -m miles_disagg.cli engine"
    mounted += f" --model-path {tiny_checkpoint} --port {apart.port}"
    asyncio.run(apart.start(command=["unshare", "-m", "sh", "-c", mounted]))
    try:
        flags = ("--update-weight-transfer-mode", "disk-delta", "--update-weight-local-checkpoint-dir", str(shared))
        status, lines = examined(capsys, tiny_checkpoint, tmp_path, *attach(apart.address), *flags)
        assert status == 1
        (line,) = (line for line in lines if "not seen there" in line)
        assert str(shared) in line
        assert "--update-weight-local-checkpoint-dir" in line
        assert list(shared.iterdir()) == []
    finally:
        assert apart.process is not None
        asyncio.run(apart.process.stop())
