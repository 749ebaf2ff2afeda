"""The version store's actor as the driver holds it: when its process dies, it is brought back to where it was.

Ray starts the actor anew, and its handles stay good. The new process has forgotten everything; the driver claims the
run again (the pointer comes from the store), reopens the publication that was open, and tells it who serves what. What
was asked meanwhile is asked again: writers here, watchers everywhere (`store.actor.RemoteLedger`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_disagg.cluster.calls import ActorLost, Lifeline, call
from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError, NotClaimed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.actor import RemoteLedger
from miles_disagg.store.claims import Claim
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.versions import DEFAULT_TTL

DEATHS = 5  # of the actor in one run, before the run ends with the error
RETURN_SECONDS = 60.0  # for Ray to start it anew
_LOOK_SECONDS = 1.0
_CONTROL_SECONDS = 30.0


class KeptLedger(RemoteLedger):
    """See the module. timeout: seconds for one write. `served`, when set, tells which version every replica serves."""

    def __init__(self, actor: Any, say: Callable[[str], None], *, timeout: float):
        super().__init__(actor)
        self._say, self._timeout = say, timeout
        self._base_digest, self._ttl = "", DEFAULT_TTL
        self._claim: Claim | None = None
        self._latest: VersionRef | None = None
        self._open: VersionRef | None = None
        self._replicas: set[str] = set()
        self._restoring = asyncio.Lock()
        self.served: Callable[[], Awaitable[Mapping[str, int | None]]] | None = None
        self.deaths = 0
        self._released = False

    # --- what has to be remembered ------------------------------------------------------------------

    async def claim(
        self, base_digest: str, *, boot_version: int = 0, owner: str | None = None, ttl: float = DEFAULT_TTL
    ) -> Claim | None:
        self._base_digest, self._ttl = base_digest, ttl
        claimed = self.actor.claim.remote(base_digest, boot_version, owner, ttl)
        self._claim = await call(claimed, "version store: claim the run", self._timeout)
        self._latest = await self.latest()
        return self._claim

    async def begin(self) -> VersionRef:
        self._open = await super().begin()
        return self._open

    async def commit(
        self, ref: VersionRef, description: Description | None = None, receipts: Sequence[Receipt] = ()
    ) -> None:
        await super().commit(ref, description, receipts)
        self._latest, self._open = ref, None

    async def abort(self, ref: VersionRef) -> None:
        await super().abort(ref)
        self._open = None

    async def release(self) -> None:
        try:
            await super().release()
        finally:
            self._released = True

    async def register(self, replica_id: str) -> None:
        self._replicas.add(replica_id)
        await super().register(replica_id)

    async def forget(self, replica_id: str) -> None:
        self._replicas.discard(replica_id)
        await super().forget(replica_id)

    # --- bringing it back ---------------------------------------------------------------------------

    async def keep(self, lifeline: Lifeline | None = None) -> None:
        """Look after the actor until cancelled, or until it cannot be brought back: `lifeline` is cut then, and every
        write says why."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._restore()
            except DeadlineExceeded as error:  # busy, or the machine is
                self._say(f"{error}")
            except MilesDisaggError as error:
                self._say(f"[bold red]the version store is lost[/bold red]: {error}")
                if lifeline is not None:
                    lifeline.cut(error)
                return

    async def _write(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._ask("call", method, self._timeout, *args, **kwargs)

    async def _watch(self, method: str, *args: Any, **kwargs: Any) -> Any:
        waits = args[-1] if method.startswith("wait_") else 0.0
        return await self._ask("watch", method, _CONTROL_SECONDS + waits, *args, **kwargs)

    async def _ask(self, group: str, method: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                asked = getattr(self.actor, group).remote(method, *args, **kwargs)
                return await call(asked, f"version store: {method}", timeout)
            except (ActorLost, NotClaimed):
                await self._restore()

    async def _restore(self) -> None:
        """See that the actor lives and has its claim. ActorLost if Ray gave it up; ClaimConflict if the run was resumed
        elsewhere."""
        if self._released:
            raise ActorLost("version store", "the run has released it")
        async with self._restoring:
            while not await self._answers():
                try:
                    await self._tell_where_it_was()
                except ActorLost:  # once more
                    continue
                return

    async def _tell_where_it_was(self) -> None:
        self.deaths += 1
        claim, latest = self._claim, self._latest
        self._say(f"the version store's process died; its new one claims the run again at {latest}")
        boot = latest.version if latest is not None and claim is None else 0  # without a store, only we know
        terms = (boot, claim.owner if claim else None, self._ttl, claim.epoch if claim else None)
        claimed = self.actor.claim.remote(self._base_digest, *terms)
        self._claim = await call(claimed, "version store: claim the run again", self._timeout)
        if self._open is not None:
            await self._control("call", "reopen", self._open)
        for name in sorted(self._replicas):
            await self._control("watch", "register", name)
        await self._tell_who_serves()

    async def _answers(self) -> bool:
        """True if it has its claim, False if it is a new process; waits for one."""
        deadline = time.monotonic() + RETURN_SECONDS
        while True:
            try:
                return await call(self.actor.claimed.remote(), "version store: answer", _CONTROL_SECONDS)
            except ActorLost:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _tell_who_serves(self) -> None:
        """What replicas acknowledged is acknowledged once: say it for them."""
        if self.served is None or self._latest is None:
            return
        newest = self._open or self._latest
        for name, version in (await self.served()).items():
            if version is not None and name in self._replicas and version <= newest.version:
                ref = VersionRef(newest.run_id, version)
                await self._control("watch", "record_activation", name, ref, time.time())

    async def _control(self, group: str, method: str, *args: Any) -> None:
        await call(getattr(self.actor, group).remote(method, *args), f"version store: {method}", _CONTROL_SECONDS)
