"""Version files from other hosts: each host fetches from the one above it in a tree, and passes on what it has.

A file is passed on while it still arrives, so a tree costs latency, not transfers one after another. What a file must
be (size, digest) is read from the origin's index; its last block is kept back until that is certain, so nobody is
handed a whole file that is wrong. A peer that is dead, silent, slow or lying is passed over with a reason: the one
above it is asked, then the origin. Where peers stand in the tree is the gateway's to say (`gateway.relays`). Links and
disks are `relay_links`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from miles_disagg.domain.errors import CheckpointError, ChecksumMismatch, DeadlineExceeded, MilesDisaggError
from miles_disagg.store.publication import FileProof
from miles_disagg.weights.digest import new_hasher

log = logging.getLogger(__name__)


class PeerFailed(MilesDisaggError):
    """A peer did not give a file. `begun`: it had begun to, so it may have met a bad source itself: ask it again."""

    def __init__(self, reason: str, begun: bool = False):
        self.begun = begun
        super().__init__(reason)


@dataclass(frozen=True)
class RelaySettings:
    """Seconds and bytes. stall: silence of a peer until another is asked; slowest: bytes a second, on average after
    `stall`, below which a peer is passed over; settle: for a gateway's first word about peers, then the origin is
    asked; keep: how long a file is kept for others after it was last read; block: read and passed on at a time."""

    stall: float = 10.0
    slowest: float = 256 * 1024
    settle: float = 5.0
    keep: float = 900.0
    block: int = 1 << 20


class Spool(Protocol):
    """Where one file is collected and read from."""

    async def append(self, data: bytes) -> None:
        """Add at the end."""
        ...

    async def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of what was added."""
        ...

    async def clear(self) -> None:
        """Start over with nothing."""
        ...

    def remove(self) -> None:
        """Give it up for good."""
        ...


class Links(Protocol):
    """How a relay reaches the store and other relays. Blocks come in order."""

    def from_origin(self, key: str, nbytes: int, block: int) -> AsyncGenerator[bytes, None]:
        """The object from the store."""
        ...

    def from_peer(self, url: str, key: str, block: int) -> AsyncGenerator[bytes, None]:
        """The object from the relay at `url`. PeerFailed."""
        ...

    async def proof(self, key: str) -> FileProof | None:
        """What the origin's index says of the file; None if the index, or a proof in it, does not exist."""
        ...

    def spool(self, key: str, proof: FileProof) -> Spool:
        """An empty spool."""
        ...


