"""The rollout protocol's JSON (docs/rollout-protocol.md): parsing requests, stamping responses, errors and statuses.

Pure. Shared by the replica and the gateway; the HTTP servers around it are `replica.app` and `gateway.app`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidConstraint,
    InvalidRequest,
    MilesDisaggError,
    Overloaded,
    RequestError,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import Constraint, TokenSpan, normalise_spans

GENERATE = "/generate"
ROLLOUT_ROUTES = (GENERATE, "/v1/completions", "/v1/chat/completions")
CONTROL_ROUTES = (
    "pause_generation", "continue_generation", "abort_request", "flush_cache", "get_server_info_internal",
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "update_weight_version", "init_weights_update_group", "destroy_weights_update_group",
    "init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance", "get_weights_by_name",
    "weights_digest", "weights_checker", "release_memory_occupation", "resume_memory_occupation", "slow_down",
    "load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter", "open_session", "close_session",
    "start_profile", "stop_profile", "set_internal_state", "configure_logging", "freeze_gc", "shutdown",
)  # fmt: skip
HOLD_SECONDS, MAX_HOLD_SECONDS = 600.0, 86_400.0
RID = re.compile(r"[\x21-\x7e]{1,200}")
# Fields of a batched /generate request that hold one entry per prompt.
_PER_PROMPT = (
    "text", "input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "image_data", "audio_data", "video_data", "lora_path", "extra_key", "custom_logit_processor",
)  # fmt: skip


@dataclass(frozen=True)
class RolloutRequest:
    """One engine request: `body` in SGLang's form without `weight_version`, and what the protocol adds.

    fingerprint: digest of path and body without `rid` and `stream`: the same rid must come with the same question.
    """

    path: str
    body: Mapping[str, Any]
    rid: str
    constraint: Constraint
    fingerprint: bytes


def parse_json(raw: bytes) -> dict[str, Any]:
    """Request body as a JSON object, or InvalidRequest."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return body


def parse_rid(value: Any, name: str = "rid") -> str:
    """A request id: 1 to 200 printable ASCII characters; generated if absent."""
    if value is None:
        return uuid.uuid4().hex
    if not isinstance(value, str) or not RID.fullmatch(value):
        raise InvalidRequest(f"{name}: must be a string of 1 to 200 printable ASCII characters without spaces")
    return value


def parse_hold(body: Mapping[str, Any]) -> tuple[int | None, float]:
    """Version and seconds of a `/hold`, or InvalidRequest."""
    version, seconds = body.get("version"), body.get("seconds", HOLD_SECONDS)
    if version is not None and (type(version) is not int or not 0 <= version < 10**18):
        raise InvalidRequest("version: must be a non-negative integer or null")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_HOLD_SECONDS:
        raise InvalidRequest(f"seconds: must be a number above 0, at most {MAX_HOLD_SECONDS:g}")
    return version, float(seconds)


def parse_requests(path: str, body: dict[str, Any]) -> tuple[list[RolloutRequest], bool]:
    """Split a request into single-prompt ones; the flag tells whether the answer is a list.

    Raises InvalidRequest or InvalidConstraint, naming the field.
    """
    constraint = Constraint.from_json(body.pop("weight_version", None))
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise InvalidRequest("stream: must be true or false")
    if path != GENERATE:
        _check_openai(path, body)
        return [_single(path, body, constraint)], False
    bodies, is_batch = _fan_out(body)
    requests = [_single(path, item, constraint) for item in bodies]
    if len({r.rid for r in requests}) != len(requests):
        raise InvalidRequest("rid: every prompt of a batch needs its own")
    return requests, is_batch


def _check_openai(path: str, body: Mapping[str, Any]) -> None:
    if path.endswith("chat/completions"):
        if not isinstance(body.get("messages"), list):
            raise InvalidRequest("messages: must be a list")
        return
    prompt = body.get("prompt")
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else set()
    if not isinstance(prompt, str) and (len(kinds) != 1 or not kinds <= {str, int, list}):
        raise InvalidRequest("prompt: must be a string, a list of strings, token ids, or a list of lists of token ids")


