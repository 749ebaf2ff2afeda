"""The engines behind one router: who is in rotation, who is out and why, and that the router has exactly those.

A router brings a worker back by itself as soon as its health check passes, whatever it holds; so a member that was
lost, or holds another version than the others, is taken out of the router until it is taken in here. What the members
are told is `engine.group`, the router's control plane `engine.router`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from miles_disagg.domain.errors import DeadlineExceeded, EngineError, EngineMismatch, EngineUnavailable
from miles_disagg.engine.discovery import Discovered, Wanted, differences, discover, group_differences
from miles_disagg.engine.router import RouterControl
from miles_disagg.engine.sglang import SGLangEngine

T = TypeVar("T")
log = logging.getLogger(__name__)
_LOOK_SECONDS = 3.0
_CONTROL_SECONDS = 15.0  # less than a replica gives the whole group: one that hangs is dropped, not the group


@dataclass
class Member:
    """One engine. out: why it is out of rotation, None while it is in. answers: when last asked, while out. groups:
    process groups that it has joined."""

    engine: SGLangEngine
    found: Discovered | None = None
    out: str | None = None
    answers: bool = False
    groups: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its address, as the router has it."""
        return self.engine.url

    @property
    def kind(self) -> str:
        """Its worker type."""
        return self.found.worker_type if self.found else "regular"

    @property
    def ranks(self) -> int:
        """Its ranks in an update group."""
        return self.found.ranks if self.found else 1


@dataclass(frozen=True)
class FoundGroup:
    """What `Members.look` saw; the part of `Discovered` that others ask for. `ranks`: of the members in rotation."""

    url: str
    members: tuple[Discovered, ...]
    ranks: int

    @property
    def embedded(self) -> bool:
        """True if all are embedded engines."""
        return all(m.embedded for m in self.members)

    def describe(self) -> str:
        """One line for people."""
        kinds = {kind: sum(m.worker_type == kind for m in self.members) for kind in ("regular", "prefill", "decode")}
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        lines = "; ".join(f"{m.url}: {m.describe()}" for m in self.members)
        return f"router in front of {len(self.members)} engines ({counts}), updated together: {lines}"

    def to_json(self) -> dict[str, Any]:
        """For a status page."""
        return {
            "url": self.url,
            "worker_type": "group",
            "gpus": sum(m.gpus for m in self.members),
            "ranks": self.ranks,
            "description": self.describe(),
            "members": [m.to_json() for m in self.members],
        }


