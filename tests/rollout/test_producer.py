"""The producer with a real buffer, a real ledger and a real HTTP endpoint."""

import asyncio
import dataclasses
import json

import pytest
from aiohttp import web

from miles_disagg.buffer.base import Batch, EndOfData
from miles_disagg.buffer.data_buffer import DataBuffer
from miles_disagg.domain.errors import DeadlineExceeded
from miles_disagg.domain.versions import ANY_VERSION, Constraint
from miles_disagg.prompts.ledger import Ledger
from miles_disagg.prompts.quickstart import make_tokenizer
from miles_disagg.prompts.reward import RewardRunner, exact
from miles_disagg.prompts.source import DataOptions, DatasetSource
from miles_disagg.rollout.base import RolloutOptions, SamplingOptions
from miles_disagg.rollout.evaluate import evaluate
from miles_disagg.rollout.pool import RolloutClient
from miles_disagg.rollout.producer import Producer
from tests.fakes.rollout_gateway import FakeGateway, make_answer
from tests.fakes.samples import CountingSource, make_prompt

SAMPLING = SamplingOptions(max_new_tokens=4)


class Rig:
    """Gateway, client, buffer, ledger and producer of one test."""

    def __init__(self, *, source=None, reward=exact, capacity=8, run_id="run", group_filter=None, **options):
        values = {"batch_groups": 2, "n_samples_per_prompt": 2, "max_concurrent_samples": 8, "max_staleness": 1}
        self.options = RolloutOptions(**{**values, **options})
        self.gateway, self.buffer, self.ledger = FakeGateway(), DataBuffer(capacity), Ledger()
        self.source = source or CountingSource()
        self.reward, self.group_filter, self.run_id = RewardRunner(reward, timeout=5), group_filter, run_id

    async def __aenter__(self):
        self._serving = self.gateway.serve()
        self.client = RolloutClient(await self._serving.__aenter__(), timeout=20)
        self.producer = Producer(
            self.client,
            self.source,
            self.reward,
            self.buffer,
            self.ledger,
            self.options,
            SAMPLING,
            run_id=self.run_id,
            group_filter=self.group_filter,
        )
        return self

    async def __aexit__(self, *_):
        await asyncio.gather(self.producer.stop(), return_exceptions=True)
        await self.client.close()
        await self._serving.__aexit__(None, None, None)
        self.ledger.check()

    async def batch(self, version: int, n: int | None = None, timeout: float = 10) -> Batch:
        k = self.options.max_staleness
        n = n or self.options.batch_groups
        return await self.buffer.get_batch(n, trainer_version=version, max_staleness=k, timeout=timeout)

    async def train(self, steps: int, first: int = 0) -> list[Batch]:
        """A trainer that publishes after every step."""
        batches = []
        for version in range(first, first + steps):
            batches.append(await self.batch(version))
            self.producer.trained(batches[-1].keys)
            self.ledger.check()
            self.gateway.version = version + 1
            self.producer.advance(version + 1)
        return batches


async def settled(rig: Rig) -> None:
    """Wait until the producer has nothing more that it may do."""
    for _ in range(200):
        await asyncio.sleep(0.01)
        if not rig.producer._tasks:
            return
    raise AssertionError(rig.producer.upstream())


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_training_goes_on_within_the_bound_and_throws_nothing_away(staleness):
    async with Rig(max_staleness=staleness) as rig:
        rig.producer.start()
        batches = await rig.train(12)
    assert all(0 <= lag <= staleness for b in batches for lag in b.lags)
    keys = [k for b in batches for k in b.keys]
    assert len(set(keys)) == 24
    totals = rig.ledger.totals()
    assert totals["trained"] == 24
    assert totals["dropped"] == {} or set(totals["dropped"]) == {"stopped"}


@pytest.mark.parametrize("staleness", [0, 2])
async def test_without_a_trainer_exactly_k_plus_one_batches_are_made(staleness):
    async with Rig(max_staleness=staleness, capacity=99) as rig:
        rig.producer.start()
        await settled(rig)
        assert len(rig.buffer) == (staleness + 1) * 2


