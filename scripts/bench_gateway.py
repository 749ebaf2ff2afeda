"""Added latency and throughput of gateway and replica against direct engine calls, and of sglang-router if it is here.

Processes on this machine: an engine stub (answers at once, streams like SGLang), a replica on it, a gateway, and the
load here. `requests_per_second` is per core of the process in question: requests over the CPU seconds that it used, so
that it does not depend on what else runs. Last line of stdout with --json: one object (docs/rollout-protocol.md).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
VERSION = "bench/weight_v000000"
BODY = {"input_ids": list(range(32)), "sampling_params": {"max_new_tokens": 1}}


# --- roles: each is a process of its own -------------------------------------------------------------


def answer(rid: Any) -> dict[str, Any]:
    """One finished generation of one token, in SGLang's form."""
    meta = {"id": rid, "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 32, "completion_tokens": 1}
    return {"text": "a", "output_ids": [97], "meta_info": {**meta, "cached_tokens": 0, "weight_version": VERSION}}


def engine_stub_app() -> web.Application:
    """The routes that a replica and sglang-router need of an engine."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        text = json.dumps(answer(body.get("rid"))).encode()
        if not body.get("stream"):
            return web.Response(body=text, content_type="application/json")
        event = b"data: " + text + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=event, headers={"Content-Type": "text/event-stream"})

    async def info(request: web.Request) -> web.Response:
        values = {"version": "stub", "weight_version": VERSION, "disable_radix_cache": True, "model_path": "stub"}
        return web.json_response(values)

    async def ok(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", generate)
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        app.router.add_get(path, info)
    app.router.add_get("/health", ok)
    for path in ("/continue_generation", "/abort_request", "/pause_generation"):
        app.router.add_post(path, ok)
    return app


async def run_role(role: str, port: int, engine: str, gateway: str) -> None:
    """Serve until killed."""
    from miles_disagg.engine.sglang import SGLangEngine
    from miles_disagg.gateway import app as gateway_app
    from miles_disagg.replica import app as replica_app
    from miles_disagg.replica.replica import Replica, ReplicaSettings

    if role == "engine":
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # sglang-router probes it for HTTP/2
        runner = web.AppRunner(engine_stub_app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    elif role == "gateway":
        await gateway_app.serve(port=port)
    elif role == "stub-replica":  # a replica that costs nothing: the engine stub, registered under its own name
        await beat_for(engine, gateway)
    else:
        replica = Replica(ReplicaSettings("replica", max_in_flight=4096), SGLangEngine(engine))
        async with aiohttp.ClientSession() as session:
            await until_ok(session, engine)
        await replica.attach()
        await replica_app.serve(replica, port=port, gateways=(gateway,) if gateway else ())
    await asyncio.Event().wait()


async def beat_for(url: str, gateway: str) -> None:
    """Heartbeats in the name of an engine stub."""
    message = {"replica_id": "stub", "url": url, "run_id": "bench", "applied": 0, "latest": VERSION, "ready": True}
    message |= {"state": "ready", "max_in_flight": 4096}
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{gateway}/replicas", json=message):
                    pass
            await asyncio.sleep(0.5)


class Role:
    """A child process that serves one role."""

    def __init__(self, role: str, engine: str = "", gateway: str = ""):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, __file__, "--role", role, "--port", str(port)]
        command += ["--engine", engine, "--gateway", gateway]
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def cpu_seconds(self) -> float:
        """CPU time used so far (this process and its threads)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


# --- load --------------------------------------------------------------------------------------------


async def until_ok(session: aiohttp.ClientSession, url: str, seconds: float = 60.0) -> None:
    """Wait until /generate there answers 200."""
    deadline, seen = time.monotonic() + seconds, "nothing"
    while time.monotonic() < deadline:
        try:
            async with session.post(f"{url}/generate", json=BODY) as response:
                if response.status == 200:
                    return
                seen = f"status {response.status}"
        except aiohttp.ClientError as error:
            seen = str(error)
        await asyncio.sleep(0.1)
    raise SystemExit(f"waited {seconds:.0f} s for {url}: {seen}")


async def load(session: aiohttp.ClientSession, url: str, n: int, in_flight: int) -> tuple[list[float], float]:
    """`n` requests with `in_flight` at a time: latencies in seconds and wall seconds."""
    left, latencies, raw = iter(range(n)), [], json.dumps(BODY).encode()
    headers = {"Content-Type": "application/json"}

    async def worker() -> None:
        for _ in left:
            begin = time.perf_counter()
            async with session.post(f"{url}/generate", data=raw, headers=headers) as response:
                body = await response.read()
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {body[:300]!r}")
            latencies.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return latencies, time.perf_counter() - begin


def added(direct: list[float], through: list[float]) -> tuple[float, float]:
    """Difference of medians and of 99th percentiles, in milliseconds."""

    def percentile(values: list[float], p: float) -> float:
        return sorted(values)[min(len(values) - 1, int(p * len(values)))]

    p50 = statistics.median(through) - statistics.median(direct)
    return round(1e3 * p50, 3), round(1e3 * (percentile(through, 0.99) - percentile(direct, 0.99)), 3)


async def interleaved(
    session: aiohttp.ClientSession, urls: dict[str, str], n: int, in_flight: int
) -> dict[str, list[float]]:
    """Latencies of every URL, measured in turns so that the machine's mood hits all alike."""
    out: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(10):
        for name, url in urls.items():
            out[name] += (await load(session, url, max(1, n // 10), in_flight))[0]
    return out


async def throughput(session: aiohttp.ClientSession, role: Role, n: int, in_flight: int) -> dict[str, float]:
    """Requests per CPU second of `role`, and per second of wall time."""
    await load(session, role.url, min(n, 1000), in_flight)
    before = role.cpu_seconds()
    _, wall = await load(session, role.url, n, in_flight)
    used = role.cpu_seconds() - before
    return {"per_core": round(n / max(used, 1e-3), 1), "wall": round(n / wall, 1)}


class SGLangRouter(Role):
    """sglang-router in front of the engine stub."""

    def __init__(self, python: str, engine: str):
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            port, metrics = probe.getsockname()[1], other.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", engine, "--prometheus-port", str(metrics), "--log-level", "error"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    roles: list[Role] = []

    def start(role: Role) -> Role:
        roles.append(role)
        return role

    try:
        engine = start(Role("engine"))
        gateway = start(Role("gateway"))
        bare_gateway = start(Role("gateway"))
        replica = start(Role("replica", engine.url, gateway.url))
        start(Role("stub-replica", engine.url, bare_gateway.url))
        urls = {"direct": engine.url, "replica": replica.url, "gateway": bare_gateway.url, "service": gateway.url}
        router = None
        if args.router_python:
            router = start(SGLangRouter(args.router_python, engine.url))
            urls["sglang_router"] = router.url
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            for url in urls.values():
                await until_ok(session, url)
            seconds = await interleaved(session, urls, args.latency_requests, args.latency_in_flight)
            rates = {"gateway": await throughput(session, bare_gateway, args.requests, args.in_flight)}
            rates["replica"] = await throughput(session, replica, args.requests, args.in_flight)
            if router is not None:
                rates["sglang_router"] = await throughput(session, router, args.requests, args.in_flight)
    finally:
        for role in reversed(roles):
            role.stop()
    return summary(seconds, rates, args)


def summary(seconds: dict[str, list[float]], rates: dict[str, dict[str, float]], args: Any) -> dict[str, Any]:
    """The object that --json prints."""
    direct = seconds["direct"]
    p50, p99 = added(direct, seconds["gateway"])
    service50, service99 = added(direct, seconds["service"])
    out: dict[str, Any] = {
        "added_ms_p50": p50,
        "added_ms_p99": p99,
        "requests_per_second": rates["gateway"]["per_core"],
        "requests_per_second_wall": rates["gateway"]["wall"],
        "with_replica": {
            "added_ms_p50": service50,
            "added_ms_p99": service99,
            "replica_requests_per_second": rates["replica"]["per_core"],
        },
        "direct_ms_p50": round(1e3 * statistics.median(direct), 3),
        "in_flight": args.in_flight,
        "requests": args.requests,
        "sglang_router": None,
    }
    if "sglang_router" in rates:
        router50, router99 = added(direct, seconds["sglang_router"])
        rate = rates["sglang_router"]
        out["sglang_router"] = {
            "added_ms_p50": router50,
            "added_ms_p99": router99,
            "requests_per_second": rate["per_core"],
            "requests_per_second_wall": rate["wall"],
        }
    return out


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--requests", type=int, default=10_000, help="for the throughput")
    parser.add_argument("--in-flight", type=int, default=1000, help="for the throughput")
    parser.add_argument("--latency-requests", type=int, default=2000)
    parser.add_argument("--latency-in-flight", type=int, default=1)
    parser.add_argument("--router-python", help="a Python that has sglang-router (default: this one, if it has it)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--gateway", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asyncio.run(run_role(args.role, args.port, args.engine, args.gateway))
        return
    if args.router_python is None and importlib.util.find_spec("sglang_router"):
        args.router_python = sys.executable
    result = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
