"""One request through a replica: spans across activations, pins, rids, disconnects."""

from __future__ import annotations

import asyncio
import random

import pytest

from miles_disagg.domain.errors import (
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import TokenSpan, token_versions
from miles_disagg.replica.gate import Phase
from miles_disagg.replica.replica import Replica
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import at_least, checkpoint, exact, make_replica, ref, request


async def until_tokens(replica: Replica, rid: str, n: int) -> None:
    for _ in range(2000):
        if any(f.rid == rid and f.tokens >= n for f in replica.gate.flights()):
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{rid} never had {n} tokens")


async def test_an_answer_carries_its_version_and_replica(replica: Replica) -> None:
    answer = await replica.sessions.result(request("a"))
    meta = answer["meta_info"]
    assert answer["output_ids"] == list(range(100, 108))
    assert (meta["id"], meta["replica_id"]) == ("a", "replica-0")
    assert (meta["weight_version_start"], meta["weight_version_end"], meta["weight_version"]) == (0, 0, 0)
    assert meta["weight_version_spans"] == [[0, 0]]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_spans_are_exact_for_a_request_across_two_activations(engine: FakeEngine, mode, incremental) -> None:
    engine.incremental = incremental
    replica = make_replica(engine, mode=mode)
    await replica.attach()
    engine.update_delay = 0.01
    work = asyncio.create_task(replica.sessions.result(request("a", n=60, return_logprob=True)))
    boundaries = []
    for version, at in ((1, 10), (2, 30)):
        await until_tokens(replica, "a", at)
        await replica.activate(checkpoint(version))
        boundaries.append(next(replica.gate.flights()).tokens)
    answer = await work
    meta = answer["meta_info"]
    assert meta["weight_version_spans"] == [[0, 0], [boundaries[0], 1], [boundaries[1], 2]]
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (0, 2)
    assert meta["completion_tokens"] == len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == 60
    if mode == "retract":  # three legs, each prompted with everything before it, under its own cache key
        assert [len(b["input_ids"]) for b in engine.bodies] == [3, 3 + boundaries[0], 3 + boundaries[1]]
        assert len({b["extra_key"] for b in engine.bodies}) == 3
        assert meta["prompt_tokens"] == 3
    else:
        assert len(engine.bodies) == 1
    await replica.close()


async def test_a_request_without_tokens_starts_over_under_the_new_key(replica: Replica, engine: FakeEngine) -> None:
    engine.token_delay = 0.3
    work = asyncio.create_task(replica.sessions.result(request("a", n=1)))
    await asyncio.sleep(0.02)
    await replica.activate(checkpoint(1))
    engine.token_delay = 0.0
    meta = (await work)["meta_info"]
    assert (meta["weight_version_start"], meta["weight_version_spans"]) == (1, [[0, 1]])
    assert "weight_v000001" in engine.bodies[-1]["extra_key"]


async def test_without_a_prefix_cache_a_request_without_tokens_stays_where_it_is(replica: Replica, engine) -> None:
    replica.gate.engine_recomputes = True
    engine.token_delay = 0.3
    work = asyncio.create_task(replica.sessions.result(request("a", n=1)))
    await asyncio.sleep(0.02)
    await replica.activate(checkpoint(1))
    meta = (await work)["meta_info"]
    assert (meta["weight_version_start"], meta["weight_version_spans"]) == (1, [[0, 1]])
    assert len(engine.bodies) == 1


async def test_an_engine_that_announces_at_pauses_is_asked_for_no_other_chunks(replica: Replica, engine) -> None:
    replica.sessions.announced_pauses = True
    await replica.sessions.result(request("a", n=3))
    assert [c async for c in replica.sessions.stream(request("b", n=3, stream=True))]
    asked = [body["sampling_params"].get("stream_interval") for body in engine.bodies]
    assert asked == [0, None], "a caller who streams wants to see every token"


async def test_an_exact_request_is_drained_before_an_activation(replica: Replica) -> None:
    work = asyncio.create_task(replica.sessions.result(request("a", n=20, weight_version=exact(0))))
    await until_tokens(replica, "a", 5)
    report = await replica.activate(checkpoint(1))
    meta = (await work)["meta_info"]
    assert meta["weight_version_spans"] == [[0, 0]]
    assert meta["completion_tokens"] == 20
    assert report.ended == 0


async def test_an_exact_request_that_outlives_the_drain_is_ended_by_name(replica: Replica, engine: FakeEngine) -> None:
    engine.token_delay = 0.01
    work = asyncio.create_task(replica.sessions.result(request("slow", n=1000, weight_version=exact(0))))
    await until_tokens(replica, "slow", 2)
    report = await replica.activate(checkpoint(1))
    meta = (await work)["meta_info"]
    assert report.ended == 1
    assert meta["finish_reason"]["type"] == "abort"
    assert "slow" in meta["finish_reason"]["message"]
    assert meta["weight_version_spans"] == [[0, 0]]
    assert 2 <= meta["completion_tokens"] < 1000
    assert not engine.requests


async def test_constraints_decide_who_is_served(replica: Replica) -> None:
    await replica.activate(checkpoint(3))
    for constraint in (at_least(3), exact(3), None):
        await replica.sessions.result(request(f"ok-{constraint}".replace(" ", ""), n=1, weight_version=constraint))
    with pytest.raises(WeightVersionNotReady) as caught:
        await replica.sessions.result(request("min", weight_version=at_least(4)))
    assert caught.value.served == 3
    with pytest.raises(WeightVersionNotReady):
        await replica.sessions.result(request("future", weight_version=exact(4)))
    with pytest.raises(WeightVersionGone):
        await replica.sessions.result(request("past", weight_version=exact(2)))


async def test_a_request_for_the_target_waits_for_the_running_activation(replica: Replica, engine: FakeEngine) -> None:
    engine.update_delay = 0.1
    activation = asyncio.create_task(replica.activate(checkpoint(1)))
    while replica.gate.phase is not Phase.PAUSED:
        await asyncio.sleep(0.001)
    meta = (await replica.sessions.result(request("a", weight_version=at_least(1))))["meta_info"]
    assert meta["weight_version_start"] == 1
    await activation


async def test_admission_is_bounded(engine: FakeEngine) -> None:
    replica = make_replica(engine, max_in_flight=2)
    await replica.attach()
    work = [asyncio.create_task(replica.sessions.result(request(f"r{i}", n=20))) for i in range(2)]
    await until_tokens(replica, "r1", 1)
    with pytest.raises(Overloaded):
        await replica.sessions.result(request("r2"))
    await asyncio.gather(*work)
    await replica.sessions.result(request("r2"))
    await replica.close()


async def test_a_repeated_rid_joins_in_flight_and_is_answered_from_memory_afterwards(
    replica: Replica, engine: FakeEngine
) -> None:
    first, second = await asyncio.gather(
        replica.sessions.result(request("a")), replica.sessions.result(request("a", n=8))
    )
    third = await replica.sessions.result(request("a"))
    assert first == second == third
    assert len(engine.bodies) == 1


async def test_a_rid_reused_for_another_question_is_refused(replica: Replica) -> None:
    await replica.sessions.result(request("a"))
    with pytest.raises(InvalidRequest, match="rid"):
        await replica.sessions.result(request("a", n=9))


async def test_a_remembered_answer_older_than_asked_for_is_not_given(replica: Replica) -> None:
    await replica.sessions.result(request("a"))
    await replica.activate(checkpoint(1))
    with pytest.raises(InvalidRequest, match="new rid"):
        await replica.sessions.result(request("a", weight_version=at_least(1)))


async def test_a_pinned_request_does_not_join_an_unpinned_one_of_its_rid(replica: Replica) -> None:
    work = asyncio.create_task(replica.sessions.result(request("a", n=40)))
    await until_tokens(replica, "a", 2)
    with pytest.raises(InvalidRequest, match="new rid"):
        await replica.sessions.result(request("a", n=40, weight_version=exact(0)))
    joined = asyncio.create_task(replica.sessions.result(request("a", n=40, weight_version=at_least(0))))
    assert await joined == await work


async def test_errors_are_not_remembered(replica: Replica, engine: FakeEngine) -> None:
    engine.kill()
    with pytest.raises(EngineUnavailable):
        await replica.sessions.result(request("a"))
    engine.revive(str(ref(0)))
    assert (await replica.sessions.result(request("a")))["output_ids"]


async def test_the_last_caller_leaving_frees_the_engine(replica: Replica, engine: FakeEngine) -> None:
    callers = [asyncio.create_task(replica.sessions.result(request("a", n=4000))) for _ in range(2)]
    await until_tokens(replica, "a", 2)
    callers[0].cancel()
    await asyncio.sleep(0.02)
    assert engine.requests
    callers[1].cancel()
    await asyncio.sleep(0.05)
    assert not engine.requests
    assert replica.gate.active == 0


async def test_an_engine_that_restarted_behind_our_back_never_answers(replica: Replica, engine: FakeEngine) -> None:
    await replica.activate(checkpoint(7))
    engine.revive(str(ref(0)))
    with pytest.raises(EngineUnavailable):
        await replica.sessions.result(request("a", weight_version=at_least(7)))
    assert replica.gate.phase is Phase.FENCED
    assert not replica.ready


async def test_abort_mode_ends_requests_with_what_they_have(engine: FakeEngine) -> None:
    replica = make_replica(engine, mode="abort")
    await replica.attach()
    work = asyncio.create_task(replica.sessions.result(request("a", n=1000)))
    await until_tokens(replica, "a", 3)
    await replica.activate(checkpoint(1))
    meta = (await work)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_version_spans"] == [[0, 0]]
    await replica.close()


async def test_a_text_prompt_that_cannot_be_continued_is_ended_by_name_under_retract(engine: FakeEngine) -> None:
    replica = make_replica(engine, mode="retract")
    await replica.attach()
    body = request("a", n=1000, input_ids=None, text="abc")
    work = asyncio.create_task(replica.sessions.result(body))
    await until_tokens(replica, "a", 3)
    await replica.activate(checkpoint(1))
    meta = (await work)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert "activation" in meta["finish_reason"]["message"]
    await replica.close()


@pytest.mark.parametrize("seed", range(4))
async def test_never_older_than_asked_and_every_token_has_its_version_under_random_load(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(str(ref(0)), token_delay=0.0005)
    replica = make_replica(engine, mode=rng.choice(["in_place", "retract"]))
    await replica.attach()
    truth: dict[str, list[int]] = {}
    chunk = engine._chunk

    def spy(req, body, done, seconds):  # which version really wrote each token, as the engine sees it
        log = truth.setdefault(body["rid"].split(".", 1)[1], [])
        prompted = len(body["input_ids"]) - 3
        del log[prompted + len(req.output) - 1 :]
        log.append(ref_version(engine.version))
        return chunk(req, body, done, seconds)

    engine._chunk = spy
    answered = 0

    async def client(i: int) -> None:
        nonlocal answered
        for j in range(6):
            served = replica.gate.served
            version = max(0, (served.version if served else 0) + rng.choice([-1, 0, 0, 1]))
            pin = rng.choice([None, exact(version), at_least(version)])
            rid = f"r{i}-{j}"
            try:
                answer = await replica.sessions.result(request(rid, n=rng.randint(1, 25), weight_version=pin))
            except (WeightVersionNotReady, WeightVersionGone):
                await asyncio.sleep(0.005)
                continue
            meta = answer["meta_info"]
            spans = [TokenSpan(*s) for s in meta["weight_version_spans"]]
            written = token_versions(spans, meta["completion_tokens"])
            assert written == truth[rid][: len(written)]
            if pin and "min_version" in pin:
                assert min(written, default=version) >= version
            if pin and "exact_version" in pin:
                assert set(written) <= {version}
            answered += 1

    async def activations() -> None:
        for version in range(1, 9):
            await asyncio.sleep(rng.random() * 0.02)
            await replica.activate(checkpoint(version))

    await asyncio.gather(activations(), *(client(i) for i in range(12)))
    assert answered > 20
    assert not engine.requests
    assert replica.gate.active == 0
    await replica.close()


def ref_version(text: str) -> int:
    return int(text.rsplit("v", 1)[1])
