"""An engine host without Ray: what becomes of an engine process that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from miles_disagg.replica.staging import DiskStager
from miles_disagg.rollout.host import EngineHost, HostSpec
from miles_disagg.rollout.processes import EngineCommand
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource
from tests.cluster import processes
from tests.fakes.publishing import FakeTrainer, step


@pytest.mark.slow
async def test_an_engine_that_hangs_for_good_is_killed_and_started_again_at_the_newest_version(tmp_path: Path) -> None:
    import safetensors.torch

    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    base = tmp_path / "base"
    make_model(Recipe(hidden_size=64, layers=2)).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", ranks=1)
    for source in trainer.sources:
        source.source._companions = (base / "config.json", base / "tokenizer.json")
    await trainer.claim()
    store = VersionStore(open_store(str(tmp_path / "store")))
    command = EngineCommand("embedded", str(base), "cpu", tmp_path / "engine.log")
    host = EngineHost(
        HostSpec("r", None, command, hang_limit=4.0),
        source=PollingSource(store),
        stager=lambda: DiskStager(store, tmp_path / "host", base, reader="r"),
        sink=None,
    )
    await host.start()
    try:
        replica = host.replica
        assert replica is not None
        await until(lambda: replica.ready, 60)
        (engine,) = set(processes.with_text(str(base), "cmdline")) - set(processes.with_text("guard.py", "cmdline"))
        os.kill(engine, signal.SIGSTOP)
        await until(lambda: not replica.ready, 60)
        tensors = safetensors.torch.load_file(base / "model.safetensors")
        ref = (await trainer.publish(step(tensors, 1))).ref
        await until(lambda: replica.ready and replica.applied == ref, 60)
        assert host.restarts == 1
        assert engine not in processes.with_text(str(base), "cmdline")
    finally:
        await host.stop(0.0)


async def until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.05)
