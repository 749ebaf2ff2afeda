"""A router and the engines behind it, over HTTP in this process: sglang-router's control plane, SGLang's routes.

The engines generate one token, stamped with the version that they hold; they can be ended and started anew at their
port. The router goes round its healthy workers, and looks at none of them.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import aiohttp
from aiohttp import web

from miles_disagg.config.machine import free_port


class FakeMember:
    """One engine. `refuses`: updates are refused, as `refusal` says; `info`: further fields of `/server_info`."""

    def __init__(self, version: str, **info: Any):
        self.port = free_port()
        self.version, self.info, self.model_path = version, info, "/model"
        self.paused = self.refuses = False
        self.refusal = "refused"
        self.loaded: list[str] = []
        self.calls: list[str] = []
        self.groups: list[dict[str, Any]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, version: str | None = None) -> None:
        """Listen, at `version`."""
        self.version, self.paused = version or self.version, False
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def end(self) -> None:
        """Nobody listens any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, text = request.path, await request.text()
        body = json.loads(text) if text else {}
        self.calls.append(path)
        match path:
            case "/server_info":
                return web.json_response({"version": "0.5.17", "weight_version": self.version, **self.info})
            case "/model_info":
                known = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "weight_version": self.version}
                return web.json_response({"model_path": self.model_path, **known})
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/init_weights_update_group":
                self.groups.append(body)
            case "/update_weights_from_disk" | "/update_weights_from_distributed":
                if self.refuses:
                    return web.json_response({"success": False, "message": self.refusal}, status=400)
                self.version = body["weight_version"]
                self.loaded.append(str(body.get("model_path") or body.get("group_name")))
            case "/generate":
                return await self._generate(request, body)
        return web.json_response({"success": True, "message": ""})

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        meta = {"id": body.get("rid"), "weight_version": self.version, "finish_reason": {"type": "length"}}
        chunk = {"text": "x", "output_ids": [self.port], "meta_info": {**meta, "completion_tokens": 1}}
        if not body.get("stream"):
            return web.json_response(chunk)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return response


class FakeRouter:
    """sglang-router as far as this project uses it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.workers: dict[str, dict[str, Any]] = {}
        self._turn = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def end(self) -> None:
        """Stop."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": list(self.workers.values()), "total": len(self.workers)})

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.workers[body["url"]] = {"id": str(uuid.uuid4()), "is_healthy": True, **body}
        return web.json_response({"status": "accepted"}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        self.workers = {url: row for url, row in self.workers.items() if row["id"] != request.match_info["id"]}
        return web.json_response({"status": "accepted"}, status=202)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Like sglang-router: any worker, the next one where it is not reached, 500 where none is."""
        body = await request.json()
        for _ in range(3 * len(self.workers)):
            self._turn += 1
            url = list(self.workers)[self._turn % len(self.workers)]
            try:
                async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
                    return web.Response(body=await response.read(), content_type=response.content_type)
            except aiohttp.ClientError:
                await asyncio.sleep(0)
        message = {"code": "call_upstream_request_error", "message": "error sending request"}
        return web.json_response({"error": message}, status=500 if self.workers else 503)
