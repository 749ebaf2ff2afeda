"""A Hugging Face checkpoint directory: open it validated and memory-mapped, write it, name it by a digest.

Reads only the files that the index names. Deltas between checkpoints are `delta`; which version a directory holds is
`store` and `replica.staging`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.digest import DEFAULT_CHECKSUM, digest, new_hasher
from miles_disagg.weights.safetensors_file import (
    FileHeader,
    ShardSpool,
    TensorInfo,
    WrittenFile,
    read_header,
    write_durably,
)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_OPEN_MAPS = 256


class Checkpoint:
    """An open checkpoint. `tensors` in file order; `bytes(name)` is a view of the mapped file, never a copy."""

    def __init__(self, path: Path, headers: Mapping[str, FileHeader], metadata: Mapping[str, Any], writable: bool):
        self.path = path
        self.headers = dict(headers)
        self.metadata = dict(metadata)
        self.writable = writable
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers.values():
            self.tensors.update(header.tensors)
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def bytes(self, name: str) -> np.ndarray:
        """Raw bytes of a tensor, uint8 [nbytes], a view (writable if the checkpoint was opened so)."""
        try:
            info = self.tensors[name]
        except KeyError:
            raise CheckpointError(f"no such tensor in {self.path}", tensor=name) from None
        if not info.nbytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._map(info.file), np.uint8, info.nbytes, info.begin)

    def checksums(self) -> dict[str, str]:
        """Published checksum by tensor name, from the files' `__metadata__` (empty for a foreign checkpoint)."""
        return {
            name: header.metadata[name]
            for header in self.headers.values()
            for name in header.tensors
            if name in header.metadata
        }

    def sync(self) -> None:
        """Make writes through the views durable (fsync of every file)."""
        for file in self.headers:
            with open(self.path / file, "rb") as handle:
                os.fsync(handle.fileno())

    def close(self) -> None:
        """Forget the maps; views that are still held stay valid."""
        with self._lock:
            self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, file: str) -> mmap.mmap:
        with self._lock:  # a bounded set of maps: a checkpoint may have thousands of shards
            if file not in self._maps:
                with open(self.path / file, "r+b" if self.writable else "rb") as handle:
                    if os.fstat(handle.fileno()).st_size != self.headers[file].file_bytes:
                        raise CheckpointError("file changed size after it was opened", file=file)
                    access = mmap.ACCESS_WRITE if self.writable else mmap.ACCESS_READ
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=access)
                if len(self._maps) > _MAX_OPEN_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(file)
            return self._maps[file]


def open_checkpoint(path: str | os.PathLike[str], *, writable: bool = False) -> Checkpoint:
    """Open the checkpoint directory `path`; CheckpointError naming file and tensor for anything malformed.

    With an index, exactly the files it names are read and its `weight_map` must agree with them; without one, a single
    `model.safetensors`. A delta version is refused.
    """
    path = Path(path)
    index = read_index(path)
    if index is None:
        headers, metadata = {SINGLE_FILE: read_header(path / SINGLE_FILE)}, {}
    else:
        metadata, weight_map = index
        if "delta_encoding" in metadata:
            raise CheckpointError("this is a delta version, not a full checkpoint", file=str(path / INDEX_FILE))
        headers = read_headers(path, weight_map)
    return Checkpoint(path, headers, metadata, writable)


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """(metadata, weight_map) of a checkpoint or delta directory; None if it has a single unindexed file."""
    try:
        with open(path / INDEX_FILE, "rb") as handle:
            size = min(os.fstat(handle.fileno()).st_size, MAX_INDEX_BYTES + 1)
            raw = handle.read(size)
    except FileNotFoundError:
        if (path / SINGLE_FILE).is_file():
            return None
        if not path.is_dir():
            raise CheckpointError(f"no such directory: {path}") from None
        raise CheckpointError(f"neither {INDEX_FILE} nor {SINGLE_FILE} is in {path}") from None
    return parse_index(raw)