def _single(path: str, body: dict[str, Any], constraint: Constraint) -> RolloutRequest:
    rid = parse_rid(body.get("rid"))
    question = {k: v for k, v in body.items() if k not in ("rid", "stream", "stream_options")}
    try:
        text = json.dumps([path, question], sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request body cannot be read: {error}") from None
    return RolloutRequest(path, body, rid, constraint, hashlib.blake2b(text.encode(), digest_size=16).digest())


def _fan_out(body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None) and body.get("input_embeds") is None:
        raise InvalidRequest("text, input_ids: give exactly one of them")
    prompts = ids if ids is not None else text
    is_batch = isinstance(prompts, list) and bool(prompts) and (isinstance(prompts[0], list) or text is not None)
    if isinstance(prompts, list) and not prompts:
        raise InvalidRequest(f"{'input_ids' if ids is not None else 'text'}: must not be empty")
    bodies = _split(body, len(prompts)) if is_batch and isinstance(prompts, list) else [body]
    for item in bodies:
        _check_prompt(item)
    out: list[dict[str, Any]] = []
    for item in bodies:
        n = item["sampling_params"].get("n", 1)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise InvalidRequest("sampling_params.n: must be an integer from 1 to 1024")
        if n == 1:
            out.append(item)
            continue
        for i in range(n):
            single = {**item, "sampling_params": {**item["sampling_params"], "n": 1}}
            out.append(single if "rid" not in item else {**single, "rid": f"{parse_rid(item['rid'])}-{i}"})
    return out, is_batch or len(out) > 1


def _check_prompt(item: dict[str, Any]) -> None:
    ids, text = item.get("input_ids"), item.get("text")
    if ids is None and not isinstance(text, str) and item.get("input_embeds") is None:
        raise InvalidRequest("text: must be a string (or a list of strings)")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(t) is int and t >= 0 for t in ids)):
        raise InvalidRequest("input_ids: must be a non-empty list of non-negative token ids (or a list of such lists)")
    if item.get("sampling_params") is None:
        item["sampling_params"] = {}
    if not isinstance(item["sampling_params"], dict):
        raise InvalidRequest("sampling_params: must be an object (or a list of objects for a batch)")


def _split(body: dict[str, Any], n: int) -> list[dict[str, Any]]:
    rid = body.get("rid")
    if isinstance(rid, str):
        body = {**body, "rid": [f"{rid}-{i}" for i in range(n)]}
    shared = {k: v for k, v in body.items() if k not in _PER_PROMPT or not isinstance(v, list)}
    out = [copy.copy(shared) for _ in range(n)]
    for name in _PER_PROMPT:
        values = body.get(name)
        if not isinstance(values, list):
            continue
        if len(values) != n:
            raise InvalidRequest(f"{name}: has {len(values)} entries for {n} prompts")
        for item, value in zip(out, values, strict=True):
            item[name] = value
    return out


def stamp(
    target: dict[str, Any],
    *,
    start: int,
    end: int,
    spans: Sequence[TokenSpan] | None,
    tokens: int,
    replica_id: str,
    run_id: str | None = None,
) -> None:
    """Add the attribution fields to `target` (a `meta_info`, or the top level of a /v1 response), in place.

    spans None: which token came from which version is not known (several choices across an activation).
    """
    target["weight_version_start"], target["weight_version_end"], target["weight_version"] = start, end, end
    if spans is None:
        target["weight_version_spans"] = None
    else:
        merged = normalise_spans(spans or [TokenSpan(0, start)], tokens)
        target["weight_version_spans"] = [[s.first_token, s.version] for s in merged]
    target["replica_id"] = replica_id
    if run_id is not None:
        target["run_id"] = run_id


# --- errors -----------------------------------------------------------------------------------------


def error_status(error: Exception) -> tuple[int, str, dict[str, Any]]:
    """HTTP status, wire type and extra fields of an error (docs/rollout-protocol.md)."""
    match error:
        case WeightVersionNotReady():
            extra = {"requested": error.requested, "served": error.served, "latest": error.latest}
            return 409, error.type, {**extra, "retry_after": error.retry_after}
        case WeightVersionGone():
            return 410, error.type, {"requested": error.requested, "oldest": error.oldest}
        case Overloaded():
            return 429, error.type, {"retry_after": error.retry_after}
        case InvalidConstraint() | InvalidRequest():
            return 400, error.type, {}
        case RequestError():
            return 400, "InvalidRequest", {}
        case EngineUnavailable():
            return 503, "EngineUnavailable", {"retry_after": 1.0}
        case EngineError() if 400 <= error.status < 500:
            return 400, "InvalidRequest", {"engine_status": error.status}
        case EngineError():
            return 503, "EngineUnavailable", {"retry_after": 1.0}
        case DeadlineExceeded():
            return 504, "DeadlineExceeded", {}
        case _:
            return 500, "InternalError", {}


def error_body(error: Exception) -> dict[str, Any]:
    """`{"error": {"type", "message", ...}}`; the message of an unexpected error is not disclosed."""
    _, kind, extra = error_status(error)
    message = str(error) if isinstance(error, MilesDisaggError) else "internal error: see the server's log"
    return {"error": {"type": kind, "message": message, **extra}}


def retry_after(error: Exception) -> str | None:
    """Value of the Retry-After header in whole seconds, None where a retry does not help."""
    seconds = error_status(error)[2].get("retry_after")
    return None if seconds is None else str(max(1, math.ceil(seconds)))