async def test_samples_in_flight_stay_within_their_bound():
    for granularity, bound in (("group", 6), ("sample", 5)):
        async with Rig(max_concurrent_samples=bound, granularity=granularity, max_staleness=8, capacity=99) as rig:
            rig.gateway.latency = 0.02
            rig.producer.start()
            await rig.train(6)
            assert rig.gateway.peak == bound, granularity


async def test_samples_carry_reward_versions_and_unique_request_ids():
    async with Rig() as rig:
        rig.producer.start()
        batch = (await rig.train(3))[-1]
        sample = batch.groups[0].samples[1]
        assert (sample.reward, sample.replica_id) == (1.0, "r0")
        assert sample.sample_id == f"{sample.prompt.key}#1/1"
        assert {"submitted", "finished", "queue", "generate", "reward"} <= set(sample.timings)
        rids = [r["rid"] for r in rig.gateway.requests]
        assert len(set(rids)) == len(rids)
        assert all(rid.startswith("run-") for rid in rids)


async def test_a_full_buffer_stops_production_and_a_taken_batch_starts_it_again():
    async with Rig(max_staleness=None, capacity=3) as rig:
        rig.producer.start()
        await asyncio.sleep(0.3)
        assert len(rig.buffer) == 3
        assert rig.producer.outstanding <= 3 + 8, "what is queued, and twice what may be in flight"
        await rig.train(5)


async def test_a_failed_generation_is_tried_again_and_then_its_prompt_is_given_up_and_listed():
    async with Rig(source=CountingSource(3), sample_attempts=2, prompt_attempts=2, max_staleness=9) as rig:

        def poison(request, answer):
            if "-0:1#" in request["rid"]:
                answer["meta_info"]["output_token_logprobs"][0][0] = float("nan")
            return answer

        rig.gateway.edit = poison
        rig.producer.start()
        batch = await rig.batch(0)
        assert sorted(p.prompt.index for p in batch.groups) == [0, 2]
        await settled(rig)
        assert list(rig.producer.poison) == ["0:1"]
        assert "nonfinite_logprobs" in rig.producer.poison["0:1"]
        totals = rig.ledger.totals()
        assert totals["failed"] == {"nonfinite_logprobs": 2}
        assert totals["retried"] == 1
        with pytest.raises(EndOfData):
            await rig.batch(0)
        metrics = rig.producer.metrics()
        assert metrics["rollout/fully_async/aborted_groups_filtered"] == 2
        assert metrics["rollout/ledger/given_up"] == 1
        counted = ("trained", "queued", "dropped", "in_flight")
        assert metrics["rollout/ledger/generated"] == sum(metrics[f"rollout/ledger/{name}"] for name in counted) == 2


async def test_an_aborted_generation_is_tried_again_under_a_new_request_id():
    async with Rig(source=CountingSource(1), batch_groups=1) as rig:
        answers = iter([True, True])

        def abort(request, answer):
            if next(answers, False):
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
            return answer

        rig.gateway.edit = abort
        rig.producer.start()
        await rig.batch(0)
        assert len({r["rid"] for r in rig.gateway.requests}) == 4
        assert rig.ledger.totals()["failed"] == {}


async def test_a_reward_that_raises_costs_the_group_not_the_run():
    def reward(sample):
        if sample.prompt.index == 0:
            raise ValueError("no such answer")
        return 1.0

    async with Rig(reward=reward, prompt_attempts=1, sample_attempts=1) as rig:
        rig.producer.start()
        batch = await rig.batch(0)
        assert 0 not in {g.prompt.index for g in batch.groups}
        assert "no such answer" in rig.producer.poison["0:0"]
        assert rig.ledger.totals()["failed"] == {"reward_error": 1}


