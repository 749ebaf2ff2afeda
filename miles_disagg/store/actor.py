"""The version store as a Ray actor: a shell around `ledger.VersionLedger`, and its handle in the ports' form.

Rules and state are the ledger's. A restarted actor has forgotten them: until somebody claims the run again, which
brings the pointer back from the store (`cluster.ledger`), it answers everything with NotClaimed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions

from miles_disagg.config.imports import import_function
from miles_disagg.domain.errors import NotClaimed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import open_store
from miles_disagg.store.claims import Claim
from miles_disagg.store.ledger import POST_WRITE, PRE_READ, Hook, VersionLedger
from miles_disagg.store.lineage import Kind
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.retention import Collected
from miles_disagg.store.versions import DEFAULT_TTL, VersionStore


def import_hook(path: str | None, flag: str) -> Hook | None:
    """A hook for mounts by its import path, None for none; ConfigError naming `flag`."""
    return import_function(path, flag) if path else None


@ray.remote(num_cpus=0, max_restarts=0)
class VersionStoreActor:
    """One run's versions. url: None for versions without files (broadcast).

    No concurrency group of its own: Ray gives each group its own event loop, and the ledger belongs to one. Nothing
    here blocks the loop, so long polls and writers interleave.
    """

    def __init__(
        self,
        run_id: str,
        url: str | None,
        share: float = 1.0,
        post_write_path: str | None = None,
        pre_read_path: str | None = None,
    ):
        store = VersionStore(open_store(url)) if url else None
        pre_read, post_write = import_hook(pre_read_path, PRE_READ), import_hook(post_write_path, POST_WRITE)
        self._ledger = VersionLedger(run_id, store, share=share, pre_read=pre_read, post_write=post_write)
        self._alive: asyncio.Task[None] | None = None

    async def claim(
        self, base_digest: str, boot_version: int, owner: str | None, ttl: float, epoch: int | None = None
    ) -> Claim | None:
        terms = {"boot_version": boot_version, "owner": owner, "ttl": ttl, "epoch": epoch}
        claim = await self._ledger.claim(base_digest, **terms)
        self._alive = asyncio.create_task(self._ledger.keep_alive(ttl))
        return claim

    async def claimed(self) -> bool:
        """False in a process that was started anew and was not told to claim the run yet."""
        return self._ledger.claimed

    def _check_claimed(self, method: str) -> None:
        if not self._ledger.claimed:
            raise NotClaimed(f"{method}: this process of the version store has no claim yet; its driver sees to it")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the ledger that writes."""
        self._check_claimed(method)
        return await getattr(self._ledger, method)(*args, **kwargs)

    async def watch(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the ledger that waits or reports; never behind a publication."""
        self._check_claimed(method)
        result = getattr(self._ledger, method)(*args, **kwargs)
        return await result if asyncio.iscoroutine(result) else result


class RemoteLedger:
    """A handle of the actor with the ledger's methods: `LatestSource`, `ActivationSink` and `Committer` in one.

    What only watches or reports is asked again while the actor is being restarted, for `patience` seconds.
    """

    def __init__(self, actor: Any, patience: float = 90.0):
        self.actor, self._patience = actor, patience

    async def _write(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.actor.call.remote(method, *args, **kwargs)

    async def _watch(self, method: str, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await self.actor.watch.remote(method, *args, **kwargs)
            except (ray.exceptions.RayActorError, NotClaimed):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.5)

    async def claim(
        self, base_digest: str, *, boot_version: int = 0, owner: str | None = None, ttl: float = DEFAULT_TTL
    ) -> Claim | None:
        return await self.actor.claim.remote(base_digest, boot_version, owner, ttl)

    async def announce(self) -> None:
        await self._write("announce")

    async def release(self) -> None:
        await self._write("release")

    async def begin(self) -> VersionRef:
        return await self._write("begin")

    async def commit(
        self, ref: VersionRef, description: Description | None = None, receipts: Sequence[Receipt] = ()
    ) -> None:
        await self._write("commit", ref, description, list(receipts))

    async def commit_shortcut(
        self, ref: VersionRef, kind: Kind, description: Description, receipts: Sequence[Receipt]
    ) -> None:
        await self._write("commit_shortcut", ref, kind, description, list(receipts))

    async def abort(self, ref: VersionRef) -> None:
        await self._write("abort", ref)

    async def collect(self, *, keep: int | None, keep_files: bool) -> Collected:
        return await self._write("collect", keep=keep, keep_files=keep_files)

    async def latest(self) -> VersionRef | None:
        return await self._watch("latest")

    async def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        return await self._watch("wait_newer", than, timeout)

    async def wait_converged(self, ref: VersionRef, timeout: float) -> float | None:
        return await self._watch("wait_converged", ref, timeout)

    async def register(self, replica_id: str) -> None:
        await self._watch("register", replica_id)

    async def forget(self, replica_id: str) -> None:
        await self._watch("forget", replica_id)

    async def record_activation(self, replica_id: str, ref: VersionRef, at: float) -> None:
        await self._watch("record_activation", replica_id, ref, at)

    async def replicas(self) -> dict[str, VersionRef | None]:
        return await self._watch("replicas")

    async def metrics(self) -> dict[str, float]:
        return await self._watch("metrics")
