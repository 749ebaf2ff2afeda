"""The object store on S3 and what speaks its protocol, through obstore.

Endpoint, region and credentials come from the usual environment (`AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID`, ...). Races are decided by conditional writes; the store must honour `If-None-Match` and
`If-Match` (`S3Store.check` finds out).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
import stamina
from obstore import exceptions
from obstore import store as obstore_store

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.store.base import CasConflict, ObjectInfo, ObjectNotFound, Stamped, StoreError, check_key, check_races

_PART = 16 << 20
_READERS = 8
_FINAL = (
    FileNotFoundError,
    exceptions.AlreadyExistsError,
    exceptions.PreconditionError,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
)
T = TypeVar("T")


class S3Store:
    """`ObjectStore` on `s3://bucket/prefix`. attempts, timeout: tries of one request and seconds each may take."""

    def __init__(self, url: str, *, attempts: int = 6, timeout: float = 60.0, config: dict[str, Any] | None = None):
        self.url = url.rstrip("/")
        self.scratch = Path(tempfile.gettempdir())
        self._attempts = attempts
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        settings: dict[str, Any] = {"aws_endpoint_url": endpoint} if endpoint else {}
        settings |= config or {}
        self._store = obstore_store.S3Store.from_url(
            self.url,
            config=settings,  # pyright: ignore[reportArgumentType]
            client_options={
                "timeout": timedelta(seconds=timeout),
                "connect_timeout": timedelta(seconds=min(10.0, timeout)),
                "allow_http": str(settings.get("aws_endpoint_url", "")).startswith("http://"),
            },
            # Retrying inside a conditional write would report our own success as a lost race: retries are ours.
            retry_config={"max_retries": 0},
        )

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """See ObjectStore."""

        def fetch() -> bytes:
            result = obstore.get(self._store, check_key(key))
            if max_bytes is not None and result.meta["size"] > max_bytes:
                raise CheckpointError(f"object is larger than {max_bytes} bytes", file=f"{self.url}/{key}")
            return bytes(result.bytes())

        return self._retried(key, fetch)

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See ObjectStore."""
        check_key(key)
        data = self._retried(key, lambda: bytes(obstore.get_range(self._store, key, start=begin, end=end)))
        if len(data) != end - begin:
            raise StoreError(f"{self.url}/{key} has no bytes [{begin}, {end}): it is truncated")
        return data

    def read(self, key: str) -> Stamped:
        """See ObjectStore."""

        def fetch() -> Stamped:
            result = obstore.get(self._store, check_key(key))
            return Stamped(bytes(result.bytes()), _etag(result.meta["e_tag"], self.url))

        return self._retried(key, fetch)

    def size(self, key: str) -> int:
        """See ObjectStore."""
        return self._retried(key, lambda: obstore.head(self._store, check_key(key))["size"])

    def put(self, key: str, source: bytes | Path, *, consume: bool = False) -> None:
        """See ObjectStore. Above 16 MiB the upload is multipart; an unfinished one is invisible to readers."""
        check_key(key)
        self._retried(key, lambda: obstore.put(self._store, key, source, chunk_size=_PART, max_concurrency=_READERS))

    def put_if_absent(self, key: str, data: bytes) -> str:
        """See ObjectStore."""
        return self.compare_and_swap(key, None, data)

    def compare_and_swap(self, key: str, expected: str | None, data: bytes) -> str:
        """See ObjectStore.

        An answer may be lost after the write took effect, so every failure is settled by reading back: our bytes
        there mean success, another token a lost race, and the old token that a further try is harmless.
        """
        mode: Any = "create" if expected is None else {"e_tag": expected}
        failure: Exception | None = None
        for attempt in range(self._attempts):
            try:
                result = obstore.put(self._store, check_key(key), data, mode=mode, use_multipart=False)
                return _etag(result["e_tag"], self.url)
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise self._error(key, error) from error
            except (exceptions.BaseError, OSError) as error:
                failure = error
            try:
                found: Stamped | None = self.read(key)
            except ObjectNotFound:
                found = None
            if found is not None and found.data == data:
                return found.token
            if (found.token if found else None) != expected:
                raise CasConflict(key, expected, found.token if found else None, self.url)
            time.sleep(random.uniform(0, min(2.0, 0.05 * 2**attempt)))
        raise self._error(key, failure) from failure

    def download(self, key: str, path: Path) -> int:
        """See ObjectStore. Ranges of 16 MiB in parallel; the object's ETag must not change meanwhile."""
        meta = self._retried(key, lambda: obstore.head(self._store, check_key(key)))
        size = meta["size"]
        with open(path, "wb") as file:
            os.truncate(file.fileno(), size)

            def fetch(begin: int) -> None:
                end = min(begin + _PART, size)
                os.pwrite(file.fileno(), self._range_of(key, begin, end, meta["e_tag"]), begin)

            with ThreadPoolExecutor(_READERS, thread_name_prefix="s3-read") as pool:
                for _ in pool.map(fetch, range(0, size, _PART)):
                    pass
            os.fsync(file.fileno())
        return size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore."""
        if prefix:
            check_key(prefix)

        def fetch() -> list[ObjectInfo]:
            batches = obstore.list(self._store, prefix or None)
            return [
                ObjectInfo(m["path"], m["size"], m["last_modified"].timestamp()) for batch in batches for m in batch
            ]

        yield from sorted(self._retried(prefix, fetch), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        try:
            self._retried(key, lambda: obstore.delete(self._store, check_key(key)))
        except ObjectNotFound:
            return

    def sweep(self, older_than: float) -> int:
        """See ObjectStore. Unfinished multipart uploads are the bucket's lifecycle rule to remove."""
        return 0

    def check(self) -> None:
        """See ObjectStore. Some servers that speak S3 ignore `If-None-Match` and `If-Match`."""
        check_races(self, "Use a server with conditional writes (AWS S3, SeaweedFS, MinIO).")

    def _range_of(self, key: str, begin: int, end: int, etag: str | None) -> bytes:
        def fetch() -> bytes:
            options: Any = {"range": (begin, end)} | ({"if_match": etag} if etag else {})
            data = bytes(obstore.get(self._store, key, options=options).bytes())
            if len(data) != end - begin:
                raise OSError(f"got {len(data)} of {end - begin} bytes")
            return data

        return self._retried(key, fetch)

    def _retried(self, key: str, call: Callable[[], T]) -> T:
        """`call` with jittered retries of what may pass by itself; obstore's errors become the port's."""
        policy = stamina.retry_context(
            on=lambda error: isinstance(error, (exceptions.BaseError, OSError)) and not isinstance(error, _FINAL),
            attempts=self._attempts,
            timeout=None,
            wait_initial=0.05,
            wait_max=5.0,
            wait_jitter=0.5,
        )
        try:
            for attempt in policy:
                with attempt:
                    return call()
        except FileNotFoundError:
            raise ObjectNotFound(key, self.url) from None
        except (exceptions.BaseError, OSError) as error:
            raise self._error(key, error) from error
        raise AssertionError("stamina ends with a result or an error")

    def _error(self, key: str, error: Exception | None) -> StoreError:
        text = " ".join(str(error).split())
        return StoreError(f"{self.url}/{key}: {text[:500]} (check AWS_ENDPOINT_URL, AWS_REGION and credentials)")


def _etag(value: str | None, url: str) -> str:
    if not value:
        raise StoreError(f"{url} gives no ETag: the pointer cannot be moved safely on it")
    return value