class Members:
    """See the module. `router` is its URL, `urls` the engines', spelled as the router has them."""

    def __init__(self, router: str, urls: Sequence[str], api_key: str | None = None):
        self.url = router.rstrip("/")
        self._router = RouterControl(router, api_key)
        self.all = [Member(SGLangEngine(u.rstrip("/"), api_key, control_timeout=_CONTROL_SECONDS)) for u in urls]
        self._wanted: Wanted | None = None

    @property
    def present(self) -> list[Member]:
        """Members in rotation."""
        return [m for m in self.all if m.out is None]

    @property
    def missing(self) -> list[Member]:
        """Members out of rotation."""
        return [m for m in self.all if m.out is not None]

    @property
    def returned(self) -> list[Member]:
        """Members out of rotation that answer."""
        return [m for m in self.missing if m.answers]

    def found(self) -> FoundGroup | None:
        """What is known of the members, None before `look`."""
        known = tuple(m.found for m in self.all if m.found is not None)
        return FoundGroup(self.url, known, sum(m.ranks for m in self.present)) if known else None

    async def look(self, wanted: Wanted) -> None:
        """Discover the members (all at first, then those in rotation), and see that router and run can use them.

        EngineUnavailable while one does not answer, EngineMismatch with every difference, by member.
        """
        members = self.all if self._wanted is None else self.present
        problems: list[str] = []
        for member, found in zip(members, await _all(discover(m.engine) for m in members), strict=True):
            member.found = found
            problems += [f"{member.url}: {p}" for p in differences(found, wanted, routed=True)]
        problems += group_differences([m.found for m in self.all if m.found is not None])
        problems += self._strangers(await self._router.workers())
        if problems:
            raise EngineMismatch(self.url, problems)
        self._wanted = wanted

    def _strangers(self, workers: Mapping[str, Any]) -> list[str]:
        """A worker that is not ours would be sent requests and never an update."""
        ours = {m.url for m in self.all}
        return [
            f"the router also sends requests to {url}, which is not in --rollout-external-engine-addrs: add it there "
            "(spelled like that), or remove it from the router"
            for url in workers
            if url not in ours
        ]

    async def open(self, timeout: float) -> None:
        """Register members that the router does not have, and wait until it uses all of them, each as what it is."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            workers = await self.keep_router()
            late = [m.url for m in self.present if not workers.get(m.url, {}).get("is_healthy")]
            if not late:
                break
            if loop.time() > deadline:
                raise DeadlineExceeded(f"router {self.url} to use {', '.join(late)}", timeout, "look at its log")
            await asyncio.sleep(0.3)
        has = {m.url: workers[m.url].get("worker_type") for m in self.present}
        other = [
            f"it has {m.url}, a {m.kind} worker, as a {has[m.url]} one" for m in self.present if m.kind != has[m.url]
        ]
        if other:
            raise EngineMismatch(self.url, other)

    async def take_in(self, member: Member) -> None:
        """Look at what runs at a returned member's address now, and count it in; EngineError if that does not fit."""
        try:
            member.found = await discover(member.engine)
            member.groups.clear()
            if self._wanted and (problems := differences(member.found, self._wanted, routed=True)):
                raise EngineMismatch(member.url, problems)
        except EngineError as error:
            self.drop(member, f"not readmitted: {error}")
            raise
        member.out = None

    def drop(self, member: Member, reason: str, *, answers: bool = False) -> None:
        """Out of rotation; `keep_router` tells the router."""
        if member.out != reason:
            log.warning("%s leaves %s: %s", member.url, self.url, reason)
        member.out, member.answers = reason, answers
        member.groups.clear()

    def require(self) -> None:
        """EngineUnavailable unless the members in rotation can serve."""
        if not can_serve(self.present):
            why = "; ".join(f"{m.url}: {m.out}" for m in self.missing)
            raise EngineUnavailable(f"no engines behind {self.url} that can serve: {why}")

    async def look_at_missing(self) -> None:
        """See which of the members that are out answer."""

        async def one(member: Member) -> None:
            try:
                await member.engine.health(_LOOK_SECONDS)
                member.answers = True
            except EngineError:
                member.answers = False

        await asyncio.gather(*(one(m) for m in self.missing))

    async def keep_router(self, *, add: bool = True) -> dict[str, dict[str, Any]]:
        """The router has exactly the members in rotation (add False: none besides). Its workers, as they were before.

        EngineMismatch if it has workers of others.
        """
        workers = await self._router.workers()
        if strangers := self._strangers(workers):
            raise EngineMismatch(self.url, strangers)
        for member in self.all:
            row = workers.get(member.url)
            if member.out is None and row is None and add:
                port = member.found.bootstrap_port if member.found else None
                await self._router.add(member.url, member.kind, port)
            elif member.out is not None and row is not None:
                await self._router.remove(str(row["id"]))
        return workers

    async def on_each(self, call: Callable[[Member], Awaitable[T]]) -> dict[str, T]:
        """`call` on every member in rotation at once; results by URL. Those that do not answer are dropped; the first
        other error is raised once all are done. EngineUnavailable if those that are left cannot serve."""
        members = self.present
        results = await asyncio.gather(*(call(m) for m in members), return_exceptions=True)
        out: dict[str, T] = {}
        errors: list[BaseException] = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineUnavailable):
                self.drop(member, str(result))
            elif isinstance(result, BaseException):
                errors.append(result)
            else:
                out[member.url] = result
        if errors:
            raise errors[0]
        self.require()
        return out

    async def close(self) -> None:
        """Release connections. The router keeps its workers."""
        await asyncio.gather(self._router.close(), *(m.engine.close() for m in self.all))


def can_serve(members: Sequence[Member]) -> bool:
    """Any regular worker, or a prefill and a decode worker."""
    kinds = {m.kind for m in members}
    return "regular" in kinds or {"prefill", "decode"} <= kinds


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results, or the first error once all are done."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)