async def test_a_group_may_shrink_instead():
    def reward(sample):
        return float("nan") if sample.sample_id.endswith("/0") else 1.0

    async with Rig(reward=reward, failed_sample="shrink_group", n_samples_per_prompt=3, sample_attempts=1) as rig:
        rig.producer.start()
        batch = await rig.batch(0)
        assert [len(g.samples) for g in batch.groups] == [2, 2]


async def test_a_bug_in_production_reaches_the_waiting_trainer_at_once():
    class Broken(CountingSource):
        def next_prompt(self):
            raise KeyError("broken source")

    async with Rig(source=Broken()) as rig:
        rig.producer.start()
        with pytest.raises(KeyError, match="broken source"):
            await rig.batch(0)
        with pytest.raises(KeyError):
            await rig.producer.stop()


async def test_a_filter_drops_groups_by_reason():
    def no_spread(group):
        return "zero_variance" if group.prompt.index % 2 else None

    async with Rig(group_filter=no_spread) as rig:
        rig.producer.start()
        batches = await rig.train(3)
        assert {g.prompt.index % 2 for b in batches for g in b.groups} == {0}
        assert rig.ledger.totals()["dropped"]["zero_variance"] >= 5


async def test_pause_holds_production_and_resume_continues_it():
    async with Rig(capacity=99) as rig:
        rig.producer.pause()
        rig.producer.start()
        with pytest.raises(DeadlineExceeded, match="the producer is paused"):
            await rig.batch(0, timeout=0.1)
        assert rig.gateway.requests == []
        rig.producer.resume()
        await rig.batch(0)


async def test_drain_waits_for_what_is_in_flight_and_says_what_is_late():
    async with Rig() as rig:
        rig.gateway.latency = 0.5
        rig.producer.start()
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded, match="groups in flight"):
            await rig.producer.drain(0.05)
        await rig.producer.drain(10)
        assert rig.ledger.totals()["generating"] == 0
        assert len(rig.buffer) == 4


async def test_stopping_frees_the_engines_and_balances_the_books():
    async with Rig() as rig:
        rig.gateway.latency = 30
        rig.producer.start()
        await asyncio.sleep(0.2)
        assert rig.gateway.in_flight == 8
        await rig.producer.stop()
        await asyncio.sleep(0.2)
        assert rig.gateway.in_flight == 0, "a client that goes away frees the engine"
        assert rig.ledger.totals()["failed"] == {"stopped": 4}


async def test_the_synchronous_schedule_makes_exactly_one_batch():
    async with Rig(prompt_attempts=1, sample_attempts=1, max_staleness=0) as rig:
        rig.gateway.version = 4
        await rig.producer.produce(2, Constraint(exact_version=4), timeout=10)
        assert len(rig.gateway.requests) == 4
        batch = await rig.batch(4)
        assert batch.lags == [0] * 4
        with pytest.raises(DeadlineExceeded, match="2 groups under version >= 9"):
            await rig.producer.produce(2, Constraint(min_version=9), timeout=0.2)


async def test_the_synchronous_schedule_replaces_groups_that_fail():
    def reward(sample):
        if sample.prompt.index == 0:
            raise ValueError("bad")
        return 0.0

    async with Rig(reward=reward, prompt_attempts=1, sample_attempts=1) as rig:
        await rig.producer.produce(2, ANY_VERSION, timeout=10)
        assert len((await rig.batch(0)).groups) == 2


class SlowGateway(FakeGateway):
    """Answers prompts from index 2 on only when `released`."""

    def __init__(self):
        super().__init__()
        self.released = asyncio.Event()

    async def generate(self, request):
        rid = (await request.json())["rid"]
        start = self.version
        if int(rid.rsplit(":", 1)[1].partition("#")[0]) >= 2:
            await self.released.wait()
        response = await super().generate(request)
        if start != self.version:
            return web.json_response(make_answer(start, self.version))
        return response


