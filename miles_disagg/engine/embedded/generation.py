"""From HTTP bodies to the scheduler and back: results, stream chunks and their JSON form.

The bridge between the scheduler's thread and the event loop. Routes are `server`; OpenAI's forms are `openai`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.embedded.requests import Chunk, GenerateBody, Limits, Request, parse_generate
from miles_disagg.engine.embedded.scheduler import Scheduler
from miles_disagg.engine.embedded.text import StreamText, Text


class _Mail:
    """Chunks of the requests of one HTTP call, delivered in the event loop, once a step for all of them."""

    def __init__(self, bridge: Bridge):
        self._bridge = bridge
        self._items: deque[tuple[Request, Chunk]] = deque()
        self._ready = asyncio.Event()

    def notify(self, request: Request, chunk: Chunk) -> None:
        """Called in the scheduler's thread."""
        self._bridge.post(self, request, chunk)

    def put(self, request: Request, chunk: Chunk) -> None:
        """Called in the event loop."""
        self._items.append((request, chunk))
        self._ready.set()

    async def take(self) -> list[tuple[Request, Chunk]]:
        """Everything delivered since the last call, at least one item."""
        await self._ready.wait()
        self._ready.clear()
        items = list(self._items)
        self._items.clear()
        return items


class Bridge:
    """Hands chunks from the scheduler's thread to the event loop: one wake-up for all that a step announced."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[_Mail, Request, Chunk]] = deque()
        self._scheduled = False

    def post(self, mail: _Mail, request: Request, chunk: Chunk) -> None:
        """Thread-safe."""
        self._outbox.append((mail, request, chunk))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        while self._outbox:
            mail, request, chunk = self._outbox.popleft()
            mail.put(request, chunk)


class Generation:
    """Runs parsed requests. `result` and `stream` give SGLang's dicts."""

    def __init__(self, scheduler: Scheduler, text: Text, limits: Limits):
        self.scheduler, self.text, self.limits = scheduler, text, limits
        self._bridge = Bridge()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        if self.text.tokenizer is None:
            raise InvalidRequest("text: this checkpoint has no tokenizer; send input_ids")
        return list(self.text.tokenizer.encode(text))

    def parse(self, body: Mapping[str, Any]) -> tuple[GenerateBody, _Mail]:
        """Validate a `/generate` body; nothing is queued yet."""
        mail = _Mail(self._bridge)
        parsed = parse_generate(body, self.limits, self.encode, mail.notify)
        needs_text = any(r.params.stop or r.params.stop_regex for r in parsed.requests)
        if needs_text and self.text.tokenizer is None:
            raise InvalidRequest("stop: this checkpoint has no tokenizer; use stop_token_ids")
        return parsed, mail

    async def results(self, parsed: GenerateBody, mail: _Mail) -> list[dict[str, Any]]:
        """Run to the end; results in the order of the requests. Cancelled: the requests end too."""
        done: dict[Request, dict[str, Any]] = {}
        await asyncio.wrap_future(self.scheduler.submit(parsed.requests))
        try:
            while len(done) < len(parsed.requests):
                for request, chunk in await mail.take():
                    if chunk.finish_reason is not None:
                        done[request] = self._result(request, chunk, parsed)
        finally:
            self._end(parsed, done)
        return [done[r] for r in parsed.requests]

    async def stream(self, parsed: GenerateBody, mail: _Mail) -> AsyncIterator[dict[str, Any]]:
        """Cumulative chunks as they are due; with `index` if there are several requests.

        A slow reader gets fewer chunks, but never one whose new tokens are of two versions.
        """
        await asyncio.wrap_future(self.scheduler.submit(parsed.requests))
        texts = {r: StreamText(self.text, r.params) for r in parsed.requests}
        finished: dict[Request, Any] = {}
        try:
            while len(finished) < len(parsed.requests):
                for request, chunk in _coalesce(await mail.take()):
                    out = self._result(request, chunk, parsed, texts[request])
                    if chunk.finish_reason is not None:
                        finished[request] = True
                    if parsed.is_list:
                        out["index"] = parsed.requests.index(request)
                    yield out
        finally:
            self._end(parsed, finished)

    def _end(self, parsed: GenerateBody, done: Mapping[Request, Any]) -> None:
        for request in parsed.requests:
            if request not in done:
                self.scheduler.call(lambda rid=request.rid: self.scheduler.abort(rid))

    def _result(
        self, request: Request, chunk: Chunk, parsed: GenerateBody, stream: StreamText | None = None
    ) -> dict[str, Any]:
        count, reason = chunk.tokens, chunk.finish_reason
        output = request.output[:count]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "weight_version": chunk.version,
            "num_retractions": request.retractions,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        if request.return_logprob:
            self._logprobs(meta, request, output, parsed.text_in_logprobs)
        if reason is not None:
            meta["e2e_latency"] = time.monotonic() - request.created
            text = self.text.finished(output, request.params, reason)
        elif stream is not None:
            text = stream.upto(output, count)
        else:
            text = self.text.decode(output, request.params)
        return {"text": text, "output_ids": output, "meta_info": meta}

    def _logprobs(self, meta: dict[str, Any], request: Request, output: list[int], with_text: bool) -> None:
        def entry(logprob: float | None, token: int) -> list[Any]:
            return [logprob, token, self.text.one(token) if with_text else None]

        meta["output_token_logprobs"] = [entry(lp, t) for lp, t in zip(request.logprobs, output, strict=False)]
        meta["output_token_logprobs_length"] = len(output)
        meta["input_token_logprobs"] = []
        if (start := request.logprob_start) is not None and request.prompt_logprobs is not None:
            scored = [None, *request.prompt_logprobs]
            meta["input_token_logprobs"] = [entry(lp, t) for lp, t in zip(scored, request.prompt[start:], strict=True)]
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = request.top_logprobs[: len(output)]


def _coalesce(items: list[tuple[Request, Chunk]]) -> list[tuple[Request, Chunk]]:
    """Keep of each request's chunks the last one of every version, in order."""
    out: list[tuple[Request, Chunk]] = []
    place: dict[Request, int] = {}
    for request, chunk in items:
        at = place.get(request)
        if at is not None and out[at][1].version == chunk.version:
            out[at] = (request, chunk)
        else:
            place[request] = len(out)
            out.append((request, chunk))
    return out
