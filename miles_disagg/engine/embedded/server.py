"""The HTTP server of the embedded engine: SGLang's generation routes, errors, authorization, start and stop."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from miles_disagg.domain.errors import InvalidRequest
from miles_disagg.engine.embedded.control import Control
from miles_disagg.engine.embedded.generation import Generation
from miles_disagg.engine.embedded.openai import OpenAIRoutes

_OPEN_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
_MAX_BODY = 1 << 31
_dumps: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def error_response(message: str, status: int = 400) -> web.Response:
    """SGLang's error body."""
    return web.json_response({"error": {"message": message}}, status=status)


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    try:
        return await handler(request)
    except InvalidRequest as e:
        return error_response(str(e))


def _authorization(api_key: str):
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):
        given = request.headers.get("Authorization", "").encode()
        if request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


async def send_stream(request: web.Request, chunks: Any) -> web.StreamResponse:
    """Server-sent events: `data: {json}` for each chunk, then `data: [DONE]`."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async for chunk in chunks:
            await response.write(b"data: " + _dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        pass  # the caller went away; closing the generator ends its requests
    finally:
        await chunks.aclose()
    return response


def build_app(generation: Generation, control: Control, api_key: str | None) -> web.Application:
    """The application with all routes."""

    async def generate(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError as e:
            raise InvalidRequest(f"the body is not JSON: {e}") from None
        parsed, mail = generation.parse(body)
        if parsed.stream:
            return await send_stream(request, generation.stream(parsed, mail))
        results = await generation.results(parsed, mail)
        return web.Response(text=_dumps(results if parsed.is_list else results[0]), content_type="application/json")

    middlewares: list[Any] = [_errors] if api_key is None else [_authorization(api_key), _errors]
    app = web.Application(middlewares=middlewares, client_max_size=_MAX_BODY)
    app.add_routes([web.post("/generate", generate), web.put("/generate", generate)])
    app.add_routes(control.routes())
    app.add_routes(OpenAIRoutes(generation, control.launched, send_stream).routes())
    return app


async def serve(app: web.Application, host: str, port: int, ready: Callable[[int], None], stop: asyncio.Event) -> None:
    """Listen until `stop` is set; `ready(port)` is called once connections are accepted. OSError: port in use."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        assert site._server is not None
        ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()
