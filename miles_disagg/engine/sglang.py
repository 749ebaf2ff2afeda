"""The HTTP adapter of the engine port, for real SGLang and for the embedded engine alike.

Knows SGLang's traps and does not step into them (each is named where it is avoided). Retries nothing: whether a
request may be repeated is the caller's knowledge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from miles_disagg.domain.errors import EngineError, EngineUnavailable, UpdateFailed
from miles_disagg.engine.base import PauseMode

_CONNECT_TIMEOUT = 10.0
_KEEP_ALIVE = 4.0  # less than the 5 s after which SGLang closes an idle connection
_MAX_LINE = 64 << 20  # one stream chunk carries the whole output so far
_DETAIL = 2000
_FLUSH_SECONDS = 2.0


class SGLangEngine:
    """`Engine` over HTTP. One per event loop; connections are opened on first use and kept.

    generate_timeout: seconds a whole generation may take (None: no limit, as requests may be held by a pause).
    control_timeout: seconds for pause, abort and information. update_timeout: seconds for weight updates and for
    joining a group.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        generate_timeout: float | None = None,
        control_timeout: float = 60.0,
        update_timeout: float = 600.0,
    ):
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._generate_timeout = generate_timeout
        self._control_timeout = control_timeout
        self._update_timeout = update_timeout
        self._session: aiohttp.ClientSession | None = None
        self._paused: PauseMode | None = None  # by this client
        self._info_path = "/server_info"
        self._prefix_cache: bool | None = None

    # --- generation -------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """See `Engine`."""
        if body.get("stream"):
            raise EngineError("generate: the body asks for a stream; use stream()", status=400)
        return await self._call("POST", "/generate", body, self._generate_timeout)

    async def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        """See `Engine`. An error event inside the stream is raised as EngineError."""
        timeout = aiohttp.ClientTimeout(total=self._generate_timeout, sock_connect=_CONNECT_TIMEOUT)
        finished = False
        try:
            async with self._open().post(self.url + path, json={**body, "stream": True}, timeout=timeout) as response:
                await self._raise_for_status(response, path)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        finished = True  # read on to the end of the body, else the connection could not be used again
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        error = chunk["error"]
                        raise EngineError(str(error.get("message", error)), status=int(error.get("code") or 400))
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            if not finished:
                raise self._unavailable(path, e) from None
        if not finished:
            raise EngineUnavailable(f"{self.url}{path}: the stream broke off before [DONE]")

    # --- state --------------------------------------------------------------------------------------------

    async def health(self, timeout: float) -> None:
        """See `Engine`. Asks the scheduler for its state: SGLang's `/health` generates a token unless it was started
        with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false, and turns 503 while paused."""
        try:
            async with asyncio.timeout(timeout):
                await self.server_info()
        except TimeoutError:
            raise EngineUnavailable(f"{self.url} did not answer within {timeout:g} s") from None

    async def server_info(self) -> dict[str, Any]:
        """See `Engine`. Falls back to `/get_server_info`, the older name."""
        try:
            info = await self._call("GET", self._info_path, None, self._control_timeout)
        except EngineError as e:
            if e.status != 404 or self._info_path != "/server_info":
                raise
            info = await self._call("GET", "/get_server_info", None, self._control_timeout)
            self._info_path = "/get_server_info"
        self._prefix_cache = not info.get("disable_radix_cache", False)
        return info

    async def model_info(self) -> dict[str, Any]:
        """See `Engine`."""
        try:
            return await self._call("GET", "/model_info", None, self._control_timeout)
        except EngineError as e:
            if e.status != 404:
                raise
            return await self._call("GET", "/get_model_info", None, self._control_timeout)

    # --- control ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine`. `retract` is refused where recomputation would reuse prefix KV of the old weights."""
        if mode == "retract":
            if self._prefix_cache is None:
                await self.server_info()
            if self._prefix_cache:
                raise EngineError(
                    "pause mode 'retract' recomputes KV, but this engine would take the prefix from its cache of the "
                    "old weights: start it with --disable-radix-cache, or use --pause-generation-mode in_place"
                )
        await self._call("POST", "/pause_generation", {"mode": mode}, self._control_timeout)
        self._paused = mode

    async def resume(self) -> None:
        """See `Engine`."""
        await self._call("POST", "/continue_generation", {}, self._control_timeout)
        self._paused = None

    async def flush_cache(self) -> None:
        """See `Engine`. Waits a moment for requests that have just ended."""
        await self._call("POST", f"/flush_cache?timeout={_FLUSH_SECONDS:g}", None, self._control_timeout)

    async def abort(self, rid: str | None = None) -> None:
        """See `Engine`."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._call("POST", "/abort_request", body, self._control_timeout)

    # --- weights ------------------------------------------------------------------------------------------

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        """See `Engine`."""
        await self._update("/update_weights_from_disk", {"model_path": path}, version, flush_cache)

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
        """See `Engine`. Use a fresh group name every time: a group that failed keeps its name in SGLang."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._refused(await self._post_update("/init_weights_update_group", body))

    async def destroy_group(self, group_name: str) -> None:
        """See `Engine`."""
        answer = await self._call(
            "POST", "/destroy_weights_update_group", {"group_name": group_name}, self._update_timeout
        )
        self._refused(answer)

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
        """See `Engine`."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(s) for s in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        await self._update("/update_weights_from_distributed", body, version, flush_cache)

    async def update_from_tensor(
        self, serialized: Sequence[str], *, load_format: str | None, version: str, flush_cache: bool
    ) -> None:
        """See `Engine`."""
        body = {"serialized_named_tensors": list(serialized), "load_format": load_format}
        await self._update("/update_weights_from_tensor", body, version, flush_cache)

    async def weights_digest(self) -> dict[str, str]:
        """See `Engine`."""
        return (await self._call("POST", "/weights_digest", {}, self._update_timeout))["digests"]

    async def close(self) -> None:
        """See `Engine`."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _update(self, path: str, body: Mapping[str, Any], version: str, flush_cache: bool) -> None:
        if flush_cache and self._paused in ("in_place", "retract"):
            raise UpdateFailed(
                f"flush_cache=True while requests are held ({self._paused}) kills SGLang ('Cache flush failed after "
                "updating weights'): pass flush_cache=False and give each version its own cache key (extra_key)"
            )
        # Never flush within the update: SGLang asserts that nothing is left to run, which is not yet so when the last
        # request has only just been answered. /flush_cache waits, and refuses without harm.
        answer = await self._post_update(path, {**body, "weight_version": version, "flush_cache": False})
        self._refused(answer)
        if flush_cache:
            await self.flush_cache()

    async def _post_update(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self._call("POST", path, body, self._update_timeout)
        except EngineUnavailable:
            raise
        except EngineError as e:
            raise UpdateFailed(f"{self.url}{path}: {e}", status=e.status) from None

    @staticmethod
    def _refused(answer: Any) -> None:
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise UpdateFailed(str(answer.get("message")), status=400)

    # --- HTTP ---------------------------------------------------------------------------------------------

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
                read_bufsize=_MAX_LINE,
            )
        return self._session

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_TIMEOUT)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=limit) as response:
                await self._raise_for_status(response, path)
                if response.content_type == "application/json":
                    return await response.json()
                text = await response.text()
                if response.content_type == "application/octet-stream":  # sglang-router names no type in front of
                    with contextlib.suppress(ValueError):  # prefill/decode groups
                        return json.loads(text)
                return text
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise self._unavailable(path, e) from None

    async def _raise_for_status(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status < 400:
            return
        text = (await response.text())[:_DETAIL]
        try:
            answer = json.loads(text)
            error = answer.get("error", answer)
            message = error.get("message", text) if isinstance(error, dict) else str(error)
        except (ValueError, AttributeError):
            message = text
        kind = EngineUnavailable if response.status in (502, 503, 504) else EngineError
        raise kind(message or f"{path} answered {response.status}", status=response.status)

    def _unavailable(self, path: str, error: BaseException) -> EngineUnavailable:
        return EngineUnavailable(f"{self.url}{path} does not answer: {error or type(error).__name__}")
