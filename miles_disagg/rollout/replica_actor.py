"""The Ray shell around one replica of a service: it follows a store and knows no training job. The work is `host`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from miles_disagg.replica.relay_links import relayed
from miles_disagg.replica.staging import DiskStager
from miles_disagg.rollout.actor import StagingSpec
from miles_disagg.rollout.host import EngineHost, HostSpec
from miles_disagg.store.base import open_store
from miles_disagg.store.shared import shared_fetch
from miles_disagg.store.versions import VersionStore
from miles_disagg.store.watch import PollingSource


@ray.remote(max_restarts=0)
class ServiceReplica:
    """One engine, its replica and its reconciler. shared: directory of the node's replicas for fetched versions.
    relay: fetch versions from other nodes' replicas, and pass them on."""

    def __init__(self, spec: HostSpec, staging: StagingSpec, shared: Path, relay: bool = False):
        if spec.listen.host in ("0.0.0.0", "::"):
            spec = replace(spec, listen=replace(spec.listen, advertise_host=ray.util.get_node_ip_address()))
        objects, passing = open_store(staging.store_url), None
        if relay:
            kept = staging.directory.with_name(f"{staging.directory.name}.relay")
            objects, passing = relayed(objects, kept, spec.replica_id, token=spec.listen.token)
        store = VersionStore(shared_fetch(objects, shared))

        def stager() -> DiskStager:
            return DiskStager(store, staging.directory, staging.base, reader=spec.replica_id)

        self._host = EngineHost(spec, source=PollingSource(store), stager=stager, sink=None, relay=passing)

    async def start(self) -> str:
        """Start the engine and serve it; the replica's URL."""
        return await self._host.start()

    async def status(self) -> dict[str, Any]:
        """The replica's status, whether its engine's process is up, a final failure."""
        return self._host.status()

    async def stop(self, drain_seconds: float) -> None:
        """Leave the gateways, let requests end, end the engine's process."""
        await self._host.stop(drain_seconds)
