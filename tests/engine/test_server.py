"""What only the embedded server has: its errors, OpenAI routes, digests, authorization, start and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import EngineError, UpdateFailed
from miles_disagg.engine import launch
from miles_disagg.engine.embedded.__main__ import main
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import dtype_name, raw_bytes, serialize
from miles_disagg.weights.digest import digest
from tests.engine.conftest import BASE
from tests.fakes.tcp_proxy import TcpProxy

NEXT = "run/weight_v000001"


@pytest.fixture
async def engine(embedded: launch.EngineProcess, checkpoints: dict[str, Path]) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(embedded.url, update_timeout=60)
    await client.update_from_disk(str(checkpoints["base"]), BASE, flush_cache=True)
    yield client
    assert embedded.exit_code is None, embedded.log_tail()
    await client.abort()
    await client.resume()
    await client.close()


async def post(engine: SGLangEngine, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body, headers=headers) as r:
        return r.status, await r.json() if r.content_type == "application/json" else await r.text()


# --- requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "text, input_ids"),
        ({"text": "a", "input_ids": [1]}, "text, input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [600]}, "vocab size"),
        ({"input_ids": [-1]}, "vocab size"),
        ({"input_ids": [1], "sampling_params": {"temperature": -2}}, "temperature"),
        ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
        ({"input_ids": [1], "logprob_start_len": 5}, "logprob_start_len"),
        ({"input_ids": [1], "image_data": "x"}, "image_data"),
        ([1, 2], "JSON object"),
    ],
)
async def test_a_malformed_request_is_400_and_names_the_field(engine: SGLangEngine, body: Any, names: str):
    for extra in ({}, {"stream": True}):
        status, answer = await post(engine, "/generate", {**body, **extra} if isinstance(body, dict) else body)
        assert status == 400
        assert names in answer["error"]["message"]


async def test_a_body_that_is_not_json_is_400(engine: SGLangEngine):
    async with aiohttp.ClientSession() as session:
        for path in ("/generate", "/v1/completions", "/pause_generation"):
            async with session.post(engine.url + path, data=b"{nope") as response:
                assert response.status == 400
                assert "JSON" in (await response.json())["error"]["message"]


async def test_seeded_requests_repeat_over_http(engine: SGLangEngine):
    params = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 11, "max_new_tokens": 16, "n": 2}
    body = {"input_ids": [1, 2, 3], "sampling_params": params}
    first, second = await engine.generate(body), await engine.generate(body)
    assert [r["output_ids"] for r in first] == [r["output_ids"] for r in second]
    assert first[0]["output_ids"] != first[1]["output_ids"]


async def test_a_batch_streams_with_an_index_for_each_member(engine: SGLangEngine):
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    last: dict[int, dict[str, Any]] = {}
    async for chunk in engine.stream({"input_ids": [[1], [2], [3]], "sampling_params": params}):
        last[chunk["index"]] = chunk
    assert sorted(last) == [0, 1, 2]
    plain = await engine.generate({"input_ids": [[1], [2], [3]], "sampling_params": params})
    assert [last[i]["output_ids"] for i in range(3)] == [r["output_ids"] for r in plain]


async def test_stream_interval_thins_the_chunks(engine: SGLangEngine):
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "stream_interval": 10}
    counts = [len(c["output_ids"]) async for c in engine.stream({"input_ids": [1], "sampling_params": params})]
    assert counts[0] == 1
    assert counts[-1] == 40
    assert len(counts) <= 6


async def test_streams_one_after_another_share_a_connection(engine: SGLangEngine):
    proxy = TcpProxy(int(engine.url.rsplit(":", 1)[1]))
    await proxy.start()
    through = SGLangEngine(proxy.url)
    try:
        for _ in range(3):
            params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
            assert [c async for c in through.stream({"input_ids": [1], "sampling_params": params})]
        assert proxy.connections == 1
    finally:
        await through.close()
        await proxy.stop()


# --- OpenAI ------------------------------------------------------------------------------------------------


async def test_completions_say_what_generate_says(engine: SGLangEngine):
    plain = await engine.generate({"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 6}})
    body = {"model": "m", "prompt": "abc", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    status, answer = await post(engine, "/v1/completions", body)
    assert status == 200
    choice = answer["choices"][0]
    assert choice["text"] == plain["text"]
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"]) or choice["logprobs"]["top_logprobs"]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert answer["metadata"]["weight_version"] == BASE


async def test_streamed_completions_add_up_to_the_whole(engine: SGLangEngine):
    body = {"prompt": [97, 98], "temperature": 0, "max_tokens": 12, "ignore_eos": True, "n": 2}
    _, whole = await post(engine, "/v1/completions", body)
    texts = {0: "", 1: ""}
    async for chunk in engine.stream({**body, "stream_options": {"include_usage": True}}, path="/v1/completions"):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {c["index"]: c["text"] for c in whole["choices"]}


async def test_chat_goes_through_the_template(engine: SGLangEngine):
    messages = [{"role": "user", "content": "hi"}]
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    plain = await engine.generate({"text": "user: hi\n", "sampling_params": params})
    body = {"messages": messages, "temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": True}
    status, answer = await post(engine, "/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": plain["text"]}
    assert len(answer["choices"][0]["logprobs"]["content"]) == 5
    deltas = [c["choices"][0]["delta"] async for c in engine.stream(body, path="/v1/chat/completions")]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d["content"] for d in deltas) == plain["text"]


async def test_what_would_change_an_answer_and_is_not_there_is_refused(engine: SGLangEngine):
    body = {"prompt": "a", "response_format": {"type": "json_object"}}
    status, answer = await post(engine, "/v1/completions", body)
    assert status == 400
    assert "response_format" in answer["error"]["message"]


# --- weights ---------------------------------------------------------------------------------------------


async def test_digests_are_those_of_the_checkpoint_that_is_served(engine: SGLangEngine, checkpoints: dict[str, Path]):
    for name in ("other", "base"):
        await engine.update_from_disk(str(checkpoints[name]), NEXT, flush_cache=True)
        tensors = load_file(checkpoints[name] / "model.safetensors")
        assert await engine.weights_digest() == {n: digest(raw_bytes(t), "xxh3-128") for n, t in tensors.items()}


async def test_a_checkpoint_that_does_not_fit_changes_nothing(
    engine: SGLangEngine, checkpoints: dict[str, Path], tmp_path: Path
):
    before = await engine.weights_digest()
    tensors = load_file(checkpoints["other"] / "model.safetensors")
    for name, broken in {
        "missing": {n: t for n, t in tensors.items() if n != "model.norm.weight"},
        "shape": {**tensors, "model.norm.weight": torch.zeros(3)},
        "unknown": {**tensors, "model.surprise": torch.zeros(3)},
    }.items():
        (tmp_path / name).mkdir()
        save_file(broken, tmp_path / name / "model.safetensors")
        with pytest.raises(UpdateFailed, match=r"model\.(norm\.weight|surprise)"):
            await engine.update_from_disk(str(tmp_path / name), NEXT, flush_cache=True)
    for bad in ([("model.norm.weight", torch.zeros(3))], [("nope", torch.zeros(1))]):
        with pytest.raises(UpdateFailed):
            await engine.update_from_tensor([serialize(bad)], load_format=None, version=NEXT, flush_cache=True)
    assert await engine.weights_digest() == before
    assert (await engine.model_info())["weight_version"] == BASE


async def test_a_pickle_that_is_more_than_tensors_is_refused(engine: SGLangEngine, tmp_path: Path):
    import base64
    import pickle

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/pwned",)

    payload = base64.b64encode(pickle.dumps([("model.norm.weight", Evil())])).decode()
    with pytest.raises(UpdateFailed, match="may not be unpickled"):
        await engine.update_from_tensor([payload], load_format=None, version=NEXT, flush_cache=True)
    assert not (tmp_path / "pwned").exists()


async def test_a_group_nobody_joins_is_given_up_and_one_that_is_unknown_is_named(
    embedded: launch.EngineProcess, engine: SGLangEngine
):
    with pytest.raises(UpdateFailed, match="nosuch"):
        await engine.update_from_distributed(
            names=["a"], dtypes=["float32"], shapes=[[1]], group_name="nosuch", version=NEXT, flush_cache=True
        )
    with pytest.raises(EngineError, match="master_port"):
        await engine.init_group(
            master_address="127.0.0.1",
            master_port="x",  # type: ignore[arg-type]
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
        )


async def test_weights_can_be_read_by_name(engine: SGLangEngine, checkpoints: dict[str, Path]):
    tensor = load_file(checkpoints["base"] / "model.safetensors")["model.norm.weight"]
    status, values = await post(engine, "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 5})
    assert status == 200
    assert values == pytest.approx(tensor[:5].tolist())
    assert (await post(engine, "/get_weights_by_name", {"name": "nope"}))[0] == 400


async def test_metrics_count_tokens(engine: SGLangEngine):
    async def tokens() -> float:
        async with aiohttp.ClientSession() as session, session.get(engine.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        (line,) = [x for x in lines if x.startswith("sglang:generation_tokens_total")]
        return float(line.split()[-1])

    before = await tokens()
    params = {"max_new_tokens": 7, "ignore_eos": True}
    await engine.generate({"input_ids": [1], "sampling_params": params})
    assert await tokens() == before + 7


def test_dtype_names_are_torchs():
    assert dtype_name(torch.bfloat16) == "bfloat16"


# --- start and end ------------------------------------------------------------------------------------------


def test_a_port_in_use_and_a_bad_path_are_said_before_anything_heavy_is_imported(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model-path", str(checkpoints["base"]), "--port", str(port)]) == 2
    assert f"--port {port}" in capfd.readouterr().err
    assert main(["--model-path", str(tmp_path / "nope"), "--port", "0"]) == 2
    assert "--model-path" in capfd.readouterr().err
    assert main(["--model-path", str(tmp_path), "--port", "0", "--threads", "0"]) == 2
    assert "--threads" in capfd.readouterr().err
    code = "import sys; from miles_disagg.engine.embedded.__main__ import parser; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_key_is_demanded_where_one_is_set_and_the_server_ends_on_sigterm(
    checkpoints: dict[str, Path], tmp_path: Path
):
    spec = launch.embedded(checkpoints["base"], port=free_port(), api_key="secret")
    process = launch.EngineProcess.start(spec, tmp_path / "log.txt")
    try:
        await process.wait_ready(120)
        stranger, friend = SGLangEngine(spec.url), SGLangEngine(spec.url, api_key="secret")
        with pytest.raises(EngineError, match="Unauthorized") as caught:
            await stranger.server_info()
        assert caught.value.status == 401
        assert (await friend.server_info())["engine"] == "miles-disagg-embedded"
        await stranger.close()
        await friend.close()
        assert await process.stop() == 0
    finally:
        process.kill()


async def test_the_server_ends_when_its_parent_dies(checkpoints: dict[str, Path], tmp_path: Path):
    code = f"""
import asyncio, sys
from miles_disagg.config.machine import free_port
from miles_disagg.engine import launch
async def go():
    spec = launch.embedded({str(checkpoints["base"])!r}, port=free_port())
    process = launch.EngineProcess.start(spec, {str(tmp_path / "log.txt")!r})
    await process.wait_ready(120)
    print(process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(go())
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    group = int(await asyncio.to_thread(owner.stdout.readline))
    members = _group_members(group)
    assert len(members) == 2  # the guard and the server
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while _group_members(group):
        assert time.monotonic() < deadline, f"group {group} outlives its owner"
        await asyncio.sleep(0.2)


def _group_members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[2]) == group and state[0] != "Z":
                found.append(int(entry.name))
    return found
