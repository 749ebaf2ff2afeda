"""A stock SGLang server in the fleet, by the commands an operator uses: what it serves is what was published."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file

from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
from miles_disagg.engine.launch import EngineProcess
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import serialize
from tests.engine import sglang_env
from tests.engine.checkpoints import make_checkpoint
from tests.fakes.publishing import step
from tests.fakes.service import Service, serves
from tests.service.test_service import trainer_of


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_weights_corrupted_inside_a_stock_sglang_server_are_found_refused_and_loaded_again(
    tmp_path: Path,
) -> None:
    base = make_checkpoint(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    python = await asyncio.to_thread(sglang_env.python)
    args = ["--dtype", "float32"]
    spec = launch.sglang(base, python=python, args=args, port=free_port(), device="cpu", weight_version="default")
    process = EngineProcess.start(spec, tmp_path / "sglang.log")
    try:
        await process.wait_ready(240.0)
        trainer = await trainer_of(tmp_path / "store", base, "run")
        async with Service(tmp_path / "service", str(tmp_path / "store"), base) as service:
            replica = service.replicas["a"] = service.start(
                "replica", "--engine", process.url, "--store", service.store, "--gateway", service.url,
                "--local-checkpoint-dir", str(tmp_path / "a"), "--replica-id", "a", "--verify-interval", "0.5",
                "--verbose", log="a-replica",
            )  # fmt: skip
            await replica.ready(120)
            await service.until(lambda fleet: "a" in fleet and bool(fleet["a"]["fingerprint"]), seconds=120)
            first = (await service.fleet())["a"]["fingerprint"]
            await trainer.publish(step(tensors, 1))
            await service.until(
                lambda fleet: serves("run", 1, "a")(fleet) and fleet["a"]["fingerprint"] not in (None, first), 120
            )
            answer = await service.generate("r", "run", weight_version={"exact_version": 1})
            assert answer["meta_info"]["weight_version_spans"] == [[0, 1]]
            published = (await service.fleet())["a"]["fingerprint"]
            engine = SGLangEngine(process.url)
            name = "model.layers.1.self_attn.k_proj.weight"
            spoiled = serialize([(name, tensors[name] + 1)])
            stamp = "run/weight_v000001"
            await engine.update_from_tensor([spoiled], load_format=None, version=stamp, flush_cache=False)
            await engine.close()
            says = f"live weights are not the published {stamp}: 1 tensor(s), {name}"
            await service.until(lambda _: says in replica.log.read_text(), seconds=120)
            await service.until(
                lambda fleet: serves("run", 1, "a")(fleet) and fleet["a"]["fingerprint"] == published, seconds=120
            )
    finally:
        await process.stop()
