"""Ports of a replica: where it learns of versions, who builds their checkpoints, who is told that one is served.

Adapters: `store.versions.VersionStore` and the store actor are latest sources, `replica.staging.DiskStager` is a
stager. How a version becomes the served one is `activation`; when is `reconciler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles_disagg.domain.versions import VersionRef


@dataclass(frozen=True)
class Materialized:
    """A verified checkpoint of one version on this host.

    path: the checkpoint directory; its contents stay as they are until the next `materialize` of the same stager.
    previous: the version the directory held before (None: it was seeded anew or written in full).
    patch: file with the positions and new values of every element that differs from `previous`, verified (format:
        `weights.chain`); an in-place activation scatters from it. None where the directory was built anew.
    seconds: `fetch` and `materialize`; wire_bytes: bytes read from the store.
    """

    ref: VersionRef
    path: Path
    previous: VersionRef | None = None
    patch: Path | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    wire_bytes: int = 0


class LatestSource(Protocol):
    """Where a replica learns what is published."""

    async def latest(self) -> VersionRef | None:
        """Newest published version, None before the first claim."""
        ...

    async def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        """Newest version as soon as it differs from `than` (another run included); None after `timeout` seconds."""
        ...


class Stager(Protocol):
    """Builds the verified checkpoint of a version on this host while the engine goes on serving."""

    async def materialize(self, target: VersionRef) -> Materialized:
        """Build `target`. Whatever is raised, the checkpoint here is whole: the old version or the target.

        Raises BaseMismatch, ChainBroken, VersionNotFound, ChecksumMismatch, CheckpointError, OSError (disk full).
        """
        ...


class ActivationSink(Protocol):
    """Who is told that a replica's engine acknowledged a version (convergence, retention of acknowledged versions)."""

    async def record_activation(self, replica_id: str, ref: VersionRef, at: float) -> None:
        """`at` is a Unix time in seconds. Idempotent."""
        ...
