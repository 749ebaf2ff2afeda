"""The example plug-ins, each at work: token-in token-out over a real HTTP endpoint, and its part in a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from examples import calculator, data_source, log, long_tail, reward, single_turn
from examples import filter as dynamic_filter
from miles_disagg.buffer.base import Batch
from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import Prompt
from miles_disagg.domain.versions import ANY_VERSION, Constraint
from miles_disagg.prompts.source import DataOptions
from miles_disagg.rollout.base import SamplingOptions
from miles_disagg.rollout.pool import RolloutClient
from miles_disagg.rollout.trajectory import PluggedClient, Trajectory
from miles_disagg.trainer.batch import train_samples
from tests.fakes.rollout_gateway import FakeGateway
from tests.fakes.samples import make_group, make_sample

SAMPLING = SamplingOptions(max_new_tokens=40)
PROMPT = Prompt(3, 0, "12*7=?", (1, 2, 3), "84")


class Characters:
    """A tokenizer of characters."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, conversation, **kwargs):
        raise NotImplementedError

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(t) for t in tokens if t or not skip_special_tokens)

    def __len__(self) -> int:
        return 256


class Scripted(FakeGateway):
    """Writes one line of its script a turn; `versions` gives the version of each turn."""

    def __init__(self, *script: str, versions: tuple[int, ...] = ()):
        super().__init__()
        self.script = list(script)
        self.versions = list(versions) or [0] * len(script)
        self.edit = self._next

    def _next(self, body, answer):
        text, version = self.script.pop(0), self.versions.pop(0)
        meta = answer["meta_info"]
        ids = [ord(c) for c in text]
        meta["output_token_logprobs"] = [[-0.01 * (i + 1), token, None] for i, token in enumerate(ids)]
        meta["weight_version"] = meta["weight_version_start"] = meta["weight_version_end"] = version
        meta["weight_version_spans"] = [[0, version]]
        stops = body["sampling_params"].get("stop", [])
        return {"text": next((text.removesuffix(s) for s in stops if text.endswith(s)), text), "output_ids": ids} | {
            "meta_info": meta
        }


async def generate(gateway: FakeGateway, function, sampling=SAMPLING, constraint: Constraint = ANY_VERSION):
    async with gateway.serve() as url, RolloutClient(url, timeout=10) as client:
        plugged = PluggedClient(client, function, Characters())
        return await plugged.generate(PROMPT, sampling, constraint, sample_id="s", group_id="g", rid="r", seed=5)


async def test_a_single_turn_is_what_the_endpoint_answers():
    gateway = Scripted("84")
    sample = await generate(gateway, single_turn.generate)
    assert (sample.text, sample.tokens, sample.loss_mask) == ("84", (56, 52), None)
    assert sample.logprobs == (-0.01, -0.02)
    assert gateway.requests[0]["input_ids"] == [1, 2, 3]


async def test_a_long_tail_occupies_the_engine_and_leaves_the_sample_as_the_policy_ended_it():
    gateway = Scripted("84\0rubbish" + "." * 200)
    sample = await generate(gateway, long_tail.generate, SamplingOptions(max_new_tokens=160))
    asked = gateway.requests[0]["sampling_params"]
    assert asked["ignore_eos"] is True
    assert asked["max_new_tokens"] == long_tail.length(5, 160)
    assert (sample.text, sample.tokens, sample.finish_reason) == ("84", (56, 52, 0), "stop")
    assert len(sample.logprobs) == 3
    lengths = sorted(long_tail.length(seed, 1600) for seed in range(2000))
    assert 140 < lengths[1000] < 180, "the median is a tenth of the longest"
    assert lengths[-20] == pytest.approx(160 * 10.2, rel=0.25), "a hundredth is ten times as long"


async def test_the_calculator_answers_within_the_sample_and_its_tokens_are_not_trained_on():
    gateway = Scripted("<calc>12*7</calc>", "so 84", versions=(4, 6))
    gateway.version = 4
    sample = await generate(gateway, calculator.generate, constraint=Constraint(min_version=4))
    first, second = gateway.requests
    call, result = [ord(c) for c in "<calc>12*7</calc>"], [ord(c) for c in "=84 "]
    assert second["input_ids"] == [1, 2, 3, *call, *result], "the policy's own ids, never tokenized again"
    assert list(sample.tokens) == [*call, *result, *(ord(c) for c in "so 84")]
    assert sample.loss_mask == (1,) * len(call) + (0,) * 4 + (1,) * 5
    assert sample.logprobs[len(call) : len(call) + 4] == (0.0,) * 4
    assert first["rid"] != second["rid"]
    assert {h["x-session-id"] for h in gateway.headers} == {"r"}, "one replica for all turns"
    assert second["sampling_params"]["max_new_tokens"] == 40 - len(call) - 4
    assert sample.token_versions() == [4] * (len(call) + 4) + [6] * 5
    assert (sample.oldest_version, sample.version_end, sample.metadata["calls"]) == (4, 6, 1)
    assert sample.text == "<calc>12*7=84 so 84"


