"""Numbering, pointer, watchers, activations and convergence of one run, as a plain object on one event loop.

The same rules with a store (`disk`) and without files (`broadcast`): version 0 is the base, versions are consecutive,
one publication is open at a time, the pointer only moves forward. `actor` puts it behind Ray.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from miles_disagg.domain.errors import ClaimConflict, DeadlineExceeded, PointerConflict, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.claims import Claim
from miles_disagg.store.lineage import Kind
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.retention import Collected, collect
from miles_disagg.store.versions import DEFAULT_TTL, VersionStore

T = TypeVar("T")
Hook = Callable[[VersionRef], None]
POST_WRITE, PRE_READ = "--custom-update-weight-post-write-path", "--custom-update-weight-pre-read-path"


@dataclass
class Activations:
    """When a version was published (None: not yet) and which replica acknowledged it when (Unix seconds)."""

    published: float | None = None
    by_replica: dict[str, float] = field(default_factory=dict)


class VersionLedger:
    """All versions of one run. store: None for versions without files.

    share: part of the known replicas that must acknowledge a version for it to count as converged, in (0, 1].
    pre_read: called before the sources' files are verified; post_write: after index and pointer are written, at least
    once a version: again where the process that was to call it may have died before (`announce`, `reopen`).
    """

    def __init__(
        self,
        run_id: str,
        store: VersionStore | None = None,
        *,
        share: float = 1.0,
        keep_history: int = 256,
        pre_read: Hook | None = None,
        post_write: Hook | None = None,
    ):
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}")
        self._run_id, self._store, self._share, self._keep_history = run_id, store, share, keep_history
        self._pre_read, self._post_write = pre_read, post_write
        self._latest: VersionRef | None = None
        self._open: VersionRef | None = None
        self._boot: VersionRef | None = None
        self._unannounced: VersionRef | None = None  # published, and `post_write` may not have been called for it
        self._changed = asyncio.Condition()
        self._replicas: dict[str, VersionRef | None] = {}
        self._activations: dict[int, Activations] = {}
        self._broken: ClaimConflict | None = None
        self._released = False

    # --- writing ----------------------------------------------------------------------------------

    @property
    def claimed(self) -> bool:
        """True once `claim` succeeded."""
        return self._latest is not None

    async def claim(
        self,
        base_digest: str,
        *,
        boot_version: int = 0,
        owner: str | None = None,
        ttl: float = DEFAULT_TTL,
        epoch: int | None = None,
    ) -> Claim | None:
        """Start or resume the run (see VersionStore.claim); None without a store."""
        claim, store = None, self._store
        if store is None:
            await self._move(VersionRef(self._run_id, boot_version))
        else:
            terms = {"boot_version": boot_version, "owner": owner, "ttl": ttl, "epoch": epoch}
            claim = await asyncio.to_thread(store.claim, self._run_id, base_digest, **terms)
            self._boot = VersionRef(self._run_id, claim.boot_version)
            await self._move(store.published)
        return claim

    async def announce(self) -> None:
        """After the claim of a run that goes on: call `post_write` for its newest version, which the process before may
        not have done. The base was not written by the run. PublicationFailed if the hook fails."""
        if self._boot is not None and self._latest is not None and self._latest != self._boot:
            await self._hook(self._post_write, POST_WRITE, self._latest)

    async def keep_alive(self, ttl: float = DEFAULT_TTL) -> None:
        """Renew the claim until it is released; run it as a task. After a ClaimConflict nothing more is published."""
        while self._store is not None:
            await asyncio.sleep(ttl / 4)
            if self._released:
                return
            try:
                await asyncio.to_thread(self._store.renew, ttl)
            except ClaimConflict as error:
                self._broken = error
                raise

    async def release(self) -> None:
        """End the claim."""
        self._released = True
        if self._store is not None and self._broken is None:
            await asyncio.to_thread(self._store.release)

    async def begin(self, timeout: float = 600.0) -> VersionRef:
        """Open the next version for publication; waits while another one is open, DeadlineExceeded after `timeout`."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait_for(lambda: self._open is None)
            except TimeoutError:
                raise DeadlineExceeded("the open publication", timeout, f"{self._open} is not committed") from None
            if self._broken is not None:
                raise self._broken
            if self._latest is None:
                raise PublicationFailed(f"run {self._run_id} has no claim yet")
            ref = self._open = self._latest.next()
        if self._store is not None:
            try:
                await asyncio.to_thread(self._store.begin, ref)
            except BaseException:
                await self._close(ref)
                raise
        return ref

    async def reopen(self, ref: VersionRef) -> None:
        """Go on with a publication that was open when the process before this one died; its files stay as they are.

        If `ref` was published all the same, its `commit` only calls `post_write`. PointerConflict if it is not the next
        version.
        """
        async with self._changed:
            if ref == self._latest:
                self._unannounced = ref
                return
            if self._latest is None or ref != self._latest.next() or self._open not in (None, ref):
                raise PointerConflict(self._latest, self._open or self._latest, ref, "It was open before.")
            self._open = ref

    async def commit(
        self, ref: VersionRef, description: Description | None = None, receipts: Sequence[Receipt] = ()
    ) -> None:
        """Publish the open version. Without a store this only moves the pointer. Repeating it is harmless."""
        if ref == self._latest:
            if ref == self._unannounced:
                await self._hook(self._post_write, POST_WRITE, ref)
                self._unannounced = None
            return
        if ref != self._open:
            raise PointerConflict(
                self._open, self._latest, ref, "Only the version that begin() returned may be committed."
            )
        if self._broken is not None:
            raise self._broken
        if self._store is not None:
            if description is None:
                raise PublicationFailed(f"{ref}: a version in a store needs its description and receipts")
            await self._hook(self._pre_read, PRE_READ, ref)
            await asyncio.to_thread(self._store.commit, ref, description, receipts)
        try:
            await self._hook(self._post_write, POST_WRITE, ref)
        finally:  # the pointer has moved, whatever the hook says
            await self._move(ref)

    async def commit_shortcut(
        self, ref: VersionRef, kind: Kind, description: Description, receipts: Sequence[Receipt]
    ) -> None:
        """Add a shortcut to the published version (see VersionStore.commit_shortcut)."""
        assert self._store is not None
        await self._hook(self._pre_read, PRE_READ, ref)
        await asyncio.to_thread(self._store.commit_shortcut, ref, kind, description, receipts)
        await self._hook(self._post_write, POST_WRITE, ref)

    async def abort(self, ref: VersionRef) -> None:
        """Give up the open version; its files are removed. No error if it is not open."""
        if ref != self._open:
            return
        try:
            if self._store is not None:
                await asyncio.to_thread(self._store.discard, ref)
        finally:
            await self._close(ref)

    async def collect(self, *, keep: int | None, keep_files: bool) -> Collected:
        """Retention: what every known replica acknowledged, and what is older than the newest `keep`, goes.

        keep None: versions that every replica has passed, nothing while one has acknowledged none or none is known.
        """
        acknowledged = self.acknowledged_by_all()
        if self._store is None or self._latest is None:
            return Collected()
        if keep is None:
            if acknowledged is None:
                return Collected()
            keep = max(2, self._latest.version - acknowledged + 1)
        return await asyncio.to_thread(
            collect, self._store, self._run_id, keep=keep, acknowledged=acknowledged, keep_files=keep_files
        )

    # --- watching ---------------------------------------------------------------------------------

    async def latest(self) -> VersionRef | None:
        """The published version, None before the claim."""
        return self._latest

    async def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        """The published version as soon as it differs from `than`; None after `timeout` seconds."""
        return await self._wait(
            lambda: self._latest is not None and self._latest != than, timeout, lambda: self._latest
        )

    async def wait_converged(self, ref: VersionRef, timeout: float) -> float | None:
        """Seconds from publication until the required share of replicas acknowledged `ref`; None after `timeout`."""
        return await self._wait(
            lambda: self.convergence_seconds(ref) is not None, timeout, lambda: self.convergence_seconds(ref)
        )

    # --- activations ------------------------------------------------------------------------------

    async def register(self, replica_id: str) -> None:
        """Count a replica among those that must acknowledge. Idempotent."""
        async with self._changed:
            self._replicas.setdefault(replica_id, None)
            self._changed.notify_all()

    async def forget(self, replica_id: str) -> None:
        """A replica left for good."""
        async with self._changed:
            self._replicas.pop(replica_id, None)
            self._changed.notify_all()

    async def record_activation(self, replica_id: str, ref: VersionRef, at: float) -> None:
        """`replica_id` serves `ref` since Unix time `at`. Idempotent; an unknown replica is registered."""
        newest = self._open or self._latest  # a broadcast reaches replicas before it is committed
        if ref.run_id != self._run_id or newest is None or ref > newest:
            raise PointerConflict(newest, newest, ref, f"{replica_id} reports a version that is not published.")
        async with self._changed:
            known = self._replicas.get(replica_id)
            if known is None or ref > known:
                self._replicas[replica_id] = ref
            self._activations.setdefault(ref.version, Activations()).by_replica.setdefault(replica_id, at)
            self._changed.notify_all()

    def replicas(self) -> dict[str, VersionRef | None]:
        """Newest acknowledged version by replica."""
        return dict(self._replicas)

    def acknowledged_by_all(self) -> int | None:
        """Newest version that every replica is at or above; None if some acknowledged nothing, or there is none."""
        versions = [ref.version if ref else None for ref in self._replicas.values()]
        return min((v for v in versions if v is not None), default=None) if None not in versions else None

    def convergence_seconds(self, ref: VersionRef) -> float | None:
        """`fleet/convergence_seconds` of `ref`, None while it has not converged.

        A replica that went straight to a later version counts with the time of that one, and a version from before
        the history that is kept is taken for as old as that.
        """
        since = (e.published for v, e in self._activations.items() if v >= ref.version)
        published = min((t for t in since if t is not None), default=None)
        if published is None or not self._replicas:
            return None
        times = [t for t in (self._reached(name, ref.version) for name in self._replicas) if t is not None]
        needed = math.ceil(self._share * len(self._replicas))
        return max(0.0, sorted(times)[needed - 1] - published) if len(times) >= needed else None

    def metrics(self) -> dict[str, float]:
        """The newest converged version's `fleet/convergence_seconds`, if any."""
        for version in sorted(self._activations, reverse=True):
            seconds = self.convergence_seconds(VersionRef(self._run_id, version))
            if seconds is not None:
                return {"fleet/convergence_seconds": seconds}
        return {}

    # --- inside -----------------------------------------------------------------------------------

    def _reached(self, replica_id: str, version: int) -> float | None:
        times = (e.by_replica.get(replica_id) for v, e in self._activations.items() if v >= version)
        return min((t for t in times if t is not None), default=None)

    @staticmethod
    async def _hook(hook: Hook | None, name: str, ref: VersionRef) -> None:
        if hook is not None:
            try:
                await asyncio.to_thread(hook, ref)
            except Exception as error:
                raise PublicationFailed(f"{name} failed for {ref}: {type(error).__name__}: {error}") from error

    async def _move(self, ref: VersionRef) -> None:
        async with self._changed:
            self._latest, self._open = ref, None
            self._activations.setdefault(ref.version, Activations()).published = time.time()
            for version in sorted(self._activations)[: -self._keep_history]:
                del self._activations[version]
            self._changed.notify_all()

    async def _close(self, ref: VersionRef) -> None:
        async with self._changed:
            if self._open == ref:
                self._open = None
            self._changed.notify_all()

    async def _wait(self, ready: Callable[[], bool], timeout: float, result: Callable[[], T]) -> T | None:
        async with self._changed:
            if not ready():
                try:
                    async with asyncio.timeout(timeout):
                        await self._changed.wait_for(ready)
                except TimeoutError:
                    return None
            return result()
