"""Trying addresses, for `doctor`: does a port answer, does a service let us in, does an engine join a group."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import aiohttp

from miles_disagg.domain.errors import EngineError, EngineUnavailable
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.router import RouterControl
from miles_disagg.engine.sglang import SGLangEngine

WAIT_SECONDS = 20.0


async def port_open(host: str, port: int) -> bool:
    """True if something accepts connections there within WAIT_SECONDS."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def endpoint_lines(
    url: str, token: str | None, newest: VersionRef | None
) -> AsyncIterator[tuple[Literal["ok", "bad", "unknown"], str, str]]:
    """(verdict, what, detail) of a rollout service. newest: what the store names, to see that it follows that store."""
    name = f"rollout service {url}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=WAIT_SECONDS)) as session,
            session.get(f"{url.rstrip('/')}/server_info") as response,
        ):
            if response.status in (401, 403):
                yield "bad", name, f"refuses ({response.status}): give its token with --rollout-auth-token-file FILE"
                return
            info = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        yield "bad", name, f"does not answer ({error or type(error).__name__}): start it, or correct --rollout-endpoint"
        return
    ready = info.get("replicas_ready", 0)
    yield ("ok" if ready else "bad"), name, f"lets us in, {ready} replica(s) ready" + ("" if ready else ": start one")
    follows = info.get("latest")
    what = f"{name}: the store that it follows"
    if newest is None or follows is None:
        yield "unknown", what, "nothing is published yet; it shows after the first version"
    elif follows == str(newest):
        yield "ok", what, f"it and --version-store both name {follows} as the newest version"
    else:
        yield "bad", what, f"it names {follows}, --version-store names {newest}: give both the same store"


async def router_lines(
    url: str, token: str | None, engines: Sequence[str]
) -> AsyncIterator[tuple[Literal["ok", "bad", "unknown"], str, str]]:
    """(verdict, what, detail) of an sglang-router in front of `engines`."""
    name, control = f"router {url}", RouterControl(url, token, timeout=WAIT_SECONDS)
    try:
        workers = await control.workers()
    except EngineUnavailable as error:
        yield "bad", name, f"{error}; start it, or correct --sglang-router-ip and --sglang-router-port"
        return
    except EngineError as error:
        remedy = "give its API key with --rollout-auth-token-file FILE" if error.status in (401, 403) else "look there"
        yield "bad", name, f"refuses: {error} ({error.status}); {remedy}"
        return
    finally:
        await control.close()
    known = sum(engine in workers for engine in engines)
    yield "ok", name, f"has {known} of the {len(engines)} engines; the run registers the others"
    for stranger in sorted(workers.keys() - set(engines)):
        remedy = "add it to --rollout-external-engine-addrs (spelled like that), or remove it from the router"
        yield "bad", name, f"also sends requests to {stranger}: {remedy}"


async def meets(engine: SGLangEngine, ranks: int) -> float:
    """Form a gloo group of this process and the engine's ranks, and leave it; seconds. Raises what went wrong."""
    import ray

    from miles_disagg.config.machine import free_port
    from miles_disagg.engine import process_group

    name, begun = f"doctor-{secrets.token_hex(6)}", time.monotonic()
    where = {"master_address": ray.util.get_node_ip_address(), "master_port": free_port("0.0.0.0")}
    world = {"world_size": 1 + ranks, "backend": "gloo"}
    ours = asyncio.create_task(
        asyncio.to_thread(process_group.join, **where, **world, rank=0, name=name, timeout=WAIT_SECONDS)
    )
    theirs = asyncio.create_task(engine.init_group(**where, **world, rank_offset=1, group_name=name))
    try:
        group = await ours
        await theirs
    finally:
        theirs.cancel()
        await asyncio.gather(theirs, return_exceptions=True)
    await asyncio.gather(asyncio.to_thread(process_group.leave, group), engine.destroy_group(name))
    return time.monotonic() - begun
