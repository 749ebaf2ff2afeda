"""One safetensors file: reading its header without trusting it, and writing it without holding it in memory.

Knows nothing of Hugging Face indexes (`checkpoint`) or of deltas (`delta`).
Format: https://github.com/huggingface/safetensors (u64 header length, JSON header, tensors without holes).
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.digest import new_hasher
from miles_disagg.weights.dtypes import tensor_nbytes

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are: `[begin, end)` counted from the start of `file` (a name, not a path)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class FileHeader:
    """A validated header: tensors in file order, and the string-to-string `__metadata__`."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_bytes: int
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> FileHeader:
    """Header of the safetensors file at `path`; CheckpointError naming file and tensor for anything malformed.

    Memory is bounded by MAX_HEADER_BYTES whatever the file claims.
    """
    path = Path(path)
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            return parse_header(lambda begin, length: _pread(handle, begin, length), size, path.name)
    except FileNotFoundError:
        raise CheckpointError("shard is missing", file=path.name) from None
    except (IsADirectoryError, PermissionError) as error:
        raise CheckpointError(f"shard cannot be read: {error.strerror}", file=path.name) from error


def parse_header(read: Callable[[int, int], bytes], file_bytes: int, file: str) -> FileHeader:
    """Header of a file of `file_bytes` bytes through `read(begin, length)` (a local file or ranged GETs)."""
    if file_bytes < 8:
        raise CheckpointError(f"file has {file_bytes} bytes, no safetensors header", file=file)
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > MAX_HEADER_BYTES or length < 2:
        raise CheckpointError(f"header claims {length} bytes, allowed are 2 to {MAX_HEADER_BYTES}", file=file)
    if 8 + length > file_bytes:
        raise CheckpointError(f"header of {length} bytes does not fit in a file of {file_bytes}", file=file)
    table = _parse_json(read(8, length), file)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("__metadata__ must map strings to strings", file=file)
    tensors = [_tensor_info(name, entry, 8 + length, file) for name, entry in table.items()]
    tensors.sort(key=lambda t: (t.begin, t.end))
    position = 8 + length
    for tensor in tensors:
        if tensor.begin != position:
            kind = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            raise CheckpointError(f"begins at byte {tensor.begin}, {kind}", file=file, tensor=tensor.name)
        position = tensor.end
    if position != file_bytes:
        raise CheckpointError(f"tensors end at byte {position}, the file has {file_bytes} (truncated?)", file=file)
    return FileHeader({t.name: t for t in tensors}, metadata, 8 + length, file_bytes)


def _parse_json(raw: bytes, file: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise CheckpointError("name appears twice in the header", file=file, tensor=twice)
        return out

    try:
        table = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"header is not JSON: {error}", file=file) from None
    if not isinstance(table, dict):
        raise CheckpointError("header is not a JSON object", file=file)
    return table


def _tensor_info(name: str, entry: Any, data_begin: int, file: str) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("header entry needs dtype, shape and two data_offsets", file=file, tensor=name) from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise CheckpointError(
            f"shape and data_offsets must be non-negative integers: {str(entry)[:200]}", file=file, tensor=name
        )
    try:
        nbytes = tensor_nbytes(dtype, shape)
    except CheckpointError as error:
        raise CheckpointError(str(error), file=file, tensor=name) from None
    if end - begin != nbytes:
        raise CheckpointError(
            f"{dtype} {shape} needs {nbytes} bytes, data_offsets give {end - begin}", file=file, tensor=name
        )
    return TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _pread(handle: BinaryIO, begin: int, length: int) -> bytes:
    data = os.pread(handle.fileno(), length, begin)
    while len(data) < length:
        more = os.pread(handle.fileno(), length - len(data), begin + len(data))
        if not more:
            raise CheckpointError(f"file ends at byte {begin + len(data)} while it is read", file=str(handle.name))
        data += more
    return data


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: its size and the xxh3-128 of the whole of it (a receipt for uploads)."""

    file: str
    nbytes: int
    digest: str


class ShardSpool:
    """Collects tensor payloads of unknown size in an unnamed temporary file, then writes one safetensors file.

    The header precedes the data, so sizes must be known first: payloads are spooled, and `finish` writes header and
    payloads to a temporary name, syncs, and renames. Memory use does not depend on the payloads. Not thread-safe.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._spool = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Payload bytes collected so far."""
        return self._size

    def write(self, chunk: Any) -> None:
        """Append bytes to the payload being collected."""
        self._spool.write(chunk)

    def commit(self, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> int:
        """End the payload as tensor `name` (shape None: 1-D, as many bytes as were written); its size in bytes."""
        begin, end = self._size, self._spool.tell()
        if name in self._entries:
            raise CheckpointError("tensor is added twice", tensor=name)
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError("name cannot stand in a safetensors header", tensor=name)
        shape = (end - begin,) if shape is None else tuple(shape)
        if tensor_nbytes(dtype, shape) != end - begin:
            raise CheckpointError(f"{dtype} {list(shape)} does not have {end - begin} bytes", tensor=name)
        self._entries[name] = (dtype, shape, begin, end)
        self._size = end
        return end - begin

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        self._spool.seek(self._size)
        self._spool.truncate()

    def finish(self, file: str, metadata: Mapping[str, str], drop: Collection[str] = ()) -> WrittenFile:
        """Write all tensors except `drop` to `file` in the spool's directory; durable when this returns.

        The spool stays readable until `close`.
        """
        kept = {name: entry for name, entry in self._entries.items() if name not in drop}
        header, position = {"__metadata__": dict(metadata)} if metadata else {}, 0
        # Wide elements first, as the reference writer does, keeps every tensor aligned to its element size.
        order = sorted(kept, key=lambda n: -_alignment(kept[n][0]))
        for name in order:
            dtype, shape, begin, end = kept[name]
            offsets = [position, position + end - begin]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}  # type: ignore[assignment]
            position = offsets[1]
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self._spool.flush()

        def parts() -> Iterable[bytes]:
            yield struct.pack("<Q", len(raw)) + raw
            for name in order:
                _, _, begin, end = kept[name]
                for at in range(begin, end, _COPY_BYTES):
                    yield _pread(self._spool, at, min(_COPY_BYTES, end - at))  # type: ignore[arg-type]

        return write_durably(self._directory / file, parts())

    def close(self) -> None:
        """Drop the spool. Safe to call twice."""
        self._spool.close()


def _alignment(dtype: str) -> int:
    return tensor_nbytes(dtype, (8,))


def write_durably(path: Path, parts: Iterable[bytes]) -> WrittenFile:
    """Write `parts` to a temporary name, fsync, rename onto `path`, fsync the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    hasher, size = new_hasher(), 0
    try:
        with open(temporary, "wb") as handle:
            for part in parts:
                handle.write(part)
                hasher.update(part)
                size += len(part)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return WrittenFile(path.name, size, hasher.hexdigest())


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make renames in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
