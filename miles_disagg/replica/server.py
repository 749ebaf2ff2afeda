"""HTTP plumbing shared by replica and gateway: start and stop on a port, bearer token, errors as JSON.

No routes here. Errors and statuses are `wire`'s.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from miles_disagg.domain.errors import InvalidRequest, MilesDisaggError
from miles_disagg.replica.exposition import Histogram
from miles_disagg.replica.wire import error_body, error_status, retry_after

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY_SECONDS = 60.0
OPEN_ROUTES = ("/health", "/")  # answered without a token: load balancers probe, and the live page asks for it


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON answer, encoded compactly."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request, seconds: float = BODY_SECONDS) -> bytes:
    """The request's body. HTTPRequestTimeout if it does not arrive in `seconds`, HTTPRequestEntityTooLarge above the
    application's limit."""
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request's body did not arrive in {seconds:g} s") from None


def error_response(error: Exception) -> web.Response:
    """The protocol's answer to an error, with Retry-After where a retry helps."""
    status = error_status(error)[0]
    if not isinstance(error, MilesDisaggError):
        log.error("unexpected error", exc_info=error)
    seconds = retry_after(error)
    return json_response(error_body(error), status, {"Retry-After": seconds} if seconds else None)


def plain_error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error that has no exception class: Unauthorized, RouteBlocked, NotFound."""
    return json_response({"error": {"type": kind, "message": message}}, status, headers)


class AnswerCount:
    """Answers of the rollout routes: by HTTP status (499: the client left), and the seconds of those that were 200."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.seconds = Histogram()

    async def answer(self, request: web.Request, serve: Handler) -> web.StreamResponse:
        """What `serve` answers, an error as JSON; counted."""
        begun, status = time.monotonic(), 499
        try:
            response = await serve(request)
            status = response.status
            return response
        except ConnectionError:
            raise  # the client left
        except web.HTTPException as error:
            status = error.status
            raise
        except Exception as error:
            response = error_response(error)
            status = response.status
            return response
        finally:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status == 200:
                self.seconds.observe(time.monotonic() - begun)


def guard(token: str | None) -> Any:
    """Middleware: bearer token on everything but OPEN_ROUTES, and every error as JSON."""
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_ROUTES:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                message = "send the token of --auth-token-file as Authorization: Bearer"
                return plain_error(401, "Unauthorized", message, {"WWW-Authenticate": "Bearer"})
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge as error:
            limit = request.client_max_size
            return plain_error(413, InvalidRequest.type, f"the request body is larger than {limit} bytes: {error.text}")
        except web.HTTPRequestTimeout as error:
            return plain_error(408, InvalidRequest.type, error.text or "the request did not arrive in time")
        except web.HTTPNotFound:
            return plain_error(404, "NotFound", f"no route {request.path}")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return plain_error(405, "MethodNotAllowed", f"{request.path} takes {allowed}", {"Allow": allowed})
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            return error_response(error)

    return middleware


class HttpServer:
    """A running aiohttp application. `url` is where it answers; `stop` ends it."""

    def __init__(self, runner: web.AppRunner, url: str):
        self._runner, self.url = runner, url

    @classmethod
    async def start(
        cls,
        app: web.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        advertise_host: str | None = None,
        backlog: int = 2048,
    ) -> HttpServer:
        """Listen on `port` (0: an ephemeral one). OSError if the port is taken. A handler is cancelled when its
        client disconnects."""
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=tls, backlog=backlog)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        port = runner.addresses[0][1]
        name = advertise_host or ("127.0.0.1" if host in ("0.0.0.0", "::") else host)
        return cls(runner, f"{'https' if tls else 'http'}://{f'[{name}]' if ':' in name else name}:{port}")

    async def stop(self) -> None:
        """Stop listening and end what is being answered."""
        await self._runner.cleanup()
