"""One replica: engine, gate, sessions and activator under one name, and what it says about itself.

A plain object without Ray or HTTP: `app` serves it, `reconciler` drives it, Ray actors wrap it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from miles_disagg.domain.errors import EngineError, InvalidVersionRef
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.base import Engine, PauseMode
from miles_disagg.replica.activation import Activation, ActivationLimits, Activator, Loader
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.gate import Gate, Phase
from miles_disagg.replica.session import SessionLimits, Sessions


@dataclass(frozen=True)
class ReplicaSettings:
    """replica_id: its name everywhere. mode: `--pause-generation-mode`. max_in_flight: admission limit (429 above)."""

    replica_id: str
    mode: PauseMode = "in_place"
    max_in_flight: int = 1024
    session: SessionLimits = field(default_factory=SessionLimits)
    activation: ActivationLimits = field(default_factory=ActivationLimits)


class Replica:
    """See the module. The engine is somebody else's: `close` ends requests, not the engine."""

    def __init__(self, settings: ReplicaSettings, engine: Engine, *, loader: Loader | None = None):
        self.settings, self.engine, self.replica_id = settings, engine, settings.replica_id
        self.gate = Gate(settings.max_in_flight, settings.mode)
        self.sessions = Sessions(engine, self.gate, settings.replica_id, settings.session)
        self.activator = Activator(engine, self.gate, loader=loader, limits=settings.activation)
        self.activity: str | None = None  # what the reconciler is doing, if anything
        self.timings: dict[str, float] = {}  # seconds of the last activation, by phase
        self.held: VersionRef | None = None  # for an evaluation, by the reconciler
        self.fingerprint: Any = None  # what `proof` last saw of the live weights, if anything
        self.started = time.time()

    async def attach(self, run_id: str | None = None) -> VersionRef | None:
        """Look at the engine and serve what it holds, if it carries a version stamp (of `run_id`, when given).

        Returns the version served, None if the engine has to be given one first. EngineError if the engine was
        started in a way that a replica cannot drive.
        """
        info = await self.engine.server_info()
        if int(info.get("stream_interval") or 1) != 1:
            raise EngineError(f"engine {self.engine.url} runs with --stream-interval above 1: token spans need 1")
        self.gate.engine_recomputes = bool(info.get("disable_radix_cache"))
        self.sessions.announced_pauses = bool(info.get("announces_at_pause"))
        try:
            ref = VersionRef.parse(str(info.get("weight_version")))
        except InvalidVersionRef:
            return None
        if run_id is not None and ref.run_id != run_id:
            return None
        await self.activator.adopt(ref)
        return ref

    @property
    def applied(self) -> VersionRef | None:
        """The version that requests are served with; None if none is."""
        return self.gate.served if self.ready else None

    @property
    def ready(self) -> bool:
        """True if requests are admitted (or wait for a running activation)."""
        gate = self.gate
        return gate.served is not None and gate.phase in (Phase.OPEN, Phase.DRAINING, Phase.PAUSED)

    @property
    def state(self) -> str:
        """One word for `/server_info` and the gateway."""
        if self.gate.phase in (Phase.FENCED, Phase.CLOSED):
            return "fenced" if self.gate.phase is Phase.FENCED else "stopping"
        if self.gate.phase in (Phase.DRAINING, Phase.PAUSED):
            return "activating"
        return self.activity or ("ready" if self.ready else "booting")

    async def activate(self, target: Materialized) -> Activation:
        """Serve `target`. Raises ActivationFailed."""
        report = await self.activator.activate(target)
        self.note(report, target)
        return report

    def note(self, report: Activation, target: Materialized | None = None) -> None:
        """Remember an activation's phase timings."""
        phases = {f"{name}_seconds": s for name, s in (target.seconds if target else {}).items()}
        self.timings = {
            **phases,
            "stage_seconds": report.stage_seconds,
            "drain_seconds": report.drain_seconds,
            "pause_seconds": report.pause_seconds,
        }

    def status(self) -> dict[str, Any]:
        """The replica's part of `/server_info`."""
        gate, served = self.gate, self.gate.served
        return {
            "replica_id": self.replica_id,
            "run_id": None if served is None else served.run_id,
            "applied": None if self.applied is None else self.applied.version,
            "latest": None if gate.latest is None else str(gate.latest),
            "state": self.state,
            "ready": self.ready,
            "reason": gate.reason,
            "held": None if self.held is None else str(self.held),
            "phase_timings": self.timings,
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_json(),
            "active_requests": gate.active,
            "max_in_flight": gate.max_in_flight,
            "pause_generation_mode": gate.mode,
            "engine_url": self.engine.url,
        }

    async def close(self, reason: str = "the replica is stopping") -> None:
        """Refuse and end requests. The engine goes on."""
        self.gate.close(reason)
        await self.sessions.close()