@pytest.mark.parametrize("unused", ["drop", "retry"])
async def test_over_sampling_takes_the_first_and_ends_the_rest(unused):
    rig = Rig(max_staleness=1, over_sampling_groups=4, unused=unused)
    rig.gateway = SlowGateway()
    async with rig:
        await rig.producer.produce(2, Constraint(min_version=0), timeout=10)
        assert sorted((await rig.batch(0)).keys) == ["0:0", "0:1"]
        assert rig.ledger.totals()["failed"] == {"surplus": 2}
        assert rig.ledger.totals()["generating"] == 0
        rig.gateway.released.set()
        await rig.producer.produce(2, Constraint(min_version=0), timeout=10)
        again = {"0:2", "0:3"} & {key for key in (f"0:{i}" for i in range(8)) if rig.ledger.attempts(key) == 2}
        assert again == ({"0:2", "0:3"} if unused == "retry" else set())


async def test_partial_rollouts_go_on_over_a_new_version_and_count_for_the_next_batch():
    rig = Rig(max_staleness=1, over_sampling_groups=4, partial=True, mask_old=True)
    rig.gateway = SlowGateway()
    async with rig:
        await rig.producer.produce(2, Constraint(min_version=0), timeout=10)
        assert sorted((await rig.batch(0)).keys) == ["0:0", "0:1"]
        assert rig.ledger.totals()["generating"] == 2, "still with the engines"
        rig.gateway.version = 1
        asyncio.get_running_loop().call_later(0.05, rig.gateway.released.set)
        await rig.producer.produce(2, Constraint(min_version=1), timeout=10)
        batch = await rig.batch(1)
        assert {"0:2", "0:3"} <= set(batch.keys)
        kept = [s for g in batch.groups if g.prompt.index in (2, 3) for s in g.samples]
        assert [s.lag(1) for s in kept] == [1] * 4
        assert {s.loss_mask for s in kept} == {(0, 0, 1, 1)}


async def test_what_went_on_for_too_long_is_replaced_in_the_synchronous_schedule():
    rig = Rig(max_staleness=1, over_sampling_groups=4, partial=True)
    rig.gateway = SlowGateway()
    async with rig:
        await rig.producer.produce(2, Constraint(min_version=0), timeout=10)
        await rig.batch(0)
        rig.gateway.version = 3
        rig.gateway.released.set()
        await rig.producer.produce(2, Constraint(min_version=3), timeout=10)
        batch = await rig.batch(3)
        assert batch.lags == [0] * 4
        assert rig.ledger.totals()["dropped"] == {"stale": 2}


async def test_a_generation_that_never_returns_is_a_timeout_by_name_and_training_goes_on():
    rig = Rig(max_staleness=None, sample_attempts=1, prompt_attempts=2)
    rig.gateway = SlowGateway()  # prompts from index 2 on hang for ever
    async with rig:
        rig.client._timeout = 0.2
        rig.producer.start()
        assert sorted((await rig.batch(0)).keys) == ["0:0", "0:1"]
        with pytest.raises(DeadlineExceeded, match="prompts given up, last: timeout: "):
            await rig.batch(0, timeout=3)
        assert rig.ledger.totals()["failed"]["timeout"] >= 2
        assert "0:2" in rig.producer.poison
        assert rig.ledger.attempts("0:2") == 2


async def test_data_smaller_than_a_batch_goes_on_into_the_next_epochs(tmp_path):
    rows = tmp_path / "three.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+0=", "label": "7"}) + "\n" for i in range(3)))
    options = DataOptions(input_key="prompt", label_key="label", epochs=4, seed=5)
    source = DatasetSource.from_files([str(rows)], make_tokenizer(), options)
    async with Rig(source=source, batch_groups=5, max_staleness=None, capacity=8) as rig:
        rig.producer.start()
        keys = [key for batch in await rig.train(2) for key in batch.keys]
        assert sorted(set(keys)) == sorted(keys), "a prompt of an epoch is trained on once"
        assert {key.partition(":")[0] for key in keys} == {"0", "1", "2", "3"}
        with pytest.raises(EndOfData, match="2 groups are left"):
            await rig.batch(2)


async def test_data_that_ends_within_a_batch_is_told():
    async with Rig(source=CountingSource(3)) as rig:
        rig.producer.start()
        await rig.train(1)
        with pytest.raises(EndOfData, match="1 groups are left"):
            await rig.batch(1)


