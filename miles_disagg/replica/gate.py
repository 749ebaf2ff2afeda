"""Admission to one engine, and which version wrote which token: a state machine without I/O.

The gate knows the served version, every request in flight and how many tokens each had when an activation fell. It
decides who may start, who is drained and who must start over. It never talks to the engine: `session` streams,
`activation` pauses and loads.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from miles_disagg.domain.errors import (
    EngineUnavailable,
    Overloaded,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import Constraint, TokenSpan, VersionRef, parse_engine_version
from miles_disagg.engine.base import PauseMode


class Phase(StrEnum):
    """What the gate lets through."""

    BOOTING = "booting"  # no version is served yet
    OPEN = "open"
    DRAINING = "draining"  # an activation waits for exact-version requests
    PAUSED = "paused"  # the engine stands still; newcomers wait here
    FENCED = "fenced"  # what the engine holds is not known to be whole: nothing passes
    CLOSED = "closed"  # the replica is stopping


class StopKind(StrEnum):
    """Why a request in flight is interrupted."""

    RESTART = "restart"  # go on (or start over) on the new weights, under the new cache key
    END = "end"  # finish now with what there is, `finish_reason` abort
    FAIL = "fail"  # the engine's state is lost


@dataclass(frozen=True)
class Stop:
    """An interruption with its reason in words."""

    kind: StopKind
    reason: str


@dataclass(eq=False)
class Flight:
    """One admitted request. `tokens` received so far, `spans` who wrote them; `on_stop` is called on interruption."""

    rid: str
    constraint: Constraint
    version_start: int
    cache_key: str
    tokens: int = 0
    spans: list[TokenSpan] = field(default_factory=list)
    stop: Stop | None = None
    on_stop: Callable[[], None] | None = None

    @property
    def exact(self) -> bool:
        """True if the whole generation must come from one version."""
        return self.constraint.exact_version is not None

    @property
    def version_end(self) -> int:
        """Version of the last token (the start version if there is none)."""
        return self.spans[-1].version if self.spans else self.version_start

    def interrupt(self, kind: StopKind, reason: str) -> None:
        """Ask the owner to stop its engine request. A second interruption may only be a stronger one."""
        if self.stop is not None and self.stop.kind is not StopKind.RESTART:
            return
        self.stop = Stop(kind, reason)
        if self.on_stop is not None:
            self.on_stop()


class Gate:
    """Admission control of one replica. Not thread-safe: one event loop.

    max_in_flight: requests admitted or waiting for an activation to end; above it, Overloaded.
    mode: what becomes of requests in flight at an activation (`--pause-generation-mode`).
    engine_recomputes: the engine has no prefix cache, and recomputes under `retract` by itself.
    """

    def __init__(self, max_in_flight: int, mode: PauseMode = "in_place", clock: Callable[[], float] = time.monotonic):
        self.max_in_flight = max_in_flight
        self.mode: PauseMode = mode
        self.engine_recomputes = False
        self.phase, self.reason = Phase.BOOTING, "no version is served yet"
        self.served: VersionRef | None = None
        self.target: VersionRef | None = None  # what the running activation leads to
        self.latest: VersionRef | None = None  # newest published version we know of
        self._clock = clock
        self._flights: set[Flight] = set()
        self._waiting = 0
        self._nonce, self._epoch = uuid.uuid4().hex[:8], 0
        self._changed = asyncio.Event()

    # --- looking ------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    @property
    def cache_key(self) -> str:
        """Cache key of prefixes computed now: differs for every activation, so no prefix KV crosses one."""
        return f"{self.served}#{self._nonce}.{self._epoch}"

    def flights(self, *, exact_only: bool = False) -> Iterator[Flight]:
        """Requests in flight (a snapshot)."""
        return iter([f for f in self._flights if f.exact or not exact_only])

    # --- admission ----------------------------------------------------------------------------------

    def try_admit(self, rid: str, constraint: Constraint) -> Flight | None:
        """Admit a request, or None where it should wait for the running activation.

        Raises WeightVersionNotReady, WeightVersionGone, Overloaded, EngineUnavailable.
        """
        if self.phase in (Phase.FENCED, Phase.CLOSED):
            raise EngineUnavailable(f"replica is {self.phase}: {self.reason}")
        if self.served is None:
            raise self._not_ready(constraint)
        if self.phase is Phase.OPEN:
            self._check_version(constraint)
        elif not self._may_wait_or_pass(constraint):
            raise self._not_ready(constraint)
        if len(self._flights) + self._waiting >= self.max_in_flight:
            raise Overloaded(
                f"{self.active} requests in flight and {self._waiting} waiting, limit {self.max_in_flight}"
            )
        if self.phase is Phase.PAUSED or (self.phase is Phase.DRAINING and self._drains_all):
            return None
        flight = Flight(rid, constraint, self.served.version, self.cache_key)
        self._flights.add(flight)
        return flight

    async def admit(self, rid: str, constraint: Constraint, wait_seconds: float) -> Flight:
        """Like `try_admit`, waiting up to `wait_seconds` for a running activation to end."""
        flight = self.try_admit(rid, constraint)
        if flight is not None:
            return flight
        deadline = self._clock() + wait_seconds
        while flight is None:
            self._waiting += 1
            try:
                if not await self.wait_changed(deadline - self._clock()):
                    raise self._not_ready(constraint)
            finally:
                self._waiting -= 1
            flight = self.try_admit(rid, constraint)
        return flight

    def leave(self, flight: Flight) -> None:
        """The request is over. Idempotent."""
        self._flights.discard(flight)
        self._notify()

    def readmit(self, flight: Flight) -> None:
        """Continue an interrupted flight on the version served now; a flight without tokens starts over."""
        if self.served is None or self.phase not in (Phase.OPEN, Phase.DRAINING):
            raise EngineUnavailable(f"replica is {self.phase}: {self.reason}")
        served = self.served.version
        if served < flight.version_end or (flight.tokens == 0 and not flight.constraint.satisfied_by(served)):
            raise EngineUnavailable(f"request {flight.rid} cannot go on: the replica is back at {self.served}")
        flight.stop, flight.cache_key = None, self.cache_key
        if flight.tokens == 0:
            flight.version_start = served

    async def reopened(self, flight: Flight, wait_seconds: float) -> None:
        """Wait until an interrupted flight can go on, or is interrupted otherwise. EngineUnavailable after the wait."""
        deadline, stop = self._clock() + wait_seconds, flight.stop
        while self.phase in (Phase.PAUSED, Phase.FENCED) and flight.stop is stop:
            if not await self.wait_changed(deadline - self._clock()):
                raise EngineUnavailable(f"replica still {self.phase} after {wait_seconds:.0f} s: {self.reason}")

    @property
    def _drains_all(self) -> bool:
        """Whole drains: `abort` mode would kill newcomers; another run's versions must not mix with ours."""
        other_run = self.target is not None and self.served is not None and self.target.run_id != self.served.run_id
        return self.mode == "abort" or other_run

    def _check_version(self, constraint: Constraint) -> None:
        assert self.served is not None
        if self.latest is not None and self.latest.run_id != self.served.run_id:
            raise self._not_ready(constraint)  # a new run is on its way: its version numbers mean other weights
        if constraint.satisfied_by(self.served.version):
            return
        exact = constraint.exact_version
        if exact is not None and exact < self.served.version:
            raise WeightVersionGone(exact, self.served.version)
        raise self._not_ready(constraint)

    def _may_wait_or_pass(self, constraint: Constraint) -> bool:
        """During an activation: true if the request is right on the target (it waits) or on both (it may pass)."""
        assert self.served is not None
        assert self.target is not None
        if not constraint.satisfied_by(self.target.version):
            return False
        if self.phase is Phase.PAUSED or self._drains_all:
            return True
        return constraint.exact_version is None and constraint.satisfied_by(self.served.version)

    def _not_ready(self, constraint: Constraint) -> WeightVersionNotReady:
        served = None if self.served is None else self.served.version
        return WeightVersionNotReady(str(constraint), served, None if self.latest is None else self.latest.version)

    # --- attribution --------------------------------------------------------------------------------

    def record(self, flight: Flight, total_tokens: int, stamp: str | None) -> None:
        """Attribute the tokens that arrived since the last call. `stamp`: the engine's version of this chunk, if told.

        A token received before the engine resumes was written by the old version whatever the stamp says; a token
        stamped old was processed before the weights changed, however late it arrives. A stamp that fits neither means
        that the engine changed behind our back: the gate is fenced and EngineUnavailable raised.
        """
        if self.served is None or total_tokens <= flight.tokens:
            return
        version = self.served.version
        if stamp is not None:
            stamped = parse_engine_version(stamp, self.served.run_id)
            ahead_while_closed = stamped is not None and stamped > version and self.phase is not Phase.OPEN
            if not ahead_while_closed:
                if stamped is None or not flight.version_end <= stamped <= version:
                    self.fence(
                        f"engine reports {stamp!r}, expected {self.served}: it restarted or was updated by others"
                    )
                    raise EngineUnavailable(self.reason)
                version = stamped
        if not flight.spans:
            flight.version_start = version  # it may have waited in the engine over an activation
        if not flight.spans or flight.spans[-1].version != version:
            flight.spans.append(TokenSpan(flight.tokens, version))
        flight.tokens = total_tokens

    # --- transitions --------------------------------------------------------------------------------

    def begin_drain(self, target: VersionRef) -> None:
        """An activation of `target` begins: no new exact-version request of the old version."""
        self.target = target
        if self.phase is Phase.OPEN:
            self._move(Phase.DRAINING, f"draining exact-version requests before {target}")

    def cancel_drain(self) -> None:
        """The activation is called off before the pause."""
        self.target = None
        if self.phase is Phase.DRAINING:
            self._move(Phase.OPEN, f"serving {self.served}")

    def draining(self) -> list[Flight]:
        """Flights the activation has to wait for."""
        return list(self.flights(exact_only=not (self._drains_all and self.mode != "abort")))

    async def drained(self, timeout: float) -> bool:
        """Wait for `draining()` to become empty; False after `timeout` seconds."""
        deadline = self._clock() + timeout
        while self.draining():
            if not await self.wait_changed(deadline - self._clock()):
                return False
        return True

    def pause(self) -> None:
        """The engine is about to be paused: newcomers wait."""
        self._move(Phase.PAUSED, f"activating {self.target}")

    def interrupt_paused(self) -> int:
        """After the engine paused: send back the flights whose cache must not survive. Returns how many.

        Flights without tokens start over (they may not have been prefilled yet, and would look up old prefixes after
        the update); under `retract` every flight does. None has to where the engine keeps no prefix.
        """
        if self.mode == "abort" or self.engine_recomputes:
            return 0
        chosen = [f for f in self._flights if self.mode == "retract" or f.tokens == 0]
        for flight in chosen:
            flight.interrupt(StopKind.RESTART, f"activation of {self.target}")
        return len(chosen)

    def open(self, ref: VersionRef) -> None:
        """The engine acknowledged `ref` (called just before it resumes)."""
        self.served, self.target = ref, None
        self._epoch += 1
        if self.latest is None or (self.latest.run_id == ref.run_id and self.latest < ref):
            self.latest = ref
        self._move(Phase.OPEN, f"serving {ref}")

    def fence(self, reason: str) -> None:
        """Refuse everything until `open`. Flights stay: the caller decides about them."""
        if self.phase is not Phase.CLOSED:
            self._move(Phase.FENCED, reason)

    def close(self, reason: str) -> None:
        """The replica stops; flights fail."""
        self._move(Phase.CLOSED, reason)
        self.fail_flights(reason)

    def fail_flights(self, reason: str) -> None:
        """End every flight with EngineUnavailable."""
        for flight in self.flights():
            flight.interrupt(StopKind.FAIL, reason)
        self._notify()

    async def wait_changed(self, timeout: float) -> bool:
        """Wait for the next transition or departure; False after `timeout` seconds."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _move(self, phase: Phase, reason: str) -> None:
        self.phase, self.reason = phase, reason
        self._notify()

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
