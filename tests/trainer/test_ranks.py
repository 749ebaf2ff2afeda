"""Real trainer ranks beyond parity: precision, layouts of micro-batches, bad input, checkpoints, broadcast.

Jobs are gathered so that each world size starts its processes once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_disagg.config.machine import free_port
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.launch import EngineProcess, embedded
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.local import LocalStore
from miles_disagg.store.versions import VersionStore
from miles_disagg.trainer.base import LossSpec, OptimizerSpec, TrainerSpec, TrainSample
from tests.engine.checkpoints import make_tokenizer
from tests.fakes.publishing import on_disk
from tests.trainer.models import Reference, make_batch, make_checkpoint
from tests.trainer.ranks import Job, run_ranks
from tests.trainer.scenarios import vocab_case

VOCAB = 61
BATCH = make_batch(6, VOCAB)
ADAM = OptimizerSpec(lr=1e-3, weight_decay=0.01, clip_grad=0.5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    out = {
        "fp32": make_checkpoint(root / "fp32", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True),
        "bf16": make_checkpoint(root / "bf16", "qwen2", vocab_size=VOCAB, dtype=torch.bfloat16),
        "tied": make_checkpoint(
            root / "tied", "qwen3", vocab_size=VOCAB, tie_word_embeddings=True, dtype=torch.bfloat16
        ),
        "engine": make_checkpoint(root / "engine", "qwen3", vocab_size=260, tie_word_embeddings=True),
        "experts": make_checkpoint(root / "experts", "qwen3_moe", vocab_size=VOCAB),
    }
    make_tokenizer().save_pretrained(out["engine"])
    broken = make_checkpoint(root / "broken", "llama", vocab_size=VOCAB)
    index = broken / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"].pop("model.norm.weight")
    (broken / shard).rename(broken / "hidden")
    out["truncated"] = broken
    wide = make_checkpoint(root / "wide", "llama", vocab_size=VOCAB)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    out["wrong shape"] = wide
    return out


@pytest.fixture(scope="module")
def engine_url(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    process = EngineProcess.start(embedded(models["engine"], port=free_port()), log)
    try:
        asyncio.run(process.wait_ready(120))
        yield process.url
    finally:
        asyncio.run(process.stop())


def spec_of(path: Path, tp: int = 1, pp: int = 1, dtype: str = "fp32", **changes: Any) -> TrainerSpec:
    options: dict[str, Any] = {"max_tokens_per_micro_batch": 60, "optimizer": ADAM, "meet_timeout": 60.0} | changes
    return TrainerSpec(str(path), tp, pp, dtype, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "step_2"


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], saved: Path) -> dict[str, list[Any]]:
    """Jobs of one rank."""
    fp32, sequences = spec_of(models["fp32"]), LossSpec(aggregate="sequence-mean")
    nan = [dataclasses.replace(s, advantage=float("nan")) for s in BATCH]
    policy = {"batch": BATCH, "global_batch_size": 6}
    return run_ranks(1, {
        "small micro-batches": Job("policy", policy | {"spec": spec_of(models["fp32"], max_tokens_per_micro_batch=24)}),
        "one micro-batch": Job("policy", policy | {"spec": spec_of(models["fp32"], max_tokens_per_micro_batch=999)}),
        "sequence-mean": Job("policy", policy | {"spec": spec_of(models["fp32"], loss=sequences)}),
        "bf16": Job("sft", {"spec": spec_of(models["bf16"], dtype="bf16"), "batch": BATCH, "steps": 3}),
        "selective": Job("sft", {"spec": spec_of(models["fp32"], recompute="selective"), "batch": BATCH, "steps": 1}),
        "transformers": Job("transformers_after_megatron", {"spec": fp32, "sample": BATCH[0]}),
        "saved": Job("save_and_go_on", {"spec": fp32, "batch": BATCH, "directory": str(saved)}),
        "nan": Job("raised", {"spec": fp32, "batch": nan}),
        "too long": Job("raised", {"spec": fp32, "batch": [TrainSample([1] * 90, 1, [0.0] * 89, 1.0)]}),
        "truncated": Job("raised", {"spec": spec_of(models["truncated"])}),
        "wrong shape": Job("raised", {"spec": spec_of(models["wrong shape"])}),
        "not a checkpoint": Job("raised", {"spec": spec_of(models["fp32"] / "nowhere")}),
        "tp 3": Job("raised", {"spec": spec_of(models["fp32"], tp=3)}),
        "experts, tp 2": Job("raised", {"spec": spec_of(models["experts"], tp=2)}),
        "world": Job("raised", {"spec": spec_of(models["fp32"], tp=2)}),
        "vocab": Job("vocab_parallel", {"vocab_size": 61, "padded": 61, "temperature": 0.7}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


def publishing(models: dict[str, Path], stores: Path, **layout: int) -> Job:
    """Sparse steps, as reinforcement learning takes them."""
    spec = spec_of(models["tied"], dtype="bf16", optimizer=OptimizerSpec(lr=3e-5), **layout)
    name = "".join(f"{axis}{size}" for axis, size in layout.items())
    return Job("published", {"spec": spec, "batch": BATCH, "store": str(stores / name / "store"), "versions": 2})


@pytest.fixture(scope="module")
def pair(
    alone: Any,
    models: dict[str, Path],
    saved: Path,
    engine_url: str,
    stores: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[Any]]:
    """Jobs of two ranks, after those of one: they load what that one saved."""
    load = {"batch": BATCH, "directory": str(saved)}
    again = {"batch": BATCH, "directory": str(tmp_path_factory.mktemp("again") / "step_2")}
    plain = {"batch": BATCH, "directory": str(tmp_path_factory.mktemp("plain") / "step_2")}
    plainly = spec_of(models["fp32"], use_distributed_optimizer=False)
    send = {"batch": BATCH, "engine_url": engine_url, "version": "r/weight_v000001"}
    few = {"batch": BATCH[:1], "global_batch_size": 1}
    experts = {"batch": BATCH, "directory": str(tmp_path_factory.mktemp("experts") / "step_2")}
    spread = spec_of(models["experts"], expert_parallel=2)
    return run_ranks(2, {
        "loaded at TP2": Job("load_and_go_on", load | {"spec": spec_of(models["fp32"], tp=2)}),
        "loaded at PP2": Job("load_and_go_on", load | {"spec": spec_of(models["fp32"], pp=2)}),
        "loaded at DP2": Job("load_and_go_on", load | {"spec": spec_of(models["fp32"])}),
        "fresh at TP2": Job("load_and_go_on", load | {"spec": spec_of(models["fp32"], tp=2), "fresh": True}),
        "fresh at DP2": Job("load_and_go_on", load | {"spec": spec_of(models["fp32"]), "fresh": True}),
        "saved at PP2": Job("save_and_go_on", again | {"spec": spec_of(models["fp32"], pp=2)}),
        "PP2 to PP2": Job("load_and_go_on", again | {"spec": spec_of(models["fp32"], pp=2)}),
        "PP2 to fresh PP2": Job("load_and_go_on", again | {"spec": spec_of(models["fp32"], pp=2), "fresh": True}),
        "PP2 to DP2": Job("load_and_go_on", again | {"spec": spec_of(models["fp32"])}),
        "saved, plain": Job("save_and_go_on", plain | {"spec": plainly}),
        "plain to fresh plain": Job("load_and_go_on", plain | {"spec": plainly, "fresh": True}),
        "plain to plain": Job("load_and_go_on", plain | {"spec": plainly}),
        "saved at EP2": Job("save_and_go_on", experts | {"spec": spread}),
        "EP2 to fresh EP2": Job("load_and_go_on", experts | {"spec": spread, "fresh": True}),
        "EP2 to DP2": Job("load_refused", experts | {"spec": spec_of(models["experts"])}),
        "bf16, TP2": Job("sft", {"spec": spec_of(models["bf16"], tp=2, dtype="bf16"), "batch": BATCH, "steps": 3}),
        "bf16, PP2": Job("sft", {"spec": spec_of(models["bf16"], pp=2, dtype="bf16"), "batch": BATCH, "steps": 3}),
        "one sample, DP2": Job("policy", few | {"spec": spec_of(models["fp32"])}),
        "one sample, TP2": Job("policy", few | {"spec": spec_of(models["fp32"], tp=2)}),
        "vocab": Job("vocab_parallel", {"vocab_size": 61, "padded": 62, "temperature": 0.7}),
        "vocab, a rank of padding": Job("vocab_parallel", {"vocab_size": 3, "padded": 8, "temperature": 1.0}),
        "broadcast PP2": Job("broadcast", send | {"spec": spec_of(models["engine"], pp=2)}),
        "published at PP2": publishing(models, stores, pp=2),
        "published at TP2": publishing(models, stores, tp=2),
    })  # fmt: skip


def check_same_steps(a: dict[str, Any], b: dict[str, Any], rel: float = 1e-5) -> None:
    for x, y in zip(a["steps"], b["steps"], strict=True):
        for key in set(x) - {"train/micro_batches"}:
            assert x[key] == pytest.approx(y[key], rel=rel, abs=1e-7), key


def test_metrics_and_weights_do_not_depend_on_the_micro_batches(alone: dict[str, list[Any]]) -> None:
    small, one = alone["small micro-batches"][0], alone["one micro-batch"][0]
    assert small["steps"][0]["train/micro_batches"] > one["steps"][0]["train/micro_batches"] == 1
    check_same_steps(small, one)
    for name, raw in one["trained"].items():
        np.testing.assert_allclose(small["trained"][name].view(np.float32), raw.view(np.float32), atol=2e-5)


def test_sequence_mean_is_another_loss(alone: dict[str, list[Any]]) -> None:
    by_token, by_sequence = alone["one micro-batch"][0]["steps"][0], alone["sequence-mean"][0]["steps"][0]
    assert by_token["train/loss"] != pytest.approx(by_sequence["train/loss"], rel=1e-3)
    assert by_token["train/entropy"] == pytest.approx(by_sequence["train/entropy"], rel=1e-5)


def test_fewer_samples_than_ranks_train_as_on_one_rank(pair: dict[str, list[Any]]) -> None:
    check_same_steps(pair["one sample, DP2"][0], pair["one sample, TP2"][0], rel=1e-4)


def test_selective_recompute_changes_nothing(alone: dict[str, list[Any]], models: dict[str, Path]) -> None:
    reference = Reference(models["fp32"], ADAM)
    loss = reference.sft_loss(BATCH)
    step = alone["selective"][0]["steps"][0]
    assert step["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(reference.step(loss), rel=1e-4)


@pytest.mark.parametrize("job", ["bf16", "bf16, TP2", "bf16, PP2"])
def test_bf16_export_is_bit_exact_and_training_follows_fp32(
    alone: dict[str, list[Any]], pair: dict[str, list[Any]], models: dict[str, Path], job: str
) -> None:
    from safetensors.torch import load_file

    results = (alone | pair)[job] if job == "bf16" else pair[job]
    found = {k: v for r in results for k, v in r["imported"].items()}
    expected = {k: v for file in models["bf16"].glob("*.safetensors") for k, v in load_file(file).items()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == torch.bfloat16
        assert np.array_equal(found[name], tensor.flatten().view(torch.uint8).numpy()), name
    reference = Reference(models["bf16"], ADAM)
    for step in range(3):
        loss = reference.sft_loss(BATCH)
        reference.step(loss)
        assert results[0]["steps"][step]["train/loss"] == pytest.approx(loss.item(), rel=0.01)


def test_transformers_is_right_in_a_process_that_has_the_shim(
    alone: dict[str, list[Any]], models: dict[str, Path]
) -> None:
    expected = Reference(models["fp32"], ADAM).logits(BATCH[0]).detach().numpy()
    np.testing.assert_allclose(alone["transformers"][0], expected, atol=1e-5)


CONTINUED = [
    *("loaded at TP2", "loaded at PP2", "loaded at DP2", "PP2 to PP2", "PP2 to DP2", "plain to plain"),
    *("fresh at TP2", "fresh at DP2", "PP2 to fresh PP2", "plain to fresh plain"),  # as a run that was restarted
]


@pytest.mark.parametrize("job", CONTINUED)
def test_a_checkpoint_continues_the_same_run_under_another_layout(
    alone: dict[str, list[Any]], pair: dict[str, list[Any]], job: str
) -> None:
    straight = alone["saved"][0]
    check_same_steps(straight, pair[job][0], rel=5e-5)
    trained = {k: v for r in pair[job] for k, v in r["trained"].items()}
    assert set(trained) == set(straight["trained"])
    for name, raw in straight["trained"].items():
        np.testing.assert_allclose(trained[name].view(np.float32), raw.view(np.float32), atol=2e-5, err_msg=name)


def test_a_checkpoint_is_whole_and_never_overwritten(alone: dict[str, list[Any]], saved: Path) -> None:
    job = alone["saved"][0]
    assert job["early"] is False, "it appeared before it was written"
    assert "the checkpoint before this one is still being written" in job["busy"]
    assert "exists" in job["again"]
    assert [p.name for p in saved.parent.iterdir()] == [saved.name], "no partial directory is left"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("nan", "FloatingPointError: loss, pg_loss, gradient not finite in optimizer step 0: the step was not applied"),
        ("too long", "ValueError: sample 0 has 90 tokens, more than max_tokens_per_micro_batch 60"),
        ("truncated", "CheckpointError: "),
        ("wrong shape", "CheckpointError: shape is [32, 48], the configuration needs [32, 96]"),
        ("not a checkpoint", "CheckpointError: is not a Hugging Face checkpoint directory: no config.json"),
        ("tp 3", "ValueError: --tensor-model-parallel-size 3 does not divide the model's num_attention_heads 4"),
        ("experts, tp 2", "ValueError: --tensor-model-parallel-size 2: a mixture of experts is trained without"),
        ("world", "ValueError: 1 trainer ranks are no multiple of TP 2 x PP 1"),
    ],
)
def test_bad_input_is_a_clear_error_and_moves_no_weight(alone: dict[str, list[Any]], job: str, words: str) -> None:
    assert words in alone[job][0]


@pytest.mark.parametrize(
    ("job", "vocab_size", "padded", "temperature"),
    [("alone", 61, 61, 0.7), ("vocab", 61, 62, 0.7), ("vocab, a rank of padding", 3, 8, 1.0)],
)
def test_vocab_parallel_logprobs_entropy_and_gradients(
    alone: dict[str, list[Any]], pair: dict[str, list[Any]], job: str, vocab_size: int, padded: int, temperature: float
) -> None:
    results = alone["vocab"] if job == "alone" else pair[job]
    logits, targets, weights = vocab_case(vocab_size, padded)
    logits.requires_grad_()
    logp = torch.log_softmax(logits[:, :vocab_size] / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    (chosen * weights[0] + entropy * weights[1]).sum().backward()
    assert logits.grad is not None
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["logp"], chosen.detach().numpy(), atol=2e-6)
        np.testing.assert_allclose(result["entropy"], entropy.detach().numpy(), atol=2e-6)
        np.testing.assert_allclose(result["grad"], logits.grad.chunk(len(results), 1)[rank].numpy(), atol=2e-6)
        assert result["untouched"], "the logits must not be changed in place"


def test_experts_that_are_spread_go_on_from_their_checkpoint_and_nobody_else_does(pair: dict[str, list[Any]]) -> None:
    saved, loaded = pair["saved at EP2"], pair["EP2 to fresh EP2"]
    for a, b in zip(saved, loaded, strict=True):
        check_same_steps(a, b)
    for name, raw in saved[0]["trained"].items():
        assert np.array_equal(raw, loaded[0]["trained"][name]), name
    assert all("was saved with --expert-model-parallel-size 2: 1 cannot" in said for said in pair["EP2 to DP2"])


async def test_an_engine_serves_a_pipelined_trainers_export_bit_for_bit(
    pair: dict[str, list[Any]], engine_url: str
) -> None:
    exported = {k: v for digests in pair["broadcast PP2"] for k, v in digests.items()}
    assert all(pair["broadcast PP2"]), "both stages are sources"
    engine = SGLangEngine(engine_url)
    assert await engine.weights_digest() == exported
    assert (await engine.model_info())["weight_version"] == "r/weight_v000001"
    await engine.close()


def check_published(results: list[list[dict[str, np.ndarray]]], store: Path, base: Path, sources: int) -> None:
    """What a replica builds of each version is what the ranks exported, each tensor in one shard, once."""
    versions = VersionStore(LocalStore(store))
    stager = DiskStager(versions, store.with_name("replica"), base, reader="r", workers=1)
    for version, parts in enumerate(zip(*results, strict=True), 1):
        exported = {name: raw for part in parts for name, raw in part.items()}
        assert len(exported) == sum(len(part) for part in parts)
        built = stager.materialize_blocking(VersionRef("run", version))
        assert on_disk(built.path) == {name: raw.tobytes() for name, raw in exported.items()}
        index = versions.index(VersionRef("run", version))
        assert index is not None
        assert len(index.files) == sources
    assert len(exported["model.embed_tokens.weight"]) == 2 * 32 * VOCAB, "no padding"
    assert "lm_head.weight" not in exported
    stager.close()


@pytest.mark.parametrize(("layout", "sources"), [("pp2", 2), ("tp2", 1)])
def test_a_replica_builds_what_real_ranks_published_as_deltas(
    pair: dict[str, list[Any]], models: dict[str, Path], stores: Path, layout: str, sources: int
) -> None:
    results = pair[f"published at {layout.upper()}"]
    check_published(results, stores / layout / "store", models["tied"], sources)


@pytest.mark.slow
def test_padding_and_a_tied_copy_on_the_last_stage_leave_no_trace_in_a_delta(
    models: dict[str, Path], stores: Path
) -> None:
    results = run_ranks(4, {"published": publishing(models, stores, tp=2, pp=2)})["published"]
    check_published(results, stores / "tp2pp2" / "store", models["tied"], 2)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(models: dict[str, Path]) -> None:
    from miles_disagg.domain.errors import DeadlineExceeded
    from miles_disagg.trainer.base import RankSpec
    from miles_disagg.trainer.megatron.parallel import meet

    with pytest.raises(DeadlineExceeded, match=r"all trainer ranks to meet at 127.0.0.1:\d+: ranks \[1, 2\] of 3"):
        meet(RankSpec(0, 3, "127.0.0.1", free_port()), timeout=0.5)
    with pytest.raises(DeadlineExceeded, match="trainer rank 0 to listen on"):
        meet(RankSpec(1, 3, "127.0.0.1", free_port()), timeout=0.5)
