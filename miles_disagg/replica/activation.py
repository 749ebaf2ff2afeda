"""Making a version the served one: drain, pause, load, verify, resume; and what happens when that fails.

The only code that pauses an engine. `Activator` does it for a checkpoint on this host and, in steps, for an update
broadcast by the trainer. A replica whose engine may hold half an update is fenced until a whole checkpoint is loaded.
When to activate is `reconciler`; building checkpoints is `staging`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from miles_disagg.domain.errors import DeadlineExceeded, EngineError, MilesDisaggError, UpdateFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.base import Engine, PauseMode
from miles_disagg.replica.base import Materialized
from miles_disagg.replica.gate import Gate, Phase, StopKind

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActivationLimits:
    """Seconds. drain: for exact-version requests; control: one engine control call; load: loading the weights;
    broadcast: silence of the trainer within a broadcast update."""

    drain: float = 30.0
    control: float = 60.0
    load: float = 900.0
    broadcast: float = 300.0


@dataclass(frozen=True)
class Activation:
    """What an activation cost. Seconds; `load_seconds` is the part of the pause that the loader took; `ended`:
    exact-version requests ended at the drain deadline; `restarted`: requests sent back to continue under the new
    weights' cache key."""

    ref: VersionRef
    drain_seconds: float = 0.0
    pause_seconds: float = 0.0
    stage_seconds: float = 0.0
    load_seconds: float = 0.0
    ended: int = 0
    restarted: int = 0


class ActivationFailed(MilesDisaggError):
    """`target` could not be activated. `healed`: the replica serves `serving` again; otherwise it is fenced."""

    def __init__(self, target: VersionRef, cause: BaseException, healed: bool, serving: VersionRef | None):
        self.target, self.cause, self.healed, self.serving = target, cause, healed, serving
        state = f"serving {serving} again" if healed else "fenced until a whole checkpoint is loaded"
        super().__init__(f"activation of {target} failed ({type(cause).__name__}: {cause}); the replica is {state}")


class Loader(Protocol):
    """How a materialized version gets into the engine."""

    async def stage(self, target: Materialized) -> None:
        """Everything that can be done before the pause."""
        ...

    async def load(self, engine: Engine, target: Materialized) -> None:
        """Under the pause: put the weights in place and stamp them `str(target.ref)`."""
        ...

    def engine_changed(self) -> None:
        """The engine may hold other weights than those that were loaded last."""
        ...


class ReloadLoader:
    """Reload the materialized checkpoint (`reload`): works with any stock SGLang."""

    async def stage(self, target: Materialized) -> None:
        """Nothing to prepare."""

    async def load(self, engine: Engine, target: Materialized) -> None:
        """POST /update_weights_from_disk. Never flushes: a flush with held requests kills SGLang, and cache keys
        carry the version."""
        await engine.update_from_disk(str(target.path), str(target.ref), flush_cache=False)

    def engine_changed(self) -> None:
        """Nothing is kept."""


@dataclass
class _Broadcast:
    ref: VersionRef
    begun: float
    watchdog: asyncio.TimerHandle
    was_whole: bool  # before the update
    buckets: int = 0
    report: Activation = field(init=False)


