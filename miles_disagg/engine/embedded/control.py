"""Control routes of the embedded engine: pause, abort, weight updates, state. JSON as SGLang writes it.

Weights are received and checked in a worker thread while the engine serves; only the copy runs between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from miles_disagg.domain.errors import InvalidRequest, MilesDisaggError, UpdateFailed
from miles_disagg.engine.base import PAUSE_MODES
from miles_disagg.engine.embedded.scheduler import Scheduler
from miles_disagg.engine.embedded.weights import Staged, UpdateGroups, stage_from_disk, stage_from_pickle
from miles_disagg.engine.inplace import HOOK, miles_inplace
from miles_disagg.engine.tensors import INDICES, deserialize


@dataclass(frozen=True)
class Launched:
    """What `/server_info` and `/model_info` say of the launch."""

    model_path: str
    served_model_name: str
    architectures: list[str] | None
    model_type: str
    dtype: str
    device: str
    context_length: int
    max_running_requests: int
    max_total_tokens: int
    version: str


class Control:
    """Handlers; `routes` lists them."""

    def __init__(self, scheduler: Scheduler, groups: UpdateGroups, launched: Launched):
        self.scheduler, self.groups, self.launched = scheduler, groups, launched
        self.weights = scheduler.runner.weights
        self.model_path = launched.model_path
        self._receiving = asyncio.Lock()  # broadcasts are received in the order they were announced

    def routes(self) -> list[web.RouteDef]:
        """All control routes."""
        both = [
            ("/flush_cache", self.flush_cache),
            ("/get_weights_by_name", self.get_weights_by_name),
        ]
        posts = [
            ("/pause_generation", self.pause),
            ("/continue_generation", self.resume),
            ("/abort_request", self.abort),
            ("/update_weights_from_disk", self.update_from_disk),
            ("/update_weights_from_tensor", self.update_from_tensor),
            ("/update_weights_from_distributed", self.update_from_distributed),
            ("/init_weights_update_group", self.init_group),
            ("/destroy_weights_update_group", self.destroy_group),
            ("/weights_digest", self.weights_digest),
        ]
        gets = [
            ("/health", self.health),
            ("/health_generate", self.health),
            ("/server_info", self.server_info),
            ("/get_server_info", self.server_info),
            ("/model_info", self.model_info),
            ("/get_model_info", self.model_info),
            ("/metrics", self.metrics),
        ]
        return [web.get(path, handler) for path, handler in gets + both] + [
            web.post(path, handler) for path, handler in posts + both
        ]

    async def _in_thread(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.scheduler.call(action))

    # --- state ----------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 if the scheduler's thread answers (paused or not); it is never busy for longer than one step."""
        await self._in_thread(lambda: None)
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        """SGLang's names for what exists here."""
        it = self.launched
        stats = await self._in_thread(self.scheduler.stats)
        info = {
            "version": it.version,
            "engine": "miles-disagg-embedded",
            "custom_weight_loader": [HOOK],
            "model_path": self.model_path,
            "tokenizer_path": it.model_path,
            "served_model_name": it.served_model_name,
            "weight_version": self.scheduler.version,
            "dtype": it.dtype,
            "device": it.device,
            "context_length": it.context_length,
            "max_running_requests": it.max_running_requests,
            "max_total_num_tokens": it.max_total_tokens,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "nnodes": 1,
            "disaggregation_mode": "null",
            "disable_radix_cache": True,
            "announces_at_pause": True,  # `stream_interval` 0: chunks at pauses and at the end only
            "status": "ready",
            "internal_states": [stats],
        }
        return web.json_response(info)

    async def model_info(self, request: web.Request) -> web.Response:
        """As SGLang."""
        it = self.launched
        return web.json_response(
            {
                "model_path": self.model_path,
                "tokenizer_path": it.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.scheduler.version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": it.model_type,
                "architectures": it.architectures,
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, under SGLang's prefix."""
        stats = await self._in_thread(self.scheduler.stats)
        label = f'{{model_name="{self.launched.served_model_name}"}}'
        lines = []
        for name, value in stats.items():
            if name != "time":
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{label} {value}"]
        return web.Response(text="\n".join(lines) + "\n")

    # --- generation -------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        """`{"mode": "abort" | "retract" | "in_place"}`, `abort` by default."""
        mode = (await _json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await self._in_thread(lambda: self.scheduler.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        """Continue."""
        await self._in_thread(self.scheduler.resume)
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: web.Request) -> web.Response:
        """`{"rid": ...}` or `{"abort_all": true}`."""
        body = await _json(request)
        rid = body.get("rid") or None
        if rid is not None or body.get("abort_all"):
            await self._in_thread(lambda: self.scheduler.abort(None if body.get("abort_all") else rid))
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Nothing is cached across requests here; as in SGLang, refused while requests run or are held."""
        try:
            deadline = time.monotonic() + float(request.query.get("timeout", 0))
        except ValueError:
            raise InvalidRequest(f"timeout must be a number, got {request.query['timeout']!r}") from None
        while not await self._in_thread(lambda: self.scheduler.idle):
            if time.monotonic() >= deadline:
                return web.Response(status=400, text="Flush cache failed: requests are running or held.\n")
            await asyncio.sleep(0.05)
        return web.Response(text="Cache flushed.\n")

    # --- weights ----------------------------------------------------------------------------------------

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Load a complete checkpoint directory."""
        body = await _json(request)
        path = _text(body, "model_path")

        async def stage() -> Staged:
            return await asyncio.to_thread(stage_from_disk, path, self.weights)

        def applied() -> None:
            self.model_path = path

        return await self._update(body, stage, applied, {"num_paused_requests": 0})

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Load pickled tensors."""
        body = await _json(request)
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or not all(isinstance(p, str) for p in payloads):
            raise InvalidRequest("serialized_named_tensors must be a list of base64 strings")

        async def stage() -> Staged:
            if body.get("load_format") == HOOK:
                named = await asyncio.to_thread(deserialize, payloads[0])
                await asyncio.wrap_future(self.scheduler.update(lambda: miles_inplace.apply(self.weights, named)))
                return {}
            return await asyncio.to_thread(stage_from_pickle, payloads, body.get("load_format"), self.weights)

        return await self._update(body, stage)

    async def update_from_distributed(self, request: web.Request) -> web.Response:
        """Receive a broadcast of rank 0."""
        body = await _json(request)
        for field in ("names", "dtypes", "shapes"):
            if not isinstance(body.get(field), list):
                raise InvalidRequest(f"{field} must be a list")

        async def stage() -> Staged:
            async with self._receiving:
                return await asyncio.to_thread(
                    self.groups.receive,
                    body["names"],
                    body["dtypes"],
                    body["shapes"],
                    body.get("group_name", "weight_update_group"),
                    body.get("load_format"),
                    self.weights,
                )

        form, _, on = str(body.get("load_format") or "").partition(":")
        return await self._update(body, stage, on=on if form == INDICES else None)

    async def _update(
        self,
        body: Mapping[str, Any],
        stage: Callable[[], Any],
        applied: Callable[[], None] | None = None,
        extra: Mapping[str, Any] | None = None,
        on: str | None = None,
    ) -> web.Response:
        """Stage while serving, then copy and stamp between two steps. A refused update changes nothing.

        on: the version that changed elements are against; another one is refused (its own later buckets are not).
        """
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            raise InvalidRequest(f"weight_version must be a string, got {version!r}")
        if body.get("abort_all_requests"):
            await self._in_thread(lambda: self.scheduler.abort(None))
        message = "Succeeded to update model weights."
        try:
            staged = await stage()

            def apply() -> None:
                if on is not None and self.scheduler.version not in (on, version):
                    raise UpdateFailed(f"changes on {on}, but {self.scheduler.version} is served", status=400)
                self.weights.apply(staged)
                if version is not None:
                    self.scheduler.version = version

            await asyncio.wrap_future(self.scheduler.update(apply))
        except MilesDisaggError as e:
            return web.json_response({"success": False, "message": str(e), **(extra or {})}, status=400)
        if applied is not None:
            applied()
        if version is not None:
            message += f" Weight version updated to {version}."
        return web.json_response({"success": True, "message": message, **(extra or {})})

    async def init_group(self, request: web.Request) -> web.Response:
        """Join a process group as rank `rank_offset`."""
        body = await _json(request)
        numbers = {}
        for field in ("master_port", "rank_offset", "world_size"):
            value = body.get(field)
            if type(value) is not int:
                raise InvalidRequest(f"{field} must be an integer, got {value!r}")
            numbers[field] = value
        name = body.get("group_name", "weight_update_group")
        try:
            await asyncio.to_thread(
                self.groups.join,
                address=_text(body, "master_address"),
                port=numbers["master_port"],
                rank=numbers["rank_offset"],
                world_size=numbers["world_size"],
                name=name,
                backend=body.get("backend", "nccl"),
            )
        except Exception as e:
            message = f"Failed to initialize custom process group: {e}."
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave a process group."""
        name = (await _json(request)).get("group_name", "weight_update_group")
        if not await asyncio.to_thread(self.groups.leave, name):
            message = "The group to be destroyed does not exist."
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def get_weights_by_name(self, request: web.Request) -> web.Response:
        """The first `truncate_size` rows of a tensor as numbers."""
        body = await _json(request)
        tensor = self.weights.get(_text(body, "name"))
        if tensor is None:
            raise InvalidRequest(f"name: {body['name']!r} is not a tensor of the served model")
        values = await self._in_thread(lambda: tensor.detach().float().cpu().tolist())
        return web.json_response(values[: body.get("truncate_size", 100)] if isinstance(values, list) else [values])

    async def weights_digest(self, request: web.Request) -> web.Response:
        """`{"weight_version", "digests": {name: xxh3-128}}` of one moment between two steps."""

        def read() -> dict[str, Any]:
            return {"weight_version": self.scheduler.version, "digests": self.weights.digests()}

        return web.json_response(await self._in_thread(read))


async def _json(request: web.Request) -> dict[str, Any]:
    if not request.can_read_body:
        return dict(request.query)
    try:
        body = await request.json()
    except ValueError as e:
        raise InvalidRequest(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field} must be a non-empty string, got {value!r}")
    return value


__all__ = ["Control", "Launched", "UpdateFailed"]
