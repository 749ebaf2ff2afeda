"""Rewards: built in, plugged in, remote; deadlines and rubbish."""

import asyncio
import json
import time

import pytest
from aiohttp import web

from miles_disagg.domain.errors import ConfigError, RewardError
from miles_disagg.prompts import reward as module
from miles_disagg.prompts.reward import RewardRunner, load_reward, task_reward
from miles_disagg.prompts.tasks import make_task
from tests.fakes.samples import make_prompt, make_sample


def sleepy(sample):
    time.sleep(5)
    return 1.0


def dies(sample):
    import os

    os._exit(3)


def half(sample):
    return 0.5


async def late(sample):
    await asyncio.sleep(5)
    return 1.0


async def awaited(sample):
    await asyncio.sleep(0)
    return 0.25


async def score(function, sample=None, **options):
    runner = RewardRunner(function, **options)
    try:
        return await runner(sample or make_sample())
    finally:
        await runner.close()


async def test_exact_compares_with_the_label_outer_space_aside():
    assert await score(load_reward("exact"), make_sample(text=" 7\n")) == 1.0
    assert await score(load_reward("exact"), make_sample(text="70")) == 0.0
    with pytest.raises(RewardError, match="0:0 has no label.*--label-key"):
        await score(load_reward("exact"), make_sample(make_prompt(label=None)))


async def test_math_finds_equal_answers_off_the_main_thread():
    pytest.importorskip("math_verify")
    prompt = make_prompt(label="$\\frac{1}{2}$")
    assert await score(load_reward("math"), make_sample(prompt, text="so it is \\boxed{0.5}"), timeout=60) == 1.0
    assert await score(load_reward("math"), make_sample(prompt, text="so it is \\boxed{0.6}"), timeout=60) == 0.0


async def test_reasoning_gym_scores_its_own_items():
    pytest.importorskip("reasoning_gym")
    item = make_task("basic_arithmetic", num_train=1, num_held_out=1).train[0]
    from miles_disagg.domain.samples import Prompt

    prompt = Prompt(0, 0, item.input, (1,), item.label, json.loads(json.dumps(item.metadata)))
    function = load_reward(task_reward("basic_arithmetic"))
    assert await score(function, make_sample(prompt, text=item.label), timeout=60) == 1.0
    assert await score(function, make_sample(prompt, text="no idea"), timeout=60) < 1.0
    with pytest.raises(RewardError, match="no `entry`"):
        await score(function, timeout=60)


async def test_import_paths_load_sync_and_async_functions():
    assert await score(load_reward(custom_path=f"{__name__}.half")) == 0.5
    assert await score(load_reward(custom_path=f"{__name__}:awaited")) == 0.25


@pytest.mark.parametrize("path", ["no.such.module.f", "miles_disagg.prompts.reward.nothing", "f", "math.pi"])
def test_an_import_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match=f"--custom-rm-path {path}"):
        load_reward(custom_path=path)


def test_an_unknown_reward_lists_what_there_is():
    with pytest.raises(ConfigError, match="--rm-type nope: unknown; there are exact, math, reasoning-gym, remote_rm"):
        load_reward("nope")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high"])
async def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(RewardError, match="0:0#1/0"):
        await score(lambda sample: value)


async def test_an_exception_names_function_and_sample():
    def broken(sample):
        raise KeyError("x")

    with pytest.raises(RewardError, match="broken raised KeyError for 0:0#1/0"):
        await score(broken)


@pytest.mark.parametrize(("function", "isolation"), [(sleepy, "thread"), (late, "thread"), (sleepy, "process")])
async def test_a_reward_that_takes_too_long_is_given_up(function, isolation):
    with pytest.raises(RewardError, match=r"took more than 0.1 s.*--reward-timeout"):
        await score(function, timeout=0.1, isolation=isolation)


async def test_the_event_loop_keeps_turning_while_rewards_are_computed():
    runner = RewardRunner(lambda sample: time.sleep(0.2) or 1.0)
    scoring = asyncio.create_task(runner(make_sample()))
    turns = 0
    while not scoring.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns >= 5


async def test_hung_threads_are_counted_and_in_the_end_refused(monkeypatch):
    monkeypatch.setattr(module, "_MAX_HUNG", 2)
    runner = RewardRunner(sleepy, timeout=0.05)
    for _ in range(2):
        with pytest.raises(RewardError, match="took more than"):
            await runner(make_sample())
    with pytest.raises(RewardError, match="2 calls hang"):
        await runner(make_sample())


async def test_a_process_that_dies_costs_its_own_sample_only():
    with pytest.raises(RewardError, match="its process died twice"):
        await score(dies, timeout=60, isolation="process")
    assert await score(half, timeout=60, isolation="process") == 0.5


async def test_a_remote_reward_is_asked_over_http():
    asked = []

    async def answer(request):
        asked.append(await request.json())
        if asked[-1]["response"] == "7":
            return web.json_response({"reward": 0.75})
        return web.json_response({}, status=200 if asked[-1]["response"] == "8" else 500)

    app = web.Application()
    app.router.add_post("/score", answer)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        function = load_reward("remote_rm", url=f"http://127.0.0.1:{server.addresses[0][1]}/score")
        assert await score(function) == 0.75
        assert asked[0] == {"prompt": "0+0=", "response": "7", "label": "7", "metadata": {}}
        with pytest.raises(RewardError, match="has no field 'reward'"):
            await score(function, make_sample(text="8"))
        with pytest.raises(RewardError, match="answered 500"):
            await score(function, make_sample(text="9"))
    finally:
        await server.cleanup()
