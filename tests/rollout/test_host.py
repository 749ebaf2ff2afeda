"""An engine host without Ray: an engine process that hangs, and a model whose weights cannot be written in place."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_disagg.domain.errors import EngineError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.rollout.host import EngineHost, HostSpec
from miles_disagg.rollout.processes import EngineCommand
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource
from tests.cluster import processes
from tests.engine import reference, sglang_env
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


def persimmon(path: Path) -> Path:
    """A model whose query, key and value rows SGLang's loader puts into another order, which no view can do."""
    import torch
    from transformers import PersimmonConfig, PersimmonForCausalLM

    from tests.engine.checkpoints import make_tokenizer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
    }
    config = PersimmonConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.1)
    PersimmonForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.sglang
async def test_a_model_that_cannot_be_mapped_is_said_to_be_reloaded_and_is(tmp_path: Path) -> None:
    import safetensors.torch

    base = persimmon(tmp_path / "base")
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", ranks=1)
    await trainer.claim()
    store = VersionStore(open_store(str(tmp_path / "store")))
    args = ("--dtype", "float32")
    command = EngineCommand("sglang", str(base), "cpu", tmp_path / "engine.log", str(sglang_env.python()), args)
    spec = HostSpec("r", VersionRef("run", 0), command, activation="auto", checkpoint=base, start_timeout=240.0)

    def host_of(spec: HostSpec) -> EngineHost:
        stager = lambda: DiskStager(store, tmp_path / spec.replica_id, base, reader=spec.replica_id)  # noqa: E731
        return EngineHost(spec, source=PollingSource(store), stager=stager, sink=None)

    host = host_of(spec)
    await host.start()
    try:
        replica = host.replica
        assert replica is not None
        assert host.activation.startswith("reload: rank 0: "), host.activation
        assert "query_key_value.bias, which is not a view" in host.activation
        strict = replace(spec, command=None, engine_url=replica.engine.url, replica_id="s", activation="in-place")
        with pytest.raises(EngineError, match=r"--activation in-place: .*query_key_value.*use --activation reload"):
            await host_of(strict).start()
        tensors = step(safetensors.torch.load_file(base / "model.safetensors"), 1)
        ref = (await trainer.publish(tensors)).ref
        await until(lambda: replica.ready and replica.applied == ref, 60)
        assert host.status()["loader"] is None
        new = tmp_path / "new"
        shutil.copytree(base, new)
        safetensors.torch.save_file(tensors, new / "model.safetensors", {"format": "pt"})
        params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        answer = await replica.engine.generate({"input_ids": [5, 80, 33], "sampling_params": params})
        assert answer["output_ids"] == reference.greedy(new, [5, 80, 33], 12)[0]
    finally:
        await host.stop(0.0)


async def until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.05)
