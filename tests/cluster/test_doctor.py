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
from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
from tests.cluster.attached import OutsideEngine

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory) -> Iterator[OutsideEngine]:
    outside = OutsideEngine(request.param, tiny_checkpoint, tmp_path_factory.mktemp("engine") / "engine.log")
    asyncio.run(outside.start())
    yield outside
    assert outside.process is not None
    assert outside.process.exit_code is None, outside.process.log_tail()
    asyncio.run(outside.process.stop())


def examined(capsys, checkpoint: Path, tmp_path: Path, *flags: str) -> tuple[int, list[str]]:
    """Exit status and lines of the command, for a run in `tmp_path`."""
    argv = ["doctor", "--hf-checkpoint", str(checkpoint), "--task", "addition", "--task-size", "64"]
    argv += ["--num-rollout", "2", "--rollout-max-response-len", "6", "--rollout-batch-size", "4"]
    argv += ["--trainer-device", "cpu", "--run-dir", str(tmp_path / "run"), *flags]
    status = cli.main(argv)
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
