"""Which replica serves a request: membership by heartbeat, version constraints, load, session affinity.

Pure: no I/O, injected clock. The HTTP proxy around it is `app`; the replica checks every constraint again itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_disagg.domain.errors import EngineUnavailable, WeightVersionGone, WeightVersionNotReady
from miles_disagg.domain.versions import Constraint, VersionRef, version_directory
from miles_disagg.gateway.heartbeat import Fingerprint, Heartbeat, parse_heartbeat
from miles_disagg.gateway.observed import Observed
from miles_disagg.gateway.relays import RelayTree
from miles_disagg.gateway.ring import Ring, weight
from miles_disagg.gateway.votes import Votes

_FEW = 8  # requests on a replica that are no reason to send a rid elsewhere
_SAMPLE = 16  # members looked at before all of them are, in a large fleet
_NEIGHBOURS = 64  # members gone through for `_SAMPLE` that fit, near a rid's place


class Outstanding(Protocol):
    """A request that waits for a member's answer."""

    def replica_gone(self) -> None:
        """The member left or fell silent: stop waiting for it."""
        ...


@dataclass(eq=False)
class Member:
    """A replica as this gateway knows it. `outstanding`: our requests there; `active`: all, as it last said."""

    replica_id: str
    url: str
    run_id: str | None = None
    applied: int | None = None
    latest: VersionRef | None = None
    state: str = "booting"
    ready: bool = False
    reason: str = ""
    active: int = 0
    max_in_flight: int = 1
    phase_timings: Mapping[str, float] = field(default_factory=dict)
    heard: float = 0.0
    suspect_until: float = 0.0
    outstanding: set[Outstanding] = field(default_factory=set)
    others: int = 0  # requests there that are not ours, at the last heartbeat
    fingerprint: Fingerprint | None = None
    says_ready: bool = False
    held: str | None = None
    canary: tuple[str, int, str] | None = None  # run, version and reason for which its canary answer was refused

    @property
    def serves(self) -> VersionRef | None:
        """What it serves, as it last said."""
        return None if self.run_id is None or self.applied is None else VersionRef(self.run_id, self.applied)

    @property
    def taken(self) -> int:
        """Requests there, ours and others', as far as we know."""
        return len(self.outstanding) + self.others

    @property
    def load(self) -> float:
        """Share of its admission limit that is taken."""
        return self.taken / self.max_in_flight


@dataclass(frozen=True)
class Pick:
    """Where a request goes. `rebound_from`: the replica that its session was on before, if that is gone."""

    member: Member
    rebound_from: str | None = None


