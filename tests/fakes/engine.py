"""A hand-written in-memory `Engine`: scripted tokens, versions, pause and resume, failures on demand.

Token i of a request is `script[i]` (default: 100, 101, ...), logprob `-0.5 - i / 1000`. Every token is stamped with the
version that is active when it is written. `token_delay` seconds pass per token (0: one turn of the event loop).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_disagg.domain.errors import EngineError, EngineUnavailable, UpdateFailed
from miles_disagg.engine.base import PauseMode


@dataclass(eq=False)
class _Request:
    rid: str
    prompt: list[int]
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    aborted: bool = False
    retractions: int = 0


class FakeEngine:
    """See the module. `calls` records control calls in order, as (name, arguments)."""

    def __init__(self, version: str = "base", *, script: Sequence[int] | None = None, token_delay: float = 0.0):
        self.url = f"http://fake-{uuid.uuid4().hex[:8]}"
        self.version = version
        self.script = script
        self.token_delay = token_delay
        self.logprob_shift = 0.0  # subtracted from every logprob: other weights
        self.context_length = 4096
        self.weights: dict[str, str] = {}  # what weights_digest answers
        self.paths: list[str] = []  # checkpoints loaded, in order
        self.requests: dict[str, _Request] = {}  # in flight
        self.bodies: list[dict[str, Any]] = []  # every generation request seen
        self.calls: list[tuple[str, Any]] = []
        self.groups: set[str] = set()
        self.paused: PauseMode | None = None
        self.dead = False
        self.fail_updates = 0  # that many of the next updates are refused
        self.update_delay = 0.0
        self.incremental = False  # as an engine started with --incremental-streaming-output
        self._running = asyncio.Event()
        self._running.set()

    # --- faults ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """From now on nothing answers, and streams in flight break."""
        self.dead = True
        self._running.set()

    def revive(self, version: str = "base") -> None:
        """Come back as a fresh process at `version`."""
        self.dead, self.version, self.paused = False, version, None
        self.requests.clear()
        self.groups.clear()
        self._running.set()

    def _alive(self) -> None:
        if self.dead:
            raise EngineUnavailable(f"{self.url} does not answer")

    # --- generation -------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> Any:
        ids = body.get("input_ids")
        if ids and isinstance(ids[0], list):
            bodies = [{**body, "input_ids": one, "rid": None} for one in ids]
            return list(await asyncio.gather(*(self.generate(one) for one in bodies)))
        last: dict[str, Any] = {}
        async for chunk in self.stream(body):
            last = chunk
        return last

    async def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        self._alive()
        self.bodies.append(dict(body))
        prompt = list(body.get("input_ids") or [ord(c) for c in body.get("text") or body.get("prompt") or ""])
        params = body.get("sampling_params") or {}
        new = int(params.get("max_new_tokens") or body.get("max_tokens") or 8)
        if len(prompt) + new > self.context_length:
            raise EngineError("Requested token count exceeds the model's maximum context length", status=400)
        request = _Request(str(body.get("rid") or uuid.uuid4().hex), prompt, new)
        if request.rid in self.requests:
            raise EngineError(f"Duplicate request ID detected: {request.rid}", status=400)
        self.requests[request.rid] = request
        started = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self.token_delay)
                await self._running.wait()
                self._alive()
                if not request.aborted:
                    i = len(request.output)
                    request.output.append(self.script[i % len(self.script)] if self.script else 100 + i)
                done = request.aborted or len(request.output) >= new
                yield self._chunk(request, body, done, time.monotonic() - started)
                if done:
                    return
        finally:
            self.requests.pop(request.rid, None)

    def _chunk(self, request: _Request, body: Mapping[str, Any], done: bool, seconds: float) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if done:
            length = {"type": "length", "length": len(request.output)}
            reason = {"type": "abort", "message": "Aborted"} if request.aborted else length
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": 0,
            "weight_version": self.version,
            "num_retractions": request.retractions,
        }
        if body.get("return_logprob"):
            first = -0.5 - self.logprob_shift
            meta["output_token_logprobs"] = [[first - i / 1000, t, None] for i, t in enumerate(request.output)]
        if done:
            meta["e2e_latency"] = seconds
        new = len(request.output) - 1 if self.incremental else 0  # a chunk every token
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][new:]
        return {"text": "".join(map(chr, request.output[new:])), "output_ids": request.output[new:], "meta_info": meta}

    # --- state ------------------------------------------------------------------------------------

    async def health(self, timeout: float) -> None:
        self._alive()

    async def server_info(self) -> dict[str, Any]:
        self._alive()
        return {"version": "fake", "weight_version": self.version, "tp_size": 1, "pp_size": 1, "dp_size": 1}

    async def model_info(self) -> dict[str, Any]:
        self._alive()
        return {"model_path": self.paths[-1] if self.paths else "fake", "weight_version": self.version}

    # --- control ----------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._alive()
        self.calls.append(("pause", mode))
        self.paused = mode
        if mode == "abort":
            for request in self.requests.values():
                request.aborted = True
            while self.requests:  # as in SGLang: returns once they have ended
                await asyncio.sleep(0)
        elif mode == "retract":
            for request in self.requests.values():
                request.retractions += 1
        self._running.clear()

    async def resume(self) -> None:
        self._alive()
        self.calls.append(("resume", None))
        self.paused = None
        self._running.set()

    async def flush_cache(self) -> None:
        self._alive()
        self.calls.append(("flush_cache", None))
        if self.requests:
            raise EngineError("Flush cache failed: requests are running", status=400)

    async def abort(self, rid: str | None = None) -> None:
        self._alive()
        self.calls.append(("abort", rid))
        for request in self.requests.values():
            if rid is None or request.rid.startswith(rid):
                request.aborted = True

    async def _update(self, name: str, detail: Any, version: str, flush_cache: bool) -> None:
        self._alive()
        self.calls.append((name, detail))
        if flush_cache and self.paused in ("in_place", "retract") and self.requests:
            self.kill()  # what SGLang does
            raise EngineUnavailable("Cache flush failed after updating weights")
        while self.paused is None and self.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.update_delay)
        self._alive()
        if self.fail_updates:
            self.fail_updates -= 1
            raise UpdateFailed(f"{name} refused by the fake", status=400)
        self.version = version

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        await self._update("update_from_disk", (path, version), version, flush_cache)
        self.paths.append(path)

    async def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        self._alive()
        self.calls.append(("init_group", group_name))
        self.groups.add(group_name)

    async def destroy_group(self, group_name: str) -> None:
        self._alive()
        self.calls.append(("destroy_group", group_name))
        if group_name not in self.groups:
            raise EngineError("The group to be destroyed does not exist.", status=400)
        self.groups.discard(group_name)

    async def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        flush_cache: bool,
        load_format: str | None = None,
    ) -> None:
        if group_name not in self.groups:
            raise UpdateFailed(f"Group {group_name} does not exist", status=400)
        await self._update("update_from_distributed", (tuple(names), version), version, flush_cache)

    async def update_from_tensor(
        self, serialized: Sequence[str], *, load_format: str | None, version: str, flush_cache: bool
    ) -> None:
        await self._update("update_from_tensor", (load_format, version), version, flush_cache)

    async def weights_digest(self) -> dict[str, str]:
        self._alive()
        return dict(self.weights)

    async def close(self) -> None:
        self.calls.append(("close", None))
