"""Example rewards that ask somebody over HTTP, and the example of an evaluation function, each at work."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web

from examples import judge, reward_server
from miles_disagg.prompts.models import VARIABLE
from miles_disagg.prompts.reward import load_reward
from miles_disagg.prompts.tasks import TaskItem
from tests.fakes.samples import make_prompt, make_sample


@asynccontextmanager
async def serving(app: web.Application):
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_the_reward_service_is_asked_for_every_sample():
    async with serving(reward_server.application()) as url:
        reward = load_reward("remote_rm", url=f"{url}/score")
        prompt = make_prompt(label="84")
        found = [await reward(make_sample(prompt, text=text)) for text in ("84", "it is 84", "83", "")]  # pyright: ignore
    assert found == [1.0, 0.25, 0.0, 0.0]


async def test_the_judge_scores_the_answers_tokens_only(monkeypatch):
    asked = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(await request.json())
        rows = [[-0.5 * i, token, None] for i, token in enumerate(asked[-1]["input_ids"])]
        return web.json_response({"meta_info": {"input_token_logprobs": rows[asked[-1]["logprob_start_len"] :]}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    reward = load_reward(None, custom_path="examples.judge.mean_logprob")
    assert reward is judge.mean_logprob
    async with serving(app) as url:
        monkeypatch.setenv(VARIABLE, json.dumps({"judge": [url]}))
        assert await reward(make_sample()) == pytest.approx(-0.5 * (3 + 4) / 2)  # pyright: ignore
    assert asked[0]["input_ids"] == [1, 2, 3, 5, 6]


def test_the_evaluation_function_counts_right_greedy_answers_of_the_checkpoint(tmp_path, monkeypatch):
    from examples import evaluate
    from miles_disagg.prompts.quickstart import Recipe, make_model, make_tokenizer

    model, tokenizer = make_model(Recipe(hidden_size=64, layers=2)).eval(), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def greedy(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        start = len(ids)
        while len(ids) < start + 8 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()

    sums = [f"{n}+{n}=" for n in range(10, 18)]
    items = [TaskItem(text, greedy(text) if i % 4 else "wrong", text) for i, text in enumerate(sums)]
    monkeypatch.setattr(evaluate, "ITEMS", len(items))
    monkeypatch.setattr(evaluate, "make_task", lambda name, num_held_out: SimpleNamespace(held_out=items))
    assert evaluate.accuracy(tmp_path, 3) == 0.75
