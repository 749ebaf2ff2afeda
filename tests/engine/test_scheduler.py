"""The embedded engine without HTTP: model runner and scheduler in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from miles_disagg.domain.errors import CheckpointError, InvalidRequest, UpdateFailed
from miles_disagg.engine.embedded.requests import Chunk, Limits, Request, parse_generate
from miles_disagg.engine.embedded.runner import ModelRunner
from miles_disagg.engine.embedded.scheduler import Scheduler
from miles_disagg.engine.embedded.text import Text
from miles_disagg.engine.embedded.weights import read_checkpoint
from miles_disagg.engine.inplace.miles_inplace.recorder import read_headers, record
from miles_disagg.engine.tensors import raw_bytes
from miles_disagg.weights.digest import digest
from miles_disagg.weights.transfer.blocks import Block, RankLayout, Storage, blocks_of
from miles_disagg.weights.transfer.layouts import ModelSizes, embedded_layout
from tests.engine import reference
from tests.engine.checkpoints import make_checkpoint

OLD, NEW = "run/weight_v000000", "run/weight_v000001"


class Harness:
    """A scheduler in its thread, and what it announced."""

    def __init__(self, path: Path, **options: Any):
        self.runner = ModelRunner(path, **options)
        text = Text(path)
        self.scheduler = Scheduler(self.runner, text, frozenset(), OLD)
        self._encode: Callable[[str], list[int]] = lambda t: text.tokenizer.encode(t)
        self.chunks: dict[str, list[Chunk]] = {}
        self._done = threading.Condition()
        self.scheduler.start()

    def submit(self, prompts: list[list[int]], rid: str = "r", **params: Any) -> list[Request]:
        raw = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True, **params}
        stream = bool(raw.pop("stream", False))
        body = {"input_ids": prompts, "rid": rid, "sampling_params": raw, "return_logprob": True, "stream": stream}
        limits = Limits(self.runner.vocab_size, self.runner.context_length)
        requests = parse_generate(body, limits, self._encode, self._notify).requests
        self.scheduler.submit(requests).result(10)
        return requests

    def _notify(self, request: Request, chunk: Chunk) -> None:
        with self._done:
            self.chunks.setdefault(request.rid, []).append(chunk)
            self._done.notify_all()

    def wait(self, requests: list[Request]) -> list[list[int]]:
        with self._done:
            assert self._done.wait_for(lambda: all(r.finish_reason for r in requests), 60)
        return [r.output for r in requests]

    def wait_tokens(self, request: Request, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(request.output) < count:  # looked at, since no chunk may be due
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def update(self, path: Path, version: str) -> None:
        checked = self.runner.weights.check(read_checkpoint(path), complete=True)

        def apply() -> None:
            self.runner.weights.apply(checked)
            self.scheduler.version = version

        self.scheduler.update(apply).result(30)


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    running: list[Harness] = []

    def begin(path: Path, **options: Any) -> Harness:
        running.append(Harness(path, **options))
        return running[-1]

    yield begin
    for harness in running:
        assert harness.scheduler.fatal is None
        harness.scheduler.stop()


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35] * 20, [8, 9]]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_architecture_gives_transformers_tokens(
    start: Callable[..., Harness], tmp_path: Path, architecture: str, tied: bool
):
    path = make_checkpoint(tmp_path, architecture=architecture, tied=tied)
    harness = start(path)
    requests = harness.submit(PROMPTS)
    assert harness.wait(requests) == [reference.greedy(path, p, 10)[0] for p in PROMPTS]
    want = reference.greedy(path, PROMPTS[2], 10)[1]
    assert requests[2].logprobs == pytest.approx(want, abs=1e-4)


def test_bfloat16_logprobs_stay_within_bfloat16_of_transformers(start: Callable[..., Harness], tmp_path: Path):
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    harness = start(path)
    assert harness.runner.dtype is torch.bfloat16
    (request,) = harness.submit([PROMPTS[1]])
    harness.wait([request])
    want = reference.logprobs_of(path, PROMPTS[1] + request.output)[len(PROMPTS[1]) - 1 :]
    assert request.logprobs == pytest.approx(want, abs=0.05)


def test_requests_that_come_and_go_do_not_disturb_each_other(
    start: Callable[..., Harness], checkpoints: dict[str, Path]
):
    harness = start(checkpoints["base"], max_running_requests=3)
    plan = [([i + 1, 2 * i + 1, 7], 3 + 5 * (i % 4)) for i in range(14)]
    requests = [harness.submit([prompt], rid=f"q{i}", max_new_tokens=n)[0] for i, (prompt, n) in enumerate(plan)]
    got = harness.wait(requests)
    assert got == [reference.greedy(checkpoints["base"], prompt, n)[0] for prompt, n in plan]


def test_a_full_cache_sends_requests_back_and_they_finish_right(
    start: Callable[..., Harness], checkpoints: dict[str, Path]
):
    harness = start(checkpoints["base"], max_total_tokens=100)
    prompts = [[i + 1] * 10 for i in range(6)]
    requests = harness.submit(prompts, max_new_tokens=40)
    got = harness.wait(requests)
    assert sum(r.retractions for r in requests) > 0
    assert got == [reference.greedy(checkpoints["base"], p, 40)[0] for p in prompts]


def test_a_long_prompt_is_prefilled_in_chunks_to_the_same_result(
    start: Callable[..., Harness], checkpoints: dict[str, Path]
):
    prompt = [(7 * i) % 250 for i in range(130)]
    harness = start(checkpoints["base"], max_prefill_tokens=16)
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 3}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 6}
    requests = parse_generate(body, Limits(512, 512), harness._encode, harness._notify).requests
    harness.scheduler.submit(requests).result(10)
    (output,) = harness.wait(requests)
    assert output == reference.greedy(checkpoints["base"], prompt, 6)[0]
    want = reference.logprobs_of(checkpoints["base"], prompt)[3:]
    assert requests[0].prompt_logprobs == pytest.approx(want, abs=1e-4)


def test_a_seed_fixes_the_tokens_whoever_else_runs(start: Callable[..., Harness], checkpoints: dict[str, Path]):
    harness = start(checkpoints["base"])
    seeded = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 20}
    alone = harness.wait(harness.submit([[1, 2, 3]], rid="a", **seeded))[0]
    noise = harness.submit([[9, i] for i in range(7)], rid="noise", temperature=1.0, max_new_tokens=25)
    crowded = harness.wait(harness.submit([[1, 2, 3]], rid="b", **seeded))[0]
    other = harness.wait(harness.submit([[1, 2, 3]], rid="c", **{**seeded, "sampling_seed": 8}))[0]
    harness.wait(noise)
    assert alone == crowded
    assert alone != other


@pytest.mark.parametrize("interval", [7, 0])
def test_an_in_place_pause_splits_the_stream_exactly_at_the_update(
    start: Callable[..., Harness], checkpoints: dict[str, Path], interval: int
):
    harness = start(checkpoints["base"])
    (request,) = harness.submit([[4, 4]], stream=True, max_new_tokens=200, stream_interval=interval)
    harness.wait_tokens(request, 20)
    harness.scheduler.call(lambda: harness.scheduler.pause("in_place")).result(10)
    at_pause = len(request.output)
    harness.update(checkpoints["other"], NEW)
    assert len(request.output) == at_pause
    harness.scheduler.call(harness.scheduler.resume).result(10)
    harness.wait([request])
    chunks = harness.chunks[request.rid]
    assert max(c.tokens for c in chunks if c.version == OLD) == at_pause
    assert min(c.tokens for c in chunks if c.version == NEW) > at_pause
    if interval == 0:
        assert [c.tokens for c in chunks] == [at_pause, 200], "only the pause and the end are told"


def test_min_new_tokens_holds_off_every_stop_token(start: Callable[..., Harness], checkpoints: dict[str, Path]):
    harness = start(checkpoints["base"])
    stop = reference.greedy(checkpoints["base"], [4, 4], 1)[0]
    params = {"stop_token_ids": stop, "ignore_eos": False, "max_new_tokens": 12}
    (early,) = harness.submit([[4, 4]], rid="early", **params)
    (late,) = harness.submit([[4, 4]], rid="late", min_new_tokens=5, **params)
    harness.wait([early, late])
    assert early.output == stop
    assert len(late.output) > 5
    assert not set(late.output[:5]) & set(stop)


def test_stop_strings_end_the_request_at_the_token_that_completes_them(
    start: Callable[..., Harness], checkpoints: dict[str, Path]
):
    harness = start(checkpoints["base"])
    (free,) = harness.submit([[4, 4]], rid="free", max_new_tokens=60)
    harness.wait([free])
    text = Text(checkpoints["base"])
    whole = text.decode(free.output, free.params)
    stop = next(c for c in whole[3:] if c.isascii() and c.isprintable())
    (cut,) = harness.submit([[4, 4]], rid="cut", max_new_tokens=60, stop=stop)
    harness.wait([cut])
    reason = {"type": "stop", "matched": stop}
    assert cut.finish_reason == reason
    assert cut.output == free.output[: len(cut.output)]
    assert stop in text.decode(cut.output, cut.params)
    assert stop not in text.decode(cut.output[:-1], cut.params)
    assert text.finished(cut.output, cut.params, reason) == whole[: whole.index(stop)]


def test_scoring_a_prompt_generates_nothing(start: Callable[..., Harness], checkpoints: dict[str, Path]):
    harness = start(checkpoints["base"])
    (request,) = harness.submit([[1, 2, 3]], max_new_tokens=0)
    harness.wait([request])
    assert request.output == []
    assert request.finish_reason == {"type": "length", "length": 0}


def test_a_request_id_in_flight_is_refused_and_can_be_used_again_later(
    start: Callable[..., Harness], checkpoints: dict[str, Path]
):
    harness = start(checkpoints["base"])
    first = harness.submit([[1]], rid="same", max_new_tokens=300)
    with pytest.raises(InvalidRequest, match="Duplicate"):
        harness.submit([[1]], rid="same")
    harness.scheduler.call(lambda: harness.scheduler.abort("same")).result(10)
    harness.wait(first)
    harness.wait(harness.submit([[1]], rid="same"))


# --- weights ------------------------------------------------------------------------------------------


def test_a_checkpoint_is_checked_before_anything_is_touched(checkpoints: dict[str, Path]):
    runner = ModelRunner(checkpoints["base"])
    before = runner.weights.digests()
    other = read_checkpoint(checkpoints["other"])
    name = "model.norm.weight"
    broken = {
        "missing": ({n: t for n, t in other.items() if n != name}, name),
        "unknown": ({**other, "model.extra": torch.zeros(1)}, "model.extra"),
        "shape": ({**other, name: torch.zeros(3)}, name),
        "dtype": ({**other, name: torch.zeros(64, dtype=torch.int64)}, name),
    }
    for staged, tensor in broken.values():
        with pytest.raises(UpdateFailed, match=tensor):
            runner.weights.check(staged, complete=True)
    assert runner.weights.digests() == before


def test_tied_copies_are_accepted_if_equal_and_refused_if_not(tmp_path: Path):
    runner = ModelRunner(make_checkpoint(tmp_path, tied=True))
    assert "lm_head.weight" not in runner.weights.digests()
    embedding = runner.weights.live["model.embed_tokens.weight"]
    pair = {"model.embed_tokens.weight": embedding + 1, "lm_head.weight": embedding + 1}
    assert list(runner.weights.check(pair, complete=False)) == ["model.embed_tokens.weight"]
    with pytest.raises(UpdateFailed, match="tied"):
        runner.weights.check({**pair, "lm_head.weight": embedding}, complete=False)


def test_experts_are_served_updated_and_mapped_by_the_names_of_their_checkpoint(start, tmp_path: Path):
    base, other = (make_checkpoint(tmp_path / str(s), architecture="qwen3_moe", seed=s) for s in (0, 1))
    harness = start(base)
    weights, held = harness.runner.weights, read_checkpoint(base)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in held
    assert weights.digests() == {name: digest(raw_bytes(t), "xxh3-128") for name, t in held.items()}
    slots, rows = record(weights, read_headers(str(base)))
    layout = RankLayout("e", *layout_of(slots, rows, {n: tuple(t.shape) for n, t in held.items()}))
    sizes = ModelSizes(512, 64, 128, 2, 4, 2, 16, experts=8, expert_ffn=64)
    formula = embedded_layout(sizes, name="e", dtype="float32")

    def placed(rank: RankLayout) -> dict[str, tuple[int, int]]:
        return {b.tensor: (b.offset, rank.storages[b.storage].elements) for b in rank.blocks}

    assert placed(layout) == placed(formula)
    harness.update(other, NEW)
    requests = harness.submit(PROMPTS[:2])
    assert harness.wait(requests) == [reference.greedy(other, p, 10)[0] for p in PROMPTS[:2]]


def layout_of(slots, rows, shapes) -> tuple[tuple[Storage, ...], tuple[Block, ...]]:
    """What was recorded, as a rank's layout has it."""
    storages = tuple(Storage(s.nbytes // s.dtype.itemsize, s.dtype.itemsize, str(s.dtype)) for s in slots)
    found = [(name, row) for name, own in rows.items() for row in own]
    blocks = (blocks_of(n, shapes[n], r.dims, r.source_offset, r.slot, r.slot_offset) for n, r in found)
    return storages, tuple(b for own in blocks for b in own)


def test_a_truncated_or_incomplete_checkpoint_is_not_served(tmp_path: Path):
    path = make_checkpoint(tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ModelRunner(path)
    file.unlink()
    with pytest.raises(CheckpointError):
        ModelRunner(path)
    save_file({n: t for n, t in load(whole).items() if n != "model.norm.weight"}, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        ModelRunner(path)
    file.write_bytes(whole)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelRunner(path)


def test_calls_whose_callers_have_gone_are_not_run_and_harm_nothing(start, checkpoints):
    harness, busy, ran = start(checkpoints["base"]), threading.Event(), []
    blocked = harness.scheduler.call(lambda: busy.wait(10))  # as an engine that was stopped for a while
    gone = [harness.scheduler.call(lambda: ran.append("call")), harness.scheduler.update(lambda: ran.append("update"))]
    assert all(future.cancel() for future in gone)
    busy.set()
    assert blocked.result(10)
    requests = harness.submit(PROMPTS[:1])
    assert len(harness.wait(requests)[0]) == 10
    assert ran == []
