"""Which replica serves a request: membership by heartbeat, version constraints, load, session affinity.

Pure: no I/O, injected clock. The HTTP proxy around it is `app`; the replica checks every constraint again itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_disagg.domain.errors import (
    EngineUnavailable,
    InvalidRequest,
    InvalidVersionRef,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import Constraint, VersionRef, check_run_id, version_directory
from miles_disagg.gateway.observed import Observed
from miles_disagg.gateway.relays import RelayPoint, RelayTree

_REPLICA_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_URL = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]{1,255}/?")
_FEW = 8  # requests on a replica that are no reason to send a rid elsewhere
_SAMPLE = 16  # members looked at before all of them are, in a large fleet


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
    fingerprint: tuple[str, str, str] | None = None  # version, digest as published, digest as served
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
        self._relays = RelayTree()
        self.observed = Observed()

    # --- membership ---------------------------------------------------------------------------------

    def heartbeat(self, message: Mapping[str, Any]) -> Member:
        """A replica says who and how it is. InvalidRequest names a field that is wrong."""
        replica_id, url = check_replica_id(message.get("replica_id")), message.get("url")
        if not isinstance(url, str) or not _URL.fullmatch(url):
            raise InvalidRequest("url: must be http(s)://host[:port]")
        url = url.rstrip("/")
        for name, kind in (("state", str), ("reason", str), ("ready", bool), ("phase_timings", dict)):
            if not isinstance(message.get(name, kind()), kind):
                raise InvalidRequest(f"{name}: must be a {kind.__name__}")
        applied, run_id, latest = _version(message, "applied"), message.get("run_id"), message.get("latest")
        try:
            run_id = None if run_id is None else check_run_id(run_id)
            latest = None if latest is None else VersionRef.parse(latest)
        except InvalidVersionRef as error:
            raise InvalidRequest(f"run_id, latest: {error}") from None
        limit = _version(message, "max_in_flight")
        limit = 1024 if limit is None else limit
        if limit < 1:
            raise InvalidRequest("max_in_flight: must be at least 1")
        member = self._members.get(replica_id)
        if member is not None and member.url != url:  # restarted elsewhere under its name
            self._remove(member, f"replica {replica_id} moved to {url}")
            member = None
        if member is None:
            member = self._members[replica_id] = Member(replica_id, url)
            self._list.append(member)
        before, served = (member.run_id, member.applied, member.ready, member.latest), member.serves
        member.run_id, member.applied, member.latest = run_id, applied, latest
        member.state, member.says_ready = message.get("state", "booting"), message.get("ready", False)
        member.reason = message.get("reason", "")
        fingerprint = _fingerprint(message)
        if fingerprint != member.fingerprint:
            member.fingerprint = fingerprint
            for other in self._list:  # who was seen to serve what may change for all at this version
                if other is not member and other.fingerprint and fingerprint and other.fingerprint[0] == fingerprint[0]:
                    self._judge(other)
        self._judge(member)
        self._relays.put(replica_id, _relay_point(message, replica_id, url))
        member.active = _version(message, "active_requests") or 0
        member.max_in_flight = limit
        self.observed.heard(latest, self._clock())
        if member.serves is not None:
            self.observed.activated(served, member.serves, message.get("phase_timings", {}), self._clock())
        member.held = _text(message, "held")
        member.phase_timings = message.get("phase_timings", {})
        member.others = max(0, member.active - len(member.outstanding))
        member.heard = self._clock()
        if member.ready:
            member.suspect_until = 0.0
        if before != (run_id, applied, member.ready, latest):
            for run in (run_id, None if latest is None else latest.run_id):
                if run is not None and run not in self._runs:
                    self._runs.append(run)
            self._forget_runs()
            self._notify()
        return member

    def _judge(self, member: Member) -> None:
        """A member is ready if it says so and its live weights, where they were looked at, are the published ones.

        Which digest is the published one is what most replicas found in the store.
        """
        member.ready, found = member.says_ready, member.fingerprint
        if member.canary is not None and member.canary[:2] == (member.run_id, member.applied):
            member.ready, member.reason = False, member.canary[2]
        if found is None:
            return
        version, _, live = found
        votes = Counter(m.fingerprint[1] for m in self._list if m.fingerprint and m.fingerprint[0] == version)
        published = votes.most_common(1)[0][0]
        if live != published and version == f"{member.run_id}/{version_directory(member.applied or 0)}":
            member.ready = False
            member.reason = f"fingerprint {live[:12]} of its live weights is not the published {published[:12]}"

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
        """A compatible replica: the session's own, else (small fleets) one chosen by `rid` among those that are not
        busier than average, so that a rid sent again finds the replica that remembers it, else the least loaded.
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
        1.25 of its share."""
        if len(self._list) > 2 * _SAMPLE:
            return None
        now = self._clock()
        fits = [
            m for m in self._list if m not in exclude and m.suspect_until <= now and self._compatible(m, constraint)
        ]
        share = 1.25 * (1 + sum(m.taken for m in fits)) / max(1, sum(m.max_in_flight for m in fits))
        calm = [m for m in fits if m.taken < max(_FEW, math.ceil(share * m.max_in_flight))]
        return max(calm, key=lambda m: _weight(rid, m.replica_id), default=None)

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
        member = max(candidates, key=lambda m: (m.suspect_until <= now, _weight(session_id, m.replica_id)))
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


def check_replica_id(value: Any) -> str:
    """Return a legal replica id or raise InvalidRequest."""
    if not isinstance(value, str) or not _REPLICA_ID.fullmatch(value):
        raise InvalidRequest("replica_id: must be 1 to 200 of letters, digits, '.', '_', ':', '-'")
    return value


def _version(message: Mapping[str, Any], name: str) -> int | None:
    value = message.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (type(value) is not int or value < 0):
        raise InvalidRequest(f"{name}: must be a non-negative integer or null")
    return value


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be a string or null")
    return value


def _fingerprint(message: Mapping[str, Any]) -> tuple[str, str, str] | None:
    value = message.get("fingerprint")
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    version, published, live = (fields.get(name) for name in ("version", "published", "live"))
    if not (isinstance(version, str) and isinstance(published, str) and isinstance(live, str)):
        raise InvalidRequest("fingerprint: must be null or an object with the texts version, published and live")
    return version, published, live


def _relay_point(message: Mapping[str, Any], replica_id: str, url: str) -> RelayPoint | None:
    value = message.get("relay")
    if value is None:
        return None
    fields = value if isinstance(value, dict) else {}
    zone, host = fields.get("zone"), fields.get("host")
    if not (isinstance(zone, str) and isinstance(host, str) and max(len(zone), len(host)) <= 200):
        raise InvalidRequest("relay: must be null or an object with the texts zone and host")
    return RelayPoint(zone, host, replica_id, url)


def _weight(session_id: str, replica_id: str) -> bytes:
    """Rendezvous hash: gateways that know the same replicas choose the same one, without talking."""
    return hashlib.blake2b(f"{session_id}\0{replica_id}".encode(), digest_size=8).digest()
