"""A hand-written rollout endpoint: PROTOCOL 2 over real HTTP, with a script of refusals and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Edit = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class FakeGateway:
    """Serves `version`; `refusals` (status, headers, body) go out first; `edit(request, answer)` spoils an answer."""

    def __init__(self) -> None:
        self.version = 0
        self.latency = 0.0
        self.refusals: list[tuple[int, dict[str, str], Any]] = []
        self.edit: Edit | None = None
        self.text = "7"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.peak = 0
        self.drop_connections = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.drop_connections:
            self.drop_connections -= 1
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if self.refusals:
            status, headers, refusal = self.refusals.pop(0)
            return web.json_response(refusal, status=status, headers=headers)
        wanted = body.get("weight_version") or {}
        if self.version < wanted.get("min_version", 0):
            error = {"type": "WeightVersionNotReady", "message": f"served {self.version}"}
            return web.json_response({"error": error}, status=409, headers={"Retry-After": "0.02"})
        start = self.version
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.latency)
        finally:
            self.in_flight -= 1
        answer = make_answer(start, self.version, text=self.text)
        return web.json_response(self.edit(body, answer) if self.edit else answer)

    @asynccontextmanager
    async def serve(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def make_answer(start: int, end: int, text: str = "7", ids: tuple[int, ...] = (5, 6, 7, 13)) -> dict[str, Any]:
    """A good answer whose second half is by `end` when that differs from `start`."""
    spans = [[0, start]] if start == end else [[0, start], [len(ids) // 2, end]]
    return {
        "text": text,
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "weight_version": end,
            "weight_version_start": start,
            "weight_version_end": end,
            "weight_version_spans": spans,
            "replica_id": "r0",
        },
    }
