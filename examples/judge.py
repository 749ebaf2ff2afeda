"""Asynchronous reward function: what a frozen model of the run thinks of the answer, asked over HTTP.

`--custom-rm-path examples.judge.mean_logprob --sglang-config FILE`

with a model called `judge` in FILE whose `update_weights` is false, and the policy's tokenizer. It runs on the event
loop and waits for the judge without holding a thread. A judge that died is there again under its URL within seconds:
its connection is tried anew until --reward-timeout.
"""

import asyncio
from typing import Any

import aiohttp

from miles_disagg.domain.samples import Sample
from miles_disagg.prompts.models import served_model


async def mean_logprob(sample: Sample) -> float:
    """Mean logprob of the answer's tokens under the judge, nats."""
    ids = [*sample.prompt.tokens, *sample.tokens]
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    body["logprob_start_len"] = len(sample.prompt.tokens) - 1
    (url,) = served_model("judge")
    answer = await _asked(f"{url}/generate", body)
    rows = answer["meta_info"]["input_token_logprobs"][-len(sample.tokens) :]
    last = max(ids)  # SGLang writes 0 for the last id of its vocabulary
    if len(rows) != len(sample.tokens) or any(
        row[1] != token and (row[1], token) != (0, last) for row, token in zip(rows, sample.tokens, strict=True)
    ):
        raise ValueError(f"the judge scored other tokens than those of {sample.sample_id}: another tokenizer?")
    return sum(row[0] for row in rows) / len(rows)


async def _asked(url: str, body: dict[str, Any]) -> Any:
    while True:  # the run ends it after --reward-timeout
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                return await response.json()
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.5)
