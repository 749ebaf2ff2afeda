"""The object store on a directory, POSIX or NFS.

A write goes to a temporary file in `<root>/.store/tmp`, is synced, and renamed into place: a reader sees all of an
object or nothing. Compare-and-swap holds an flock over read, compare and rename, so it is exact between processes of
one host (and between hosts where the mount honours flock, as NFS v4 does). Nothing depends on inotify.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from miles_disagg.domain.errors import CheckpointError, DeadlineExceeded
from miles_disagg.store.base import CasConflict, ObjectInfo, ObjectNotFound, Stamped, StoreError, check_key, check_races

_PRIVATE = ".store"
_CHUNK = 8 << 20


class LocalStore:
    """`ObjectStore` on the directory `root`. `lock_timeout`: seconds to wait for another process's compare-and-swap."""

    def __init__(self, root: Path, lock_timeout: float = 30.0):
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self.scratch = self.root / _PRIVATE / "tmp"
        self._lock_timeout = lock_timeout

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """See ObjectStore."""
        with self._open(key) as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise CheckpointError(f"object is larger than {max_bytes} bytes", file=f"{self.url}/{key}")
            return file.read()

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See ObjectStore."""
        with self._open(key) as file:
            file.seek(begin)
            data = file.read(end - begin)
        if len(data) != end - begin:
            raise StoreError(f"{self.url}/{key} has no bytes [{begin}, {end}): it is truncated")
        return data

    def read(self, key: str) -> Stamped:
        """See ObjectStore."""
        data = self.get(key)
        return Stamped(data, _token(data))

    def size(self, key: str) -> int:
        """See ObjectStore."""
        with self._open(key) as file:
            return os.fstat(file.fileno()).st_size

    def put(self, key: str, source: bytes | Path, *, consume: bool = False) -> None:
        """See ObjectStore."""
        path = self._path(key)
        if consume and isinstance(source, Path):
            try:
                return _into_place(os.rename, source, path)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
        with self._temporary(source) as temporary:
            _into_place(os.rename, temporary, path)

    def put_if_absent(self, key: str, data: bytes) -> str:
        """See ObjectStore. `link` fails when the name exists, on NFS too, so no lock is needed."""
        path = self._path(key)
        with self._temporary(data) as temporary:
            try:
                _into_place(os.link, temporary, path)
            except FileExistsError:
                found = self.read(key)
                if found.data != data:
                    raise CasConflict(key, None, found.token, self.url) from None
        return _token(data)

    def compare_and_swap(self, key: str, expected: str | None, data: bytes) -> str:
        """See ObjectStore."""
        with self._locked(key):
            try:
                actual = self.read(key).token
            except ObjectNotFound:
                actual = None
            if actual != expected:
                raise CasConflict(key, expected, actual, self.url)
            self.put(key, data)
        return _token(data)

    def download(self, key: str, path: Path) -> int:
        """See ObjectStore."""
        with self._open(key) as source, open(path, "wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
            return target.tell()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore. Names that start with a dot are not objects."""
        top = self._path(prefix) if prefix else self.root
        yield from self._walk(top, prefix)

    def _walk(self, directory: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            entries = sorted(os.scandir(directory), key=lambda e: e.name + ("/" if e.is_dir() else ""))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(directory / entry.name, key)
                continue
            with suppress(FileNotFoundError):  # deleted while we were listing
                stat = entry.stat()
                yield ObjectInfo(key, stat.st_size, stat.st_mtime)

    def delete(self, key: str) -> None:
        """See ObjectStore. Directories that become empty go too."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.root:
                break
            try:
                parent.rmdir()
            except OSError:
                break

    def check(self) -> None:
        """See ObjectStore. Fails where flock is not supported, or is not exact."""
        check_races(self, "Mount it with working locks, or use an s3:// store.")

    def sweep(self, older_than: float) -> int:
        """See ObjectStore."""
        removed = 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.scratch):
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime < older_than:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)
                    removed += 1
        return removed

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _open(self, key: str):
        try:
            return open(self._path(key), "rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectNotFound(key, self.url) from None

    @contextmanager
    def _temporary(self, source: bytes | Path) -> Iterator[Path]:
        """A synced temporary file with the bytes of `source`; removed unless it was renamed away."""
        _make_directory(self.scratch)
        path = self.scratch / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with open(path, "xb") as target:
                if isinstance(source, Path):
                    with open(source, "rb") as file:
                        while chunk := file.read(_CHUNK):
                            target.write(chunk)
                else:
                    target.write(source)
                target.flush()
                os.fsync(target.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        directory = self.root / _PRIVATE / "locks"
        _make_directory(directory)
        deadline = time.monotonic() + self._lock_timeout
        fd = os.open(directory / xxhash.xxh3_64_hexdigest(key.encode()), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                        raise StoreError(
                            f"{self.url} is on a file system without flock ({error}): mount it with locks "
                            "(nfs: v4, or without nolock), or use an s3:// store"
                        ) from error
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the lock on {key} in {self.url}", self._lock_timeout, "its holder is stuck"
                    )
                time.sleep(random.uniform(0.002, 0.02))
            yield
        finally:
            os.close(fd)


def _token(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _into_place(move: Callable[[Path, Path], None], source: Path, target: Path) -> None:
    """Rename or link into a directory that a concurrent `delete` may be removing because it is empty."""
    for attempt in range(20):
        _make_directory(target.parent)
        try:
            move(source, target)
            return _sync_directory(target.parent)
        except FileNotFoundError:
            if attempt == 19 or not source.exists():
                raise


def _make_directory(path: Path) -> None:
    """Make `path` and sync every parent that gained an entry, so that a rename into it survives a power cut."""
    missing = []
    current = path
    while not current.is_dir():
        missing.append(current)
        current = current.parent
    for directory in reversed(missing):
        directory.mkdir(parents=True, exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
