"""Several engines behind one router, as one engine: requests through the router, control on every member.

A router may pick any engine and passes no version constraint, so its engines hold the same version at any moment that
one generates: they are paused together, updated together, and one that is lost waits outside until it holds what the
others hold. Who is in is `engine.members`; when a member is readmitted between updates is `replica.reconciler`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

from miles_disagg.domain.errors import EngineError, EngineUnavailable
from miles_disagg.engine.base import PauseMode
from miles_disagg.engine.discovery import Wanted
from miles_disagg.engine.members import FoundGroup, Member, Members, can_serve
from miles_disagg.engine.sglang import SGLangEngine

log = logging.getLogger(__name__)
MIXED = "of several versions"


class RoutedEngine:
    """`Engine` over a router. A member that does not answer is dropped, and the rest goes on while it can serve.

    Errors as `Engine`; besides, an update that some members took and others refused is an EngineError (not
    UpdateFailed), since the members then hold different versions.
    """

    def __init__(self, router: str, members: Sequence[str], api_key: str | None = None):
        self.url = router.rstrip("/")
        self._front = SGLangEngine(router, api_key)
        self.members = Members(router, members, api_key)
        self._expected: str | None = None  # the stamp that every member in rotation carries
        self._updating = False  # between pause and resume

    async def look(self, wanted: Wanted) -> FoundGroup | None:
        """See `Members.look`."""
        await self.members.look(wanted)
        return self.members.found()

    async def open(self, timeout: float) -> None:
        """Let the router use all members, and see one token come through it. Seconds for each."""
        await self.members.open(timeout)
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            async with asyncio.timeout(timeout):
                answer = await self._front.generate(probe)
            log.info("router %s answers, by an engine at %s", self.url, answer["meta_info"]["weight_version"])
        except (TimeoutError, EngineError, KeyError, TypeError) as error:
            pd = self.members.all[0].kind != "regular"
            remedy = "start it with --pd-disaggregation" if pd else "look at its log"
            raise EngineError(f"router {self.url} does not bring a token from its engines ({error!r}); {remedy}") from (
                error
            )

    @property
    def returned(self) -> list[Member]:
        """Members out of rotation that answer."""
        return self.members.returned

    async def readmit(self, path: str, version: str) -> list[str]:
        """Load `version` from `path` into members that answer again and fit, and put them back; their URLs.

        The others stay out, with the reason. Nobody else is paused.
        """
        back = []
        for member in self.returned:
            with suppress(EngineError):
                await self.members.take_in(member)
                member.out = "being loaded"
                try:
                    await member.engine.resume()  # it may have been paused when it was lost
                    await member.engine.update_from_disk(path, version, flush_cache=False)
                    stamp = (await member.engine.model_info()).get("weight_version")
                    if stamp != version:
                        raise EngineError(f"it reports {stamp!r} after loading {version}")
                except EngineError as error:
                    self.members.drop(member, f"not readmitted: {error}")
                    raise
                member.out = None
                back.append(member.url)
                log.info("%s is back behind %s at %s", member.url, self.url, version)
        if back:
            await self.members.keep_router()
        return back

    # --- generation -----------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """See `Engine`. A router's 5xx (its engine died, or none is left) is EngineUnavailable."""
        try:
            return await self._front.generate(body)
        except EngineError as error:
            raise _through_router(error) from error

    async def stream(self, body: Mapping[str, Any], path: str = "/generate") -> AsyncIterator[dict[str, Any]]:
        """See `Engine`, and `generate`."""
        try:
            async with aclosing(cast(Any, self._front.stream(body, path))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineError as error:
            raise _through_router(error) from error

    # --- state ----------------------------------------------------------------------------------------

    async def health(self, timeout: float) -> None:
        """See `Engine`: the members in rotation."""
        await self.members.on_each(lambda m: m.engine.health(timeout))

    async def server_info(self) -> dict[str, Any]:
        """See `Engine`: the strictest of the members' settings, and the stamp that all in rotation carry.

        Sees who is in: a member that does not answer, or holds another version than the others, leaves; where those
        that are left cannot serve, all that answer count again, whatever they hold. Keeps the router at that.
        """
        await self.members.look_at_missing()
        if not can_serve(self.members.present):
            for member in self.returned:
                with suppress(EngineError):
                    await self.members.take_in(member)
        infos = await self.members.on_each(lambda m: m.engine.server_info())
        if not self._updating:
            infos = self._without_stale(infos)
        await self.members.keep_router()
        rows = list(infos.values())
        return {
            **rows[0],
            "weight_version": _common(rows),
            "disable_radix_cache": all(row.get("disable_radix_cache") for row in rows),
            "stream_interval": max(int(row.get("stream_interval") or 1) for row in rows),
            "announces_at_pause": all(row.get("announces_at_pause") for row in rows),
        }

    async def model_info(self) -> dict[str, Any]:
        """See `Engine`. `weight_version`: the members' own, or `of several versions: ...`."""
        infos = self._without_stale(await self.members.on_each(lambda m: m.engine.model_info()))
        return {**next(iter(infos.values())), "weight_version": _common(infos.values())}

    def _without_stale(self, infos: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Drops members that hold another version than they were given, if the others can serve without them."""
        stamps = {url: str(info.get("weight_version")) for url, info in infos.items()}
        if self._expected is None and len(set(stamps.values())) == 1:
            self._expected = next(iter(stamps.values()))
        stale = [m for m in self.members.present if stamps.get(m.url, self._expected) != self._expected]
        keep = [m for m in self.members.present if m not in stale]
        if self._expected is None or not stale or not can_serve(keep):
            return infos
        for member in stale:
            reason = f"it reports {stamps[member.url]!r}, the others hold {self._expected}"
            self.members.drop(member, reason, answers=True)
        return {m.url: infos[m.url] for m in keep}

    # --- control --------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine`: all members stand still when this returns, and those that came back take part."""
        self._updating = True
        for member in self.returned:
            with suppress(EngineError):
                await self.members.take_in(member)
        await self.members.on_each(lambda m: m.engine.pause(mode))

    async def resume(self) -> None:
        """See `Engine`. Members that were lost leave the router first."""
        if self.members.missing:
            await self._keep_router(add=False)
        await self.members.on_each(lambda m: m.engine.resume())
        self._updating = False
        await self._keep_router(add=True)

    async def _keep_router(self, *, add: bool) -> None:
        try:
            await self.members.keep_router(add=add)
        except EngineUnavailable as error:  # nothing comes through it; the next look keeps it right
            log.warning("%s", error)

    async def flush_cache(self) -> None:
        """See `Engine`."""
        await self.members.on_each(lambda m: m.engine.flush_cache())

    async def abort(self, rid: str | None = None) -> None:
        """See `Engine`. Nobody here knows which member has it."""
        await self.members.on_each(lambda m: m.engine.abort(rid))

    # --- weights --------------------------------------------------------------------------------------

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool) -> None:
        """See `Engine`: all members, or an error."""

        async def load(member: Member) -> None:
            await member.engine.update_from_disk(path, version, flush_cache=flush_cache)

        await self._update(load, version)

    async def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """See `Engine`. The members' ranks follow one another, in the order of their addresses."""
        offsets, following = {}, rank_offset
        for member in self.members.present:
            offsets[member.url] = following
            following += member.ranks

        async def join(member: Member) -> None:
            await member.engine.init_group(
                master_address=master_address,
                master_port=master_port,
                rank_offset=offsets[member.url],
                world_size=world_size,
                group_name=group_name,
                backend=backend,
            )
            member.groups.add(group_name)

        await self._whole(join)

    def joined(self, group_name: str) -> bool:
        """True if every member in rotation is in the process group."""
        return all(group_name in m.groups for m in self.members.present)

    async def destroy_group(self, group_name: str) -> None:
        """See `Engine`."""

        async def leave(member: Member) -> None:
            if group_name in member.groups:
                member.groups.discard(group_name)
                await member.engine.destroy_group(group_name)

        await self.members.on_each(leave)

    async def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        flush_cache: bool,
        load_format: str | None = None,
    ) -> None:
        """See `Engine`. A member that is lost meanwhile breaks the group for the others too: EngineUnavailable."""

        async def receive(member: Member) -> None:
            await member.engine.update_from_distributed(
                names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, version=version,
                flush_cache=flush_cache, load_format=load_format,
            )  # fmt: skip

        self._expected = None
        await self._whole(receive)
        self._expected = version

    async def update_from_tensor(
        self, serialized: Sequence[str], *, load_format: str | None, version: str, flush_cache: bool
    ) -> None:
        """See `Engine`. The tensors are read from memory that only engines of one host share."""

        async def take(member: Member) -> None:
            await member.engine.update_from_tensor(
                serialized, load_format=load_format, version=version, flush_cache=flush_cache
            )

        await self._update(take, version)

    async def _update(self, call: Callable[[Member], Awaitable[None]], version: str) -> None:
        took: list[str] = []

        async def one(member: Member) -> None:
            await call(member)
            took.append(member.url)

        try:
            await self.members.on_each(one)
        except EngineError as error:
            if not took:
                raise  # by contract nothing changed anywhere
            self._expected = None
            raise EngineError(f"of the engines behind {self.url} only {', '.join(took)} took {version}: {error}") from (
                error
            )
        self._expected = version

    async def _whole(self, call: Callable[[Member], Awaitable[None]]) -> None:
        before = self.members.present
        await self.members.on_each(call)
        if self.members.present != before:
            raise EngineUnavailable("; ".join(f"{m.url}: {m.out}" for m in self.members.missing))

    async def weights_digest(self) -> dict[str, str]:
        """See `Engine`. EngineError if the members do not serve the same bytes."""
        return same_digests(self.url, await self.members.on_each(lambda m: m.engine.weights_digest()))

    async def close(self) -> None:
        """See `Engine`. The router keeps its workers."""
        await asyncio.gather(self._front.close(), self.members.close())


def same_digests(what: str, by_member: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The digests that all members have; EngineError names the first tensor that differs."""
    (first, wanted), *others = by_member.items()
    for url, digests in others:
        for name in sorted({*wanted, *digests}):
            if wanted.get(name) != digests.get(name):
                raise EngineError(f"behind {what}, {first} and {url} serve different bytes of {name}")
    return dict(wanted)


def _common(rows: Iterable[Mapping[str, Any]]) -> str:
    distinct = sorted({str(row.get("weight_version")) for row in rows})
    return distinct[0] if len(distinct) == 1 else f"{MIXED}: {', '.join(distinct)}"


def _through_router(error: EngineError) -> EngineError:
    """A router answers 500 where it could not reach its engine; nothing was generated."""
    if isinstance(error, EngineUnavailable) or error.status < 500:
        return error
    return EngineUnavailable(f"the router could not pass the request on: {error}", status=error.status)