class Router:
    """Registry and choice. `expiry`: seconds of silence after which a replica leaves rotation. run_id: serve only
    this run (None: the run that the replicas' store moved to last)."""

    def __init__(
        self,
        *,
        expiry: float = 5.0,
        run_id: str | None = None,
        max_sessions: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ):
        self._expiry, self._pinned, self._max_sessions, self._clock = expiry, run_id, max_sessions, clock
        self._rng = rng or random.Random()
        self._members: dict[str, Member] = {}
        self._list: list[Member] = []
        self._runs: list[str] = []  # in order of first sight as somebody's latest
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()
        self._relays, self._ring, self._votes = RelayTree(), Ring(), Votes()
        self.observed = Observed()

    # --- membership ---------------------------------------------------------------------------------

    def heartbeat(self, message: Mapping[str, Any]) -> Member:
        """A replica says who and how it is. InvalidRequest names a field that is wrong."""
        beat = parse_heartbeat(message)
        member = self._members.get(beat.replica_id)
        if member is not None and member.url != beat.url:  # restarted elsewhere under its name
            self._remove(member, f"replica {beat.replica_id} moved to {beat.url}")
            member = None
        if member is None:
            member = self._members[beat.replica_id] = Member(beat.replica_id, beat.url)
            self._list.append(member)
            self._ring.add(beat.replica_id)
        before, served = (member.run_id, member.applied, member.ready, member.latest), member.serves
        member.run_id, member.applied, member.latest = beat.run_id, beat.applied, beat.latest
        member.state, member.says_ready, member.reason = beat.state, beat.ready, beat.reason
        self._vote(member, beat.fingerprint)
        self._judge(member)
        self._relays.put(beat.replica_id, beat.relay)
        member.active, member.max_in_flight = beat.active, beat.max_in_flight
        self._observe(beat, served, member.serves)
        member.held, member.phase_timings = beat.held, beat.phase_timings
        member.others = max(0, member.active - len(member.outstanding))
        member.heard = self._clock()
        if member.ready:
            member.suspect_until = 0.0
        if before != (member.run_id, member.applied, member.ready, member.latest):
            for run in (member.run_id, None if member.latest is None else member.latest.run_id):
                if run is not None and run not in self._runs:
                    self._runs.append(run)
            self._forget_runs()
            self._notify()
        return member

    def _observe(self, beat: Heartbeat, before: VersionRef | None, serves: VersionRef | None) -> None:
        now = self._clock()
        self.observed.heard(beat.latest, now)
        if serves is not None:
            self.observed.activated(before, serves, beat.phase_timings, now)

    def _vote(self, member: Member, fingerprint: Fingerprint | None) -> None:
        """What a member's look at its weights found: others may be judged otherwise by it."""
        if fingerprint == member.fingerprint:
            return
        moved = self._votes.change(member.fingerprint, fingerprint)
        member.fingerprint = fingerprint
        for other in self._list if moved else ():
            if other is not member and other.fingerprint is not None and other.fingerprint.version in moved:
                self._judge(other)

    def _judge(self, member: Member) -> None:
        """A member is ready if it says so and its live weights, where they were looked at, are the published ones.

        Which digest is the published one is what most replicas found in the store.
        """
        member.ready, found = member.says_ready, member.fingerprint
        if member.canary is not None and member.canary[:2] == (member.run_id, member.applied):
            member.ready, member.reason = False, member.canary[2]
        if found is None:
            return
        published = self._votes.published(found.version) or found.published
        if found.live != published and found.version == f"{member.run_id}/{version_directory(member.applied or 0)}":
            member.ready = False
            member.reason = f"fingerprint {found.live[:12]} of its live weights is not the published {published[:12]}"

    def set_canary(self, member: Member, refused: tuple[str, int, str] | None) -> None:
        """A member's answer to the canary prompt was refused (run, version, reason), or not (None)."""
        if member.canary != refused:
            member.canary = refused
            self._judge(member)
            self._notify()

    def relays_above(self, member: Member) -> tuple[str, ...] | None:
        """Whom a member should fetch version files from, the nearest first; None if it does not relay."""
        return self._relays.above(member.replica_id, self._clock())

    def goodbye(self, replica_id: str) -> bool:
        """A replica leaves. False if it was not known."""
        member = self._members.get(replica_id)
        if member is not None:
            self._remove(member, "goodbye", interrupt=False)
        return member is not None

    def expire(self) -> list[Member]:
        """Drop members that were silent too long; requests waiting for them are told."""
        limit = self._clock() - self._expiry
        silent = [m for m in self._list if m.heard < limit]
        for member in silent:
            self._remove(member, f"silent for {self._expiry:g} s")
        return silent

    def suspect(self, member: Member, seconds: float = 1.0) -> None:
        """A connection to it failed: prefer others for a moment, or until its next heartbeat says ready."""
        member.suspect_until = self._clock() + seconds

    def _remove(self, member: Member, reason: str, *, interrupt: bool = True) -> None:
        member.ready, member.state, member.reason = False, "gone", reason
        self._relays.put(member.replica_id, None)
        del self._members[member.replica_id]
        self._list.remove(member)
        self._ring.remove(member.replica_id)
        self._vote(member, None)
        self._forget_runs()
        if interrupt:
            for waiting in list(member.outstanding):
                waiting.replica_gone()
        self._notify()

    def _forget_runs(self) -> None:
        """Drop runs that nobody speaks of any more: first sight after a restart says nothing about their order."""
        if len(self._runs) > 1:
            live = {r for m in self._list for r in (m.run_id, m.latest.run_id if m.latest else None)}
            self._runs = [r for r in self._runs if r in live] or self._runs[-1:]

    @property
    def members(self) -> list[Member]:
        """Everybody in the registry."""
        return list(self._list)

    @property
    def run_id(self) -> str | None:
        """The run that is served."""
        return self._pinned or (self._runs[-1] if self._runs else None)

    @property
    def latest(self) -> VersionRef | None:
        """Newest published version that any replica knows of, of the run that is served."""
        run = self.run_id
        return max((m.latest for m in self._list if m.latest is not None and m.latest.run_id == run), default=None)

    @property
    def sessions(self) -> int:
        """Sessions bound to a replica."""
        return len(self._sessions)

    async def wait_changed(self, timeout: float) -> bool:
        """Wait until a replica came, left or serves something else; False after `timeout` seconds."""
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # --- choice -------------------------------------------------------------------------------------

    def pick(
        self,
        constraint: Constraint,
        session_id: str | None = None,
        exclude: Collection[Member] = (),
        rid: str | None = None,
        run_id: str | None = None,
    ) -> Pick:
        """A compatible replica: the session's own, else one chosen by `rid` among those that are not busier than
        average, so that a rid sent again finds the replica that remembers it, else the least loaded.
        run_id: the run that the versions are meant of (None: whichever is served).

        Raises WeightVersionNotReady (none is compatible yet), WeightVersionGone (an exact version that nobody can
        reach any more), EngineUnavailable (nobody is here, or everybody compatible is excluded).
        """
        if not self._list:
            raise EngineUnavailable("no replica is registered with this gateway")
        if run_id is not None and run_id != self.run_id:
            raise WeightVersionNotReady(f"{constraint} of run {run_id}", None, None)
        if session_id is not None:
            return self._pick_for_session(session_id, constraint, exclude)
        member = self._by_rid(rid, constraint, exclude) if rid is not None else None
        member = member or self._least_loaded(constraint, exclude)
        if member is None:
            raise self._refusal(constraint)
        return Pick(member)

    def _compatible(self, member: Member, constraint: Constraint) -> bool:
        return member.ready and member.run_id == self.run_id and constraint.satisfied_by(member.applied)

    def _by_rid(self, rid: str, constraint: Constraint, exclude: Collection[Member]) -> Member | None:
        """Rendezvous hashing with bounded loads (Mirrokni et al., 2018): beyond a few requests, nobody gets more than
        1.25 of its share. In a large fleet only among the first that fit near the rid's place on a circle of all."""
        now, large = self._clock(), len(self._list) > 2 * _SAMPLE
        near = (self._members[name] for name in self._ring.after(rid, _NEIGHBOURS)) if large else self._list
        fits: list[Member] = []
        for m in near:
            if m.suspect_until <= now and m not in exclude and self._compatible(m, constraint):
                fits.append(m)
                if large and len(fits) == _SAMPLE:
                    break
        share = 1.25 * (1 + sum(m.taken for m in fits)) / max(1, sum(m.max_in_flight for m in fits))
        calm = [m for m in fits if m.taken < max(_FEW, math.ceil(share * m.max_in_flight))]
        return max(calm, key=lambda m: weight(rid, m.replica_id), default=None)

    def _least_loaded(self, constraint: Constraint, exclude: Collection[Member]) -> Member | None:
        pool = self._list
        if len(pool) > 2 * _SAMPLE:
            sample = self._rng.sample(pool, _SAMPLE)
            found = self._best(sample, constraint, exclude)
            if found is not None:
                return found
        return self._best(pool, constraint, exclude)

    def _best(self, pool: list[Member], constraint: Constraint, exclude: Collection[Member]) -> Member | None:
        now, run, best, best_key = self._clock(), self.run_id, None, (True, 0.0, 0.0)
        for member in pool:
            if not member.ready or member.run_id != run or member in exclude:
                continue
            if not constraint.satisfied_by(member.applied):
                continue
            key = (member.suspect_until > now, member.load, self._rng.random())
            if best is None or key < best_key:
                best, best_key = member, key
        return best

    def _pick_for_session(self, session_id: str, constraint: Constraint, exclude: Collection[Member]) -> Pick:
        bound = self._sessions.get(session_id)
        member = None if bound is None else self._members.get(bound)
        if member is not None and member.ready and member not in exclude and member.run_id == self.run_id:
            if constraint.satisfied_by(member.applied):
                self._sessions.move_to_end(session_id)
                return Pick(member)
            exact, applied = constraint.exact_version, member.applied
            if exact is None or (applied is not None and exact > applied):
                raise self._not_ready(constraint)  # it will get there: a session does not move because others are ahead
        candidates = [m for m in self._list if m not in exclude and self._compatible(m, constraint)]
        if not candidates:
            raise self._refusal(constraint)
        now = self._clock()
        member = max(candidates, key=lambda m: (m.suspect_until <= now, weight(session_id, m.replica_id)))
        self._sessions[session_id] = member.replica_id
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return Pick(member, bound if bound != member.replica_id else None)

    def _refusal(self, constraint: Constraint) -> Exception:
        run = self.run_id
        ours = [m for m in self._list if m.run_id == run]
        if any(self._compatible(m, constraint) for m in ours):
            return EngineUnavailable(f"no replica that serves {constraint} answers")
        applied = [m.applied for m in ours if m.applied is not None]
        exact = constraint.exact_version
        everybody_knows = len(applied) == len(self._list)  # one that is booting or fenced may still come up anywhere
        if exact is not None and everybody_knows and applied and min(applied) > exact:
            return WeightVersionGone(exact, min(applied))
        return self._not_ready(constraint)

    def _not_ready(self, constraint: Constraint) -> WeightVersionNotReady:
        served = [m.applied for m in self._list if m.applied is not None and m.run_id == self.run_id]
        latest = self.latest
        number = None if latest is None else latest.version
        return WeightVersionNotReady(str(constraint), max(served, default=None), number)
