"""What a training job sees of an independent rollout service: one URL. It starts, restarts and enumerates nothing.

Stands where `fleet.Fleet` stands in the other topologies. What the service says about itself is used for metrics only;
whether samples come, and of which version, is decided request by request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from miles_disagg.domain.errors import ConfigError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Event

_POLL_SECONDS = 0.25


class ServiceFleet:
    """A service at `url`. token: sent as a bearer token. `members` is empty: replicas are the service's business."""

    def __init__(self, url: str, say: Callable[[str], None], *, token: str | None = None):
        self.url, self.say = url.rstrip("/"), say
        self.members: list[Any] = []
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._last: Mapping[str, Any] = {}

    async def start(self) -> None:
        """Ask the service how it is. Silence is no error, since requests are retried; a refused token is."""
        timeout = aiohttp.ClientTimeout(total=5)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        try:
            async with self._session.get(f"{self.url}/server_info") as response:
                if response.status in (401, 403):
                    raise ConfigError(
                        [f"--rollout-endpoint {self.url} wants a token: give --rollout-auth-token-file PATH"]
                    )
                info = await response.json()
                self.say(f"rollout service {self.url}: {info.get('replicas_ready', 0)} replica(s) ready")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.say(f"rollout service {self.url} does not answer yet ({error or type(error).__name__}); going on")

    async def wait_converged(self, ref: VersionRef, timeout: float) -> float | None:
        """Seconds until every ready replica of the service serves `ref` or newer; None if that cannot be seen.

        Never an error: which replicas a service has, and how long it takes for them, is not this job's to judge.
        """
        begun = time.monotonic()
        await self._ask("POST", "/wake")
        while (waited := time.monotonic() - begun) < timeout:
            answer = await self._ask("GET", "/fleet")
            if answer is not None:
                self._last = answer
                ready = [r for r in answer.get("replicas", ()) if r.get("ready")]
                if ready and all(r["run_id"] == ref.run_id and (r["applied"] or 0) >= ref.version for r in ready):
                    return waited
            await asyncio.sleep(_POLL_SECONDS)
        self.say(f"rollout service {self.url}: not every replica was seen to serve {ref} in {timeout:.0f} s")
        return None

    async def phase_metrics(self) -> dict[str, float]:
        """`replica/*_seconds` of the last activations (the slowest replica's) and `fleet/replicas_ready`."""
        ready = [r for r in self._last.get("replicas", ()) if r.get("ready")]
        out = {"fleet/replicas_ready": float(len(ready))}
        for phase in ("fetch", "materialize", "stage", "pause"):
            values = [t[f"{phase}_seconds"] for r in ready if f"{phase}_seconds" in (t := r.get("phase_timings", {}))]
            if values:
                out[f"replica/{phase}_seconds"] = max(values)
        return out

    async def without_version(self) -> list[str]:
        """None: a service brings itself up to date from the store."""
        return []

    async def events(self) -> list[Event]:
        """None: the service keeps its own."""
        return []

    async def stop(self) -> None:
        """Close connections. The service goes on."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, method: str, path: str) -> dict[str, Any] | None:
        """A JSON answer, None if there is none."""
        if self._session is None:
            return None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._session.request(method, self.url + path) as response:
                if response.status == 200:
                    return await response.json()
        return None