class Activator:
    """Serialises everything that changes the engine's weights."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        loader: Loader | None = None,
        limits: ActivationLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._gate = engine, gate
        self._loader, self._limits, self._clock = loader or ReloadLoader(), limits or ActivationLimits(), clock
        self._lock = asyncio.Lock()
        self._broadcast: _Broadcast | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self.whole = True  # the engine holds exactly one version; a fence for other reasons keeps this
        self.last_good: Materialized | None = None  # served now and loaded from a directory on this host
        self.history: list[Activation] = []
        self.groups: set[str] = set()  # process groups that the present engine process has joined

    # --- from a checkpoint on this host -------------------------------------------------------------

    async def activate(self, target: Materialized) -> Activation:
        """Load `target` into the engine and serve it. Raises ActivationFailed; then the old version serves or the
        replica is fenced, never anything in between."""
        async with self._lock:
            begun, was_whole = self._clock(), self.whole
            if self.last_good is not None and self.last_good.path == target.path and self.last_good.ref != target.ref:
                self.last_good = None  # that directory holds the target now
            await self._loader.stage(target)
            staged = self._clock() - begun
            report = await self._drain(target.ref)
            paused_at = self._clock()
            try:
                restarted = await self._pause()
                began = self._clock()
                await self._within(self._loader.load(self._engine, target), self._limits.load, f"loading {target.ref}")
                loaded = self._clock() - began
                await self._serve(target.ref)
            except Exception as error:
                self.whole = was_whole and isinstance(error, UpdateFailed)
                raise await self._heal(target, error) from error
            except BaseException:
                self.fence(f"activation of {target.ref} was cancelled")
                raise
            pause = self._clock() - paused_at
            report = replace(
                report, pause_seconds=pause, restarted=restarted, stage_seconds=staged, load_seconds=loaded
            )
            self.last_good = target
            return self._done(report)

    async def _heal(self, target: Materialized, cause: Exception) -> ActivationFailed:
        """After a failed load: fence, reload something whole, else stay fenced. Returns what to raise.

        Order: the version served before, if its directory is still on this host; the target once more if the engine's
        state is unknown. Where the engine refused the update by contract (UpdateFailed: nothing changed) and confirms
        the old stamp, it goes on serving that.
        """
        gate, served = self._gate, self._gate.served
        gate.fence(f"activation of {target.ref} failed: {cause}")
        log.warning("activation of %s failed, healing: %s", target.ref, cause)
        previous = self.last_good if self.last_good and self.last_good.path != target.path else None
        candidates = [previous] if previous is not None and await asyncio.to_thread(_is_there, previous.path) else []
        if not candidates and not self.whole:
            candidates = [target]
        try:
            for candidate in candidates:
                await self._pause_engine()
                load = ReloadLoader().load(self._engine, candidate)
                await self._within(load, self._limits.load, f"reloading {candidate.ref}")
                await self._serve(candidate.ref)
                self.last_good = candidate
            if not candidates and served is not None:
                await self._serve(served)  # verifies the stamp first
        except Exception as error:
            self.fence(f"activation of {target.ref} failed ({cause}) and could not be healed ({error})")
        healed = gate.phase is Phase.OPEN
        return ActivationFailed(target.ref, cause, healed, gate.served if healed else None)

    def fence(self, reason: str, *, whole: bool = False) -> None:
        """Refuse everything, fail what is in flight, until a version is activated.

        whole: the engine is known to hold exactly one version (its process was started anew), so that `adopt` may
        serve what its stamp says. Otherwise it may hold half an update and only a load opens the gate again.
        """
        self.whole = whole
        if whole:
            self.groups.clear()
        self._gate.fence(reason)
        self._gate.fail_flights(reason)

    def engine_changed(self, reason: str) -> None:
        """Somebody restarted the engine or changed its weights: fenced until it serves a whole version again."""
        self._loader.engine_changed()
        self.fence(reason, whole=self.whole)

    async def adopt(self, ref: VersionRef) -> None:
        """Serve what the engine already holds, if its stamp says it is `ref`. Not after a failed update."""
        async with self._lock:
            if not self.whole:
                raise EngineError(f"the engine may hold half an update: load a whole checkpoint to serve {ref}")
            await self._serve(ref)

    @property
    def busy(self) -> bool:
        """True while an activation or a broadcast update is in progress."""
        return self._lock.locked()

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """The weights stay as they are while this is held: no activation and no broadcast begins."""
        async with self._lock:
            yield

    # --- broadcast by the trainer -------------------------------------------------------------------

    async def init_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Let the engine join the trainer's process group."""
        join = self._engine.init_group(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        await self._within(join, self._limits.broadcast, f"process group {group_name}")
        self.groups.add(group_name)

    async def destroy_group(self, group_name: str) -> None:
        """Let the engine leave the trainer's process group."""
        self.groups.discard(group_name)
        await self._within(self._engine.destroy_group(group_name), self._limits.control, f"leaving {group_name}")

    async def begin_update(self, ref: VersionRef) -> None:
        """Drain and pause for an update sent in buckets. End it with `finish_update` or `abort_update`."""
        await self._within(self._lock.acquire(), self._limits.broadcast, "the activation before this one")
        try:
            served = self._gate.served
            if served is not None and self._gate.phase is Phase.OPEN and served.run_id == ref.run_id and ref <= served:
                raise UpdateFailed(f"asked to update to {ref}, already serving {served}")
            report = await self._drain(ref)
            begun, was_whole = self._clock(), self.whole
            watchdog = asyncio.get_running_loop().call_later(self._limits.broadcast, self._give_up)
            self._broadcast = _Broadcast(ref, begun, watchdog, was_whole)
            self._broadcast.report = replace(report, restarted=await self._pause())
        except BaseException as error:
            pausing, self._broadcast = self._broadcast, None
            if pausing is not None:
                pausing.watchdog.cancel()
                self.fence(f"could not pause for {ref}: {error}")
            self._lock.release()
            raise

    async def receive_bucket(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> None:
        """Receive one bucket of the update in progress. An error leaves the replica fenced."""
        update = self._expect_broadcast()
        if group_name not in self.groups:  # SGLang's scheduler dies of a group that it does not know
            raise UpdateFailed(f"the engine is not in process group {group_name}: it was restarted, or never joined")
        receive = self._engine.update_from_distributed(
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            version=str(update.ref),
            flush_cache=False,
            load_format=load_format,
        )
        await self.receive(receive, f"bucket {update.buckets + 1}")

    async def receive(self, work: Awaitable[object], what: str) -> None:
        """Change the live weights as a part of the update in progress. An error leaves the replica fenced."""
        update = self._expect_broadcast()
        update.buckets += 1
        self.whole = False
        try:
            await self._within(work, self._limits.broadcast, f"{what} of {update.ref}")
        except Exception as error:
            if self._broadcast is update:
                await self.abort_update(f"{what} of {update.ref} failed: {error}")
            raise
        update.watchdog.cancel()
        update.watchdog = asyncio.get_running_loop().call_later(self._limits.broadcast, self._give_up)

    @property
    def updating_to(self) -> VersionRef:
        """The version of the update in progress; UpdateFailed if there is none."""
        return self._expect_broadcast().ref

    @property
    def serving(self) -> bool:
        """True if the engine runs requests now: it is neither paused nor fenced."""
        return self._gate.phase is Phase.OPEN

    async def finish_update(self) -> Activation:
        """All buckets are in: verify the stamp, serve, resume."""
        update = self._expect_broadcast()
        try:
            if update.buckets == 0:
                raise UpdateFailed(f"the update to {update.ref} is finished before any bucket was received")
            await self._serve(update.ref)
        except Exception as error:
            await self.abort_update(f"{update.ref} could not be verified: {error}")
            raise ActivationFailed(update.ref, error, False, None) from error
        self._end_broadcast(update)
        self.last_good = None  # these weights are nowhere on this host
        return self._done(replace(update.report, pause_seconds=self._clock() - update.begun))

    async def abort_update(self, reason: str) -> None:
        """Give an update up. Untouched weights serve on, else it is fenced until the next whole update."""
        update = self._broadcast
        if update is None:
            return
        served = self._gate.served
        try:
            if update.buckets or served is None or not update.was_whole:
                self.fence(f"update to {update.ref} was given up after {update.buckets} buckets: {reason}")
            else:
                await self._serve(served)
        except Exception as error:
            self.fence(f"update to {update.ref} was given up ({reason}) and the engine did not resume: {error}")
        finally:
            self._end_broadcast(update)

    def _give_up(self) -> None:
        reason = f"the trainer was silent for {self._limits.broadcast:.0f} s"
        self._giving_up = asyncio.ensure_future(self.abort_update(reason))

    def _expect_broadcast(self) -> _Broadcast:
        if self._broadcast is None:
            raise UpdateFailed(f"no update is in progress here ({self._gate.reason}); begin_update first")
        return self._broadcast

    def _end_broadcast(self, update: _Broadcast) -> None:
        if self._broadcast is update:
            update.watchdog.cancel()
            self._broadcast = None
            self._lock.release()

    # --- steps --------------------------------------------------------------------------------------

    async def _drain(self, ref: VersionRef) -> Activation:
        """Let exact-version requests finish; end the rest by name at the deadline."""
        gate, begun = self._gate, self._clock()
        gate.begin_drain(ref)
        ended, limit = 0, self._limits.drain
        try:
            if not await gate.drained(limit):
                for flight in gate.draining():
                    what = str(flight.constraint) if flight.exact else f"started under {gate.served}"
                    reason = f"request {flight.rid} ({what}) was ended for the activation of {ref} after {limit:g} s"
                    flight.interrupt(StopKind.END, reason)
                    ended += 1
                if not await gate.drained(self._limits.control):
                    raise DeadlineExceeded("drained requests to end", self._limits.control, f"activation of {ref}")
        except BaseException:
            gate.cancel_drain()
            raise
        return Activation(ref, drain_seconds=self._clock() - begun, ended=ended)

    async def _pause(self) -> int:
        """Pause gate and engine; send back the requests whose cache must not survive. Returns how many."""
        self._gate.pause()
        await self._pause_engine()
        return self._gate.interrupt_paused()

    async def _pause_engine(self) -> None:
        mode: PauseMode = self._gate.mode
        if mode == "retract" and not self._gate.engine_recomputes:
            mode = "in_place"  # every request is ended and continued by us, under the new weights' cache key
        await self._within(self._engine.pause(mode), self._limits.control, "the engine to pause")

    async def _serve(self, ref: VersionRef) -> None:
        """Serve `ref` once the engine says that this is what it holds; resume it.

        The gate opens before the engine resumes: a token that arrives earlier is an old one.
        """
        info = await self._within(self._engine.model_info(), self._limits.control, "the engine's version")
        if info.get("weight_version") != str(ref):
            raise EngineError(f"engine reports version {info.get('weight_version')!r} after loading {ref}")
        self.whole = True
        self._gate.open(ref)
        try:
            await self._within(self._engine.resume(), self._limits.control, "the engine to resume")
        except Exception as error:
            self._gate.fence(f"engine did not resume after loading {ref}: {error}")
            raise

    def _done(self, report: Activation) -> Activation:
        self.history.append(report)
        del self.history[:-1000]
        return report

    @staticmethod
    async def _within(work: Awaitable[T], seconds: float, what: str) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(what, seconds) from None


def _is_there(path: Path) -> bool:
    return path.is_dir()
