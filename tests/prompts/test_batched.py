"""Rewards for many samples at once: who shares a call, and what a call that fails means for each."""

import asyncio

import pytest

from examples.batched_reward import brevity
from miles_disagg.domain.errors import RewardError
from miles_disagg.domain.samples import Prompt
from miles_disagg.prompts.batched import batched
from miles_disagg.prompts.reward import RewardRunner, load_reward
from tests.fakes.samples import make_sample

PROMPT = Prompt(0, 0, "1+1=", (1,), "2")


def samples(n: int):
    return [make_sample(PROMPT, text=str(i)) for i in range(n)]


async def test_samples_asked_for_together_share_calls_and_each_gets_its_own():
    calls = []

    @batched(most=4, wait=0.02)
    def number(batch):
        calls.append(len(batch))
        return [float(s.text) for s in batch]

    runner = RewardRunner(number, workers=16)
    try:
        assert await asyncio.gather(*(runner(s) for s in samples(10))) == [float(i) for i in range(10)]
        assert sorted(calls) == [2, 4, 4]
        assert await runner(samples(3)[2]) == 2.0
    finally:
        await runner.close()


async def test_a_call_that_fails_fails_all_of_its_samples_and_no_other():
    @batched(most=2, wait=0.02)
    def picky(batch):
        if any(s.text == "1" for s in batch):
            raise KeyError("one")
        return [1.0] if len(batch) == 2 else [0.5]

    runner = RewardRunner(picky, workers=8)
    try:
        results = await asyncio.gather(*(runner(s) for s in samples(5)), return_exceptions=True)
    finally:
        await runner.close()
    assert all(isinstance(r, RewardError) for r in results[:4])
    assert "KeyError('one')" in str(results[0])
    assert "returned 1 rewards for 2 samples" in str(results[3])
    assert results[4] == 0.5


def test_it_works_in_one_event_loop_after_another():
    def run() -> float:
        async def ask() -> float:
            return await brevity(make_sample(PROMPT, text="2"))

        return asyncio.run(ask())

    assert run() == run() == 0.0


async def test_the_example_is_found_by_its_path_and_compares_within_a_call():
    runner = RewardRunner(load_reward(custom_path="examples.batched_reward.brevity"), workers=8)
    short, long, wrong = (
        make_sample(PROMPT, text=t, tokens=k) for t, k in (("2", (1,)), ("so 2", (1, 2, 3, 4)), ("3", (1,)))
    )
    try:
        assert await asyncio.gather(*(runner(s) for s in (short, long, wrong))) == [0.75, 0.0, 0.0]
    finally:
        await runner.close()


@pytest.mark.parametrize("most", [1, 3])
async def test_a_caller_that_gives_up_leaves_the_others_alone(most: int):
    @batched(most=most, wait=0.05)
    def slow(batch):
        return [1.0] * len(batch)

    first = asyncio.create_task(slow(samples(1)[0]))
    second = asyncio.create_task(slow(samples(1)[0]))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await second == 1.0
