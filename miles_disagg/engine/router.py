"""The control plane of an existing sglang-router: which engines it sends requests to.

Registering and taking out only; requests go through it by `engine.sglang`, and what the engines behind it hold is
`engine.group`. Measured on sglang-router 0.3.2: a worker is added in the background after 202, is removed by its id,
and comes back into rotation by itself when its health check passes again, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from miles_disagg.domain.errors import EngineError, EngineUnavailable

_SECONDS = 10.0


class RouterControl:
    """`GET|POST|DELETE /workers`. EngineUnavailable if it does not answer, EngineError if it refuses."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float = _SECONDS):
        self.url = url.rstrip("/")
        self._key, self._timeout = api_key, timeout
        self._session: aiohttp.ClientSession | None = None

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Its workers by URL: `id`, `worker_type`, `is_healthy`, ..."""
        answer = await self._call("GET", "/workers", None)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("workers"), list):
            raise EngineError(f"{self.url} answers, but not as an sglang-router (no `workers` in /workers)")
        return {str(row["url"]).rstrip("/"): row for row in answer["workers"]}

    async def add(self, url: str, worker_type: str, bootstrap_port: int | None) -> None:
        """Ask it to send requests to `url`; it looks at the engine first, in its own time."""
        body: dict[str, Any] = {"url": url, "worker_type": worker_type}
        if self._key:
            body["api_key"] = self._key
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        await self._call("POST", "/workers", body)

    async def remove(self, identity: str) -> None:
        """Ask it to send nothing any more to the worker with this `id`."""
        await self._call("DELETE", f"/workers/{identity}", None)

    async def close(self) -> None:
        """Release connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(headers=headers)
        try:
            limit = aiohttp.ClientTimeout(total=self._timeout)
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text()
                if response.status >= 400 and response.status != 404:
                    raise EngineError(f"router {self.url}{path}: {text[:300]}", status=response.status)
                if response.status == 404 and method != "DELETE":  # one that is gone needs no removing
                    raise EngineError(f"{self.url} answers, but not as an sglang-router (no {path})", status=404)
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineUnavailable(f"router {self.url} does not answer: {error or type(error).__name__}") from None