async def test_stale_groups_are_handed_out_again_when_asked_for():
    async with Rig(source=CountingSource(4), unused="retry", max_staleness=0) as rig:
        rig.producer.start()
        await settled(rig)
        rig.gateway.version = 1
        rig.producer.advance(1)
        batch = await rig.batch(1)
        assert {g.oldest_version for g in batch.groups} == {1}
        assert rig.ledger.totals()["dropped"] == {"stale": 2}
        rig.producer.trained(batch.keys)
        rig.gateway.version = 2
        rig.producer.advance(2)
        await rig.batch(2)
        assert rig.ledger.totals()["retried"] == 2


async def test_a_restart_loses_no_prompt_and_trains_none_twice():
    async with Rig(source=CountingSource(8)) as first:
        first.producer.start()
        trained = (await first.train(1))[0].keys
        await first.batch(1)  # taken and never trained: the crash
        first.gateway.latency = 30
        state = json.loads(json.dumps(first.producer.state()))
    async with Rig(source=CountingSource(8)) as second:
        second.gateway.version = 1
        second.producer.load_state(state)
        second.ledger.check()
        second.producer.start()
        rest = [k for b in await second.train(3, first=1) for k in b.keys]
    assert sorted(trained + rest) == [f"0:{i}" for i in range(8)]
    assert second.ledger.totals()["trained"] == 8


async def test_a_restart_is_no_failure_of_the_prompts_that_were_in_flight():
    options = {"source": CountingSource(1), "batch_groups": 1, "prompt_attempts": 2, "sample_attempts": 1}
    state = None
    for _ in range(3):
        async with Rig(**options) as rig:
            rig.gateway.latency = 30
            if state is not None:
                rig.producer.load_state(state)
            rig.producer.start()
            while not rig.gateway.requests:
                await asyncio.sleep(0.01)
            state = json.loads(json.dumps(rig.producer.state()))
    failed = []

    def first_one_fails(request, answer):
        failed.append(request["rid"])
        if len(failed) == 1:
            del answer["meta_info"]["output_token_logprobs"]
        return answer

    async with Rig(**options) as rig:
        rig.gateway.edit = first_one_fails
        rig.producer.load_state(state)
        rig.producer.start()
        assert (await rig.batch(0)).keys == ["0:0"]
        assert rig.producer.poison == {}
        assert rig.ledger.totals()["failed"] == {"restart": 3, "missing_logprobs": 1}


async def test_evaluation_is_greedy_and_says_which_version_it_is_for():
    async with Rig() as rig:
        rig.gateway.version = 5
        prompts = [make_prompt(i, label="7" if i % 4 else "8") for i in range(20)]
        result = await evaluate(
            rig.client, prompts, SAMPLING.greedy(), Constraint(min_version=5), rig.reward, name="run-5"
        )
        assert (result.accuracy, result.version, result.num_failed) == (0.75, 5, 0)
        assert result.metrics()["eval/accuracy"] == 0.75
        assert rig.gateway.requests[0]["sampling_params"]["temperature"] == 0.0


async def test_an_evaluation_without_an_answer_is_an_error():
    async with Rig() as rig:
        rig.gateway.edit = lambda request, answer: {}
        with pytest.raises(Exception, match="none of 1 prompts was answered: SampleRejected"):
            await evaluate(rig.client, [make_prompt()], SAMPLING, ANY_VERSION, rig.reward, name="e")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_concurrent_samples": 3}, "--async-max-concurrent-samples 3 is less than the 4"),
        ({"max_staleness": -1}, "--max-weight-staleness"),
        ({"batch_groups": 0}, "batch_groups"),
        ({"groups_per_version": 1}, "less than one batch"),
    ],
)
def test_options_that_cannot_work_are_refused(change, message):
    options = RolloutOptions(batch_groups=2, n_samples_per_prompt=4, max_concurrent_samples=8)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **change)
