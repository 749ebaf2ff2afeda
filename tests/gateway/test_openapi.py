"""openapi.yaml is valid, complete, and what gateway and replica do (schemathesis against a live pair)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from openapi_spec_validator import validate

from miles_disagg.gateway import app as gateway_app
from miles_disagg.gateway.app import GatewayApp, GatewaySettings
from miles_disagg.gateway.router import Router
from miles_disagg.replica import app as replica_app
from miles_disagg.replica.app import ReplicaApp
from miles_disagg.replica.replica import Replica
from miles_disagg.replica.wire import CONTROL_ROUTES
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import make_replica, ref

SPEC = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text())
schema = schemathesis.openapi.from_dict(SPEC)


class OpenAIFake(FakeEngine):
    """Answers `/v1/*` in deltas of one token."""

    async def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        seen = 0
        async for chunk in super().stream({**body, "prompt": "a"} if path != "/generate" else body):
            if path == "/generate":
                yield chunk
                continue
            text, reason = chunk["text"][seen:], chunk["meta_info"]["finish_reason"]
            seen = len(chunk["text"])
            delta = {"delta": {"content": text}} if "chat" in path else {"text": text}
            prompt = body.get("prompt")
            n = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
            choices = [{"index": i, **delta, "finish_reason": reason and reason["type"]} for i in range(n)]
            yield {"id": "x", "model": "fake", "choices": choices, "usage": {"completion_tokens": seen}}


@pytest.fixture(scope="module")
def gateway_urls() -> Iterator[list[str]]:
    """A gateway with one replica and one without, in a thread: schemathesis speaks blocking HTTP."""
    ready, stop = threading.Event(), asyncio.Event()
    where: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        replica = make_replica(OpenAIFake(str(ref(3))))
        await replica.attach()
        gateway = await gateway_app.serve(settings=GatewaySettings(wait=0.05, attempts=2, expiry=60.0))
        server = await replica_app.serve(replica, gateways=(gateway.url,), heartbeat_seconds=0.2)
        while not gateway.router.members:
            await asyncio.sleep(0.01)
        empty = await gateway_app.serve()
        where.extend([gateway.url, empty.url])
        loops.append(asyncio.get_running_loop())
        ready.set()
        await stop.wait()
        await server.stop()
        await gateway.stop()
        await empty.stop()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield where
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(30)


def test_the_specification_is_valid() -> None:
    validate(SPEC)


async def test_every_route_is_specified_and_every_specified_route_exists() -> None:
    engine = FakeEngine(str(ref(0)))
    apps = [GatewayApp(Router()).app, ReplicaApp(Replica(make_replica(engine).settings, engine)).app]
    served = {(r.resource.canonical, r.method.lower()) for app in apps for r in app.router.routes() if r.resource}
    served = {(p, m) for p, m in served if p.strip("/") not in CONTROL_ROUTES and m != "head"}
    specified = {(path, method) for path, item in SPEC["paths"].items() for method in item}
    assert served - specified == {("/get_server_info", "get")}  # SGLang's older name
    assert specified <= served


@schema.include(method="GET").parametrize()
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_status_routes_answer_as_specified(case: schemathesis.Case, gateway_urls: list[str]) -> None:
    case.call_and_validate(base_url=gateway_urls[0])


@schema.include(path_regex="^/replicas").parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_heartbeats_are_answered_as_specified(case: schemathesis.Case, gateway_urls: list[str]) -> None:
    case.call_and_validate(base_url=gateway_urls[1])


@schema.include(path_regex="^/(generate|v1|wake|hold|release)").parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_requests_are_answered_as_specified(case: schemathesis.Case, gateway_urls: list[str]) -> None:
    excluded = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
    case.call_and_validate(base_url=gateway_urls[0], excluded_checks=excluded)
