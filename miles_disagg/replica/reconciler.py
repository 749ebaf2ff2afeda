"""Keeping a replica at the newest published version: watch, materialize while serving, activate, acknowledge.

One loop per replica. A wake is only a hint; the store is asked anyway. How to build a checkpoint is `staging`, how to
put it into the engine `activation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    WeightVersionGone,
)
from miles_disagg.domain.versions import VersionRef, parse_engine_version
from miles_disagg.replica.base import ActivationSink, LatestSource, Materialized, Stager
from miles_disagg.replica.gate import Phase
from miles_disagg.replica.replica import Replica

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReconcilerSettings:
    """Seconds. poll: longest wait for the store to tell of something newer; engine_check: how often the engine's
    stamp is read; store: deadline of one question to the store; materialize: of building a checkpoint;
    backoff_first/_cap: after an error, doubled each time with jitter."""

    poll: float = 30.0
    engine_check: float = 2.0
    engine_deadline: float = 20.0
    store: float = 60.0
    materialize: float = 3600.0
    backoff_first: float = 0.2
    backoff_cap: float = 15.0


class Group(Protocol):
    """Engines that serve as one (`engine.group`): some of them may be out, and some of those may answer again."""

    @property
    def returned(self) -> Sequence[object]:
        """Those that are out and answer."""
        ...

    async def readmit(self, path: str, version: str) -> list[str]:
        """Load `version` into them and count them in; their URLs."""
        ...


class Reconciler:
    """See the module. `run` until cancelled; every error is logged, remembered in `last_error` and retried.

    stager None: versions come by broadcast from the trainer; the loop then only watches the engine, and serves again
    what a restarted engine says it holds. follow: False for a replica that stays where it is until `hold` names
    another version. admit: raises what speaks against an engine that answers while it is fenced: whoever runs it may
    have started another one at that address. group: the engine, if it is several.
    """

    def __init__(
        self,
        replica: Replica,
        source: LatestSource,
        stager: Stager | None,
        *,
        sink: ActivationSink | None = None,
        settings: ReconcilerSettings | None = None,
        admit: Callable[[], Awaitable[None]] | None = None,
        follow: bool = True,
        group: Group | None = None,
    ):
        self._admit, self._follow, self._group = admit, follow, group
        self._replica, self._source, self._stager, self._sink = replica, source, stager, sink
        self._settings = settings or ReconcilerSettings()
        self._wake = asyncio.Event()
        self._held_until = 0.0
        self._newer: asyncio.Task[VersionRef | None] | None = None
        self._unacknowledged: tuple[VersionRef, float] | None = None
        self._failures: dict[VersionRef, int] = {}  # activations of a version that failed
        self._last_served: VersionRef | None = None
        self._engine_checked = -1e9
        self.errors_in_a_row = 0
        self.last_error: str | None = None
        self.engine_lost = False  # it does not answer, or is not the one that belongs there

    # --- from outside -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may be newer: look now."""
        self._wake.set()

    def hold(self, version: int | None, seconds: float) -> VersionRef:
        """Stay at `version` of the run served (None: at what is served now) for an evaluation, until `release` or for
        `seconds`; a version that is not published yet is waited for. WeightVersionGone for one that was left behind, or
        is being left right now."""
        gate = self._replica.gate
        if gate.served is None or self._stager is None:
            raise InvalidRequest("hold: nothing is served yet, or versions come by broadcast")
        ref = gate.served if version is None else VersionRef(gate.served.run_id, version)
        if ref < gate.served or (self._replica.activator.busy and ref == gate.served):
            raise WeightVersionGone(ref.version, gate.served.version + (ref == gate.served))
        self._replica.held, self._held_until = ref, time.monotonic() + seconds
        log.info("%s is held at %s for %g s", self._replica.replica_id, ref, seconds)
        self.wake()
        return ref

    def release(self, why: str = "released") -> None:
        """Follow the newest version again."""
        if self._replica.held is not None:
            log.info("%s is no longer held at %s: %s", self._replica.replica_id, self._replica.held, why)
        self._replica.held = None
        self.wake()

    @property
    def held(self) -> VersionRef | None:
        """The version this replica is held at, if it is."""
        if self._replica.held is not None and time.monotonic() >= self._held_until:
            self.release("the time is up")
        return self._replica.held

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                try:
                    await self.step()
                    self.errors_in_a_row, self.last_error = 0, None
                except Exception as error:
                    await self._back_off(error)
        finally:
            if self._newer is not None:
                self._newer.cancel()

    # --- one round ----------------------------------------------------------------------------------

    async def step(self) -> None:
        """Bring engine and version up to date once, then wait for a reason to look again."""
        self._wake.clear()
        await self._check_engine()
        await self._acknowledge()
        await self._readmit()
        target = await self._target()
        if target is None or target == self._replica.applied or self._stager is None:
            await self._idle()
            return
        if self._replica.activator.busy:  # an update broadcast by the trainer
            await asyncio.sleep(min(0.05, self._settings.engine_check))
            return
        await self._advance(target, self._stager)

    async def _readmit(self) -> None:
        """Give engines of a group that answer again what the others serve. Here, since nothing is materialized now."""
        activator, gate = self._replica.activator, self._replica.gate
        if self._group is None or not self._group.returned or activator.busy or gate.phase is not Phase.OPEN:
            return
        good = activator.last_good  # None under broadcast: there they take part in the next update
        if good is not None and good.ref == gate.served:
            async with activator.undisturbed(), _deadline("engines to be readmitted", self._settings.materialize):
                await self._group.readmit(str(good.path), str(good.ref))

    async def _target(self) -> VersionRef | None:
        async with _deadline("the newest version from the store", self._settings.store):
            latest = await self._source.latest()
        gate = self._replica.gate
        if latest is not None and (gate.latest is None or gate.latest.run_id != latest.run_id or gate.latest < latest):
            gate.latest = latest
        if self.held is not None and latest is not None and self.held.run_id != latest.run_id:
            self.release(f"the store moved to {latest}")
        target = latest if self._follow or gate.served is None else gate.served
        if self.held is not None and (latest is None or self.held <= latest):
            target = self.held
        fallback = self._last_served
        if target is None or fallback is None or self._replica.applied is not None:
            return target
        stuck = fallback != target and fallback.run_id == target.run_id and self._failures.get(target, 0) >= 2
        return fallback if stuck else target

    async def _advance(self, target: VersionRef, stager: Stager) -> None:
        replica, applied = self._replica, self._replica.applied
        with self._doing("materializing" if applied else "catching_up" if target.version else "materializing_base"):
            async with _deadline(f"{target} to be materialized", self._settings.materialize):
                materialized = await self._materialize(target, stager)
        if self.held is not None and self.held.run_id == target.run_id and self.held < target:  # held meanwhile
            return
        try:
            with self._doing("activating"):
                report = await replica.activate(materialized)
        except Exception:
            self._failures[target] = self._failures.get(target, 0) + 1
            raise
        self._failures.clear()
        self._last_served, self._unacknowledged = target, (target, time.time())
        log.info("%s serves %s (paused %.3f s)", replica.replica_id, target, report.pause_seconds)
        await self._acknowledge()

    async def _materialize(self, target: VersionRef, stager: Stager) -> Materialized:
        """A stager may patch the directory that was loaded last: then there is nothing to fall back to on this host."""
        activator = self._replica.activator
        before, activator.last_good = activator.last_good, None
        materialized = await stager.materialize(target)
        if before is not None and (before.path != materialized.path or before.ref == target):
            activator.last_good = before
        return materialized

    async def _acknowledge(self) -> None:
        if self._unacknowledged is None or self._sink is None:
            return
        ref, at = self._unacknowledged
        async with _deadline(f"acknowledgement of {ref}", self._settings.store):
            await self._sink.record_activation(self._replica.replica_id, ref, at)
        self._unacknowledged = None

    async def _check_engine(self) -> None:
        """See that the engine lives and holds what the gate believes. Raises EngineUnavailable while it does not."""
        replica, now = self._replica, time.monotonic()
        gate, activator = replica.gate, replica.activator
        fenced = gate.phase is Phase.FENCED
        if activator.busy or (not fenced and now - self._engine_checked < self._settings.engine_check):
            return
        self._engine_checked = now
        before = gate.served
        try:
            async with _deadline("the engine's version", self._settings.engine_deadline):
                stamp = (await replica.engine.server_info()).get("weight_version")  # asks the scheduler too
        except (EngineError, DeadlineExceeded) as error:
            if not activator.busy and not fenced:
                gate.fence(f"the engine does not answer: {error}")
            gate.fail_flights(f"the engine does not answer: {error}")
            self.engine_lost = True
            activator.groups.clear()  # it may come back as another process, which is in none
            raise EngineUnavailable(str(error)) from error
        if self._admit is not None and gate.phase is Phase.FENCED:
            self.engine_lost = True
            await self._admit()
        self.engine_lost = False
        if activator.busy or gate.served != before or before is None:
            return
        if stamp != str(before) and gate.phase is Phase.OPEN:
            activator.engine_changed(
                f"engine reports {stamp!r}, expected {before}: it restarted or was updated by others"
            )
        if gate.phase is not Phase.FENCED or not activator.whole:
            return
        if stamp == str(before):
            await activator.adopt(before)
        elif self._stager is None and (number := parse_engine_version(stamp, before.run_id)) is not None:
            await activator.adopt(VersionRef(before.run_id, number))

    # --- waiting ------------------------------------------------------------------------------------

    async def _idle(self) -> None:
        """Until the store has something newer, somebody wakes us or the engine wants a look."""
        if self._newer is None:
            wait = self._source.wait_newer(self._replica.gate.latest, self._settings.poll)
            self._newer = asyncio.ensure_future(wait)
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            done, _ = await asyncio.wait(
                {self._newer, woken}, timeout=self._settings.engine_check, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            woken.cancel()
        if self._newer in done:
            finished, self._newer = self._newer, None
            finished.result()

    async def _back_off(self, error: Exception) -> None:
        self.errors_in_a_row += 1
        self.last_error = f"{type(error).__name__}: {error}"
        settings = self._settings
        delay = min(settings.backoff_cap, settings.backoff_first * 2 ** min(self.errors_in_a_row - 1, 20))
        delay *= random.uniform(0.5, 1.5)
        log.warning("%s: %s; retry in %.1f s", self._replica.replica_id, self.last_error, delay)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._wake.wait()

    @contextlib.contextmanager
    def _doing(self, activity: str) -> Iterator[None]:
        self._replica.activity = activity
        try:
            yield
        finally:
            self._replica.activity = None


@asynccontextmanager
async def _deadline(what: str, seconds: float) -> AsyncIterator[None]:
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(what, seconds) from None
