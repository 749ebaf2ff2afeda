"""The replica's HTTP face: rollout routes, readiness, status, wake, metrics. docs/rollout-protocol.md is its contract.

Engine control routes are refused here: only the replica itself drives its engine. The work is `session` and `replica`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from miles_disagg.domain.errors import CheckpointError, EngineError, InvalidRequest
from miles_disagg.replica.exposition import CONTENT_TYPE, Family, Histogram, render
from miles_disagg.replica.reconciler import Reconciler
from miles_disagg.replica.registration import Registration
from miles_disagg.replica.relay import PeerFailed
from miles_disagg.replica.relay_links import RelayedStore
from miles_disagg.replica.replica import Replica
from miles_disagg.replica.server import AnswerCount, HttpServer, guard, json_response, plain_error, read_body
from miles_disagg.replica.wire import (
    CONTROL_ROUTES,
    ROLLOUT_ROUTES,
    RolloutRequest,
    error_body,
    parse_hold,
    parse_json,
    parse_requests,
)
from miles_disagg.store.base import check_key

MAX_BODY_BYTES = 64 * 2**20


class ReplicaApp:
    """Routes of one replica. `reconciler` may be None where versions come by broadcast alone."""

    def __init__(
        self,
        replica: Replica,
        reconciler: Reconciler | None = None,
        *,
        token: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        relay: RelayedStore | None = None,
    ):
        self._replica, self._reconciler, self._relay = replica, reconciler, relay
        self._answers = AnswerCount()
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[guard(token)])
        for route in ROLLOUT_ROUTES:
            self.app.router.add_post(route, self._rollout)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/server_info", self._server_info)
        self.app.router.add_get("/get_server_info", self._server_info)
        self.app.router.add_post("/wake", self._wake)
        self.app.router.add_post("/hold", self._hold)
        self.app.router.add_post("/release", self._release)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/relay/{key:.+}", self._pass_on)
        for name in CONTROL_ROUTES:
            self.app.router.add_route("*", f"/{name}", blocked)

    # --- rollout requests ---------------------------------------------------------------------------

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        return await self._answers.answer(request, self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await read_body(request))
        requests, is_list = parse_requests(request.path, body)
        sessions = self._replica.sessions
        if body.get("stream"):
            chunks = self._merged(requests) if is_list else sessions.stream(requests[0])
            return await stream_out(request, chunks)
        if not is_list:
            return json_response(await sessions.result(requests[0]))
        answers = await _all(*(sessions.result(r) for r in requests))
        return json_response([{**answer, "index": i} for i, answer in enumerate(answers)])

    async def _merged(self, requests: list[RolloutRequest]) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks of a batch as they come, each with its prompt's `index`."""
        queue: asyncio.Queue[tuple[int, dict[str, Any] | Exception | None]] = asyncio.Queue(64)

        async def pump(index: int, request: RolloutRequest) -> None:
            try:
                async with aclosing(self._replica.sessions.stream(request)) as chunks:
                    async for chunk in chunks:
                        await queue.put((index, chunk))
                await queue.put((index, None))
            except Exception as error:
                await queue.put((index, error))

        pumps = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
        try:
            left = len(pumps)
            while left:
                index, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield {**item, "index": index}
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    # --- status -------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        replica = self._replica
        body = {"ready": replica.ready, "state": replica.state, "reason": replica.gate.reason}
        return json_response(body, 200 if replica.ready else 503)

    async def _server_info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = self._replica.status()
        if self._reconciler is not None:
            info["last_error"] = self._reconciler.last_error
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(5.0):
                info["engine"] = await self._replica.engine.server_info()
        return json_response(info)

    async def _wake(self, request: web.Request) -> web.Response:
        if self._reconciler is not None:
            self._reconciler.wake()
        return json_response({"ok": True})

    async def _hold(self, request: web.Request) -> web.Response:
        """Stay at a version for a while: `{"version", "seconds"}`, both optional."""
        if self._reconciler is None:
            raise InvalidRequest("hold: this replica does not follow a store")
        version, seconds = parse_hold(parse_json(await read_body(request)))
        ref = self._reconciler.hold(version, seconds)
        return json_response({"replica_id": self._replica.replica_id, "held": str(ref), "seconds": seconds})

    async def _release(self, request: web.Request) -> web.Response:
        if self._reconciler is not None:
            self._reconciler.release()
        return json_response({"replica_id": self._replica.replica_id, "held": None})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """A version file for another host. Breaking off is how the other side learns that it is not whole."""
        if self._relay is None:
            return plain_error(404, "NotFound", "this replica does not relay (--relay)")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        try:
            key = check_key(request.match_info["key"])
        except CheckpointError as error:
            raise InvalidRequest(str(error)) from None
        async with aclosing(self._relay.relay.pass_on(key)) as blocks:
            try:
                first = await anext(blocks, b"")
            except PeerFailed as error:
                return plain_error(404, "NotFound", str(error))
            await response.prepare(request)
            try:
                await response.write(first)
                async for block in blocks:
                    await response.write(block)
            except PeerFailed as error:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionAbortedError(str(error)) from error
            await response.write_eof()
        return response

    async def _metrics(self, request: web.Request) -> web.Response:
        replica, totals = self._replica, self._replica.sessions.totals
        gate = replica.gate
        labels = {"replica_id": replica.replica_id}
        gauge = [
            ("miles_replica_ready", "1 if requests are admitted", float(replica.ready)),
            ("miles_replica_weight_version", "version served", -1.0 if gate.served is None else gate.served.version),
            ("miles_replica_active_requests", "requests in flight", gate.active),
        ]
        gauge += [
            (f"miles_replica_{name}", "seconds of the last activation's phase", s)
            for name, s in replica.timings.items()
        ]
        pauses = Histogram()
        for report in replica.activator.history:
            pauses.observe(report.pause_seconds)
        families = [Family(name, "gauge", text, ((labels, value),)) for name, text, value in gauge]
        if self._relay is not None:
            totals = totals | {f"relay_{name}": n for name, n in self._relay.relay.totals.items()}
        families += [
            Family(f"miles_replica_{name}_total", "counter", f"{name} so far", ((labels, float(n)),))
            for name, n in totals.items()
        ]
        answers = tuple(({**labels, "status": str(s)}, float(n)) for s, n in sorted(self._answers.statuses.items()))
        families += [
            Family("miles_replica_answers_total", "counter", "rollout answers by HTTP status", answers),
            Family(
                "miles_replica_request_seconds", "histogram", "answered requests", ((labels, self._answers.seconds),)
            ),
            Family("miles_replica_activation_pause_seconds", "histogram", "recent pauses", ((labels, pauses),)),
        ]
        return web.Response(body=render(families).encode(), headers={"Content-Type": CONTENT_TYPE})


