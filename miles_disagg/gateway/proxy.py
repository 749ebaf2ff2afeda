"""One attempt to have one replica answer: forward the bytes, pass the answer through, or say why not.

Nothing is sent to the client before the replica's status is known (and, unless it streams, its whole body), so a
failed attempt can be repeated elsewhere and a request is never answered twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from miles_disagg.domain.errors import EngineUnavailable
from miles_disagg.gateway.router import Member
from miles_disagg.replica.wire import error_body

RETRYABLE = (409, 410, 429, 503)  # another replica may answer
STREAM = web.RequestKey("stream", web.StreamResponse)  # the answer, once it has begun to stream
_LAST_WORD_SECONDS = 2.0


class ReplicaGone(Exception):
    """The replica broke off, or fell silent, before it answered."""


class ClientLeft(ConnectionError):
    """The client broke off while it was being answered."""


class Refused(Exception):
    """The replica answered with a status that another one may not give."""

    def __init__(self, status: int, headers: Mapping[str, str], body: Any, retry_after: str | None):
        self.status, self.headers, self.body, self.retry_after = status, headers, body, retry_after
        super().__init__(f"status {status}")

    def response(self) -> web.Response:
        """The refusal, for the client."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = self.retry_after
        return web.Response(status=self.status, body=body, headers=headers, content_type="application/json")


class Attempt:
    """See the module. Registered with its member, which interrupts it when it leaves."""

    def __init__(self, member: Member):
        self._member, self._gone = member, False
        self._task: asyncio.Task[Any] | None = None

    def replica_gone(self) -> None:
        """The member left or fell silent: stop waiting for it."""
        if not self._gone and self._task is not None:
            self._gone = True
            self._task.cancel()

    async def run(
        self, session: aiohttp.ClientSession, request: web.Request, raw: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """The replica's answer with `headers` added. Raises ReplicaGone or Refused while nothing was sent."""
        member, self._task = self._member, asyncio.current_task()
        member.outstanding.add(self)
        answer: web.StreamResponse | None = None
        try:
            async with session.post(
                member.url + request.path, data=raw, headers={"Content-Type": "application/json"}
            ) as upstream:
                if upstream.status in RETRYABLE:
                    raise Refused(upstream.status, headers, await upstream.read(), upstream.headers.get("Retry-After"))
                kind = upstream.headers.get("Content-Type", "application/json")
                if kind.startswith("text/event-stream"):
                    answer = web.StreamResponse(status=upstream.status, headers={**headers, "Content-Type": kind})
                    await answer.prepare(request)
                    request[STREAM] = answer
                    async for data in upstream.content.iter_any():
                        await _write(answer, data)
                    await answer.write_eof()
                    return answer
                body = await upstream.read()
                return web.Response(status=upstream.status, body=body, headers={**headers, "Content-Type": kind})
        except asyncio.CancelledError:
            assert self._task is not None
            if not self._gone or self._task.uncancel() > 0:
                raise  # the client left
            return await self._broke(request, answer, f"{member.reason}, left rotation")
        except ClientLeft:
            raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            return await self._broke(request, answer, f"{type(error).__name__}: {error}")
        finally:
            member.outstanding.discard(self)

    async def _broke(self, request: web.Request, answer: web.StreamResponse | None, why: str) -> web.StreamResponse:
        """Before anything was sent the request can go elsewhere; a stream under way ends with an error event."""
        message = f"replica {self._member.replica_id} broke off ({why})"
        if answer is None:
            raise ReplicaGone(message)
        return await end_stream(request, answer, EngineUnavailable(message))


async def end_stream(request: web.Request, answer: web.StreamResponse, error: Exception) -> web.StreamResponse:
    """End a stream under way with an error event. A client that does not take it in time is cut off: ClientLeft."""
    event = json.dumps(error_body(error)).encode()
    try:
        async with asyncio.timeout(_LAST_WORD_SECONDS):
            await _write(answer, b"data: " + event + b"\n\ndata: [DONE]\n\n")
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # closing would wait until it has read what is buffered
        raise ClientLeft("it does not read what it is sent") from None
    return answer


async def _write(answer: web.StreamResponse, data: bytes) -> None:
    try:
        await answer.write(data)
    except ConnectionError as error:
        raise ClientLeft(str(error)) from error
