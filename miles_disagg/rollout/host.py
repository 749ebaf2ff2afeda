"""One managed or attached engine on its host: process, replica, reconciler and HTTP face as one thing with a life.

Starts the engine process (managed) or finds it (attached), brings it to the current version, restarts a dead process
into it, and leaves nothing behind. Ray-free: `actor` wraps it, tests run it directly.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineMismatch,
    EngineUnavailable,
    MilesDisaggError,
)
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.base import PauseMode
from miles_disagg.engine.discovery import Discovered, Wanted, differences, discover
from miles_disagg.engine.group import RoutedEngine
from miles_disagg.engine.members import FoundGroup
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.observe.events import Timeline
from miles_disagg.replica.activation import Activation, ActivationLimits
from miles_disagg.replica.app import ReplicaServer, serve
from miles_disagg.replica.base import ActivationSink, LatestSource, Stager
from miles_disagg.replica.inplace import InPlaceLoader, InPlaceUnavailable
from miles_disagg.replica.listen import Listen
from miles_disagg.replica.peer import PeerOptions, PeerReceiver
from miles_disagg.replica.proof import ProvenStager, Prover
from miles_disagg.replica.reconciler import Reconciler
from miles_disagg.replica.relay_links import RelayedStore
from miles_disagg.replica.replica import Replica, ReplicaSettings
from miles_disagg.rollout.exports import Exports
from miles_disagg.rollout.processes import EngineCommand, EngineProcesses, Node, NodeLost

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSpec:
    """What one engine host runs.

    command: how to start the engine's process (None: `engine_url` is an attached engine's, which must fit `wanted`
    if that is given; with `members` it is a router's, and they are the engines behind it). base: version of the
    checkpoint that the process is started from (None: of no run; it serves once it was given a version). gateways:
    URLs that the replica registers with. checkpoint: the run's base on this host, needed for in-place activation.
    hang_limit: silence after which a process is killed and started again.
    verify_interval: between looks at the live weights (None: never). follow: False for an engine that only evaluates:
    it serves the version that `pin` named last, not the newest. zone: where this host is, for relays. peer: how
    weights come peer to peer (None: they do not). staging: where versions are built here. Times in seconds.
    """

    replica_id: str
    base: VersionRef | None
    command: EngineCommand | None
    engine_url: str | None = None
    members: tuple[str, ...] = ()
    wanted: Wanted | None = None
    gateways: tuple[str, ...] = ()
    listen: Listen = field(default_factory=Listen)
    api_key: str | None = None
    mode: PauseMode = "in_place"
    activation: Literal["auto", "in-place", "reload"] = "reload"
    checkpoint: Path | None = None
    max_in_flight: int = 4096
    start_timeout: float = 300.0
    limits: ActivationLimits = field(default_factory=ActivationLimits)
    watch_interval: float = 0.5
    restart_limit: int = 5
    hang_limit: float = 60.0
    verify_interval: float | None = None
    follow: bool = True
    zone: str = ""
    peer: PeerOptions | None = None
    staging: Path | None = None

    @property
    def run_id(self) -> str | None:
        """The only run that is served; None: whichever the store names."""
        return None if self.base is None else self.base.run_id


class EngineHost:
    """See the module. `stager` and `source` are None where versions come by broadcast alone. nodes: further ones that
    the engine spans, which reach this one at `address`."""

    def __init__(
        self,
        spec: HostSpec,
        *,
        source: LatestSource | None,
        stager: Callable[[], Stager] | None,
        sink: ActivationSink | None,
        relay: RelayedStore | None = None,
        nodes: Sequence[Node] = (),
        address: str = "127.0.0.1",
    ):
        self._relay = relay
        self.spec, self._source, self._make_stager, self._sink = spec, source, stager, sink
        self.timeline = Timeline(spec.replica_id)
        self._processes: EngineProcesses | None = None
        if spec.command is not None:
            self._processes = EngineProcesses(spec.command, spec.base, spec.start_timeout, nodes, address)
        self._server: ReplicaServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stager: ProvenStager | None = None
        self._proving: asyncio.Task[None] | None = None
        self._reconciler: Reconciler | None = None
        self.found: Discovered | FoundGroup | None = None
        self.replica: Replica | None = None
        self.restarts = 0
        self.process_up = False
        self.failure: str | None = None
        self.node_lost: str | None = None
        self.activation = "reload"
        self._loader: InPlaceLoader | None = None
        self._exports: Exports | None = None
        self.peer: PeerReceiver | None = None

    async def start(self) -> str:
        """Start the engine and serve it; the replica's URL. EngineStartError carries the engine's last lines."""
        spec = self.spec
        url = spec.engine_url or await self._launch(self._managed())
        engine = RoutedEngine(url, spec.members, spec.api_key) if spec.members else SGLangEngine(url, spec.api_key)
        settings = ReplicaSettings(spec.replica_id, spec.mode, spec.max_in_flight, activation=spec.limits)
        try:
            if spec.wanted is not None:
                await self._find(engine, spec.wanted)
            self._loader = await self._in_place(engine)
            self.replica = Replica(settings, engine, loader=self._loader)
            self._exports = Exports(engine, self.replica.activator, spec.checkpoint, self._loader)
            if spec.peer is not None and spec.checkpoint is not None:
                name = spec.replica_id
                self.peer = PeerReceiver(name, engine, self.replica.activator, spec.checkpoint, spec.peer)
            served = await self.replica.attach(spec.run_id)
            if served is None and self._make_stager is None and spec.command is not None:
                info = await engine.server_info()
                raise EngineError(
                    f"engine {url} is at version {info.get('weight_version')!r}, not at {spec.base}: restart it with "
                    f"--weight-version {spec.base} on the run's base checkpoint, or use disk transport"
                )
            if self._make_stager is not None and self._source is not None:
                self._stager = ProvenStager(self._make_stager())
                if self._loader is not None and spec.base is not None:  # so that the first version has a patch too
                    await self._stager.materialize(spec.base)
            if self._source is not None and (self._stager is not None or spec.command is None):
                admit = None if spec.wanted is None else lambda: self._check(engine)
                group = engine if isinstance(engine, RoutedEngine) else None
                self._reconciler = Reconciler(
                    self.replica,
                    self._source,
                    self._stager,
                    sink=self._sink,
                    admit=admit,
                    follow=spec.follow,
                    group=group,
                )
            self._server = await _serve(self.replica, self._reconciler, spec, self._relay)
            if served is not None and self._sink is not None:
                await self._sink.record_activation(spec.replica_id, served, time.time())
        except BaseException:
            await self.stop()
            raise
        if self._stager is not None and spec.verify_interval is not None:
            prover = Prover(self.replica, self._stager, spec.verify_interval, self._exports.digests)
            self._proving = asyncio.create_task(prover.run(), name=f"prove {spec.replica_id}")
        if spec.command is not None:
            self._watch = asyncio.create_task(self._watch_process(), name=f"watch {spec.replica_id}")
        return self._server.url

    async def _find(self, engine: SGLangEngine | RoutedEngine, wanted: Wanted) -> None:
        """Wait for an attached engine (all behind a router) and see that it fits. DeadlineExceeded, EngineMismatch."""
        begun = time.monotonic()
        while True:
            try:
                await self._check(engine)
                if isinstance(engine, RoutedEngine):
                    await engine.open(self.spec.start_timeout)
                return
            except EngineUnavailable as error:
                if time.monotonic() - begun > self.spec.start_timeout:
                    what = f"the attached engine {engine.url} to answer"
                    remedy = f"{error}; start it, or correct --rollout-external-engine-addrs"
                    raise DeadlineExceeded(what, self.spec.start_timeout, remedy) from None
                await asyncio.sleep(1.0)

    async def _check(self, engine: SGLangEngine | RoutedEngine) -> None:
        """Look at what runs there; EngineMismatch if the run cannot use it."""
        assert self.spec.wanted is not None
        if isinstance(engine, RoutedEngine):
            self.found = await engine.look(self.spec.wanted)
            return
        self.found = await discover(engine)
        if problems := differences(self.found, self.spec.wanted):
            raise EngineMismatch(engine.url, problems)

    async def _in_place(self, engine: SGLangEngine | RoutedEngine) -> InPlaceLoader | None:
        """A loader for in-place activation if it is wanted and works; `activation` then says which is used and why."""
        spec = self.spec
        if spec.activation == "reload" or self._make_stager is None or spec.checkpoint is None or spec.base is None:
            return None
        loader = InPlaceLoader(engine, spec.checkpoint)
        try:
            stamp = (await engine.model_info()).get("weight_version")
            if stamp != str(spec.base):
                if spec.command is None:
                    await loader.plugin.check()
                    self.activation = f"in-place after a first reload: the engine is at {stamp}, not at {spec.base}"
                    return loader
                raise InPlaceUnavailable(f"the engine is at {stamp}, the map is checked at {spec.base}")
            found = await loader.open(spec.base)
        except InPlaceUnavailable as error:
            loader.plugin.close()
            if spec.activation == "in-place":
                raise EngineError(f"--activation in-place: {error}; use --activation reload") from error
            self.activation = f"reload: {error}"
            return None
        self.activation = f"in-place: {found['elements']:,} elements in {found['rows']} pieces mapped and checked"
        return loader

    async def _launch(self, processes: EngineProcesses) -> str:
        """Start the engine's processes, and see that all of their nodes see what this one builds."""
        url = await processes.start()
        directory = self.spec.staging
        if processes.further and directory is not None:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            if blind := await processes.blind_to(directory):
                raise EngineError(
                    f"node(s) {', '.join(map(str, blind))} of this engine do not see {directory}, where its versions "
                    "are built: put --update-weight-local-checkpoint-dir on a file system that all nodes of an engine "
                    "mount, or use --update-weight-transfer-mode broadcast"
                )
        self.process_up = True
        return url

    async def _watch_process(self) -> None:
        """Restart an engine that died or hangs; the reconciler (or the trainer, under broadcast) brings it up to date.

        Ends where a node is lost: whoever placed the engine has to place it anew.
        """
        replica, processes, answered = self._running(), self._managed(), time.monotonic()
        while True:
            await asyncio.sleep(self.spec.watch_interval)
            if self._reconciler is None or not self._reconciler.engine_lost:
                answered = time.monotonic()
            try:
                reason = await processes.ended()
            except NodeLost as error:
                self.process_up, self.node_lost = False, str(error)
                replica.activator.fence(self.node_lost)
                return
            if reason is None:
                if time.monotonic() - answered > self.spec.hang_limit:
                    log.warning("%s: the engine did not answer for %g s", self.spec.replica_id, self.spec.hang_limit)
                    processes.kill()
                    answered = time.monotonic()
                continue
            self.process_up = False
            log.warning("%s: %s; restarting it", self.spec.replica_id, reason)
            replica.activator.fence(reason, whole=True)  # a process that starts over holds the whole base
            if self.restarts >= self.spec.restart_limit:
                self.failure = f"{reason}; given up after {self.restarts} restarts. {processes.log_tail()}"
                return
            self.restarts += 1
            with self.timeline.span("restart_engine"):
                try:
                    await processes.stop()
                    await self._launch(processes)
                    if self._exports is not None:
                        self._exports.close()
                    if self._loader is not None and self.spec.base is not None:
                        await self._loader.reopen(self.spec.base, self.spec.checkpoint)
                    await replica.attach(self.spec.run_id)
                except MilesDisaggError as error:
                    log.warning("%s: restart failed: %s", self.spec.replica_id, error)
            answered = time.monotonic()
            if self._reconciler is not None:
                self._reconciler.wake()  # it may be waiting between two attempts

    async def pin(self, version: int, seconds: float) -> None:
        """Serve exactly `version`, once it is published, until the next call. WeightVersionGone if the engine is past
        it, EngineUnavailable if it was given up, DeadlineExceeded after `seconds`."""
        replica, reconciler = self._running(), self._reconciler
        if reconciler is None:
            raise EngineError(f"{self.spec.replica_id} reads no versions from a store")
        ref, deadline = reconciler.hold(version, math.inf), time.monotonic() + seconds
        while True:
            if self.failure is not None:
                raise EngineUnavailable(self.failure)
            if replica.applied == ref:
                return
            left = deadline - time.monotonic()
            if not await replica.gate.wait_changed(min(1.0, left)) and left <= 1.0:
                why = reconciler.last_error or f"newest published version {replica.gate.latest}, {replica.gate.reason}"
                raise DeadlineExceeded(f"{self.spec.replica_id} to serve {ref}", seconds, why)

    # --- updates broadcast by the trainer -----------------------------------------------------------

    async def begin_update(self, ref: VersionRef) -> None:
        """Drain and pause for an update."""
        await self._running().activator.begin_update(ref)

    async def init_group(self, **group: Any) -> None:
        """Let the engine join the trainer's group."""
        await self._running().activator.init_group(**group)

    def in_group(self, name: str) -> bool:
        """True if the engine's present process is in the trainer's group `name`."""
        replica = self._running()
        return name in replica.activator.groups and (
            not isinstance(replica.engine, RoutedEngine) or replica.engine.joined(name)
        )

    async def destroy_group(self, name: str) -> None:
        """Let the engine leave the trainer's group."""
        await self._running().activator.destroy_group(name)

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None,
    ) -> None:
        """Receive one bucket."""
        await self._running().activator.receive_bucket(
            names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format
        )

    async def finish_update(self) -> Activation:
        """Serve the broadcast version and acknowledge it."""
        replica = self._running()
        report = await replica.activator.finish_update()
        replica.note(report)
        now = time.time()
        self.timeline.add("pause", now - report.pause_seconds, now, report.ref.version)
        if self._sink is not None:
            await self._sink.record_activation(self.spec.replica_id, report.ref, now)
        return report

    async def abort_update(self, reason: str) -> None:
        """Give the update up."""
        await self._running().activator.abort_update(reason)

    def receiver(self) -> PeerReceiver:
        """The engine's side of peer-to-peer updates."""
        if self.peer is None:
            raise EngineError(f"{self.spec.replica_id} does not receive weights peer to peer")
        return self.peer

    # --- status -------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The replica's status, plus whether its engine's process is up, restarts and a final failure."""
        replica = self._running()
        up = self.process_up if self.spec.command is not None else self._answers()
        own = {"process_up": up, "restarts": self.restarts, "failure": self.failure, "timings": replica.timings}
        own["node_lost"] = self.node_lost
        own["activation"] = self.activation
        if isinstance(replica.engine, RoutedEngine):
            self.found = replica.engine.members.found()
            own["out"] = {m.url: {"why": m.out, "answers": m.answers} for m in replica.engine.members.missing}
        own["engine"] = None if self.found is None else self.found.to_json()
        own["peer"] = self.peer.describes if self.peer is not None else None
        own["loader"] = self._loader.describe() if self._loader is not None else None
        return {**replica.status(), **own}

    def _answers(self) -> bool:
        """False while an attached engine does not answer, or not as one that fits."""
        return self._reconciler is None or not self._reconciler.engine_lost

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor as the engine serves it: asked of the embedded engine, copied out of SGLang."""
        replica, spec = self._running(), self.spec
        if spec.command is not None:
            embedded = spec.command.kind == "embedded"
        else:
            embedded = self.found is None or self.found.embedded
        if spec.checkpoint is None or embedded:
            return await replica.engine.weights_digest()
        if self.peer is not None:
            return await self.peer.digests()
        assert self._exports is not None
        return await self._exports.digests()

    def _managed(self) -> EngineProcesses:
        assert self._processes is not None
        return self._processes

    def _running(self) -> Replica:
        if self.replica is None:
            raise EngineError(f"{self.spec.replica_id} has not started")
        return self.replica

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Leave the gateway, let requests finish for `drain_seconds`, end the rest, stop the process (managed).

        Nothing is left running."""
        for task in (self._watch, self._proving):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._server is not None:
            await self._server.stop(drain_seconds)
        for plugin in (self._exports, self._loader and self._loader.plugin, self.peer):
            if plugin is not None:
                plugin.close()
        if self.replica is not None:
            await self.replica.close()
            await self.replica.engine.close()
        if self._stager is not None:
            self._stager.close()
        if self._processes is not None:
            await self._processes.stop()


async def _serve(
    replica: Replica, reconciler: Reconciler | None, spec: HostSpec, relay: RelayedStore | None
) -> ReplicaServer:
    listen = spec.listen
    return await serve(
        replica,
        reconciler,
        host=listen.host,
        port=listen.port,
        advertise_host=listen.advertise_host,
        token=listen.token,
        tls=listen.tls.context() if listen.tls else None,
        gateways=spec.gateways,
        relay=relay,
        zone=spec.zone,
    )