async def blocked(request: web.Request) -> web.Response:
    """Answer to an engine control route."""
    return plain_error(403, "RouteBlocked", f"{request.path} is an engine control route: only its replica may use it")


async def stream_out(request: web.Request, chunks: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """Send chunks as server-sent events. An error before the first chunk is an ordinary error answer; a later one is
    an `error` event."""
    async with aclosing(chunks):
        first = await anext(chunks, None)
        if first is None:
            raise InvalidRequest("nothing to stream")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for chunk in chunks:
                await response.write(_event(chunk))
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(_event(error_body(error)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _all(*work: Any) -> list[Any]:
    """Gather; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ReplicaServer:
    """A replica that serves: HTTP, reconciler loop and heartbeats. Made by `serve`; end it with `stop`."""

    def __init__(self, replica: Replica, http: HttpServer, loop: asyncio.Task[None] | None, heart: Registration | None):
        self.replica, self.url = replica, http.url
        self._http, self._loop, self._heart = http, loop, heart
        self.relay: RelayedStore | None = None

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Say goodbye, let requests in flight finish for up to `drain_seconds`, end the rest, stop listening.

        The engine goes on."""
        if self._heart is not None:
            await self._heart.stop()
        gate, deadline = self.replica.gate, time.monotonic() + drain_seconds
        while gate.active and (left := deadline - time.monotonic()) > 0:
            await gate.wait_changed(left)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        if self.relay is not None:
            await self.relay.close()
        await self.replica.close()
        await self._http.stop()


async def serve(
    replica: Replica,
    reconciler: Reconciler | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise_host: str | None = None,
    token: str | None = None,
    gateways: tuple[str, ...] = (),
    heartbeat_seconds: float = 1.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    tls: ssl.SSLContext | None = None,
    relay: RelayedStore | None = None,
    zone: str = "",
) -> ReplicaServer:
    """Serve `replica` in the running event loop: HTTP on `port` (0: ephemeral), its reconciler, heartbeats to
    `gateways`, version files to other hosts of `relay`. OSError if the port is taken."""
    app = ReplicaApp(replica, reconciler, token=token, max_body_bytes=max_body_bytes, relay=relay).app
    if relay is not None:
        relay.start()
    http = await HttpServer.start(app, host=host, port=port, tls=tls, advertise_host=advertise_host)
    loop = None if reconciler is None else asyncio.create_task(reconciler.run(), name=f"reconcile {replica.replica_id}")
    heart = None
    if gateways:
        heart = Registration(
            replica, http.url, gateways, token=token, interval=heartbeat_seconds,
            relay=relay and relay.relay, zone=zone,
        )  # fmt: skip
        heart.start()
    server = ReplicaServer(replica, http, loop, heart)
    server.relay = relay
    return server
