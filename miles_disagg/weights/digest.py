"""Checksums of tensor bytes, in the string forms that miles and slime write.

`xxh3-128` and `blake3` are lower-case hex digests; `adler32` is eight hex digits. What is hashed, and when, is the
caller's business.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import blake3
import xxhash

from miles_disagg.domain.errors import CheckpointError

DEFAULT_CHECKSUM = "xxh3-128"


class Hasher(Protocol):
    """Incremental hash of bytes; `update` releases the GIL for large buffers."""

    def update(self, data: Any, /) -> Any: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    """zlib's adler32 behind the incremental interface."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_HASHERS: dict[str, Callable[[], Hasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": _Adler32,
}
CHECKSUM_FORMATS = tuple(_HASHERS)


def new_hasher(checksum_format: str = DEFAULT_CHECKSUM) -> Hasher:
    """An empty hasher of `checksum_format`; CheckpointError for an unknown one."""
    try:
        return _HASHERS[checksum_format]()
    except KeyError:
        raise CheckpointError(
            f"unknown checksum_format {checksum_format!r}; known: {', '.join(CHECKSUM_FORMATS)}"
        ) from None


def digest(buffer: Any, checksum_format: str = DEFAULT_CHECKSUM) -> str:
    """Checksum string of a contiguous buffer (bytes, memoryview or array)."""
    hasher = new_hasher(checksum_format)
    hasher.update(buffer)
    return hasher.hexdigest()
