"""What a relay stands on: the store behind it, HTTP to its peers, files on this host, and the stager's door to it.

The rules are `relay`. `RelayedStore.download` is called from the stager's thread, everything else on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import aiohttp

from miles_disagg.replica.relay import PeerFailed, Relay, RelaySettings
from miles_disagg.store.base import ObjectNotFound, ObjectStore
from miles_disagg.store.publication import FileProof, file_proofs
from miles_disagg.weights.checkpoint import INDEX_FILE, MAX_INDEX_BYTES

_RANGE = 8 << 20
_AHEAD = 4  # ranges of the store read at a time
_PROOF_SECONDS = 30.0
_PROOFS = 32


class FileSpool:
    """One file under a relay's directory."""

    def __init__(self, path: Path):
        self.path = path
        path.unlink(missing_ok=True)

    async def append(self, data: bytes) -> None:
        """See `Spool`."""
        await asyncio.to_thread(self._append, data)

    def _append(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    async def read(self, begin: int, end: int) -> bytes:
        """See `Spool`."""
        return await asyncio.to_thread(self._read, begin, end)

    def _read(self, begin: int, end: int) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - begin, begin)

    async def clear(self) -> None:
        """See `Spool`."""
        self.remove()

    def remove(self) -> None:
        """See `Spool`."""
        self.path.unlink(missing_ok=True)


class HttpLinks:
    """`relay.Links` to an object store and to replicas that relay. directory: its own, emptied here."""

    def __init__(self, origin: ObjectStore, directory: Path, *, token: str | None = None, connect: float = 2.0):
        self._origin, self._directory, self._connect = origin, Path(directory).absolute(), connect
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._proofs: OrderedDict[str, tuple[float, dict[str, FileProof]]] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    async def from_origin(self, key: str, nbytes: int, block: int) -> AsyncGenerator[bytes, None]:
        """See `Links`. A few ranges at a time; StoreError as the store gives it."""
        begins = iter(range(0, nbytes, _RANGE))
        ahead: list[asyncio.Task[bytes]] = []

        def read_on() -> None:
            if (begin := next(begins, None)) is not None:
                end = min(nbytes, begin + _RANGE)
                ahead.append(asyncio.create_task(asyncio.to_thread(self._origin.get_range, key, begin, end)))

        try:
            for _ in range(_AHEAD):
                read_on()
            while ahead:
                data = await ahead[0]
                ahead.pop(0)
                read_on()
                yield data
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def from_peer(self, url: str, key: str, block: int) -> AsyncGenerator[bytes, None]:
        """See `Links`."""
        begun = False
        try:
            async with self._client(block).get(f"{url}/relay/{key}") as response:
                if response.status != 200:
                    raise PeerFailed(f"status {response.status}: {(await response.text())[:200]}")
                async for data in response.content.iter_chunked(block):
                    begun = True
                    yield data
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(f"{type(error).__name__}: {error}", begun) from error

    async def proof(self, key: str) -> FileProof | None:
        """See `Links`. An index is asked for again after a while: a store may be emptied and used anew."""
        prefix, _, name = key.rpartition("/")
        known = self._proofs.get(prefix)
        if known is None or time.monotonic() - known[0] > _PROOF_SECONDS:
            try:
                raw = await asyncio.to_thread(self._origin.get, f"{prefix}/{INDEX_FILE}", MAX_INDEX_BYTES)
            except ObjectNotFound:
                return None
            known = self._proofs[prefix] = (time.monotonic(), file_proofs(raw))
            self._proofs.move_to_end(prefix)
            while len(self._proofs) > _PROOFS:
                self._proofs.popitem(last=False)
        return known[1].get(name)

    def spool(self, key: str, proof: FileProof) -> FileSpool:
        """See `Links`."""
        name = hashlib.blake2b(f"{key}\0{proof.digest}".encode(), digest_size=16).hexdigest()
        return FileSpool(self._directory / name)

    def _client(self, block: int) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers, read_bufsize=block)
        return self._session

    async def close(self) -> None:
        """Close connections and remove the directory."""
        if self._session is not None:
            await self._session.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class RelayedStore:
    """An `ObjectStore` whose payload files come through a relay. Everything else, the pointer and the indexes above
    all, is read from the store itself, and so is a file whose index says nothing to verify it by."""

    def __init__(self, inner: ObjectStore, directory: Path, name: str, *, token: str | None = None):
        self._inner, self._links = inner, HttpLinks(inner, directory, token=token)
        self.relay = Relay(name, self._links, RelaySettings())
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self) -> None:
        """Relay on the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def download(self, key: str, path: Path) -> int:
        """See `ObjectStore`."""
        if self._loop is None:
            return self._inner.download(key, path)
        spool = asyncio.run_coroutine_threadsafe(self._fetch(key), self._loop).result()
        if spool is None:
            return self._inner.download(key, path)
        shutil.copyfile(spool.path, path)  # a copy: what is adopted as a checkpoint is patched in place later
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return path.stat().st_size

    async def _fetch(self, key: str) -> FileSpool | None:
        proof = await self._links.proof(key)
        return None if proof is None else cast(FileSpool, await self.relay.fetch(key, proof))

    async def close(self) -> None:
        """End transfers and remove what was kept for others."""
        await self.relay.close()
        await self._links.close()


def relayed(
    inner: ObjectStore, directory: Path, name: str, *, token: str | None = None
) -> tuple[ObjectStore, RelayedStore]:
    """`inner` behind a relay (as the port, and as itself)."""
    store = RelayedStore(inner, directory, name, token=token)
    return cast(ObjectStore, store), store