class Held:
    """One file here, or on its way here. `received` bytes are in the spool; `attempt` counts starts from nothing."""

    def __init__(self, key: str, proof: FileProof, spool: Spool):
        self.key, self.proof, self.spool = key, proof, spool
        self.received = self.attempt = 0
        self.whole = False
        self.used = 0.0
        self.source = ""
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def available(self, block: int) -> int:
        """Bytes that may be passed on: all but the last block until the whole is verified."""
        return self.received if self.whole else min(self.received, max(0, self.proof.nbytes - block))

    def tell(self) -> None:
        """Something changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._news.wait()


class Relay:
    """See the module. One per replica, on its event loop."""

    def __init__(
        self,
        name: str,
        links: Links,
        settings: RelaySettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._name, self._links, self.settings, self._clock = name, links, settings or RelaySettings(), clock
        self._held: dict[str, Held] = {}
        self._above: tuple[str, ...] = ()
        self._known = asyncio.Event()
        self.totals = {"from_origin_bytes": 0, "from_peer_bytes": 0, "passed_on_bytes": 0, "peer_failures": 0}

    def follow(self, above: Sequence[str]) -> None:
        """A gateway said who stands above: the parent first, nobody for the one that reads from the origin."""
        self._above = tuple(above)
        self._known.set()

    async def fetch(self, key: str, proof: FileProof) -> Spool:
        """The verified file. Raises what the origin raised once no peer could give it, ChecksumMismatch among it."""
        held = self._get(key, proof)
        assert held.task is not None
        await asyncio.shield(held.task)
        held.used = self._clock()
        return held.spool

    async def pass_on(self, key: str) -> AsyncGenerator[bytes, None]:
        """The file in blocks for another host, while it still arrives here. PeerFailed if it cannot be given."""
        proof = await self._links.proof(key)
        if proof is None:
            raise PeerFailed(f"no file {key} with a digest in its index")
        held = self._get(key, proof)
        at, attempt = 0, held.attempt
        while at < proof.nbytes:
            if held.attempt != attempt and at:
                raise PeerFailed(f"{key} is fetched here once more", begun=True)
            attempt = held.attempt
            end = min(held.available(self.settings.block), at + self.settings.block)
            if end > at:
                data = await held.spool.read(at, end)
                if held.attempt != attempt:
                    continue
                yield data
                at, held.used = end, self._clock()
                self.totals["passed_on_bytes"] += len(data)
            elif held.task is not None and held.task.done() and not held.whole:
                raise PeerFailed(f"{key} could not be fetched here either", begun=bool(at))
            else:
                await held.changed()

    # --- fetching -----------------------------------------------------------------------------------

    def _get(self, key: str, proof: FileProof) -> Held:
        """What is here or on its way; begun if there is nothing."""
        self._sweep()
        held = self._held.get(f"{key} {proof.digest}")
        if held is None or (held.task is not None and held.task.done() and not held.whole):
            held = self._held[f"{key} {proof.digest}"] = Held(key, proof, self._links.spool(key, proof))
            held.used = self._clock()
            held.task = asyncio.create_task(self._collect(held), name=f"relay {key}")
            held.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits sees it
        return held

    async def _collect(self, held: Held) -> None:
        try:
            for url in await self._peers():
                if await self._try(held, url):
                    return
            await self._receive(held, "the origin", self._links.from_origin, held.key, held.proof.nbytes)
            self.totals["from_origin_bytes"] += held.received
        finally:
            if not held.whole:
                held.spool.remove()
            held.tell()

    async def _peers(self) -> Iterator[str]:
        """The parent and the one above it."""
        if not self._known.is_set():
            try:
                async with asyncio.timeout(self.settings.settle):
                    await self._known.wait()
            except TimeoutError:
                log.info("%s: no gateway named a peer in %g s, asking the origin", self._name, self.settings.settle)
                self._known.set()  # later fetches do not wait again
        return iter(self._above[:2])

    async def _try(self, held: Held, url: str) -> bool:
        """True if the peer gave the file. One that broke off half way is asked once more: it starts over itself."""
        for again in (False, True):
            try:
                await self._receive(held, url, self._links.from_peer, url, held.key, slowest=self.settings.slowest)
                self.totals["from_peer_bytes"] += held.received
                return True
            except (PeerFailed, CheckpointError, DeadlineExceeded) as error:
                self.totals["peer_failures"] += 1
                more = not again and isinstance(error, PeerFailed) and error.begun
                log.warning("%s: %s from %s: %s; %s", self._name, held.key, url, error, "again" if more else "next")
                if not more:
                    return False
        return False

    async def _receive(
        self,
        held: Held,
        source: str,
        read: Callable[..., AsyncGenerator[bytes, None]],
        *where: object,
        slowest: float = 0.0,
    ) -> None:
        """Collect from one source and verify."""
        if held.received:
            held.received = 0
            held.attempt += 1
            held.tell()
            await held.spool.clear()
        held.source, begun, hasher, proof = source, self._clock(), new_hasher(), held.proof
        async with aclosing(read(*where, self.settings.block)) as blocks:
            while (data := await self._next(blocks, held, source if slowest else None)) is not None:
                if held.received + len(data) > proof.nbytes:
                    raise CheckpointError(f"more than the published {proof.nbytes} bytes", file=held.key)
                await held.spool.append(data)
                hasher.update(data)
                held.received += len(data)
                held.tell()
                seconds = self._clock() - begun
                if seconds > self.settings.stall and held.received < slowest * seconds:
                    raise PeerFailed(f"{held.received / seconds:,.0f} bytes a second are too few")
        if held.received != proof.nbytes:
            raise PeerFailed(f"broke off after {held.received} of {proof.nbytes} bytes", begun=held.received > 0)
        if hasher.hexdigest() != proof.digest:
            raise ChecksumMismatch(proof.digest, hasher.hexdigest(), file=held.key)
        held.whole = True

    async def _next(self, blocks: AsyncGenerator[bytes, None], held: Held, peer: str | None) -> bytes | None:
        """The next block, None at the end. A peer may not be silent for longer than `stall`."""
        if peer is None:  # the store has its own deadlines and retries
            return await anext(blocks, None)
        waiting: Awaitable[bytes | None] = anext(blocks, None)
        try:
            async with asyncio.timeout(self.settings.stall):
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(f"more than {held.received} bytes", self.settings.stall) from None

    def _sweep(self) -> None:
        oldest = self._clock() - self.settings.keep
        for name, held in list(self._held.items()):
            if held.used < oldest and held.task is not None and held.task.done():
                held.spool.remove()
                del self._held[name]

    async def close(self) -> None:
        """End what is under way and give up what is held."""
        tasks = [held.task for held in self._held.values() if held.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            held.spool.remove()
        self._held.clear()
