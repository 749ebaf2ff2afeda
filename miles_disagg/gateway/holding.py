"""Holding a replica at a version for an evaluation, through the gateway: the others move on meanwhile.

The replica does it (`replica.reconciler`) and lets go by itself when the time is up; nothing is kept here.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from aiohttp import web

from miles_disagg.domain.errors import EngineUnavailable
from miles_disagg.domain.versions import Constraint
from miles_disagg.gateway.heartbeat import check_replica_id
from miles_disagg.gateway.router import Member, Router
from miles_disagg.replica.server import json_response, plain_error, read_body
from miles_disagg.replica.wire import parse_hold, parse_json


async def hold(request: web.Request, router: Router, session: aiohttp.ClientSession) -> web.Response:
    """`{"replica_id", "version", "seconds"}`, all optional: have that replica, or one that serves the version, stay."""
    body = parse_json(await read_body(request))
    version, seconds = parse_hold(body)
    given = body.get("replica_id")
    if given is not None:
        return await _forward(_member(router, given), "hold", {"version": version, "seconds": seconds}, session)
    wanted, excluded = Constraint(exact_version=version), set[Member]()
    while True:  # a replica may have moved on since its last heartbeat
        member = router.pick(wanted, exclude=excluded).member
        response = await _forward(member, "hold", {"version": member.applied, "seconds": seconds}, session)
        if response.status != 410:
            return response
        excluded.add(member)


async def release(request: web.Request, router: Router, session: aiohttp.ClientSession) -> web.Response:
    """`{"replica_id"}`: it follows the newest version again."""
    body = parse_json(await read_body(request))
    return await _forward(_member(router, body.get("replica_id")), "release", {}, session)


def _member(router: Router, replica_id: Any) -> Member | None:
    name = check_replica_id(replica_id)
    for member in router.members:
        if member.replica_id == name:
            return member
    return None


async def _forward(
    member: Member | None, what: str, body: dict[str, Any], session: aiohttp.ClientSession
) -> web.Response:
    if member is None:
        return plain_error(404, "NotFound", "replica_id: no such replica is registered with this gateway")
    try:
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with session.post(f"{member.url}/{what}", data=json.dumps(body), timeout=timeout) as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = error or type(error).__name__
        raise EngineUnavailable(f"replica {member.replica_id} does not answer: {why}") from None
    return json_response(answer, response.status)
