"""Applying a chain of deltas in one pass over the weights, and the patch that makes this crash-safe.

* `apply_chain`: in place, verified afterwards. Fast; a failure leaves the target half-changed, so give it a copy.
* `build_patch` + `apply_patch`: `build_patch` computes the complete target state block by block in scratch memory,
  verifies every checksum, and writes only the changed elements with their absolute new values to a file, synced.
  Nothing was touched until then: a bad version is refused with the base intact. `apply_patch` scatters them,
  idempotently: after a crash run it again. The same file serves in-place activation (positions and values per tensor).
* `fold_chain`: k deltas as one delta, for late joiners.

Which versions form a chain is `store`'s business; marker files and the switch are `replica.staging`'s.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from miles_disagg.domain.errors import ChainBroken, CheckpointError, ChecksumMismatch
from miles_disagg.weights.checkpoint import Checkpoint, open_checkpoint
from miles_disagg.weights.codecs import BLOCK_BYTES, codec_hasher, get_codec
from miles_disagg.weights.delta import (
    DeltaIndex,
    DeltaVersion,
    ShardSummary,
    ShardWriter,
    merge_weight_maps,
    plan_shards,
    write_version_index,
)
from miles_disagg.weights.digest import DEFAULT_CHECKSUM
from miles_disagg.weights.dtypes import BITS, element_size, unsigned
from miles_disagg.weights.indices import POSITIONS, VALUES, changed_positions, position_dtype, scatter
from miles_disagg.weights.safetensors_file import FileHeader, ShardSpool, WrittenFile, read_header

_IN_MEMORY_BYTES = 64 << 20


def check_chain(deltas: Sequence[DeltaVersion]) -> None:
    """ChainBroken unless every delta's base is the version before it in the sequence."""
    for before, after in zip(deltas, deltas[1:], strict=False):
        if after.index.base_version != before.index.version:
            raise ChainBroken(after.index.version, after.index.base_version, f"it follows {before.index.version} here")


class _Target:
    """One tensor on its way through a chain. `base` is a view of the checkpoint; `expected` the final checksum."""

    def __init__(self, checkpoint: Checkpoint, name: str, deltas: Sequence[DeltaVersion]):
        if name not in checkpoint.tensors:
            first = next(d for d in deltas if name in d.names)
            raise CheckpointError(
                f"the delta changes a tensor that {checkpoint.path} does not have",
                file=first.file_of(name),
                tensor=name,
            )
        self.name = name
        self.dtype = checkpoint.tensors[name].dtype
        self.base = checkpoint.bytes(name)
        self._links = [delta for delta in deltas if name in delta]
        self.expected = self._links[-1].checksum(name)

    def run(self, visit: Callable[[int, np.ndarray], None], *, in_place: bool) -> None:
        """Compute the target state block by block, `visit(byte offset, block in target state)`, then verify it.

        Not in place, the block is scratch memory that is valid during the visit only.
        """
        last = self._links[-1]
        try:
            decoders = [
                get_codec(d.index.encoding).decoder(d.frame(self.name), self.base.nbytes, self.dtype)
                for d in self._links
            ]
            hasher = codec_hasher(last.index.checksum_format)
            scratch = None if in_place else np.empty(min(BLOCK_BYTES, self.base.nbytes), np.uint8)
            for begin in range(0, self.base.nbytes, BLOCK_BYTES):
                block = self.base[begin : begin + BLOCK_BYTES]
                if scratch is not None:
                    scratch[: block.size] = block
                    block = scratch[: block.size]
                for decoder in decoders:
                    decoder.step(block, hasher if decoder is decoders[-1] else None)
                visit(begin, block)
            for decoder in decoders:
                decoder.finish()
        except CheckpointError as error:
            raise CheckpointError(str(error), file=last.file_of(self.name), tensor=self.name) from error
        if hasher.hexdigest() != self.expected:
            raise ChecksumMismatch(self.expected, hasher.hexdigest(), file=last.file_of(self.name), tensor=self.name)


def _each_changed_tensor(
    checkpoint: Checkpoint, deltas: Sequence[DeltaVersion], work: Callable[[_Target], None], workers: int | None
) -> list[str]:
    """Run `work` for every tensor that any delta changes, on threads; their names. The first error is raised."""
    check_chain(deltas)
    names = list(dict.fromkeys(name for delta in deltas for name in delta.names))
    with ThreadPoolExecutor(workers or min(32, os.cpu_count() or 1), "apply") as pool:
        futures = [pool.submit(lambda n: work(_Target(checkpoint, n, deltas)), name) for name in names]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return names


def apply_chain(checkpoint: Checkpoint, deltas: Sequence[DeltaVersion], workers: int | None = None) -> list[str]:
    """Apply `deltas` in order to a writable checkpoint, one pass over each changed tensor; names of those.

    Every changed tensor's final bytes are verified; the first mismatch raises ChecksumMismatch and the checkpoint is
    then neither old nor new. Intermediate versions are never verified nor written.
    """
    if not checkpoint.writable:
        raise CheckpointError(f"{checkpoint.path} was opened read-only")
    return _each_changed_tensor(checkpoint, deltas, lambda t: t.run(lambda *_: None, in_place=True), workers)


@dataclass(frozen=True)
class PatchFile:
    """A verified patch on disk: how many tensors and elements it changes, and the file's receipt."""

    path: Path
    written: WrittenFile
    tensors: int
    changed_elements: int


