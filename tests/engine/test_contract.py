"""What every engine behind the port does, run on the embedded engine and (marked `sglang`) on real SGLang.

Both run in fp32 on the CPU. Stated tolerance: greedy tokens equal transformers' exactly, logprobs within 2e-4.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import EngineError, UpdateFailed
from miles_disagg.engine import process_group
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import dtype_name, flatten, serialize
from miles_disagg.replica.assemble import GenerateAssembler
from tests.engine import reference
from tests.engine.conftest import BASE, Server

NEXT = "run/weight_v000001"
TOLERANCE = 2e-4
PROMPT = [5, 80, 33, 7, 120]
LONG = 450


def greedy(new: int = 12, **extra: Any) -> dict[str, Any]:
    return {"sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}, **extra}


async def tokens_of(engine: SGLangEngine, prompt: list[int] = PROMPT, new: int = 12, **extra: Any) -> list[int]:
    return (await engine.generate(greedy(new, input_ids=prompt, **extra)))["output_ids"]


async def collect(engine: SGLangEngine, body: dict[str, Any], at: int = 0, event: asyncio.Event | None = None):
    """What a stream had brought after each of its chunks; sets `event` once `at` tokens were seen."""
    chunks, assembler = [], GenerateAssembler(body, "contract")
    async for chunk in engine.stream(body):
        so_far = assembler.add(chunk)
        assert so_far is not None
        chunks.append(copy.deepcopy(so_far))
        if event is not None and len(so_far["output_ids"]) >= at:
            event.set()
    return chunks


async def start_stream(engine: SGLangEngine, new: int = LONG, at: int = 5, prompt: list[int] = PROMPT, **extra: Any):
    """A stream that has produced at least `at` tokens and goes on."""
    event = asyncio.Event()
    task = asyncio.create_task(collect(engine, greedy(new, input_ids=prompt, **extra), at, event))
    await asyncio.wait_for(event.wait(), 60)
    return task


def close(got: list[float], want: list[float]) -> bool:
    return len(got) == len(want) and all(abs(a - b) <= TOLERANCE for a, b in zip(got, want, strict=True))


# --- generation -----------------------------------------------------------------------------------


async def test_greedy_tokens_and_logprobs_are_those_of_transformers(engine: SGLangEngine, checkpoints: dict[str, Path]):
    result = await engine.generate(greedy(24, input_ids=PROMPT, return_logprob=True))
    tokens, logprobs = reference.greedy(checkpoints["base"], PROMPT, 24)
    meta = result["meta_info"]
    assert result["output_ids"] == tokens
    assert [t for _, t, _ in meta["output_token_logprobs"]] == tokens
    assert close([lp for lp, _, _ in meta["output_token_logprobs"]], logprobs)
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (5, 24, BASE)


async def test_logprobs_of_the_prompt_are_returned_from_where_they_are_asked_for(
    engine: SGLangEngine, checkpoints: dict[str, Path]
):
    body = greedy(1, input_ids=PROMPT, return_logprob=True, logprob_start_len=0)
    entries = (await engine.generate(body))["meta_info"]["input_token_logprobs"]
    assert [t for _, t, _ in entries] == PROMPT
    assert entries[0][0] is None
    assert close([lp for lp, _, _ in entries[1:]], reference.logprobs_of(checkpoints["base"], PROMPT))


async def test_sampled_tokens_carry_the_logprob_at_their_temperature(
    engine: SGLangEngine, checkpoints: dict[str, Path]
):
    params = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 16, "ignore_eos": True}
    result = await engine.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    got = [lp for lp, _, _ in result["meta_info"]["output_token_logprobs"]]
    want = reference.logprobs_of(checkpoints["base"], PROMPT + result["output_ids"], temperature=0.7)
    assert close(got, want[len(PROMPT) - 1 :])


async def test_a_stream_grows_to_the_whole_answer(engine: SGLangEngine):
    body = greedy(20, input_ids=PROMPT, return_logprob=True)
    chunks = await collect(engine, body)
    whole = await engine.generate(body)
    lengths = [len(c["output_ids"]) for c in chunks]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 20
    for chunk in chunks:
        n = len(chunk["output_ids"])
        assert chunk["output_ids"] == whole["output_ids"][:n]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == n
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["text"] == whole["text"]


async def test_a_batch_is_answered_in_order_and_n_gives_a_list(engine: SGLangEngine, checkpoints: dict[str, Path]):
    prompts = [[1, 2, 3], [9] * 17, [200, 4]]
    results = await engine.generate(greedy(6, input_ids=prompts))
    assert [r["output_ids"] for r in results] == [reference.greedy(checkpoints["base"], p, 6)[0] for p in prompts]
    params = {"temperature": 0, "max_new_tokens": 3, "n": 2, "ignore_eos": True}
    twice = await engine.generate({"input_ids": PROMPT, "sampling_params": params})
    assert len(twice) == 2
    assert twice[0]["output_ids"] == twice[1]["output_ids"]


async def test_text_in_and_text_out(engine: SGLangEngine):
    from_text = await engine.generate(greedy(5, text="abc"))
    from_ids = await engine.generate(greedy(5, input_ids=[97, 98, 99]))
    assert from_text["output_ids"] == from_ids["output_ids"]
    assert from_text["text"] == from_ids["text"]


async def test_a_stop_token_ends_the_answer_and_is_counted_but_not_in_the_text(engine: SGLangEngine):
    tokens = await tokens_of(engine)
    stop = tokens[4]
    params = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [stop]}
    result = await engine.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    first = tokens.index(stop)
    assert result["output_ids"] == tokens[: first + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(result["meta_info"]["output_token_logprobs"]) == first + 1


async def test_a_request_beyond_the_context_is_refused_with_400(engine: SGLangEngine):
    with pytest.raises(EngineError, match="context length") as caught:
        await engine.generate(greedy(450, input_ids=[1] * 100))
    assert caught.value.status == 400
    with pytest.raises(EngineError):
        await collect(engine, greedy(450, input_ids=[1] * 100))
    assert await tokens_of(engine, new=2)


# --- ending requests ----------------------------------------------------------------------------------


async def test_abort_by_rid_ends_that_request_with_what_it_has(engine: SGLangEngine):
    one, two = await asyncio.gather(
        start_stream(engine, rid="first", at=2), start_stream(engine, rid="second", at=2, new=40)
    )
    await engine.abort("first")
    last = (await asyncio.wait_for(one, 60))[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 2 <= len(last["output_ids"]) < LONG
    assert len((await asyncio.wait_for(two, 60))[-1]["output_ids"]) == 40


async def test_a_caller_that_goes_away_frees_the_engine(engine: SGLangEngine):
    async for chunk in engine.stream(greedy(LONG, input_ids=PROMPT)):
        if len(chunk["output_ids"]) >= 3:
            break
    for _ in range(100):
        try:
            await engine.flush_cache()  # refused while anything runs
            return
        except EngineError:
            await asyncio.sleep(0.1)
    pytest.fail("the request still runs 10 s after its caller left")


# --- pauses -------------------------------------------------------------------------------------------


async def test_a_request_held_in_place_continues_on_the_new_weights(engine: SGLangEngine, checkpoints: dict[str, Path]):
    stream = await start_stream(engine)
    await engine.pause("in_place")
    await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=False)
    assert not stream.done()
    await engine.resume()
    chunks = await asyncio.wait_for(stream, 60)
    versions = [c["meta_info"]["weight_version"] for c in chunks]
    assert len(chunks[-1]["output_ids"]) == LONG
    assert (versions[0], versions[-1]) == (BASE, NEXT)
    assert versions == sorted(versions)
    switched = versions.index(NEXT)
    before = len(chunks[switched - 1]["output_ids"])
    assert chunks[-1]["output_ids"][:before] == reference.greedy(checkpoints["base"], PROMPT, before)[0]


async def test_requests_wait_while_paused_and_health_answers(engine: SGLangEngine):
    await engine.pause("in_place")
    waiting = asyncio.create_task(tokens_of(engine, new=3))
    await asyncio.sleep(0.3)
    await engine.health(timeout=10)
    assert not waiting.done()
    await engine.resume()
    assert len(await asyncio.wait_for(waiting, 60)) == 3


async def test_abort_pause_ends_requests_with_their_partial_output(engine: SGLangEngine):
    stream = await start_stream(engine)
    await engine.pause("abort")
    last = (await asyncio.wait_for(stream, 60))[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 5 <= len(last["output_ids"]) < LONG
    await engine.resume()
    assert len(await tokens_of(engine, new=3)) == 3


async def test_a_retracted_request_is_recomputed_with_the_new_weights(
    engine: SGLangEngine, server: Server, checkpoints: dict[str, Path]
):
    if server.kind == "sglang":
        with pytest.raises(EngineError, match="--disable-radix-cache"):
            await engine.pause("retract")
        return
    stream = await start_stream(engine, new=60)
    await engine.pause("retract")
    await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=False)
    await engine.resume()
    chunks = await asyncio.wait_for(stream, 60)
    output = chunks[-1]["output_ids"]
    old = [len(c["output_ids"]) for c in chunks if c["meta_info"]["weight_version"] == BASE][-1]
    assert output[:old] == reference.greedy(checkpoints["base"], PROMPT, old)[0]
    # with all KV recomputed, the rest is what the new model alone would say after the same tokens
    assert output[old:] == reference.greedy(checkpoints["other"], PROMPT + output[:old], len(output) - old)[0]


# --- weight updates -------------------------------------------------------------------------------------


async def test_an_update_from_disk_changes_tokens_and_stamp(engine: SGLangEngine, checkpoints: dict[str, Path]):
    await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=True)
    result = await engine.generate(greedy(12, input_ids=PROMPT))
    assert result["output_ids"] == reference.greedy(checkpoints["other"], PROMPT, 12)[0]
    assert result["meta_info"]["weight_version"] == NEXT
    assert (await engine.model_info())["weight_version"] == NEXT
    assert (await engine.server_info())["weight_version"] == NEXT


async def test_a_failed_update_changes_nothing(engine: SGLangEngine, checkpoints: dict[str, Path], tmp_path: Path):
    with pytest.raises(UpdateFailed):
        await engine.update_from_disk(str(tmp_path / "nowhere"), NEXT, flush_cache=True)
    result = await engine.generate(greedy(12, input_ids=PROMPT))
    assert result["output_ids"] == reference.greedy(checkpoints["base"], PROMPT, 12)[0]
    assert result["meta_info"]["weight_version"] == BASE


async def test_an_unpaused_update_waits_for_running_requests(engine: SGLangEngine, checkpoints: dict[str, Path]):
    stream = await start_stream(engine, new=80)
    await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=True)
    chunks = await asyncio.wait_for(stream, 60)
    assert {c["meta_info"]["weight_version"] for c in chunks} == {BASE}
    assert chunks[-1]["output_ids"] == reference.greedy(checkpoints["base"], PROMPT, 80)[0]


async def test_an_update_from_pickled_tensors(engine: SGLangEngine, checkpoints: dict[str, Path]):
    tensors = load_file(checkpoints["other"] / "model.safetensors")
    await engine.update_from_tensor(
        [serialize(list(tensors.items()))], load_format=None, version=NEXT, flush_cache=True
    )
    result = await engine.generate(greedy(12, input_ids=PROMPT))
    assert result["output_ids"] == reference.greedy(checkpoints["other"], PROMPT, 12)[0]
    assert result["meta_info"]["weight_version"] == NEXT


class Sender:
    """Rank 0 of an update group, in a thread as a trainer would be."""

    def __init__(self, name: str):
        self.name, self.port = name, free_port()
        self.group: Any = None

    def _join(self) -> None:
        where = {"master_address": "127.0.0.1", "master_port": self.port, "name": self.name}
        self.group = process_group.join(**where, rank=0, world_size=2, backend="gloo", timeout=60)

    async def meet(self, engine: SGLangEngine) -> None:
        thread = asyncio.create_task(asyncio.to_thread(self._join))
        await engine.init_group(
            master_address="127.0.0.1",
            master_port=self.port,
            rank_offset=1,
            world_size=2,
            group_name=self.name,
            backend="gloo",
        )
        await thread

    async def send(self, tensors: list[torch.Tensor]) -> None:
        def run() -> None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self.group)

        await asyncio.to_thread(run)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_an_update_through_a_process_group(
    engine: SGLangEngine, checkpoints: dict[str, Path], load_format: str | None
):
    tensors = list(load_file(checkpoints["other"] / "model.safetensors").items())
    sender = Sender(f"update-{load_format}-{free_port()}")
    await sender.meet(engine)
    update = engine.update_from_distributed(
        names=[n for n, _ in tensors],
        dtypes=[dtype_name(t.dtype) for _, t in tensors],
        shapes=[list(t.shape) for _, t in tensors],
        group_name=sender.name,
        version=NEXT,
        flush_cache=True,
        load_format=load_format,
    )
    payload = [flatten(tensors)] if load_format else [t.contiguous() for _, t in tensors]
    await asyncio.gather(update, sender.send(payload))
    result = await engine.generate(greedy(12, input_ids=PROMPT))
    assert result["output_ids"] == reference.greedy(checkpoints["other"], PROMPT, 12)[0]
    assert result["meta_info"]["weight_version"] == NEXT
    await engine.destroy_group(sender.name)
    process_group.leave(sender.group)
    with pytest.raises(EngineError):
        await engine.destroy_group(sender.name)


async def test_updates_under_load_lose_no_request_and_stamp_every_token(
    engine: SGLangEngine, checkpoints: dict[str, Path]
):
    paths = [checkpoints["base"], checkpoints["other"]]
    streams = [await start_stream(engine, new=LONG, at=2, prompt=[i + 1, 7, 9]) for i in range(6)]
    for version in range(1, 4):
        await engine.pause("in_place")
        await engine.update_from_disk(str(paths[version % 2]), f"run/weight_v{version:06d}", flush_cache=False)
        await engine.resume()
        await asyncio.sleep(0.05)
    for chunks in await asyncio.wait_for(asyncio.gather(*streams), 120):
        versions = [c["meta_info"]["weight_version"] for c in chunks]
        assert versions == sorted(versions)
        assert versions[0] == BASE
        assert versions[-1] == "run/weight_v000003"
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert len(chunks[-1]["output_ids"]) == LONG


async def test_kv_of_another_version_is_not_reused_under_a_key_of_its_own(
    engine: SGLangEngine, checkpoints: dict[str, Path]
):
    prompt = list(range(1, 60))
    await tokens_of(engine, prompt, extra_key=BASE)  # warms the prefix
    await engine.pause("in_place")
    await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=False)
    await engine.resume()
    result = await engine.generate(greedy(12, input_ids=prompt, extra_key=NEXT))
    assert result["output_ids"] == reference.greedy(checkpoints["other"], prompt, 12)[0]
    assert result["meta_info"]["cached_tokens"] == 0


async def test_the_client_refuses_the_flush_that_kills_a_paused_server(
    engine: SGLangEngine, checkpoints: dict[str, Path]
):
    stream = await start_stream(engine)
    await engine.pause("in_place")
    with pytest.raises(UpdateFailed, match="extra_key"):
        await engine.update_from_disk(str(checkpoints["other"]), NEXT, flush_cache=True)
    await engine.resume()
    assert {c["meta_info"]["weight_version"] for c in await asyncio.wait_for(stream, 60)} == {BASE}
