"""Interrupted generations go on on their own tokens, over real HTTP: spans, logprobs, limits, masks."""

import pytest

from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.versions import ANY_VERSION, Constraint, TokenSpan
from miles_disagg.rollout.base import SamplingOptions
from miles_disagg.rollout.continuation import ContinuingClient, only_newest
from miles_disagg.rollout.pool import RolloutClient
from tests.fakes.rollout_gateway import FakeGateway, make_answer
from tests.fakes.samples import make_prompt


class Interrupting(FakeGateway):
    """Answers with the given (tokens, version, whether it was interrupted), one a request."""

    def __init__(self, *legs: tuple[tuple[int, ...], int, bool]):
        super().__init__()
        self.legs = list(legs)
        self.edit = self._next

    def _next(self, body, answer):
        tokens, version, interrupted = self.legs.pop(0)
        answer = make_answer(version, version, text="".join(map(str, tokens)), ids=tokens)
        if interrupted:
            answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "weights"}
        return answer


async def generate(gateway: FakeGateway, *, limit: int = 10, constraint: Constraint = ANY_VERSION):
    async with gateway.serve() as url, RolloutClient(url, timeout=10) as client:
        continuing = ContinuingClient(client)
        sampling = SamplingOptions(max_new_tokens=limit)
        return await continuing.generate(
            make_prompt(), sampling, constraint, sample_id="s", group_id="g", rid="r", seed=7
        )


async def test_an_interrupted_generation_goes_on_on_its_own_tokens():
    gateway = Interrupting(((5, 6), 1, True), ((), 2, True), ((7,), 2, True), ((8, 13), 4, False))
    sample = await generate(gateway)
    assert sample.tokens == (5, 6, 7, 8, 13)
    assert sample.spans == (TokenSpan(0, 1), TokenSpan(2, 2), TokenSpan(3, 4))
    assert (sample.version_start, sample.version_end, sample.finish_reason) == (1, 4, "stop")
    assert (len(sample.logprobs), sample.text, sample.metadata["parts"]) == (5, "567813", 3)
    assert sample.prompt == make_prompt()
    prompt = list(make_prompt().tokens)
    asked = [body["input_ids"] for body in gateway.requests]
    assert asked == [prompt, [*prompt, 5, 6], [*prompt, 5, 6], [*prompt, 5, 6, 7]]
    assert [body["sampling_params"]["max_new_tokens"] for body in gateway.requests] == [10, 8, 8, 7]
    assert len({body["rid"] for body in gateway.requests}) == 4
    assert len({body["sampling_params"]["sampling_seed"] for body in gateway.requests}) == 4


async def test_what_is_interrupted_at_its_limit_is_complete():
    sample = await generate(Interrupting(((5, 6), 1, True), ((7,), 2, True)), limit=3)
    assert (sample.tokens, sample.finish_reason) == ((5, 6, 7), "length")


async def test_an_exact_version_is_never_continued_by_another():
    with pytest.raises(SampleRejected, match="aborted"):
        await generate(Interrupting(((5,), 1, True), ((6,), 2, False)), constraint=Constraint(exact_version=1))


async def test_old_tokens_can_be_masked():
    sample = await generate(Interrupting(((5, 6), 1, True), ((7, 13), 2, False)))
    masked = only_newest(sample)
    assert masked.loss_mask == (0, 0, 1, 1)
    assert masked.oldest_version == 1, "the lag is still that of the oldest token"
    whole = await generate(Interrupting(((5, 6), 1, False)))
    assert only_newest(whole) is whole
