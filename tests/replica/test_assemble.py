"""An engine's stream put together: whole chunks and chunks of what is new give the same answer, over any legs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.replica.assemble import GenerateAssembler

_LEG = st.lists(st.integers(0, 3), min_size=1, max_size=8)  # tokens in each chunk; 0: it only repeats or ends


def _chunks(legs: list[list[int]], incremental: bool) -> list[list[dict[str, Any]]]:
    """The stream of each leg; tokens count up from 100 over all of them."""
    streams, token = [], 100
    for number, leg in enumerate(legs):
        output: list[int] = []
        stream = []
        for i, count in enumerate(leg):
            begin = len(output) if incremental else 0
            output += range(token, token + count)
            token += count
            ids = output[begin:]
            ended = number == len(legs) - 1 and i == len(leg) - 1
            meta = {
                "completion_tokens": len(output), "prompt_tokens": 3 + token - 100 - len(output),
                "weight_version": f"v{number}", "output_token_logprobs": [[-t / 1000, t, None] for t in ids],
                "finish_reason": {"type": "stop"} if ended else None,
            }  # fmt: skip
            stream.append({"text": "".join(map(chr, ids)), "output_ids": ids, "meta_info": meta})
        streams.append(stream)
    return streams


def _assembled(legs: list[list[int]], incremental: bool) -> tuple[dict[str, Any], list[tuple[int, Any]], list[Any]]:
    assembler = GenerateAssembler({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 500}}, "rid")
    seen, prompts = [], []
    for stream in _chunks(legs, incremental):
        prompts.append(assembler.engine_body("key", "engine-rid")["input_ids"])
        for chunk in stream:
            shown = assembler.add(chunk)
            assert shown is not None
            assert len(shown["output_ids"]) == assembler.tokens
            seen.append((assembler.tokens, assembler.engine_version))
        assembler.next_leg()
    assert assembler.finished
    return assembler.answer(), seen, prompts


@given(st.lists(_LEG, min_size=1, max_size=4))
def test_incremental_and_cumulative_streams_give_the_same_answer(legs: list[list[int]]) -> None:
    total = sum(map(sum, legs))
    answer, seen, prompts = _assembled(legs, incremental=True)
    assert answer["output_ids"] == list(range(100, 100 + total))
    assert [t for _, t, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert answer["text"] == "".join(map(chr, answer["output_ids"]))
    assert answer["meta_info"]["completion_tokens"] == total
    assert (answer, seen, prompts) == _assembled(legs, incremental=False)
