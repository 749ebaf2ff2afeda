"""The single rollout endpoint: proxies requests to compatible replicas, and is where replicas register.

Bodies pass through as bytes. Nothing here keeps state that a restart would lose: replicas register again by heartbeat.
Who gets a request is `router`; docs/rollout-protocol.md is the contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    Overloaded,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import Constraint
from miles_disagg.gateway import status
from miles_disagg.gateway.canary import Canary, CanarySettings
from miles_disagg.gateway.heartbeat import check_replica_id
from miles_disagg.gateway.holding import hold, release
from miles_disagg.gateway.proxy import STREAM, Attempt, Refused, ReplicaGone, end_stream
from miles_disagg.gateway.router import Member, Router
from miles_disagg.gateway.status import Counts
from miles_disagg.replica.app import blocked
from miles_disagg.replica.exposition import CONTENT_TYPE, render
from miles_disagg.replica.server import AnswerCount, HttpServer, guard, json_response, read_body
from miles_disagg.replica.wire import CONTROL_ROUTES, ROLLOUT_ROUTES, error_body, parse_json, parse_rid

log = logging.getLogger(__name__)
_PAGE = (Path(__file__).parent / "page.html").read_bytes()


@dataclass(frozen=True)
class GatewaySettings:
    """Seconds, counts and bytes. wait: for a compatible replica, then 409; attempts: replicas tried when they fail;
    request: whole answer; receive: for a request's body to arrive; expiry: silence after which a replica leaves
    rotation; canary: a prompt that all must answer alike (None: not asked)."""

    wait: float = 10.0
    attempts: int = 4
    request: float = 3600.0
    receive: float = 60.0
    connect: float = 5.0
    expiry: float = 5.0
    max_in_flight: int = 20_000
    max_body_bytes: int = 64 * 2**20
    canary: CanarySettings | None = None


class GatewayApp:
    """Routes of a gateway. `token` is asked of clients and replicas, and sent to replicas."""

    def __init__(self, router: Router, settings: GatewaySettings | None = None, *, token: str | None = None):
        self._router, self.settings, self._token = router, settings or GatewaySettings(), token
        self.gateway_id = f"gateway-{uuid.uuid4().hex[:8]}"
        self._session: aiohttp.ClientSession | None = None
        self._active = self._waiting = 0
        self._answers = AnswerCount()
        self._totals = {"retries": 0, "rebinds": 0, "replicas_lost": 0}
        self.app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[guard(token)])
        self.app.cleanup_ctx.append(self._lifetime)
        router_ = self.app.router
        for route in ROLLOUT_ROUTES:
            router_.add_post(route, self._rollout)
        router_.add_get("/", page)
        router_.add_get("/health", self._health)
        router_.add_get("/fleet", self._fleet)
        router_.add_get("/server_info", self._server_info)
        router_.add_get("/metrics", self._metrics)
        router_.add_post("/wake", self._wake)
        router_.add_post("/hold", self._hold)
        router_.add_post("/release", self._release)
        router_.add_post("/replicas", self._register)
        router_.add_delete("/replicas/{replica_id}", self._unregister)
        for name in CONTROL_ROUTES:
            router_.add_route("*", f"/{name}", blocked)

    async def _lifetime(self, app: web.Application):
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect),
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        tasks = [asyncio.create_task(self._expire(), name="expire silent replicas")]
        if self.settings.canary is not None:
            canary = Canary(self._router, self.settings.canary)
            tasks.append(asyncio.create_task(canary.run(self._session), name="ask for the canary prompt"))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self.settings.expiry / 4))
            for member in self._router.expire():
                self._totals["replicas_lost"] += 1
                log.warning("replica %s left rotation: %s", member.replica_id, member.reason)

    # --- rollout requests ---------------------------------------------------------------------------

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        self._active += 1
        try:
            return await self._answers.answer(request, self._route)
        finally:
            self._active -= 1

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if self._active > self.settings.max_in_flight:
            raise Overloaded(f"{self._active} requests in flight, limit {self.settings.max_in_flight}")
        raw = await read_body(request, self.settings.receive)
        body = parse_json(raw)
        constraint = Constraint.from_json(body.get("weight_version"))
        session_id = request.headers.get("x-session-id")
        if session_id is not None:
            parse_rid(session_id, "x-session-id")
        run_id = request.headers.get("x-run-id")
        if run_id is not None:
            parse_rid(run_id, "x-run-id")
        rid = body["rid"] if isinstance(body.get("rid"), str) else None
        if body.get("rid") is None:  # so that a retry on another replica is known to be the same request
            rest = raw.lstrip()[1:]
            raw = b'{"rid":"' + parse_rid(None).encode() + (b'",' if len(body) else b'"') + rest
            if "rid" in body:  # an explicit null: the last of two equal keys would win
                raw = _with_rid(body)
        scope = asyncio.timeout(self.settings.request)
        try:
            async with scope:
                return await self._send(request, raw, constraint, session_id=session_id, rid=rid, run_id=run_id)
        except TimeoutError:
            if not scope.expired():
                raise
            late = DeadlineExceeded("an answer from a replica", self.settings.request)
            if (begun := request.get(STREAM)) is not None:
                return await end_stream(request, begun, late)
            raise late from None

    async def _send(
        self,
        request: web.Request,
        raw: bytes,
        constraint: Constraint,
        *,
        session_id: str | None,
        rid: str | None,
        run_id: str | None,
    ) -> web.StreamResponse:
        """Try compatible replicas until one answers; wait a bounded time for one to become compatible."""
        assert self._session is not None
        give_up, attempts = time.monotonic() + self.settings.wait, 0
        excluded: set[Member] = set()
        refused: Refused | None = None  # the last refusal a replica gave; passed on when nobody else is left
        rebound: str | None = None
        while True:
            try:
                pick = self._router.pick(constraint, session_id, excluded, rid, run_id)
            except WeightVersionGone:
                raise
            except (WeightVersionNotReady, EngineUnavailable) as error:
                final = refused is not None and refused.status in (429, 503)
                if final or attempts >= self.settings.attempts or not await self._wait_for_change(give_up):
                    if refused is not None:
                        return refused.response()
                    raise error
                excluded.clear()
                continue
            rebound = rebound or pick.rebound_from
            headers = {"x-replica-id": pick.member.replica_id}
            if rebound is not None:
                headers["x-session-rebound"] = rebound
            try:
                response = await Attempt(pick.member).run(self._session, request, raw, headers)
                self._totals["rebinds"] += rebound is not None
                return response
            except ReplicaGone as error:
                log.warning("replica %s: %s", pick.member.replica_id, error)
                self._router.suspect(pick.member)
                refused = Refused(503, {}, error_body(EngineUnavailable(str(error))), "1")
            except Refused as error:
                refused = error
                if error.status == 503:
                    self._router.suspect(pick.member)
            self._totals["retries"] += 1
            attempts += refused.status != 409
            stays = session_id is not None and refused.status in (409, 429)  # a session moves when its replica is gone
            if attempts >= self.settings.attempts or (stays and not await self._wait_for_change(give_up)):
                return refused.response()
            if not stays:
                excluded.add(pick.member)

    async def _wait_for_change(self, give_up: float) -> bool:
        """Wait for the fleet to change; false once the time is up."""
        remaining = give_up - time.monotonic()
        if remaining <= 0:
            return False
        self._waiting += 1
        try:
            await self._router.wait_changed(min(remaining, 0.25))
        finally:
            self._waiting -= 1
        return True

    # --- replicas -----------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        member = self._router.heartbeat(parse_json(await read_body(request)))
        answer = {"gateway_id": self.gateway_id, "replica_id": member.replica_id, "expiry": self.settings.expiry}
        above = self._router.relays_above(member)
        return json_response(answer if above is None else {**answer, "relays": above})

    async def _unregister(self, request: web.Request) -> web.Response:
        known = self._router.goodbye(check_replica_id(request.match_info["replica_id"]))
        return json_response({"known": known})

    async def _wake(self, request: web.Request) -> web.Response:
        """Pass the hint on to every replica; who does not hear it asks the store anyway."""
        assert self._session is not None
        session = self._session

        async def wake(member: Member) -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(f"{member.url}/wake", timeout=aiohttp.ClientTimeout(total=2.0)) as response:
                    return response.status == 200
            return False

        heard = await asyncio.gather(*(wake(m) for m in self._router.members))
        return json_response({"ok": True, "woken": sum(heard)})

    # --- status -------------------------------------------------------------------------------------

    @property
    def _counts(self) -> Counts:
        return Counts(self.gateway_id, self._active, self._waiting, self._totals, self._answers)

    async def _health(self, request: web.Request) -> web.Response:
        ready, reason = status.health(self._router)
        return json_response({"ready": ready, "reason": reason}, 200 if ready else 503)

    async def _server_info(self, request: web.Request) -> web.Response:
        return json_response(status.server_info(self._router, self._counts))

    async def _fleet(self, request: web.Request) -> web.Response:
        return json_response(status.fleet(self._router, self._counts))

    async def _metrics(self, request: web.Request) -> web.Response:
        families = status.metrics(self._router, self._counts)
        return web.Response(body=render(families).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _hold(self, request: web.Request) -> web.Response:
        assert self._session is not None
        return await hold(request, self._router, self._session)

    async def _release(self, request: web.Request) -> web.Response:
        assert self._session is not None
        return await release(request, self._router, self._session)


async def page(request: web.Request) -> web.Response:
    """The live page: plain HTML that asks `/fleet` each second. It holds no data, so it needs no token."""
    headers = {"Content-Security-Policy": "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"}
    return web.Response(body=_PAGE, headers={**headers, "Content-Type": "text/html; charset=utf-8"})


def _with_rid(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, "rid": parse_rid(None)}, separators=(",", ":")).encode()


class GatewayServer:
    """A running gateway. Made by `serve`; end it with `stop`."""

    def __init__(self, router: Router, http: HttpServer):
        self.router, self.url, self._http = router, http.url, http

    async def stop(self) -> None:
        """Stop listening and end what is in flight."""
        await self._http.stop()


async def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise_host: str | None = None,
    settings: GatewaySettings | None = None,
    token: str | None = None,
    run_id: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> GatewayServer:
    """Serve a gateway in the running event loop on `port` (0: ephemeral). OSError if the port is taken."""
    settings = settings or GatewaySettings()
    router = Router(expiry=settings.expiry, run_id=run_id)
    app = GatewayApp(router, settings, token=token).app
    return GatewayServer(
        router, await HttpServer.start(app, host=host, port=port, tls=tls, advertise_host=advertise_host)
    )
