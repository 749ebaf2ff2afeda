"""One fetch a host: version files that several replicas on a host need are downloaded by the first of them.

An `ObjectStore` around another one, with a directory that the host's replicas share. Only payload files of versions
go through it; they never change once their index exists. Everything else, the pointer above all, is read afresh.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from miles_disagg.store.base import ObjectStore
from miles_disagg.store.claims import MAX_JSON_BYTES, Claim

_KEEP_SECONDS = 900.0


class SharedFetch:
    """See the module. Files that nobody asked for in `keep_seconds` are removed."""

    def __init__(self, inner: ObjectStore, directory: Path, *, keep_seconds: float = _KEEP_SECONDS):
        self._inner, self._directory, self._keep_seconds = inner, Path(directory).absolute(), keep_seconds
        self._directory.mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def download(self, key: str, path: Path) -> int:
        """See `ObjectStore`: from the shared directory, after fetching into it if nobody has yet."""
        with self._locked(name := self._name(key)):
            shared = self._directory / name
            if not shared.exists():
                partial = self._directory / f"{name}.{uuid.uuid4().hex}.part"
                try:
                    self._inner.download(key, partial)
                    partial.replace(shared)
                finally:
                    partial.unlink(missing_ok=True)
            os.utime(shared)
            shutil.copyfile(shared, path)  # a copy: what is adopted as a checkpoint is patched in place later
        self._sweep()
        return path.stat().st_size

    def _name(self, key: str) -> str:
        """The claim's birth tells two runs of one name apart, where a store was emptied and used again."""
        run_key = f"{key.partition('/')[0]}/run.json"
        created = Claim.from_json(self._inner.get(run_key, MAX_JSON_BYTES), run_key).created
        return hashlib.blake2b(f"{self._inner.url}\0{created}\0{key}".encode(), digest_size=16).hexdigest()

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with open(self._directory / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        oldest = time.time() - self._keep_seconds
        for entry in self._directory.iterdir():
            with suppress(FileNotFoundError):
                if entry.suffix != ".lock" and entry.stat().st_mtime < oldest:
                    entry.unlink()


def shared_fetch(inner: ObjectStore, directory: Path) -> ObjectStore:
    """`inner` behind a directory that replicas on this host share."""
    return cast(ObjectStore, SharedFetch(inner, directory))
