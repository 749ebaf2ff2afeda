"""Requests of the embedded engine: SGLang's `/generate` body taken apart, and one request's state while it runs.

No model, no HTTP. The scheduler's thread writes a request's output; the event loop reads it through `Chunk`s, which
say how far the output was when a chunk was due and which version had written it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.embedded.sampling import SamplingParams, make_generator


@dataclass(frozen=True)
class Chunk:
    """A point in a request's output: its first `tokens` tokens exist, the newest written by `version`."""

    tokens: int
    version: str
    finish_reason: dict[str, Any] | None = None


@dataclass(eq=False)
class Request:
    """One sequence. `logprobs[i]` belongs to `output[i]`; `top_logprobs[i]` is `[[logprob, token, None], ...]`.

    `notify` is called by the scheduler's thread with each due Chunk; the last one has a finish reason.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    notify: Callable[[Request, Chunk], None]
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int | None = None  # first prompt position whose successors are scored; None: no prompt logprobs
    top_logprobs_num: int = 0
    limit: int = 0  # most tokens it may generate
    created: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[list[Any]]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    retractions: int = 0
    told: int = 0  # tokens announced so far
    finish_reason: dict[str, Any] | None = None
    random: random.Random = field(default_factory=random.Random)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, the sequence whose KV a row holds (all but the newest token)."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True)
class GenerateBody:
    """A parsed `/generate` body: requests in order, and whether the answer is a list."""

    requests: list[Request]
    is_list: bool
    stream: bool
    text_in_logprobs: bool


@dataclass(frozen=True)
class Limits:
    """What the model allows: vocabulary size and context length in tokens."""

    vocab_size: int
    context_length: int


def parse_generate(
    body: Mapping[str, Any],
    limits: Limits,
    encode: Callable[[str], list[int]],
    notify: Callable[[Request, Chunk], None],
) -> GenerateBody:
    """SGLang's GenerateReqInput: `text` or `input_ids`, single or batch, `n` samples each. InvalidRequest otherwise."""
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body must be a JSON object")
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "lora_path", "custom_logit_processor"):
        if body.get(name):
            raise InvalidRequest(f"{name}: not supported by the embedded engine")
    prompts, batched = _prompts(body, encode)
    count = len(prompts)
    parameters = body.get("sampling_params")
    params = [SamplingParams.parse(p) for p in (_each("sampling_params", parameters, count, (dict, type(None))))]
    n = params[0].n
    if any(p.n != n for p in params):
        raise InvalidRequest("The parallel_sample_num should be the same for all samples in sample params.")
    rids = _rids(body.get("rid"), count)
    want = _each("return_logprob", body.get("return_logprob") or False, count, (bool,))
    starts = _each("logprob_start_len", _or(body.get("logprob_start_len"), -1), count, (int,))
    tops = _each("top_logprobs_num", body.get("top_logprobs_num") or 0, count, (int,))
    stream = bool(body.get("stream"))
    requests = []
    for prompt, param, rid, logprob, start, top in zip(prompts, params, rids, want, starts, tops, strict=True):
        limit = _check_length(prompt, param, limits)
        if start < -1 or start > len(prompt):
            raise InvalidRequest(f"logprob_start_len must be in [-1, {len(prompt)}], got {start}")
        if not 0 <= top <= limits.vocab_size:
            raise InvalidRequest(f"top_logprobs_num must be in [0, {limits.vocab_size}], got {top}")
        for k in range(n):
            seed = param.sampling_seed
            requests.append(
                Request(
                    rid if n == 1 else f"{rid}_{k}",
                    prompt,
                    param,
                    notify,
                    stream=stream,
                    return_logprob=logprob,
                    logprob_start=start if logprob and 0 <= start < len(prompt) else None,
                    top_logprobs_num=top if logprob else 0,
                    limit=limit,
                    random=make_generator(None if seed is None else seed if k == 0 else hash((seed, k))),
                )
            )
    return GenerateBody(requests, batched or n > 1, stream, bool(body.get("return_text_in_logprobs")))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _prompts(body: Mapping[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidRequest("text must be a string or a non-empty list of strings")
        return [encode(t) for t in texts], batched
    if not isinstance(ids, list) or not ids:
        raise InvalidRequest("input_ids must be a non-empty list of token ids, or a list of such lists")
    batched = isinstance(ids[0], list)
    prompts = ids if batched else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt or not all(type(t) is int for t in prompt):
            raise InvalidRequest("input_ids must be a non-empty list of token ids, or a list of such lists")
    return prompts, batched


def _each(name: str, value: Any, count: int, types: tuple[type, ...]) -> list[Any]:
    """One value per request, from a single value or a list of as many."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise InvalidRequest(f"{name}: {len(values)} values for {count} prompts")
    for v in values:
        if not isinstance(v, types) or (isinstance(v, bool) and bool not in types):
            raise InvalidRequest(f"{name}: {v!r} is not {' or '.join(t.__name__ for t in types)}")
    return values


def _rids(rid: Any, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    if isinstance(rid, list) and len(rid) == count and all(isinstance(r, str) and r for r in rid):
        if len(set(rid)) < count:
            raise InvalidRequest(f"Duplicate request IDs detected within the request: {rid}")
        return list(rid)
    raise InvalidRequest("rid must be a string, or a list of as many strings as there are prompts")


def _check_length(prompt: list[int], params: SamplingParams, limits: Limits) -> int:
    """Most tokens the request may generate. InvalidRequest, in SGLang's words, if it cannot fit."""
    bad = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"The input_ids contain {bad}, outside the vocab size ({limits.vocab_size}).")
    if not prompt:
        raise InvalidRequest("the prompt has no tokens")
    if len(prompt) >= limits.context_length:
        raise InvalidRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    room = limits.context_length - len(prompt)
    if params.max_new_tokens is None:
        return room
    if params.max_new_tokens > room:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. You "
            f"requested a total of {len(prompt) + params.max_new_tokens} tokens: {len(prompt)} tokens from the input "
            f"messages and {params.max_new_tokens} tokens for the completion. Please reduce the number of tokens in "
            "the input messages or the completion to fit within the limit."
        )
    return params.max_new_tokens