def parse_index(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """(metadata, weight_map) of an index file's bytes. File names must be plain names without a path."""
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointError(f"index has more than {MAX_INDEX_BYTES} bytes", file=INDEX_FILE)
    try:
        index = json.loads(raw)
        metadata, weight_map = index.get("metadata", {}), index["weight_map"]
        if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
            raise TypeError("metadata and weight_map must be objects")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"index is malformed: {error!r}", file=INDEX_FILE) from None
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise CheckpointError(
                f"weight_map names {str(file)[:200]!r}, which is not a plain *.safetensors file name",
                file=INDEX_FILE,
                tensor=name,
            )
    return metadata, weight_map


def read_headers(path: Path, weight_map: Mapping[str, str]) -> dict[str, FileHeader]:
    """Headers of the files that `weight_map` names; CheckpointError unless map and headers agree exactly."""
    headers = {file: read_header(path / file) for file in dict.fromkeys(weight_map.values())}
    check_weight_map(weight_map, headers)
    return headers


def check_weight_map(weight_map: Mapping[str, str], headers: Mapping[str, FileHeader]) -> None:
    """CheckpointError unless every tensor is in exactly the file that the index names."""
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise CheckpointError("the index names this tensor, the file does not have it", file=file, tensor=name)
    for file, header in headers.items():
        for name in header.tensors:
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f"the file has this tensor, the index puts it in {weight_map.get(name)}", file=file, tensor=name
                )


def write_index(directory: Path, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> WrittenFile:
    """Write `model.safetensors.index.json`, durable when this returns. Last of a version's files, by contract."""
    body = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    return write_durably(Path(directory) / INDEX_FILE, [json.dumps(body).encode()])


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Iterable[tuple[str, str, tuple[int, ...], np.ndarray]],
    max_shard_bytes: int = 4 << 30,
    metadata: Mapping[str, Any] | None = None,
    checksum_format: str = DEFAULT_CHECKSUM,
) -> list[WrittenFile]:
    """Write `(name, dtype, shape, uint8 bytes)` as an HF checkpoint with checksums; files written, index last.

    Tensors are consumed one at a time and shards never exceed `max_shard_bytes` by more than one tensor. `metadata`
    joins the index's (`total_size`, `checksum_format`). The config and tokenizer files are the caller's.
    """
    directory = Path(directory)
    spools: list[tuple[ShardSpool, dict[str, str]]] = []
    try:
        for name, dtype, shape, data in tensors:
            if not spools or (len(spools[-1][0]) and spools[-1][0].nbytes + data.nbytes > max_shard_bytes):
                spools.append((ShardSpool(directory), {}))
            spool, checksums = spools[-1]
            spool.write(data.data)
            spool.commit(name, dtype, tuple(shape))
            checksums[name] = digest(data, checksum_format)
        written, weight_map, total = [], {}, 0
        for number, (spool, checksums) in enumerate(spools):
            file = f"model-{number:05d}-of-{len(spools):05d}.safetensors"
            total += spool.nbytes
            written.append(spool.finish(file, {"format": "pt", **checksums}))
            weight_map.update(dict.fromkeys(checksums, file))
    finally:
        for spool, _ in spools:
            spool.close()
    index = {**(metadata or {}), "total_size": total, "checksum_format": checksum_format}
    return [*written, write_index(directory, index, weight_map)]


def tensor_digests(
    checkpoint: Checkpoint, checksum_format: str = DEFAULT_CHECKSUM, workers: int | None = None
) -> dict[str, str]:
    """Checksum of every tensor's raw bytes, by name."""

    def one(name: str) -> str:
        return digest(checkpoint.bytes(name), checksum_format)

    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1), "digest") as pool:
        return dict(zip(checkpoint.tensors, pool.map(one, checkpoint.tensors), strict=True))


def combine_digests(tensors: Mapping[str, TensorInfo], digests: Mapping[str, str]) -> str:
    """Digest of a checkpoint from those of its tensors: over sorted (name, dtype, shape, digest)."""
    hasher = new_hasher()
    for name in sorted(tensors):
        info = tensors[name]
        hasher.update(json.dumps([name, info.dtype, list(info.shape), digests[name]]).encode())
    return f"{DEFAULT_CHECKSUM}:{hasher.hexdigest()}"


def checkpoint_digest(path: str | os.PathLike[str] | Checkpoint, workers: int | None = None) -> str:
    """Name of a checkpoint's contents, `xxh3-128:<hex>`: equal for equal tensors however they are sharded."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    return combine_digests(checkpoint.tensors, tensor_digests(checkpoint, workers=workers))
