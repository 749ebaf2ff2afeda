"""Publication to a version store, full or delta: what a source rank does, and the order in which all of them do it.

A `DiskSource` lives in each source rank's process. The trainer waits only while `stage` copies its tensors out; encode
and write run in another thread behind the next step. `publish_version` is the committer's side. The index, the pointer
and their checks are `store.versions`; frames are `weights.delta`.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from miles_disagg.domain.errors import CheckpointError, DeadlineExceeded, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.device import DeviceSnapshot
from miles_disagg.store.base import ObjectStore
from miles_disagg.store.lineage import SHORTCUTS, Kind, version_key
from miles_disagg.store.publication import Description, Receipt, told_when_full
from miles_disagg.weights.checkpoint import Checkpoint, open_checkpoint
from miles_disagg.weights.delta import ShardPlan, ShardSummary, ShardWriter, plan_shards
from miles_disagg.weights.digest import DEFAULT_CHECKSUM, digest
from miles_disagg.weights.dtypes import OF_TORCH

Bucket = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Staged:
    """A tensor copied out of the trainer: dtype as in safetensors, shape, raw bytes in host memory (uint8 [n])."""

    dtype: str
    shape: tuple[int, ...]
    host: torch.Tensor

    @property
    def bytes(self) -> np.ndarray:
        return self.host.numpy()


class DiskSource:
    """One source rank's half of a publication. States: idle -> staging -> encoding -> written -> idle.

    base: the run's base checkpoint, which says what tensors there are and which a folded delta is against. published:
    checkpoint directory with the bytes of the version published last, where that is not the base (a run that was
    continued). Later ones are what was staged, so two copies of this rank's share of the weights are held in host
    memory (pinned for CUDA tensors), or on `device`, which then also compares them.
    companions: files to put beside a full version (config, tokenizer), source rank 0 only. post_write: called with the
    version after its files are written, for mounts that need a push. workers: encoding threads (None: cores).
    """

    def __init__(
        self,
        objects: ObjectStore,
        base: Path,
        *,
        published: Path | None = None,
        checksum_format: str = DEFAULT_CHECKSUM,
        companions: Sequence[Path] = (),
        post_write: Callable[[VersionRef], None] | None = None,
        device: torch.device | None = None,
        workers: int | None = None,
    ):
        self._objects, self._checksum_format = objects, checksum_format
        self._companions, self._post_write, self._workers = tuple(companions), post_write, workers
        self._base: Checkpoint = open_checkpoint(base)
        self._published = open_checkpoint(published) if published is not None else self._base
        self._device = DeviceSnapshot(self._published, device) if device is not None else None
        self._snapshot: dict[str, _Staged] = {}
        self._staged: dict[str, _Staged] = {}
        self._spare: dict[str, _Staged] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._writer: ShardWriter | None = None
        self._scratch: Path | None = None
        self._ref: VersionRef | None = None
        self._kind: Kind = "version"
        self._full = False
        self._summary = ShardSummary()
        self._metrics: dict[str, float] = {}

    def open(self, timeout: float) -> float:
        """Start staging; waits for the previous publication to settle. Seconds waited, or DeadlineExceeded."""
        started = time.monotonic()
        if not self._idle.wait(timeout):
            raise DeadlineExceeded("the previous weight publication", timeout, f"{self._ref} is still being written")
        self._idle.clear()
        self._staged, self._metrics = {}, {"perf/update_weights_export_seconds": 0.0}
        return time.monotonic() - started

    def stage(self, bucket: Bucket) -> None:
        """Copy a bucket of `(hf name, tensor)` to host memory; the tensors may change as soon as this returns.

        CheckpointError for a name, dtype or shape that the base checkpoint does not have.
        """
        if self._idle.is_set():
            raise PublicationFailed("stage() without open()")
        started = time.monotonic()
        devices = set()
        for name, tensor in bucket:
            tensor = tensor.detach()
            dtype, shape = self._check(name, tensor)
            if self._device is not None:
                self._staged[name] = _Staged(dtype, shape, self._device.stage(name, tensor))
            else:
                self._staged[name] = staged = self._buffer(name, dtype, shape, tensor)
                staged.host.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._metrics["perf/update_weights_export_seconds"] += time.monotonic() - started

    def encode(self, ref: VersionRef, encoding: str | None, kind: Kind = "version") -> ShardSummary:
        """Diff, encode and digest what was staged; encoding: of the delta, None for a full version.

        kind: what `write` will write; a folded delta is against `base`. A shortcut comes after its version.
        NonFiniteWeights names a tensor with NaN or Inf.
        """
        started = time.monotonic()
        self._drop_writer()
        self._ref, self._kind, self._full = ref, kind, encoding is None
        self._scratch = self._objects.scratch / f"publish-{uuid.uuid4().hex}"
        with told_when_full(ref, str(self._objects.scratch)):
            self._writer = ShardWriter(self._scratch, encoding, self._checksum_format, self._workers)
            self._summary = self._encode_into(self._writer, encoding, kind)
        if kind == "version":
            self._metrics["perf/update_weights_encode_seconds"] = time.monotonic() - started
        return self._summary

    def write(self, plan: ShardPlan) -> Receipt:
        """Write this rank's shard to the store; the receipt that the commit verifies."""
        if self._writer is None or self._ref is None:
            raise PublicationFailed("write() without encode()")
        started, summary, prefix = time.monotonic(), self._summary, version_key(self._ref, self._kind)
        with told_when_full(self._ref, self._objects.url):
            written = self._writer.finish(plan)
            if written is not None and self._scratch is not None:
                self._objects.put(f"{prefix}/{written.file}", self._scratch / written.file, consume=True)
            if self._full:
                for path in self._companions:
                    self._objects.put(f"{prefix}/{path.name}", path)
        if self._post_write is not None:
            self._post_write(self._ref)
        metrics = {
            **self._metrics,
            "perf/update_weights_write_seconds": time.monotonic() - started,
            "perf/update_weights_density": summary.density,
            "perf/update_weights_wire_bytes": float(written.nbytes if written else 0),
        }
        kept = {name: c for name, c in summary.checksums.items() if name not in plan.drop} if written else {}
        return Receipt(
            written.file if written else None,
            written.nbytes if written else 0,
            written.digest if written else "",
            kept,
            sum(self._staged[name].host.nbytes for name in kept),
            summary.changed_elements,
            summary.total_elements,
            metrics,
        )

    def settle(self, published: bool) -> None:
        """End the publication: what was staged is now the snapshot if it was published, else it is forgotten."""
        self._drop_writer()
        if self._device is not None:
            self._device.settle(published)
        elif published:
            self._spare, self._snapshot = self._snapshot, self._staged
        else:
            self._spare = self._staged
        self._staged = {}
        self._idle.set()

    def _encode_into(self, writer: ShardWriter, encoding: str | None, kind: Kind) -> ShardSummary:
        encoder = None
        if self._device is not None and kind == "version" and encoding is not None:
            encoder = partial(self._device.encode, encoding)
        elif self._device is not None:
            self._device.fetch()
        for name, staged in self._staged.items():
            old = None if encoding is None else self._old_bytes(name, kind)
            own = partial(encoder, name, staged.dtype) if encoder is not None else None
            writer.add(name, staged.dtype, staged.shape, staged.bytes, old, own)
        return writer.summary()

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._writer, self._scratch = None, None

    def _check(self, name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of an exported tensor, which must be what the base checkpoint has."""
        if name in self._staged:
            raise CheckpointError("the export gives this tensor twice", tensor=name)
        dtype, shape = OF_TORCH[str(tensor.dtype)], tuple(tensor.shape)
        known = self._base.tensors.get(name)
        if known is None or (known.dtype, known.shape) != (dtype, shape):
            there = f"{known.dtype} {list(known.shape)}" if known else "no such tensor"
            raise CheckpointError(
                f"the export has {dtype} {list(shape)}, the base checkpoint {self._base.path} has {there}", tensor=name
            )
        return dtype, shape

    def _buffer(self, name: str, dtype: str, shape: tuple[int, ...], tensor: torch.Tensor) -> _Staged:
        spare = self._spare.pop(name, None)
        return spare or _Staged(dtype, shape, torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda))

    def _old_bytes(self, name: str, kind: Kind) -> np.ndarray:
        if kind != "version":
            return self._base.bytes(name)
        snapshot = self._snapshot.get(name)
        return snapshot.bytes if snapshot is not None else self._published.bytes(name)


class SourceHandle(Protocol):
    """A `DiskSource` somewhere else: in this process behind a thread, or in a Ray actor."""

    def encode(self, ref: VersionRef, encoding: str | None, kind: Kind = "version") -> Awaitable[ShardSummary]: ...

    def write(self, plan: ShardPlan) -> Awaitable[Receipt]: ...

    def settle(self, published: bool) -> Awaitable[None]: ...


class Committer(Protocol):
    """Who numbers versions and moves the pointer: `store.ledger.VersionLedger`, directly or behind its actor."""

    def begin(self) -> Awaitable[VersionRef]: ...

    def commit(self, ref: VersionRef, description: Description, receipts: Sequence[Receipt]) -> Awaitable[None]: ...

    def commit_shortcut(
        self, ref: VersionRef, kind: Kind, description: Description, receipts: Sequence[Receipt]
    ) -> Awaitable[None]: ...

    def abort(self, ref: VersionRef) -> Awaitable[None]: ...


@dataclass(frozen=True)
class Published:
    """A committed version: receipts in source order, and the metrics of PROTOCOL section 4 over all of them."""

    ref: VersionRef
    receipts: tuple[Receipt, ...]
    metrics: Mapping[str, float]
    full: bool = False
    total_bytes: int = 0
    """Raw bytes of the complete weights."""

    @property
    def changed_elements(self) -> int | None:
        """Elements that changed, over all sources; None for a full version, which is not compared."""
        return None if self.full else sum(r.changed_elements for r in self.receipts)

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights: digest over all checksums of a full version; empty for a delta."""
        checksums = sorted(item for r in self.receipts for item in r.checksums.items())
        return digest(repr(checksums).encode()) if self.full else ""


async def publish_version(
    committer: Committer,
    sources: Sequence[SourceHandle],
    encoding_of: Callable[[VersionRef], str | None],
    checksum_format: str = DEFAULT_CHECKSUM,
    *,
    shortcuts_after: Callable[[Published], Awaitable[bool]] | None = None,
    start_version: int = 0,
) -> Published:
    """Encode on every source, number the shards, write, commit, settle. Every source must have been staged.

    encoding_of: delta encoding of a version, None to publish it in full. On any error nothing moves, the sources
    forget what was staged, and the error is raised. shortcuts_after: asked after a delta was published whether it also
    gets an anchor and a folded delta on `start_version`, the version of the sources' `base`; the pointer has moved
    by then, and an error there is a PublicationFailed that says so.
    """
    ref: VersionRef | None = None
    try:
        ref = await committer.begin()
        encoding = encoding_of(ref)
        summaries = await _all(source.encode(ref, encoding) for source in sources)
        plans = plan_shards(summaries)
        receipts = await _all(source.write(plan) for source, plan in zip(sources, plans, strict=True))
        started = time.monotonic()
        await committer.commit(ref, Description(encoding, ref.version - 1, checksum_format), receipts)
        committed = time.monotonic() - started
    except BaseException:
        await asyncio.gather(*(_wrapped(source.settle(False)) for source in sources), return_exceptions=True)
        if ref is not None:
            await committer.abort(ref)
        raise
    metrics = {**combine(receipts), "perf/update_weights_commit_seconds": committed}
    total = sum(summary.total_bytes for summary in summaries)
    published = Published(ref, tuple(receipts), metrics, encoding is None, total)
    try:
        if encoding is not None and shortcuts_after is not None and await shortcuts_after(published):
            more = await _publish_shortcuts(committer, sources, published, encoding, checksum_format, start_version)
            published = replace(published, metrics={**metrics, **more})
    except Exception as error:
        raise PublicationFailed(f"{ref} is published; its shortcuts for late readers are not: {error}") from error
    finally:
        await _all(source.settle(True) for source in sources)
    return published


async def _publish_shortcuts(
    committer: Committer,
    sources: Sequence[SourceHandle],
    published: Published,
    encoding: str,
    checksum_format: str,
    start_version: int,
) -> dict[str, float]:
    """The folded delta if it is smaller than the weights and longer than one version, then the anchor."""
    started, ref, written = time.monotonic(), published.ref, 0
    for kind in SHORTCUTS:
        form = encoding if kind == "folded" else None
        if kind == "folded" and ref.version - start_version < 2:
            continue
        summaries = await _all(source.encode(ref, form, kind) for source in sources)
        if kind == "folded" and sum(s.frame_bytes for s in summaries) >= published.total_bytes:
            continue
        plans = plan_shards(summaries)
        receipts = await _all(source.write(plan) for source, plan in zip(sources, plans, strict=True))
        description = Description(form, start_version, checksum_format)
        await committer.commit_shortcut(ref, kind, description, receipts)
        written += sum(receipt.nbytes for receipt in receipts)
    return {
        "perf/update_weights_anchor_bytes": float(written),
        "perf/update_weights_anchor_seconds": time.monotonic() - started,
    }


def combine(receipts: Sequence[Receipt]) -> dict[str, float]:
    """Metrics over source ranks: bytes add up, seconds are the slowest rank's, density is by elements."""
    out: dict[str, float] = {}
    for receipt in receipts:
        for name, value in receipt.metrics.items():
            out[name] = out.get(name, 0.0) + value if name.endswith("_bytes") else max(out.get(name, 0.0), value)
    total = sum(r.total_elements for r in receipts)
    if total:
        out["perf/update_weights_density"] = sum(r.changed_elements for r in receipts) / total
    return out


async def _all(calls: Iterator[Awaitable]) -> list:
    """Await all, also when one fails: nothing may still be writing when the publication is abandoned."""
    results = await asyncio.gather(*(_wrapped(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _wrapped(call: Awaitable):
    return await call
