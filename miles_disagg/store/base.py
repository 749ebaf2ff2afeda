"""The object-store port: immutable blobs under keys, and one primitive that decides races.

What a version, a claim or a pointer is lives in `versions`; adapters are `local` (a directory) and `s3`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from miles_disagg.domain.errors import CheckpointError, MilesDisaggError

MAX_KEY_BYTES = 1024
PROBES = "_probes"
"""Where `check` writes; no run id can be called so."""


class StoreError(MilesDisaggError):
    """The store refused or could not be reached, after retries. Names the key and the store."""


class ObjectNotFound(StoreError):
    """No object under this key."""

    def __init__(self, key: str, where: str):
        self.key, self.where = key, where
        super().__init__(f"no object {key!r} in {where}")


class CasConflict(StoreError):
    """A compare-and-swap lost: the object is not what the caller saw. actual: its token (None: absent or unknown)."""

    def __init__(self, key: str, expected: str | None, actual: str | None, where: str):
        self.key, self.expected, self.actual, self.where = key, expected, actual, where
        super().__init__(
            f"{key!r} in {where} changed: expected {expected or 'absent'}, found {actual or 'something else'}"
        )


@dataclass(frozen=True)
class ObjectInfo:
    """An entry of a listing. size: bytes; modified: Unix time in seconds."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Stamped:
    """An object's bytes with the token that a compare-and-swap takes."""

    data: bytes
    token: str


def check_key(key: str) -> str:
    """Return `key` if it is a relative path of plain segments, else raise CheckpointError naming it."""
    segments = key.split("/") if isinstance(key, str) else []
    if (
        not segments
        or len(key.encode()) > MAX_KEY_BYTES
        or any(not s or s.startswith(".") or set(s) & set("\\\0\r\n") for s in segments)
    ):
        raise CheckpointError(f"{key!r} is not a legal object key: relative, no part empty or with a leading dot")
    return key


class ObjectStore(Protocol):
    """Blobs under keys. All calls block: run them in a thread when on an event loop.

    A reader never sees half of an object, also after a crash of the writer. Every call raises StoreError when the
    store stays unreachable, ObjectNotFound where a key must exist, and CheckpointError for an illegal key.
    """

    url: str
    scratch: Path
    """A local directory for files that are about to be `put` (on the store's own file system if it is local)."""

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """The whole object; CheckpointError if it is larger than `max_bytes`."""
        ...

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end). StoreError if the object is shorter."""
        ...

    def read(self, key: str) -> Stamped:
        """A small object with its token."""
        ...

    def size(self, key: str) -> int:
        """Size in bytes."""
        ...

    def put(self, key: str, source: bytes | Path, *, consume: bool = False) -> None:
        """Create or replace. A file is streamed (multipart on S3); consume: it is synced and may be moved away."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create and return the token; CasConflict if the key exists (unless with these very bytes)."""
        ...

    def compare_and_swap(self, key: str, expected: str | None, data: bytes) -> str:
        """Replace the object whose token is `expected` (None: must be absent); return the new token.

        CasConflict if it changed. Put a nonce into `data`: tokens may be content hashes, so bytes that repeat let a
        stale writer win (ABA), and a write whose answer was lost is recognised by its bytes.
        """
        ...

    def download(self, key: str, path: Path) -> int:
        """Copy the object to the local file `path` (replaced, synced); return its size in bytes."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` + '/' ('' for all), ascending by key."""
        ...

    def delete(self, key: str) -> None:
        """Remove; no error if absent."""
        ...

    def check(self) -> None:
        """StoreError unless this store can be written and decides races; called before publishing."""
        ...

    def sweep(self, older_than: float) -> int:
        """Remove what crashed writers left unfinished more than `older_than` seconds ago; return how many."""
        ...


def open_store(url: str) -> ObjectStore:
    """Open `s3://bucket/prefix`, `file:///dir` or a directory path. The directory is made when first written to."""
    if url.startswith("s3://"):
        from miles_disagg.store.s3 import S3Store

        return S3Store(url)
    if "://" in url and not url.startswith("file://"):
        raise StoreError(f"{url!r}: only a directory, file:// and s3:// are supported (--update-weight-disk-dir)")
    from miles_disagg.store.local import LocalStore

    return LocalStore(Path(url.removeprefix("file://")))


def store_time(objects: ObjectStore) -> float:
    """What the store's clock shows, Unix time in seconds: the time that it gives to an object written now."""
    key = f"{PROBES}/{uuid.uuid4().hex}"
    objects.put(key, b"?")
    try:
        return next(info.modified for info in objects.list(PROBES) if info.key == key)
    except StopIteration:
        raise StoreError(f"{objects.url} does not list {key!r}, which was just written") from None
    finally:
        objects.delete(key)


def check_races(objects: ObjectStore, remedy: str) -> None:
    """StoreError with `remedy` if the store lets a write through whose condition does not hold."""
    key = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        token = objects.compare_and_swap(key, None, b"1")
        objects.compare_and_swap(key, token, b"2")
        for expected in (None, token):
            try:
                objects.compare_and_swap(key, expected, b"3")
            except CasConflict:
                continue
            raise StoreError(
                f"{objects.url} lets a stale write win: two publishers could both move the pointer. {remedy}"
            )
    finally:
        objects.delete(key)
