"""Putting an engine's stream together: cumulative /generate chunks over several legs, and /v1 deltas.

An assembler takes chunks as they come and knows, after each, how many tokens there are, which version the engine says
it is at, what a streaming caller should see, and the answer a non-streaming caller gets. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from miles_disagg.domain.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
# Sampling parameters whose state lies in the tokens generated so far: such a request cannot be continued as a prompt.
_STATEFUL = (
    "json_schema", "regex", "ebnf", "structural_tag", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


class Assembler(Protocol):
    """What a generation needs from its stream. `cumulative`: a later chunk replaces an earlier one."""

    cumulative: bool
    tokens: int
    engine_version: str | None
    finished: bool

    def engine_body(self, cache_key: str, rid: str) -> dict[str, Any]:
        """Body of the next leg's engine request."""
        ...

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Take a chunk; returns what a streaming caller should see (None: nothing)."""
        ...

    def continuable(self) -> bool:
        """True if a new leg can take over where the last one stopped."""
        ...

    def next_leg(self) -> None:
        """The engine request was interrupted; a new one follows."""
        ...

    def end(self, reason: str) -> dict[str, Any]:
        """Finish here with what there is (`finish_reason` abort); returns the last chunk for streaming callers."""
        ...

    def answer(self) -> dict[str, Any]:
        """The complete answer."""
        ...

    def stamp_target(self, message: dict[str, Any]) -> dict[str, Any]:
        """Where in a chunk or answer the attribution fields go."""
        ...


class GenerateAssembler:
    """/generate: a chunk carries the whole text, `output_ids` and logprobs so far, or (an engine started with
    --incremental-streaming-output) what is new in them. Which it is shows in the counts of each chunk; callers see the
    whole in both cases.

    sparse: ask for chunks at pauses and at the end only, of an engine that announces at a pause what it has.
    """

    cumulative = True

    def __init__(self, body: Mapping[str, Any], rid: str, *, sparse: bool = False):
        self._body, self._rid, self._sparse = body, rid, sparse
        self.tokens, self.finished = 0, False
        self.engine_version: str | None = None
        self._prior: dict[str, Any] | None = None  # merged state at the end of the earlier legs
        self._last: dict[str, Any] | None = None
        self._leg_tokens = 0  # in `_last`, from the leg being read

    def engine_body(self, cache_key: str, rid: str) -> dict[str, Any]:
        body = {**self._body, "stream": True, "rid": rid}
        own = body.get("extra_key")
        body["extra_key"] = cache_key if own is None else f"{own}|{cache_key}"
        if self._sparse:
            body["sampling_params"] = {**(body.get("sampling_params") or {}), "stream_interval": 0}
        if self._prior is not None:
            done, params = self._prior["output_ids"], dict(body.get("sampling_params") or {})
            limit = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
            if limit is not None:
                params["max_new_tokens"] = limit - len(done)
            if params.get("min_new_tokens"):
                params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(done))
            body["sampling_params"] = params
            body["input_ids"] = [*self._body["input_ids"], *done]
        return body

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        meta = chunk.setdefault("meta_info", {})
        self.engine_version = meta.get("weight_version")
        total, new = meta.get("completion_tokens"), len(chunk.get("output_ids") or ())
        if self._last is not None and self._leg_tokens > 0 and self._leg_tokens + new == total:
            merged = _extend(self._last, chunk, new, continued=self._prior is not None)
        else:
            merged = chunk if self._prior is None else _join(self._prior, chunk)
        self._leg_tokens = int(total or 0)
        merged["meta_info"]["id"] = self._rid
        self._last = merged
        self.tokens = int(merged["meta_info"].get("completion_tokens") or len(merged.get("output_ids") or ()))
        self.finished = merged["meta_info"].get("finish_reason") is not None
        return merged

    def continuable(self) -> bool:
        if self.tokens == 0:
            return True
        params = self._body.get("sampling_params") or {}
        neutral = (None, 0, 0.0, "") if "repetition_penalty" not in params else (None, 0, 0.0, "", 1, 1.0)
        return (
            isinstance(self._body.get("input_ids"), list)
            and self._last is not None
            and len(self._last.get("output_ids") or ()) == self.tokens
            and all(params.get(name) in neutral for name in _STATEFUL)
        )

    def next_leg(self) -> None:
        self._leg_tokens = 0
        if self.tokens:
            self._prior = self._last

    def end(self, reason: str) -> dict[str, Any]:
        if self._last is None:
            self._last = {"text": "", "output_ids": [], "meta_info": {"id": self._rid, "completion_tokens": 0}}
            if isinstance(ids := self._body.get("input_ids"), list):
                self._last["meta_info"]["prompt_tokens"] = len(ids)
        self._last["meta_info"]["finish_reason"] = {"type": "abort", "message": reason}
        self.finished = True
        return self._last

    def answer(self) -> dict[str, Any]:
        assert self._last is not None
        return self._last

    def stamp_target(self, message: dict[str, Any]) -> dict[str, Any]:
        return message["meta_info"]


def _extend(so_far: dict[str, Any], chunk: dict[str, Any], new: int, *, continued: bool) -> dict[str, Any]:
    """`so_far` with the `new` tokens of an incremental chunk of the same leg appended, in place."""
    before, meta = so_far["meta_info"], chunk["meta_info"]
    for name, value in meta.items():
        if name.startswith("output_") and isinstance(value, list) and isinstance(before.get(name), list):
            before[name].extend(value)
        elif name == "completion_tokens":
            before[name] += new
        elif not (continued and _is_of_the_prompt(name)):
            before[name] = value
    so_far["output_ids"].extend(chunk.get("output_ids") or ())
    if "text" in chunk:
        so_far["text"] = (so_far.get("text") or "") + chunk["text"]
    return so_far


def _is_of_the_prompt(name: str) -> bool:
    return name.startswith("input_") or name in ("prompt_tokens", "cached_tokens")


def _join(prior: dict[str, Any], chunk: dict[str, Any]) -> dict[str, Any]:
    """Earlier legs' merged state followed by this leg's chunk."""
    before, meta = prior["meta_info"], dict(chunk["meta_info"])
    for name, value in meta.items():
        if name.startswith("output_") and isinstance(value, list) and isinstance(before.get(name), list):
            meta[name] = [*before[name], *value]
        elif _is_of_the_prompt(name):
            meta[name] = before.get(name)
    meta["completion_tokens"] = before["completion_tokens"] + int(meta.get("completion_tokens") or 0)
    return {
        **chunk,
        "text": prior.get("text", "") + chunk.get("text", ""),
        "output_ids": [*prior["output_ids"], *(chunk.get("output_ids") or ())],
        "meta_info": meta,
    }


class OpenAIAssembler:
    """/v1/completions and /v1/chat/completions: chunks are deltas by choice index.

    Tokens are counted through `continuous_usage_stats` where the engine knows it, else by logprobs or chunks until
    the final usage comes. With several choices the count per choice is not known.
    """

    cumulative = False

    def __init__(self, path: str, body: Mapping[str, Any], rid: str):
        self._chat, self._body, self._rid = path.endswith("chat/completions"), body, rid
        self.tokens, self.finished = 0, False
        self.engine_version: str | None = None
        prompts = body.get("prompt")
        batch = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        choices, options = body.get("n") or 1, body.get("stream_options") or {}
        if isinstance(choices, bool) or not isinstance(choices, int) or choices < 1:
            raise InvalidRequest(f"n: must be a positive integer, got {choices!r}")
        if not isinstance(options, Mapping):
            raise InvalidRequest("stream_options: must be an object")
        self._expected = batch * choices
        self._usage_wanted = bool(options.get("include_usage"))
        self._continuous_wanted = bool(options.get("continuous_usage_stats"))
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None

    @property
    def single_choice(self) -> bool:
        """True if tokens can be told apart: there is one choice only."""
        return self._expected == 1

    def engine_body(self, cache_key: str, rid: str) -> dict[str, Any]:
        options = {**(self._body.get("stream_options") or {}), "include_usage": True, "continuous_usage_stats": True}
        own = self._body.get("extra_key")
        key = cache_key if own is None else f"{own}|{cache_key}"
        return {**self._body, "stream": True, "stream_options": options, "rid": rid, "extra_key": key}

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        if not self._head:
            self._head = {k: v for k, v in chunk.items() if k not in ("choices", "usage", "object")}
        self.engine_version = (chunk.get("metadata") or {}).get("weight_version")
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
            self.tokens = int(usage.get("completion_tokens") or 0)
        for choice in chunk.get("choices") or ():
            self._merge(choice)
            if not usage:
                self.tokens += _delta_tokens(choice)
        ended = sum(1 for c in self._choices.values() if c.get("finish_reason"))
        self.finished = ended >= self._expected
        if not chunk.get("choices"):
            return chunk if self._usage_wanted else None
        if not self._continuous_wanted:
            chunk = {k: v for k, v in chunk.items() if k != "usage"}
        return chunk

    def _merge(self, choice: dict[str, Any]) -> None:
        index = int(choice.get("index") or 0)
        state = self._choices.setdefault(index, {"index": index})
        if self._chat:
            message = state.setdefault("message", {"role": "assistant", "content": None})
            for name, value in (choice.get("delta") or {}).items():
                if name == "tool_calls":
                    _merge_tool_calls(message.setdefault("tool_calls", []), value or [])
                elif name != "role" and isinstance(value, str):
                    message[name] = (message.get(name) or "") + value
                elif value is not None:
                    message[name] = value
        else:
            state["text"] = state.get("text", "") + (choice.get("text") or "")
        if isinstance(logprobs := choice.get("logprobs"), dict):
            total = state.setdefault("logprobs", {})
            for name, value in logprobs.items():
                total[name] = [*(total.get(name) or ()), *value] if isinstance(value, list) else value
        for name in ("finish_reason", "matched_stop", "stop_reason"):
            if choice.get(name) is not None:
                state[name] = choice[name]

    def continuable(self) -> bool:
        return not self._choices

    def next_leg(self) -> None:
        self._head = {}

    def end(self, reason: str) -> dict[str, Any]:
        for choice in self._choices.values() or [self._choices.setdefault(0, {"index": 0})]:
            choice.setdefault("finish_reason", "abort")
            choice.setdefault("abort_reason", reason)
        self.finished = True
        empty = {"delta": {}} if self._chat else {"text": ""}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choices = [{"index": i, **empty, "finish_reason": "abort", "abort_reason": reason} for i in self._choices]
        return {**self._head, "id": self._rid, "object": kind, "choices": choices}

    def answer(self) -> dict[str, Any]:
        kind = "chat.completion" if self._chat else "text_completion"
        empty = {"message": {"role": "assistant", "content": ""}} if self._chat else {"text": ""}
        choices = [
            {**empty, "logprobs": None, "finish_reason": None, **self._choices[i]} for i in sorted(self._choices)
        ]
        return {"id": self._rid, **self._head, "object": kind, "choices": choices, "usage": self._usage}

    def stamp_target(self, message: dict[str, Any]) -> dict[str, Any]:
        return message


def _delta_tokens(choice: Mapping[str, Any]) -> int:
    """How many tokens a delta holds, as far as it can be told."""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        entries = logprobs.get("content", logprobs.get("tokens"))
        if isinstance(entries, list):
            return len(entries)
    return int(bool(choice.get("text") or (choice.get("delta") or {}).get("content")))


def _merge_tool_calls(total: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = int(delta.get("index") or 0)
        while len(total) <= index:
            total.append(
                {"index": len(total), "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
        call, function = total[index], delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
