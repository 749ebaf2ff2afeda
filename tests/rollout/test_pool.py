"""The rollout client against a real HTTP endpoint."""

import time

import pytest

from miles_disagg.domain.errors import DeadlineExceeded, InvalidRequest, SampleRejected, WeightVersionGone
from miles_disagg.domain.versions import ANY_VERSION, Constraint, TokenSpan
from miles_disagg.rollout.base import SamplingOptions
from miles_disagg.rollout.pool import RolloutClient, sample_from_answer
from tests.fakes.rollout_gateway import FakeGateway, make_answer
from tests.fakes.samples import make_prompt

SAMPLING = SamplingOptions(max_new_tokens=4)


async def ask(client: RolloutClient, constraint: Constraint = ANY_VERSION, rid: str = "r"):
    return await client.generate(
        make_prompt(), SAMPLING, constraint, sample_id="0:0#1/0", group_id="0:0#1", rid=rid, session_id="s"
    )


async def test_an_answer_becomes_an_attributed_sample():
    gateway = FakeGateway()
    gateway.version = 3
    async with gateway.serve() as url, RolloutClient(url, api_key="k") as client:
        sample = await ask(client, Constraint(min_version=2))
    assert (sample.tokens, sample.logprobs) == ((5, 6, 7, 13), (-0.5,) * 4)
    assert (sample.version_start, sample.version_end, sample.spans) == (3, 3, (TokenSpan(0, 3),))
    assert (sample.text, sample.replica_id, sample.finish_reason) == ("7", "r0", "stop")
    assert sample.timings["finished"] >= sample.timings["submitted"]
    body, headers = gateway.requests[0], gateway.headers[0]
    assert body["input_ids"] == [1, 2, 3]
    assert body["return_logprob"] is True
    assert body["weight_version"] == {"min_version": 2}
    assert (headers["x-session-id"], headers["Authorization"]) == ("s", "Bearer k")


async def test_refusals_are_waited_out_under_one_request_id():
    gateway = FakeGateway()
    refusal = {"error": {"type": "x", "message": "not yet"}}
    gateway.refusals = [(s, {"Retry-After": "0.01"}, refusal) for s in (409, 429, 503)]
    gateway.drop_connections = 1
    async with gateway.serve() as url, RolloutClient(url) as client:
        await ask(client, rid="once")
        assert client.refusals == 4
    assert [r["rid"] for r in gateway.requests] == ["once"] * 5


async def test_retry_after_is_obeyed():
    gateway = FakeGateway()
    gateway.refusals = [(409, {"Retry-After": "0.3"}, {})]
    async with gateway.serve() as url, RolloutClient(url) as client:
        begin = time.monotonic()
        await ask(client)
    assert time.monotonic() - begin >= 0.3


async def test_the_deadline_names_the_last_refusal():
    gateway = FakeGateway()
    async with gateway.serve() as url, RolloutClient(url, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded, match=r"version >= 9.*409 WeightVersionNotReady: served 0"):
            await ask(client, Constraint(min_version=9))


async def test_a_dead_endpoint_is_a_deadline_that_says_so():
    async with RolloutClient("http://127.0.0.1:9", timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded, match="ClientConnectorError"):
            await ask(client)


@pytest.mark.parametrize(("status", "error"), [(410, WeightVersionGone), (400, InvalidRequest), (401, InvalidRequest)])
async def test_final_answers_are_not_retried(status, error):
    gateway = FakeGateway()
    gateway.refusals = [(status, {}, {"error": {"type": "T", "message": "m"}})]
    async with gateway.serve() as url, RolloutClient(url) as client:
        with pytest.raises(error):
            await ask(client, Constraint(exact_version=1))
    assert len(gateway.requests) == 1


def parse(answer, constraint=ANY_VERSION):
    return sample_from_answer(answer, make_prompt(), constraint, "s", "g", {})


def spoil(**changes):
    answer = make_answer(1, 1)
    for key, value in changes.items():
        (answer if key in ("text", "output_ids") else answer["meta_info"])[key] = value
    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "malformed_answer"),
        (spoil(output_token_logprobs=None), "missing_logprobs"),
        (spoil(output_token_logprobs=[]), "missing_logprobs"),
        (spoil(output_token_logprobs=[[None, 5, None]], output_ids=[5]), "missing_logprobs"),
        (spoil(output_token_logprobs=[[float("nan"), 5, None]], output_ids=[5]), "nonfinite_logprobs"),
        (spoil(output_token_logprobs=[[float("-inf"), 5, None]], output_ids=[5]), "nonfinite_logprobs"),
        (spoil(output_ids=[5, 6]), "logprob_mismatch"),
        (spoil(output_token_logprobs=[], output_ids=[]), "empty_completion"),
        (spoil(finish_reason={"type": "abort", "message": "paused"}), "aborted"),
        (spoil(finish_reason=None), "malformed_answer"),
        (spoil(weight_version_start=None), "missing_version"),
        (spoil(weight_version_start="run/weight_v000001"), "missing_version"),
        (spoil(weight_version_end=2, weight_version_spans=None), "missing_version"),
        (spoil(weight_version_spans=[[1, 1]]), "malformed_spans"),
        (spoil(weight_version_spans=[[0, 2], [1, 1]]), "malformed_spans"),
        (spoil(weight_version_spans=[["0", 1]]), "malformed_spans"),
    ],
)
def test_a_faulty_answer_is_rejected_by_name(answer, reason):
    with pytest.raises(SampleRejected) as caught:
        parse(answer)
    assert caught.value.reason == reason


def test_spans_of_an_update_in_flight_are_kept():
    sample = parse(make_answer(1, 2))
    assert sample.spans == (TokenSpan(0, 1), TokenSpan(2, 2))
    assert (sample.version_start, sample.version_end, sample.oldest_version) == (1, 2, 1)


@pytest.mark.parametrize(
    "constraint", [Constraint(min_version=2), Constraint(exact_version=1), Constraint(exact_version=2)]
)
def test_a_token_of_another_version_than_asked_for_is_rejected(constraint):
    with pytest.raises(SampleRejected, match="wrong_version"):
        parse(make_answer(1, 2), constraint)
