"""What a running engine says of itself, and the differences that make it unusable, each by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_disagg.engine.discovery import ModelFacts, Wanted, differences, discover, discovered
from miles_disagg.engine.inplace import HOOK
from miles_disagg.engine.sglang import SGLangEngine

MODEL = ModelFacts(("Qwen3ForCausalLM",), "qwen3", "bfloat16", {"vocab_size": 512, "hidden_size": 64})
WANTED = Wanted(MODEL, "bfloat16", "disk", tokens=256)
INFO = {"version": "0.5.17", "weight_version": "default", "dtype": "auto", "device": "cuda", "tp_size": 2}
SERVED = {"model_path": "/nowhere", "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def problems(wanted: Wanted = WANTED, served: dict[str, Any] | None = None, **info: Any) -> list[str]:
    return differences(discovered("http://engine", {**INFO, **info}, {**SERVED, **(served or {})}), wanted)


def test_sizes_of_an_engine_are_counted_in_gpus_and_in_ranks_of_an_update_group() -> None:
    found = discovered("http://engine", {**INFO, "pp_size": 2, "disaggregation_mode": "null"}, SERVED)
    assert (found.gpus, found.ranks, found.worker_type) == (4, 2, "regular")
    assert replace(found, dp=2).gpus == 8
    assert replace(found, dp=2, dp_attention=True).gpus == 4
    assert replace(found, on_gpu=False).gpus == 0
    assert not differences(found, WANTED)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"disaggregation_mode": "prefill"}, "worker type is prefill"),
        ({"dtype": "float16"}, "dtype is float16, the run's is bfloat16"),
        ({"context_length": 255}, "context_length is 255, the run needs 256 tokens"),
    ],
)
def test_what_an_engine_cannot_do_for_a_run_is_named(info: dict[str, Any], said: str) -> None:
    (problem,) = problems(**info)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures are LlamaForCausalLM, the checkpoint's are Qwen3"),
        ({"architectures": None, "model_type": "llama"}, "model_type is llama, the checkpoint's is qwen3"),
        ({"is_generation": False}, "it does not generate"),
    ],
)
def test_another_model_is_named(served: dict[str, Any], said: str) -> None:
    (problem,) = problems(served=served)
    assert problem.startswith(said)


def test_a_model_of_another_size_is_seen_where_its_directory_can_be_read(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems(served={"model_path": str(tmp_path)})
    assert problem == f"hidden_size is 128 in its model {tmp_path}, the checkpoint's is 64"


def test_differences_that_do_not_matter_do_not_reject() -> None:
    assert not problems(weight_version="other-run/weight_v000012", max_running_requests=1, tokenizer_path="/else")
    assert not problems(pp_size=2, dp_size=2)  # by disk


@pytest.mark.parametrize("info", [{"pp_size": 2}, {"dp_size": 2}, {"quantization": "fp8"}])
def test_what_cannot_take_a_broadcast_is_refused_for_broadcast_only(info: dict[str, Any]) -> None:
    (problem,) = problems(replace(WANTED, transport="broadcast"), **info)
    assert problem.startswith(next(iter(info)))
    assert "disk transport" in problem
    assert not problems(**info)


def test_what_trainer_ranks_cannot_write_into_is_refused_for_peer_to_peer_only() -> None:
    peer = replace(WANTED, transport="p2p")
    assert not problems(peer, custom_weight_loader=["another.loader", HOOK])
    (problem,) = problems(peer, custom_weight_loader=["another.loader"])
    assert problem.startswith(f"it was not started with --custom-weight-loader {HOOK}")
    assert not problems()
    for info in ({"pp_size": 2}, {"dp_size": 2}, {"quantization": "fp8"}):
        (problem,) = problems(peer, custom_weight_loader=[HOOK], **info)
        assert problem.startswith(next(iter(info)))
        assert problem.endswith("use --update-weight-transfer-mode disk-delta (or disk-full)")


def test_auto_is_resolved_as_sglang_does_it() -> None:
    fp32 = replace(MODEL, dtype="float32")
    (problem,) = problems(Wanted(fp32, "float32", "disk", 1))
    assert problem.startswith("dtype is float16 (auto), the run's is float32: start it with --dtype float32")
    assert not problems(Wanted(fp32, "float16", "disk", 1))


async def test_a_running_engine_is_found_as_what_it_is(engine: SGLangEngine, checkpoints: dict[str, Path]) -> None:
    found = await discover(engine)
    assert (found.gpus, found.ranks, found.worker_type, found.dtype) == (0, 1, "regular", "float32")
    assert found.architectures == ("Qwen3ForCausalLM",)
    for transport in ("broadcast", "disk", "p2p"):
        assert not differences(found, Wanted(ModelFacts.read(checkpoints["base"]), "float32", transport, 128))
