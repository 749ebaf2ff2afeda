"""The Ray shell around a gateway, of a training job or of a service. Routing and HTTP are `router` and `app`."""

from __future__ import annotations

import ray

from miles_disagg.gateway.app import GatewayServer, GatewaySettings, serve
from miles_disagg.replica.listen import TlsFiles


@ray.remote(num_cpus=0, max_restarts=0)
class GatewayActor:
    """The run's single rollout endpoint."""

    def __init__(self) -> None:
        self._server: GatewayServer | None = None

    async def start(
        self,
        host: str,
        port: int,
        run_id: str | None,
        settings: GatewaySettings,
        token: str | None = None,
        tls: TlsFiles | None = None,
    ) -> str:
        """Listen; returns the URL. OSError if the port is taken."""
        advertise = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else None
        self._server = await serve(
            host=host, port=port, advertise_host=advertise, run_id=run_id, settings=settings, token=token,
            tls=tls.context() if tls else None,
        )  # fmt: skip
        return self._server.url

    async def alive(self) -> bool:
        """True, if anything answers."""
        return True

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
