"""A delta version on disk: its index, its shard files, and the writer that one source rank drives.

Writing takes three moves, so that source ranks need no shared view of the file system:

1. every source rank: `ShardWriter.add(...)` per tensor, then `summary()`;
2. somebody who has all summaries: `plan_shards(summaries)` numbers the files and drops replicas;
3. every source rank: `finish(plan)`; then the committer calls `write_version_index`: without it, no version.

`ShardWriter(encoding=None)` writes a full version (anchor) by the same moves. Applying is `chain`.
Layout: miles `update_weight_from_distributed/delta.py`, slime `update_weight_from_disk_delta.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from miles_disagg.domain.errors import CheckpointError, NonFiniteWeights, PublicationFailed
from miles_disagg.weights.checkpoint import INDEX_FILE, Checkpoint, parse_index, read_headers, read_index, write_index
from miles_disagg.weights.codecs import DELTA_ENCODINGS, Codec, EncodeStats, codec_hasher, get_codec
from miles_disagg.weights.codecs.base import Sink
from miles_disagg.weights.digest import CHECKSUM_FORMATS, DEFAULT_CHECKSUM, Hasher, new_hasher
from miles_disagg.weights.dtypes import count_non_finite, element_size, tensor_nbytes, unsigned
from miles_disagg.weights.safetensors_file import ShardSpool, WrittenFile

COMPRESSION_FORMAT = "zstd"
Encoder = Callable[[Sink, Hasher], EncodeStats]
_IN_MEMORY_BYTES = 64 << 20  # a frame larger than this waits for its turn on disk


@dataclass(frozen=True)
class DeltaIndex:
    """What `model.safetensors.index.json` of a delta version says. `weight_map`: changed tensor -> file."""

    version: int
    base_version: int
    encoding: str
    checksum_format: str
    weight_map: Mapping[str, str]

    def metadata(self) -> dict[str, str]:
        """The index's `metadata` object, as miles and slime write it."""
        return {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": COMPRESSION_FORMAT,
            "checksum_format": self.checksum_format,
        }

    @classmethod
    def from_json(cls, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> DeltaIndex:
        """Validate an index's two halves; CheckpointError names the field."""
        encoding = _known(metadata, "delta_encoding", DELTA_ENCODINGS)
        checksum_format = _known(metadata, "checksum_format", CHECKSUM_FORMATS)
        _known(metadata, "compression_format", (COMPRESSION_FORMAT,))
        version, base = _number(metadata, "version"), _number(metadata, "base_version")
        if base >= version:
            raise CheckpointError(f"base_version {base} is not before version {version}", file=INDEX_FILE)
        return cls(version, base, encoding, checksum_format, dict(weight_map))


def parse_delta_index(raw: bytes) -> DeltaIndex | None:
    """The delta index in an index file's bytes; None if they index a full checkpoint."""
    metadata, weight_map = parse_index(raw)
    return DeltaIndex.from_json(metadata, weight_map) if "delta_encoding" in metadata else None


def _known(metadata: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
    if metadata.get(key) not in known:
        raise CheckpointError(f"{key} is {metadata.get(key)!r}; known: {', '.join(known)}", file=INDEX_FILE)
    return str(metadata[key])


def _number(metadata: Mapping[str, Any], key: str) -> int:
    text = metadata.get(key)
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CheckpointError(f"{key} is {str(text)[:50]!r}, not a zero-padded number", file=INDEX_FILE)
    return int(text)


# --- reading --------------------------------------------------------------------------------------


class DeltaVersion:
    """An open, validated delta version: frames (views of the mapped files) and target checksums by tensor name."""

    def __init__(self, path: Path, index: DeltaIndex, files: Checkpoint):
        self.path, self.index, self._files = path, index, files
        self._checksums = files.checksums()
        for name, info in files.tensors.items():
            if info.dtype != "U8" or len(info.shape) != 1:
                raise CheckpointError("a delta payload must be 1-D U8", file=info.file, tensor=name)
            if name not in self._checksums:
                raise CheckpointError("no checksum in __metadata__", file=info.file, tensor=name)

    def __contains__(self, name: str) -> bool:
        return name in self._checksums

    @property
    def names(self) -> list[str]:
        """Changed tensors, in file order."""
        return list(self._files.tensors)

    def frame(self, name: str) -> np.ndarray:
        """The tensor's frame, uint8 [n], a view of the file."""
        return self._files.bytes(name)

    def checksum(self, name: str) -> str:
        """Checksum of the tensor's complete target state."""
        return self._checksums[name]

    def file_of(self, name: str) -> str:
        """Name of the shard that holds the tensor, for messages."""
        return f"{self.path.name}/{self._files.tensors[name].file}"

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self._files.nbytes

    def close(self) -> None:
        self._files.close()


def open_delta(path: str | os.PathLike[str]) -> DeltaVersion:
    """Open a delta version directory; CheckpointError naming file and tensor for anything malformed."""
    path = Path(path)
    index = read_index(path)
    if index is None or "delta_encoding" not in index[0]:
        raise CheckpointError("this is a full checkpoint, not a delta version", file=str(path))
    metadata, weight_map = index
    parsed = DeltaIndex.from_json(metadata, weight_map)
    return DeltaVersion(path, parsed, Checkpoint(path, read_headers(path, weight_map), metadata, writable=False))


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardSummary:
    """What one source rank has to publish; small and picklable. Checksums are of complete target states."""

    checksums: dict[str, str] = field(default_factory=dict)
    changed_elements: int = 0
    total_elements: int = 0
    total_bytes: int = 0
    frame_bytes: int = 0

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed_elements / max(self.total_elements, 1)


@dataclass(frozen=True)
class ShardPlan:
    """File that a source rank writes (None: it has nothing), and tensors that another rank already publishes."""

    file: str | None
    drop: frozenset[str] = frozenset()


def plan_shards(summaries: Sequence[ShardSummary]) -> list[ShardPlan]:
    """Number files without gaps and keep the lowest rank's copy of replicated tensors.

    Replicas that differ (pipeline stages out of step) raise PublicationFailed.
    """
    owner: dict[str, int] = {}
    drops: list[set[str]] = [set() for _ in summaries]
    for rank, summary in enumerate(summaries):
        for name, checksum in summary.checksums.items():
            first = owner.setdefault(name, rank)
            if first == rank:
                continue
            if summaries[first].checksums[name] != checksum:
                raise PublicationFailed(
                    f"{name!r} differs between source ranks {first} and {rank}: replicated parameters are out of step"
                )
            drops[rank].add(name)
    writing = [len(drop) < len(summary.checksums) for summary, drop in zip(summaries, drops, strict=True)]
    total, plans = sum(writing), []
    for rank, drop in enumerate(drops):
        number = sum(writing[:rank])
        file = f"model-{number:05d}-of-{total:05d}.safetensors" if writing[rank] else None
        plans.append(ShardPlan(file, frozenset(drop)))
    return plans


class ShardWriter:
    """Encodes one source rank's tensors on a pool of threads and writes its shard file.

    encoding: a `delta_encoding`, or None for a full version. Calls come from one thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        encoding: str | None,
        checksum_format: str = DEFAULT_CHECKSUM,
        workers: int | None = None,
    ):
        self._codec: Codec | None = get_codec(encoding) if encoding is not None else None
        self._checksum_format = checksum_format
        new_hasher(checksum_format)  # an unknown format fails here
        workers = workers or min(32, os.cpu_count() or 1)
        self._directory = Path(directory)
        self._spool = ShardSpool(directory)
        self._pool = ThreadPoolExecutor(workers, "encode")
        self._slots = threading.BoundedSemaphore(2 * workers)
        self._lock = threading.Lock()
        self._futures: list[Future[None]] = []
        self._checksums: dict[str, str] = {}
        self._changed = self._elements = self._bytes = self._frames = 0

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        new: np.ndarray,
        old: np.ndarray | None = None,
        encode: Encoder | None = None,
    ) -> Future[None]:
        """Encode one tensor in the background; blocks while `2 * workers` are under way.

        new, old: raw bytes, contiguous uint8 [n] (`old`: state of the base version; only for deltas). Both must stay
        as they are until the returned future is done. encode: writes the same frame another way, say on a device, and
        feeds the target's bytes to the hasher; `new` and `old` then only give the size. An unchanged tensor is left out
        of a delta. Errors (also
        NonFiniteWeights for a changed element that is NaN or Inf) come out of the future and of `summary`.
        """
        if new.nbytes != tensor_nbytes(dtype, shape):
            raise CheckpointError(f"{dtype} {list(shape)} does not have {new.nbytes} bytes", tensor=name)
        if (old is None) != (self._codec is None):
            raise CheckpointError("a delta needs the base bytes, a full version takes none", tensor=name)
        self._slots.acquire()
        future = self._pool.submit(self._encode, name, dtype, shape, new, old, encode)
        future.add_done_callback(lambda _: self._slots.release())
        self._futures.append(future)
        return future

    def summary(self) -> ShardSummary:
        """Wait for all tensors; the first error of `add` is raised here."""
        for future in self._futures:
            future.result()
        self._futures.clear()
        return ShardSummary(dict(self._checksums), self._changed, self._elements, self._bytes, self._frames)

    def finish(self, plan: ShardPlan) -> WrittenFile | None:
        """Write the shard file, durable when this returns; None if the plan gives this rank none."""
        self.summary()
        if plan.file is None:
            return None
        kept = {name: checksum for name, checksum in self._checksums.items() if name not in plan.drop}
        metadata = kept if self._codec else {"format": "pt", **kept}
        return self._spool.finish(plan.file, metadata, plan.drop)

    def close(self) -> None:
        """Drop everything that was not written. Safe to call twice."""
        self._pool.shutdown(cancel_futures=True)
        self._spool.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        new: np.ndarray,
        old: np.ndarray | None,
        encode: Encoder | None,
    ) -> None:
        hasher = codec_hasher(self._checksum_format)
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(self._directory)) as frame:
            if self._codec is None or old is None:
                stats = EncodeStats(
                    new.nbytes // element_size(dtype), count_non_finite(new.view(unsigned(dtype)), dtype)
                )
                hasher.update(new)
                frame.write(new.data)
            else:
                encode = encode or partial(self._codec.encode, old, new, dtype)
                stats = encode(frame.write, hasher)
            if stats.non_finite:
                raise NonFiniteWeights(name, stats.non_finite)
            with self._lock:
                self._elements += new.nbytes // element_size(dtype)
                self._bytes += new.nbytes
                if stats.changed or self._codec is None:
                    self._changed += stats.changed
                    self._frames += self._append(name, dtype, shape, frame)  # type: ignore[arg-type]
                    self._checksums[name] = hasher.hexdigest()

    def _append(self, name: str, dtype: str, shape: tuple[int, ...], frame: IO[bytes]) -> int:
        frame.seek(0)
        try:
            shutil.copyfileobj(frame, self._spool, 1 << 20)
            return self._spool.commit(name, dtype, shape) if self._codec is None else self._spool.commit(name, "U8")
        except BaseException:
            self._spool.discard()
            raise


def write_version_index(directory: str | os.PathLike[str], index: DeltaIndex) -> WrittenFile:
    """Write a delta version's index: from now on the version exists."""
    return write_index(Path(directory), index.metadata(), index.weight_map)


def merge_weight_maps(summaries: Sequence[ShardSummary], plans: Sequence[ShardPlan]) -> dict[str, str]:
    """tensor -> file over all source ranks, each tensor once."""
    return {
        name: plan.file
        for summary, plan in zip(summaries, plans, strict=True)
        if plan.file is not None
        for name in summary.checksums
        if name not in plan.drop
    }


def write_delta(
    directory: str | os.PathLike[str],
    version: int,
    base_version: int,
    tensors: Sequence[tuple[str, str, tuple[int, ...], np.ndarray, np.ndarray]],
    encoding: str,
    checksum_format: str = DEFAULT_CHECKSUM,
    workers: int | None = None,
) -> ShardSummary:
    """Single-source convenience: write `(name, dtype, shape, old, new)` as one complete delta version."""
    with ShardWriter(directory, encoding, checksum_format, workers) as writer:
        for name, dtype, shape, old, new in tensors:
            writer.add(name, dtype, shape, new, old)
        summary = writer.summary()
        plans = plan_shards([summary])
        writer.finish(plans[0])
    weight_map = merge_weight_maps([summary], plans)
    write_version_index(directory, DeltaIndex(version, base_version, encoding, checksum_format, weight_map))
    return summary