def build_patch(
    checkpoint: Checkpoint,
    deltas: Sequence[DeltaVersion],
    path: str | os.PathLike[str],
    *,
    undo: bool = False,
    metadata: Mapping[str, str] | None = None,
    workers: int | None = None,
) -> PatchFile:
    """Verify the state after `deltas` and write the changed elements to `path`, durable when this returns.

    The checkpoint is only read; a malformed frame or a wrong checksum raises before `path` exists. undo: write the old
    values instead (what rolls the change back). The file's `__metadata__` has `metadata` and, without `undo`, the
    target checksum by tensor name.
    """
    path = Path(path)
    spool, lock, checksums, total = ShardSpool(path.parent), threading.Lock(), {}, 0

    def work(target: _Target) -> None:
        nonlocal total
        size, kind = element_size(target.dtype), position_dtype(target.base.nbytes // element_size(target.dtype))
        with _temporary(path.parent) as positions, _temporary(path.parent) as values:

            def collect(begin: int, block: np.ndarray) -> None:
                before = target.base[begin : begin + block.size]
                found = changed_positions(before, block, target.dtype)
                if found.size:
                    chosen = (before if undo else block).view(unsigned(target.dtype))[found]
                    positions.write((found + begin // size).astype(kind.numpy).data.cast("B"))
                    values.write(chosen.data.cast("B"))

            target.run(collect, in_place=False)
            count = values.tell() // size
            with lock:
                total += count
                checksums[target.name] = target.expected
                _spool_file(spool, positions, target.name + POSITIONS, kind.name, count)
                _spool_file(
                    spool, values, target.name + VALUES, target.dtype if BITS[target.dtype] >= 8 else "U8", count
                )

    try:
        names = _each_changed_tensor(checkpoint, deltas, work, workers)
        written = spool.finish(path.name, {**(metadata or {}), **({} if undo else checksums)})
    finally:
        spool.close()
    return PatchFile(path, written, len(names), total)


def apply_patch(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> list[str]:
    """Scatter a patch into a writable checkpoint; idempotent. Names of the tensors it lists. Not synced: `sync()` does.

    The file is trusted as far as its header and positions are in range: it was verified when built. A whole-file
    receipt (`PatchFile.written.digest`) tells whether it is the file that was built.
    """
    header = read_header(path)
    patch = Checkpoint(Path(path).parent, {Path(path).name: header}, {}, writable=False)
    names = patch_names(header)
    for name in names:
        if name not in checkpoint.tensors:
            raise CheckpointError("the patch changes a tensor that is not here", file=str(path), tensor=name)
        positions = patch.bytes(name + POSITIONS).view(
            np.dtype("<i4" if patch.tensors[name + POSITIONS].dtype == "I32" else "<i8")
        )
        try:
            scatter(checkpoint.bytes(name), checkpoint.tensors[name].dtype, positions, patch.bytes(name + VALUES))
        except CheckpointError as error:
            raise CheckpointError(str(error), file=str(path), tensor=name) from None
    return names


def patch_names(header: FileHeader) -> list[str]:
    """Tensors that a patch file changes."""
    return [name.removesuffix(POSITIONS) for name in header.tensors if name.endswith(POSITIONS)]


def fold_chain(
    checkpoint: Checkpoint,
    deltas: Sequence[DeltaVersion],
    directory: str | os.PathLike[str],
    encoding: str,
    checksum_format: str = DEFAULT_CHECKSUM,
    workers: int | None = None,
) -> ShardSummary:
    """Write one delta in `directory` that does what `deltas` do to `checkpoint` (their base; only read).

    The chain's checksums are verified on the way. Needs scratch disk of the changed tensors' size.
    """
    check_chain(deltas)
    directory = Path(directory)
    with (
        ShardWriter(directory, encoding, checksum_format, workers) as writer,
        tempfile.TemporaryFile(dir=directory) as scratch,
    ):
        for name in dict.fromkeys(name for delta in deltas for name in delta.names):
            target = _Target(checkpoint, name, deltas)
            scratch.truncate(target.base.nbytes)
            new = np.memmap(scratch, np.uint8, "r+", shape=(target.base.nbytes,)) if target.base.nbytes else target.base

            def keep(begin: int, block: np.ndarray, new: np.ndarray = new) -> None:
                new[begin : begin + block.size] = block

            target.run(keep, in_place=False)
            writer.add(name, target.dtype, checkpoint.tensors[name].shape, new, target.base).result()
        summary = writer.summary()
        plans = plan_shards([summary])
        writer.finish(plans[0])
    index = DeltaIndex(
        deltas[-1].index.version,
        deltas[0].index.base_version,
        encoding,
        checksum_format,
        merge_weight_maps([summary], plans),
    )
    write_version_index(directory, index)
    return summary


def verify_target(
    path: str | os.PathLike[str], deltas: Sequence[DeltaVersion], workers: int | None = None
) -> list[str]:
    """Recompute the state after `deltas` on the checkpoint at `path` without writing anything; names verified."""
    with open_checkpoint(path) as checkpoint:
        return _each_changed_tensor(checkpoint, deltas, lambda t: t.run(lambda *_: None, in_place=False), workers)


def _temporary(directory: Path) -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, dir=str(directory))


def _spool_file(
    spool: ShardSpool, source: IO[bytes] | tempfile.SpooledTemporaryFile[bytes], name: str, dtype: str, count: int
) -> None:
    source.seek(0)
    while chunk := source.read(1 << 20):
        spool.write(chunk)
    spool.commit(name, dtype, (count,))
