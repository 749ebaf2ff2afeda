"""OpenAI's routes on the embedded engine, translated to and from `/generate`.

Completions and chat completions, streamed or not. Fields that SGLang adds to them (`rid`, `top_k`, `ignore_eos`, ...)
are understood; fields that would change the answer and are not implemented are refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.embedded.control import Launched
from miles_disagg.engine.embedded.generation import Generation

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "n",
             "skip_special_tokens", "no_stop_trim", "frequency_penalty", "presence_penalty", "repetition_penalty",
             "logit_bias")  # fmt: skip
_REFUSED = ("echo", "suffix", "tools", "response_format", "json_schema", "regex", "ebnf", "best_of")
_DEFAULT_COMPLETION_TOKENS = 16


class OpenAIRoutes:
    """Handlers; `routes` lists them."""

    def __init__(self, generation: Generation, launched: Launched, send_stream: Callable[..., Any]):
        self._generation, self._launched, self._send_stream = generation, launched, send_stream

    def routes(self) -> list[web.RouteDef]:
        """`/v1/models`, `/v1/completions`, `/v1/chat/completions`."""
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """The one served model."""
        it = self._launched
        card = {"id": it.served_model_name, "object": "model", "owned_by": "miles-disagg", "root": it.model_path,
                "created": 0, "max_model_len": it.context_length}  # fmt: skip
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`/v1/completions`: `prompt` is text, token ids, or a list of either."""
        body = await _body(request)
        prompt = body.get("prompt")
        is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], (int, list))
        inner = self._inner(body, _DEFAULT_COMPLETION_TOKENS)
        inner["input_ids" if is_ids else "text"] = prompt
        return await self._run(request, body, inner, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`/v1/chat/completions`: `messages` through the checkpoint's chat template."""
        body = await _body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a non-empty list")
        tokenizer = self._generation.text.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise InvalidRequest("messages: this checkpoint has no chat template; use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(body.get("chat_template_kwargs") or {})
            )
        except Exception as e:
            raise InvalidRequest(f"messages: the chat template refuses them: {e}") from None
        inner = self._inner(body, None)
        inner["input_ids"] = list(tokenizer.encode(text, add_special_tokens=False))
        return await self._run(request, body, inner, chat=True)

    def _inner(self, body: Mapping[str, Any], default_tokens: int | None) -> dict[str, Any]:
        for name in _REFUSED:
            if body.get(name) not in (None, False, [], {"type": "text"}, 1):
                raise InvalidRequest(f"{name}: not supported by the embedded engine")
        params = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
        tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        params["max_new_tokens"] = default_tokens if tokens is None else tokens
        if body.get("min_tokens"):
            params["min_new_tokens"] = body["min_tokens"]
        if body.get("seed") is not None:
            params["sampling_seed"] = body["seed"]
        want = body.get("logprobs")
        top = body.get("top_logprobs", 0) if want is True else (want or 0)
        return {
            "sampling_params": params,
            "rid": body.get("rid"),
            "stream": bool(body.get("stream")),
            "return_logprob": want is not None and want is not False,
            "top_logprobs_num": top or 0,
        }

    async def _run(
        self, request: web.Request, body: Mapping[str, Any], inner: Mapping[str, Any], *, chat: bool
    ) -> web.StreamResponse:
        parsed, mail = self._generation.parse(inner)
        head = {
            "id": parsed.requests[0].rid,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or self._launched.served_model_name,
        }
        if parsed.stream:
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return await self._send_stream(request, self._chunks(head, parsed, mail, chat, usage))
        results = await self._generation.results(parsed, mail)
        choices = [self._choice(i, r, chat) for i, r in enumerate(results)]
        metas = [r["meta_info"] for r in results]
        answer = {**head, "choices": choices, "usage": _usage(metas, len(metas))}
        answer["metadata"] = {"weight_version": metas[-1]["weight_version"]}
        return web.json_response(answer)

    async def _chunks(
        self, head: dict[str, Any], parsed: Any, mail: Any, chat: bool, usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Deltas: each chunk holds what is new since the last one of its choice."""
        if chat:
            head = {**head, "object": "chat.completion.chunk"}
        sent: dict[int, tuple[int, int]] = {}
        last: dict[int, dict[str, Any]] = {}
        async for result in self._generation.stream(parsed, mail):
            index = result.get("index", 0)
            chars, tokens = sent.get(index, (0, 0))
            meta = result["meta_info"]
            choice = self._choice(index, result, chat, since=tokens)
            delta = result["text"][chars:]
            sent[index] = (max(chars, len(result["text"])), meta["completion_tokens"])
            last[index] = meta
            if chat:
                choice.pop("message")
                choice["delta"] = {"role": "assistant", "content": delta} if index not in sent else {"content": delta}
                if not tokens:
                    choice["delta"]["role"] = "assistant"
            else:
                choice["text"] = delta
            yield {**head, "choices": [choice], "metadata": {"weight_version": meta["weight_version"]}}
        if usage:
            yield {**head, "choices": [], "usage": _usage(list(last.values()), len(last))}

    def _choice(self, index: int, result: Mapping[str, Any], chat: bool, since: int = 0) -> dict[str, Any]:
        meta = result["meta_info"]
        reason = meta["finish_reason"]
        choice: dict[str, Any] = {"index": index, "finish_reason": reason["type"] if reason else None, "logprobs": None}
        if reason and "matched" in reason:
            choice["matched_stop"] = reason["matched"]
        if "output_token_logprobs" in meta:
            choice["logprobs"] = self._logprobs(meta, chat, since)
        if chat:
            choice["message"] = {"role": "assistant", "content": result["text"]}
        else:
            choice["text"] = result["text"]
        return choice

    def _logprobs(self, meta: Mapping[str, Any], chat: bool, since: int) -> dict[str, Any]:
        one = self._generation.text.one
        chosen = meta["output_token_logprobs"][since:]
        tops = meta.get("output_top_logprobs", [[] for _ in meta["output_token_logprobs"]])[since:]
        if not chat:
            return {
                "tokens": [one(t) for _, t, _ in chosen],
                "token_logprobs": [lp for lp, _, _ in chosen],
                "top_logprobs": [{one(t): lp for lp, t, _ in top} for top in tops],
                "text_offset": [-1] * len(chosen),
            }

        def entry(logprob: float, token: int) -> dict[str, Any]:
            text = one(token)
            return {"token": text, "bytes": list(text.encode()), "logprob": logprob}

        return {
            "content": [
                {**entry(lp, t), "top_logprobs": [entry(a, b) for a, b, _ in top]}
                for (lp, t, _), top in zip(chosen, tops, strict=True)
            ]
        }


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _usage(metas: list[dict[str, Any]], count: int) -> dict[str, int]:
    prompt = metas[0]["prompt_tokens"] if count else 0
    completion = sum(m["completion_tokens"] for m in metas)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
