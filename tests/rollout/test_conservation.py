"""Random faults, lags and restarts: the books balance at every step and no prompt is lost."""

import asyncio
import json
import random

import pytest

from miles_disagg.buffer.base import EndOfData
from miles_disagg.buffer.data_buffer import DataBuffer
from miles_disagg.domain.errors import DeadlineExceeded, InvalidRequest, RewardError, SampleRejected
from miles_disagg.domain.samples import Prompt, Sample
from miles_disagg.domain.versions import Constraint, TokenSpan
from miles_disagg.prompts.ledger import Ledger
from miles_disagg.rollout.base import RolloutOptions, SamplingOptions
from miles_disagg.rollout.producer import Producer
from tests.fakes.samples import CountingSource, make_sample

PROMPTS = 60


class FaultyClient:
    """Answers after a random number of turns of the loop, with faults; versions move on while it generates."""

    def __init__(self, rng: random.Random, faults: float):
        self.rng, self.faults, self.version = rng, faults, 0

    async def generate(self, prompt: Prompt, sampling, constraint: Constraint, *, sample_id, group_id, **_) -> Sample:
        for _ in range(500):
            if constraint.satisfied_by(self.version):
                break
            await asyncio.sleep(0)
        start = self.version
        for _ in range(int(self.rng.lognormvariate(1.5, 1))):
            await asyncio.sleep(0)
        if self.rng.random() < self.faults:
            raise self.rng.choice(
                [SampleRejected("aborted"), DeadlineExceeded("x", 1.0), InvalidRequest("400"), SampleRejected("empty")]
            )
        spans = (TokenSpan(0, start),) if start == self.version else (TokenSpan(0, start), TokenSpan(1, self.version))
        return make_sample(
            prompt, start, sample_id=sample_id, group_id=group_id, version_end=self.version, spans=spans, reward=None
        )


class FaultyReward:
    def __init__(self, rng: random.Random, faults: float):
        self.rng, self.faults = rng, faults

    async def __call__(self, sample: Sample) -> float:
        await asyncio.sleep(0)
        if self.rng.random() < self.faults:
            raise RewardError("no")
        return self.rng.random()

    async def close(self) -> None: ...


def assemble(rng: random.Random, faults: float, staleness: int | None) -> tuple[Producer, DataBuffer, FaultyClient]:
    client, buffer = FaultyClient(rng, faults), DataBuffer(rng.choice([3, 6, 12]))
    options = RolloutOptions(
        batch_groups=3,
        n_samples_per_prompt=2,
        max_concurrent_samples=rng.choice([2, 5, 16]),
        max_staleness=staleness,
        granularity=rng.choice(["sample", "group"]),
        sample_attempts=2,
        unused="retry",
        failed_sample=rng.choice(["drop_group", "shrink_group"]),
    )
    producer = Producer(
        client,
        CountingSource(PROMPTS),
        FaultyReward(rng, faults / 2),
        buffer,
        Ledger(),
        options,
        SamplingOptions(4, seed=1),
        run_id="run",
    )
    return producer, buffer, client


async def train(
    producer: Producer, buffer: DataBuffer, client: FaultyClient, staleness, version: int, steps: int, keys: list[str]
):
    """Up to `steps` batches; the version reached and whether the data is over. `keys` gets what was trained on."""
    producer.start()
    for _ in range(steps):
        try:
            batch = await buffer.get_batch(3, trainer_version=version, max_staleness=staleness, timeout=20)
        except EndOfData:
            return version, True
        producer.ledger.check()
        if staleness is not None:
            assert all(0 <= lag <= staleness for lag in batch.lags)
        await asyncio.sleep(0)
        producer.trained(batch.keys)
        keys += batch.keys
        version += 1
        client.version = version
        producer.advance(version)
        producer.ledger.check()
    return version, False


@pytest.mark.parametrize("staleness", [0, 1, 4, None])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("books", ["of now", "of before"])
async def test_every_prompt_is_trained_on_or_listed_whatever_goes_wrong(seed, staleness, books):
    """`of before`: the producer dies, and only what was trained on since its books were handed over is known."""
    rng = random.Random(f"{seed}:{staleness}")
    producer, buffer, client = assemble(rng, rng.choice([0.0, 0.1, 0.4]), staleness)
    version, over, restarts = 0, False, 0
    state, since = json.loads(json.dumps(producer.state())), []
    while not over:
        version, over = await train(producer, buffer, client, staleness, version, rng.randint(2, 9), since)
        if not over:
            if books == "of now" or rng.random() < 0.3:
                state, since = json.loads(json.dumps(producer.state())), []
            await producer.stop()
            faults, restarts = client.faults, restarts + 1
            producer, buffer, client = assemble(rng, faults, staleness)
            client.version = version
            if books == "of now":
                producer.load_state(state)
            else:
                producer.load_state(state, version=version, trained=since)
            producer.ledger.check()
    totals = producer.ledger.totals()
    left = {g["prompt"]["index"] for g in buffer.snapshot()["groups"]}
    trained = {i for i in range(PROMPTS) if producer.ledger.entry(f"0:{i}").state == "trained"}
    poison = {int(key.split(":")[1]) for key in producer.poison}
    assert trained | left | poison == set(range(PROMPTS)), totals
    assert len(trained) + len(left) + len(poison) == PROMPTS, "each ends in one place only"
    assert len(left) < 3
    assert totals["trained"] == len(trained) > 0
    assert restarts > 0
    await producer.stop()
