"""The Ray shell around a gateway of a training job. Routing and HTTP are `router` and `app`."""

from __future__ import annotations

import ray

from miles_disagg.gateway.app import GatewayServer, GatewaySettings, serve


@ray.remote(num_cpus=0, max_restarts=0)
class GatewayActor:
    """The run's single rollout endpoint."""

    def __init__(self) -> None:
        self._server: GatewayServer | None = None

    async def start(self, host: str, port: int, run_id: str, settings: GatewaySettings) -> str:
        """Listen; returns the URL. OSError if the port is taken."""
        advertise = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else None
        self._server = await serve(host=host, port=port, advertise_host=advertise, run_id=run_id, settings=settings)
        return self._server.url

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