async def test_a_multi_turn_sample_reaches_the_loss_with_its_mask():
    sample = await generate(Scripted("<calc>1+1</calc>", "2"), calculator.generate)
    group = make_group()
    (row,) = train_samples([type(group)("g", PROMPT, (sample,))], [[1.0]])
    assert row.trained_tokens == len("<calc>1+1</calc>") + 1
    assert row.behaviour_logprobs is not None
    assert len(row.behaviour_logprobs) == row.response_len


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(("12*7", "84"), ("(1+2)/2", "1.5"), ("-3+1", "-2"), ("1/0", "error")),
        *(("__import__('os')", "error"), ("2**9", "error"), ("", "error")),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression: str, value: str):
    assert calculator.calculate(expression) == value


async def test_turns_end_at_the_response_limit_and_with_the_tools_patience():
    tight = SamplingOptions(max_new_tokens=20)
    sample = await generate(Scripted("<calc>12*7</calc>"), calculator.generate, tight)
    assert len(sample.tokens) == 17, "the result would leave no token for the policy"
    many = await generate(Scripted(*["<calc>1</calc>"] * 9), calculator.generate, SamplingOptions(max_new_tokens=999))
    assert many.metadata["calls"] == calculator.MAX_TURNS


async def test_a_generate_function_that_fails_is_a_rejected_sample_with_its_name():
    async def broken(trajectory: Trajectory) -> None:
        raise KeyError("state")

    async def silent(trajectory: Trajectory) -> None:
        trajectory.append_text("hello")

    async def greedy(trajectory: Trajectory) -> None:
        trajectory.append([1] * 41, "too much")

    for function, words in ((broken, "broken raised KeyError"), (silent, "never called"), (greedy, "do not fit")):
        with pytest.raises(SampleRejected, match=words):
            await generate(Scripted("x"), function)


def test_the_reward_is_closer_to_one_the_closer_the_number():
    sample = make_sample(PROMPT, text="maybe 85")
    assert reward.closeness(sample) == 0.5
    assert reward.closeness(make_sample(PROMPT, text="12*7 = 84")) == 1.0
    assert reward.closeness(make_sample(PROMPT, text="no idea")) == 0.0


def test_the_data_source_gives_the_same_prompts_after_a_restart():
    first = data_source.Sums([], Characters(), DataOptions(seed=7))
    begin = [first.next_prompt() for _ in range(300)]
    state = dict(first.state())
    rest = [first.next_prompt() for _ in range(5)]
    second = data_source.Sums([], Characters(), DataOptions(seed=7))
    second.load_state(state)
    assert [second.next_prompt() for _ in range(5)] == rest
    assert second.prompt(begin[9].key) == begin[9]
    assert len(begin[0].text) < len(begin[299].text)
    assert all(eval(p.text.removesuffix("=")) == int(p.label or "") for p in begin)
    with pytest.raises(ValueError, match="--rollout-seed 7, not 8"):
        data_source.Sums([], Characters(), DataOptions(seed=8)).load_state(state)


def test_the_filter_keeps_what_says_something():
    def group(*rewards: float):
        return type(make_group())("g", PROMPT, tuple(make_sample(PROMPT, reward=r) for r in rewards))

    assert dynamic_filter.neither_solved_nor_hopeless(group(0, 1)) is None
    assert dynamic_filter.neither_solved_nor_hopeless(group(1, 1)) == "all_right"
    assert dynamic_filter.neither_solved_nor_hopeless(group(0, 0)) == "all_wrong"


def test_the_loggers_write_lines(tmp_path: Path):
    batch = Batch((make_group(1), make_group(2)), 3, 0.1)
    log.best_answer(4, batch, {"rollout/reward_mean": 0.25}, tmp_path)
    log.evaluation(4, 5, {"eval/accuracy": 0.5}, tmp_path)
    assert (tmp_path / "best_answers.txt").read_text() == "step 4, 0.25 on average: '1+0=' '7'\n"
    assert (tmp_path / "evaluations.txt").read_text() == "step 4, version 5: 0.50\n"
