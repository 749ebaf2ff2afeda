"""A reward function that asks a frozen model of the run: the mean logprob of the response under it."""

import aiohttp

from miles_disagg.domain.samples import Sample
from miles_disagg.prompts.models import served_model


async def mean_logprob(sample: Sample) -> float:
    ids = [*sample.prompt.tokens, *sample.tokens]
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    body["logprob_start_len"] = len(sample.prompt.tokens) - 1
    (url,) = served_model("judge")
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
    rows = answer["meta_info"]["input_token_logprobs"][-len(sample.tokens) :]
    assert [row[1] for row in rows] == list(sample.tokens)
    return sum(row[0] for row in rows) / len(rows)
