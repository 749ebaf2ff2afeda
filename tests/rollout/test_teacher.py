"""A served teacher: logprobs of given tokens from a real engine, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, web

from miles_disagg.config.machine import free_port
from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import Prompt
from miles_disagg.domain.versions import ANY_VERSION
from miles_disagg.engine import launch
from miles_disagg.rollout.base import SamplingOptions
from miles_disagg.rollout.teacher import TaughtClient, Teachers, TeacherSpec
from miles_disagg.trainer.losses import distilled
from tests.fakes.samples import make_sample
from tests.fakes.scorers import server_of, sharp_model

PROMPT = Prompt(0, 0, "12+34=", (3, 4, 12, 5, 6), "46", {"opd_teacher": "sums"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("teacher") / "model", seed=5, factor=4.0)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def url(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    spec = server_of(request.param, model)
    process = launch.EngineProcess.start(spec, tmp_path_factory.mktemp("log") / "engine.log")
    try:
        asyncio.run(process.wait_ready(240))
        yield process.url
    finally:
        asyncio.run(process.stop())


def teachers(*urls: str, **named: str) -> Teachers:
    default = {"default": urls[0]} if urls else {}
    return Teachers(TeacherSpec(default | named, "opd_teacher", 60.0))


async def test_a_teacher_scores_the_tokens_as_transformers_does(url: str, model: Path):
    from transformers import AutoModelForCausalLM

    tokens = [7, 2, 9, 1, 13, 0, 13]  # 13 is the last of the vocabulary, which SGLang reports as 0
    async with teachers(url) as asked:
        found = await asked.logprobs(PROMPT, tokens)
        assert await asked.logprobs(PROMPT, []) == ()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT.tokens, *tokens]])).logits[0]
    expected = torch.log_softmax(logits[len(PROMPT.tokens) - 1 : -1], -1).gather(1, torch.tensor(tokens)[:, None])
    assert found == pytest.approx(expected[:, 0].tolist(), abs=1e-4)
    assert max(found) - min(found) > 0.5, "the case must tell tokens apart"


async def test_samples_of_an_engine_that_is_its_own_teacher_have_no_divergence(url: str):
    class Engine:
        """The engine without a replica before it, so without versions."""

        async def generate(self, prompt, sampling, constraint, **ask):
            body = {"input_ids": prompt.tokens, "sampling_params": sampling.to_json(), "return_logprob": True}
            async with ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
                written = [(row[1], row[0]) for row in (await response.json())["meta_info"]["output_token_logprobs"]]
            tokens, logprobs = zip(*written, strict=True)
            return dataclasses.replace(make_sample(prompt), tokens=tokens, logprobs=logprobs)

    async with teachers(url) as asked:
        taught = TaughtClient(Engine(), asked)
        sample = await taught.generate(
            PROMPT, SamplingOptions(max_new_tokens=6), ANY_VERSION, sample_id="s", group_id="g", rid="r"
        )
    assert sample.teacher_logprobs is not None
    assert len(sample.teacher_logprobs) == len(sample.tokens) > 0
    assert sample.teacher_logprobs == pytest.approx(sample.logprobs, abs=1e-4)


def test_the_teachers_advantage_is_the_reverse_kl_token_by_token():
    """Its expected policy gradient at one token, over the vocabulary, is the gradient of KL(policy || teacher)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    advantages = distilled(torch.zeros(7, dtype=torch.float64), policy, teacher, 0.5)
    assert advantages.tolist() == pytest.approx(
        [0.5 * (t - p) for p, t in zip(policy.tolist(), teacher.tolist(), strict=True)]
    )
    loss = -(policy.exp().detach() * advantages * policy).sum()  # the mean over samples of the policy
    (found,) = torch.autograd.grad(loss, logits)
    assert (2 * found).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


async def test_prompts_go_to_the_teacher_that_they_name(url: str):
    nowhere = TeacherSpec({"default": "http://127.0.0.1:9", "sums": url}, "opd_teacher", 2.0)
    async with Teachers(nowhere) as asked:
        assert len(await asked.logprobs(PROMPT, [7])) == 1
        with pytest.raises(SampleRejected, match=r"127.0.0.1:9 gave no answer within 2 s .*last: ClientConnector"):
            await asked.logprobs(Prompt(1, 0, "", (3,), None), [7])
    async with teachers(maths=url) as asked:
        with pytest.raises(SampleRejected, match="wants teacher 'sums', and there is no `default`"):
            await asked.logprobs(PROMPT, [7])


async def test_a_teacher_with_another_vocabulary_or_none_there_is_refused(url: str):
    from miles_disagg.prompts.quickstart import make_tokenizer

    ours: Any = make_tokenizer()
    async with teachers(url) as asked:
        assert await asked.check(ours) == []

        class Shifted:
            """The same characters under other ids."""

            def get_vocab(self):
                return {word: i + 1 for word, i in ours.get_vocab().items()}

            def decode(self, ids, **options):
                return ours.decode([i - 1 for i in ids if i], **options)

            def encode(self, text):
                return [i + 1 for i in ours.encode(text)]

        (problem,) = await asked.check(Shifted())
    assert "--opd-teacher-urls" in problem
    assert "another vocabulary" in problem
    async with teachers("http://127.0.0.1:9") as asked:
        (problem,) = await asked.check(ours)
    assert "--opd-teacher-urls http://127.0.0.1:9: " in problem


async def test_a_teacher_that_is_started_again_meanwhile_is_waited_for():
    port = free_port()

    async def generate(request: web.Request) -> web.Response:
        return web.json_response({"meta_info": {"input_token_logprobs": [[None, 3, None], [-1.0, 7, None]]}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    async with teachers(f"http://127.0.0.1:{port}") as asked:
        waiting = asyncio.create_task(asked.logprobs(Prompt(1, 0, "", (3,), None), [7]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            assert await asyncio.wait_for(waiting, 20) == (-1.0,)
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"meta_info": {}}, "no meta_info.input_token_logprobs"),
        ({"meta_info": {"input_token_logprobs": [[None, 3, None], [-1.0, 8, None]]}}, "scored other tokens"),
        ({"meta_info": {"input_token_logprobs": [[None, 3, None], [float("nan"), 7, None]]}}, "not finite"),
    ],
)
async def test_an_answer_that_cannot_be_used_is_a_rejected_sample(answer: dict[str, Any], words: str):
    async def generate(request: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with teachers(f"http://127.0.0.1:{runner.addresses[0][1]}") as asked:
            with pytest.raises(SampleRejected, match=words):
                await asked.logprobs(Prompt(1, 0, "", (3,), None), [7])
    finally:
        await runner.cleanup()
