"""Publication over a process group: a source rank sends its tensors straight into the engines' ranks.

A `BroadcastSource` lives in each source rank's process: the trainer waits only while `stage` copies tensors out, `send`
runs behind the next step. `broadcast_version` is the coordinator's side. Engines are reached through `UpdateTarget`s;
theirs is the other half of SGLang's `init_weights_update_group` and `update_weights_from_distributed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from miles_disagg.domain.errors import ConfigError, DeadlineExceeded, PublicationFailed
from miles_disagg.engine.tensors import INDICES, dtype_name, unflatten
from miles_disagg.publish.base import BucketTarget, GroupSpec, UpdateTarget
from miles_disagg.publish.changes import Metas, changed_bucket
from miles_disagg.publish.finite import refuse_non_finite
from miles_disagg.weights.digest import new_hasher

MOVED = "weights/moved"
"""Among a send's metrics: elements that changed since the version before, or, sent in full, 1 if any bit did."""

T = TypeVar("T")
Bucket = Sequence[tuple[str, torch.Tensor]]
_GRACE_SECONDS = 5.0  # the store's own deadline passes first, and says how many ranks came


_SPARE_BYTES = 1 << 30  # left free on a GPU that holds buckets


@dataclass(frozen=True)
class _Staged:
    """One bucket: tensors' bytes one after another, uint8 [n], and what they are."""

    flat: torch.Tensor
    metas: Metas


_Sending = tuple[list[_Staged], str | None, int]  # buckets, their load format, MOVED


@dataclass(frozen=True)
class _Group:
    """A process group that is kept from one send to the next, and who is in it."""

    name: str
    group: Any
    targets: tuple[BucketTarget, ...]

    @property
    def members(self) -> list[tuple[str, int]]:
        return [(t.name, t.num_ranks) for t in self.targets]


class BroadcastSource:
    """One source rank's half of a broadcast. States: idle -> staging -> sending -> idle.

    The process group outlives a send, since NCCL takes about a second to form one and engines are paused meanwhile; it
    is formed anew, under a new name, when the engines are others, one was restarted, or a send failed.

    Holds one copy of this rank's share of the weights in host memory, reused (pinned if they come from CUDA); with
    `delta` two, and sends what changed between them, except for the first version, which goes whole. Those two stay on
    the GPU that they come from, and are compared there, as far as they fit beside 1 GiB.
    address: where engines reach this process. backend: `gloo`, or `nccl`, which needs NCCL_CUMEM_ENABLE=0 in this
    process's environment as SGLang sets it in its own (the first transfer fails or hangs without). timeout: seconds for
    the ranks to meet and for each bucket. flattened: one transfer a bucket instead of one a tensor.
    """

    def __init__(
        self,
        *,
        address: str,
        backend: str,
        timeout: float,
        flattened: bool = True,
        delta: bool = False,
        device: torch.device | None = None,
    ):
        if backend not in ("gloo", "nccl"):
            raise ConfigError([f"broadcast backend {backend!r} is not gloo or nccl"])
        if backend == "nccl" and os.environ.get("NCCL_CUMEM_ENABLE") != "0":
            raise ConfigError(["broadcast over nccl needs NCCL_CUMEM_ENABLE=0 in the trainer's environment"])
        self._address, self._backend, self._timeout, self._flattened = address, backend, timeout, flattened
        self._device = device or torch.device("cuda" if backend == "nccl" else "cpu")
        self._delta = delta
        self._version = ""  # of what is staged, once it was sent
        self._published, self._published_version = list[_Staged](), ""
        self._digest = ("", "", 0)  # of what was last sent whole: version, digest, MOVED
        self._staged: list[_Staged] = []
        self._spare: list[_Staged] = []
        self._idle = threading.Event()
        self._idle.set()
        self._export_seconds = 0.0
        self._kept: _Group | None = None
        self._prepared: tuple[str, _Sending] | None = None  # version and what is sent of it

    def open(self, timeout: float) -> float:
        """Start staging; waits for the previous send to settle. Seconds waited, or DeadlineExceeded."""
        started = time.monotonic()
        if not self._idle.wait(timeout):
            raise DeadlineExceeded("the previous weight broadcast", timeout, "it has neither ended nor failed")
        self._idle.clear()
        if self._delta and self._version:
            self._spare, self._published, self._published_version = self._published, self._staged, self._version
        else:
            self._spare = self._staged
        self._staged, self._version, self._export_seconds, self._prepared = [], "", 0.0, None
        return time.monotonic() - started

    def stage(self, bucket: Bucket) -> None:
        """Copy a bucket of `(hf name, tensor)` to host memory; the tensors may change as soon as this returns."""
        if self._idle.is_set():
            raise PublicationFailed("stage() without open()")
        started = time.monotonic()
        metas = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)
        size = sum(tensor.nbytes for _, tensor in bucket)
        on_cuda = any(tensor.is_cuda for _, tensor in bucket)
        index = len(self._staged)
        reusable = index < len(self._spare) and self._spare[index].flat.numel() == size
        flat = self._spare[index].flat if reusable else self._buffer(size, bucket)
        at = 0
        for _, tensor in bucket:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            flat[at : at + raw.numel()].copy_(raw, non_blocking=True)
            at += raw.numel()
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        self._staged.append(_Staged(flat, metas))
        self._export_seconds += time.monotonic() - started

    def _buffer(self, size: int, bucket: Bucket) -> torch.Tensor:
        """Memory for a bucket of `size` bytes, which stays as long as this object."""
        devices = {tensor.device for _, tensor in bucket if tensor.is_cuda}
        if self._delta and len(devices) == 1:
            free, _ = torch.cuda.mem_get_info(*devices)
            if free >= size + _SPARE_BYTES:
                return torch.empty(size, dtype=torch.uint8, device=next(iter(devices)))
        return torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))

    def prepare(self, version: str) -> None:
        """Work out what `send` will send, before any engine is paused for it. NonFiniteWeights for NaN or Inf."""
        for staged in self._staged:
            refuse_non_finite(unflatten(staged.flat, staged.metas))
        self._prepared = (version, self._buckets(version, False))

    async def send(self, version: str, targets: Sequence[BucketTarget], *, whole: bool = False) -> Mapping[str, float]:
        """Send every staged bucket to the targets' ranks, met before or now; `perf/update_weights_*` metrics.

        The targets are between `begin_update` and `finish_update`. whole: send complete tensors, to an engine that may
        not hold the version before. Raises DeadlineExceeded if they do not meet, or stop receiving, in time, and what a
        target raised; then the group is gone.
        """
        started = time.monotonic()
        try:
            prepared = self._prepared
            if prepared is not None and prepared[0] == version and not whole:
                buckets, form, moved = prepared[1]
            else:
                buckets, form, moved = await asyncio.to_thread(self._buckets, version, whole)
            group = await self._group_with(targets)
            self._version = version
            try:
                await self._send_all(buckets, group, version, targets, form)
            except BaseException:
                await self.close()
                raise
        finally:
            self._idle.set()
        return {
            "perf/update_weights_export_seconds": self._export_seconds,
            "perf/update_weights_write_seconds": time.monotonic() - started,
            "perf/update_weights_wire_bytes": float(sum(s.flat.numel() for s in buckets)),
            MOVED: float(moved),
        }

    def discard(self) -> None:
        """Drop what was staged without sending it (the publication was abandoned)."""
        self._idle.set()

    async def close(self) -> None:
        """Leave the group, if there is one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await self._leave(kept.name, kept.group, kept.targets)

    async def _group_with(self, targets: Sequence[BucketTarget]) -> _Group:
        """The kept group if exactly these engines are still in it, else a new one."""
        kept = self._kept
        same = kept is not None and kept.members == [(t.name, t.num_ranks) for t in targets]
        if kept is not None and same and all(await asyncio.gather(*(t.in_group(kept.name) for t in targets))):
            return kept
        await self.close()
        name, group = await self._meet(targets)
        self._kept = _Group(name, group, tuple(targets))
        return self._kept

    async def _meet(self, targets: Sequence[BucketTarget]) -> tuple[str, Any]:
        """The group's name and the group. All ranks have connected to our store before the group is formed."""
        name, world = f"weights-{secrets.token_hex(6)}", 1 + sum(t.num_ranks for t in targets)
        meeting = _Meeting(self._address, world, timedelta(seconds=self._timeout))
        joining: list[asyncio.Task[None]] = []
        offset = 1
        for target in targets:
            spec = GroupSpec(name, self._address, meeting.port, offset, world, self._backend)
            joining.append(_task(target.init_group(spec)))
            offset += target.num_ranks
        what = (
            f"{world - 1} engine ranks ({', '.join(t.name for t in targets)}) to join group {name} at "
            f"{self._address}:{meeting.port}, which their hosts must reach (where they cannot, use "
            "--update-weight-transfer-mode disk-delta)"
        )
        try:
            forming = asyncio.to_thread(meeting.form, name, self._backend)
            group = await _first_error(forming, joining, time.monotonic() + self._timeout + _GRACE_SECONDS, what)
        except BaseException as e:
            meeting.abandon()
            await self._leave(name, None, targets)
            for task in joining:
                task.cancel()
            await asyncio.gather(*joining, return_exceptions=True)
            if isinstance(e, dist.DistStoreError):
                raise DeadlineExceeded(what, self._timeout, f"{str(e).splitlines()[0]} (this rank included)") from None
            raise
        return name, group

    def _buckets(self, version: str, whole: bool) -> _Sending:
        """What to send, in which load format, and MOVED."""
        plain = "flattened_bucket" if self._flattened else None
        old = self._published
        if self._delta and not whole and [s.metas for s in old] == [s.metas for s in self._staged] and old:
            changed = [_changed(a, b) for a, b in zip(old, self._staged, strict=True)]
            sent = [_Staged(flat, metas) for flat, metas, count in changed if count] or [_Staged(*changed[0][:2])]
            return sent, f"{INDICES}:{self._published_version}", sum(count for *_, count in changed)
        if self._digest[0] != version:
            hasher = new_hasher()
            for staged in self._staged:
                hasher.update(staged.flat.cpu().numpy())
            self._digest = (version, hasher.hexdigest(), int(hasher.hexdigest() != self._digest[1]))
        return self._staged, plain, self._digest[2]

    async def _send_all(
        self,
        buckets: Sequence[_Staged],
        group: _Group,
        version: str,
        targets: Sequence[BucketTarget],
        form: str | None,
    ) -> None:
        """One bucket after another; the next one is copied to the device meanwhile."""
        loading = _task(asyncio.to_thread(self._to_device, buckets[0]))
        try:
            for i, staged in enumerate(buckets):
                flat = await loading
                if i + 1 < len(buckets):
                    loading = _task(asyncio.to_thread(self._to_device, buckets[i + 1]))
                await self._send_bucket(staged, flat, group, version, targets, form)
        finally:
            await asyncio.gather(loading, return_exceptions=True)

    def _to_device(self, staged: _Staged) -> torch.Tensor:
        if self._device.type != "cuda":
            return staged.flat.to(self._device)
        aside = torch.cuda.Stream(self._device)
        with torch.cuda.stream(aside):
            flat = staged.flat.to(self._device, non_blocking=True)
        aside.synchronize()
        return flat

    async def _send_bucket(
        self,
        staged: _Staged,
        flat: torch.Tensor,
        group: _Group,
        version: str,
        targets: Sequence[BucketTarget],
        load_format: str | None,
    ) -> None:
        names = [n for n, _, _ in staged.metas]
        dtypes = [dtype_name(d) for _, d, _ in staged.metas]
        shapes = [list(s) for _, _, s in staged.metas]
        receiving = [_task(t.receive_bucket(names, dtypes, shapes, group.name, version, load_format)) for t in targets]
        what = f"{len(targets)} engines to receive {len(names)} tensors from {names[0]!r} on"
        deadline = time.monotonic() + self._timeout
        await _first_error(
            asyncio.to_thread(self._broadcast, flat, None if load_format else staged.metas, group.group),
            receiving,
            deadline,
            what,
        )

    def _broadcast(self, flat: torch.Tensor, metas: Metas | None, group: Any) -> None:
        """One transfer, or with `metas` one a tensor."""
        tensors = [flat] if metas is None else [t for _, t in unflatten(flat, metas)]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # The group's own method: dist.broadcast would look for this process's rank in the trainer's default group.
        for work in [group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def _leave(self, name: str, group: Any, targets: Sequence[BucketTarget]) -> None:
        """Both sides leave. Failures here are not news: the send has succeeded or has failed already."""
        left = [_task(t.destroy_group(name)) for t in targets]
        done, pending = await asyncio.wait(left, timeout=self._timeout) if left else (set(), set())
        for task in pending:
            task.cancel()
        await asyncio.gather(*done, *pending, return_exceptions=True)
        if group is not None:
            await asyncio.to_thread(dist.destroy_process_group, group)


def _changed(old: _Staged, new: _Staged) -> tuple[torch.Tensor, Metas, int]:
    """`changed_bucket` where `new` is; on a GPU beside the training step, not behind it."""
    device = new.flat.device
    if device.type == "cpu":
        return changed_bucket(old.flat.cpu(), new.flat, new.metas)
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        bucket = changed_bucket(old.flat.to(device), new.flat, new.metas)
    aside.synchronize()
    return bucket


class _Meeting:
    """A TCP store on a fresh port at which rank 0 waits for the others, and the group it forms when they have come."""

    def __init__(self, address: str, world_size: int, limit: timedelta):
        self._address, self._world_size, self._limit = address, world_size, limit
        self._socket = socket.create_server(("", 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._waiting = self._abandoned = False

    def form(self, name: str, backend: str) -> Any:
        """Rank 0's half of SGLang's `init_custom_process_group`. Blocks; DistStoreError tells how many came in time."""
        with self._lock:
            if self._abandoned:
                return None
            self._waiting = True
        try:
            store = dist.TCPStore(
                self._address, self.port, self._world_size, True, self._limit, master_listen_fd=self._socket.detach()
            )
        finally:
            self._waiting = False
        if self._abandoned:
            return None
        group, _ = _new_process_group_helper(
            self._world_size,
            0,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=self._limit,
        )
        _world.pg_group_ranks[group] = {}
        return group

    def abandon(self) -> None:
        """Let a `form` that waits go at once. TCPStore's wait cannot be interrupted: stand in for who has not come."""
        with self._lock:
            self._abandoned = True
        for _ in range(self._world_size - 1):
            if self._waiting:
                with contextlib.suppress(dist.DistError):
                    dist.TCPStore(self._address, self.port, self._world_size, False, timedelta(seconds=1))
        self._socket.close()


Send = Callable[[str, Sequence[BucketTarget]], Awaitable[Mapping[str, float]]]


async def broadcast_version(version: str, sends: Sequence[Send], targets: Sequence[UpdateTarget]) -> dict[str, float]:
    """One update of all `targets` from all sources (`sends`: each source's `send`, in source order).

    Sources send one after another, since an engine is in each one's group in turn. If anything fails, every target is
    told so (`abort_update`) and PublicationFailed is raised. Metrics: seconds and bytes added up over sources.
    """
    total: dict[str, float] = {}
    try:
        await _all([t.begin_update(version) for t in targets])
        for send in sends:
            for key, value in (await send(version, targets)).items():
                total[key] = total.get(key, 0.0) + value
        await _all([t.finish_update(version) for t in targets])
    except BaseException as e:
        reason = f"broadcast of {version} failed: {e or type(e).__name__}"
        await asyncio.gather(*(t.abort_update(reason) for t in targets), return_exceptions=True)
        if isinstance(e, Exception):
            raise PublicationFailed(reason) from e
        raise
    return total


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them to their end, then the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _first_error(own: Awaitable[Any], others: list[asyncio.Task[None]], deadline: float, what: str) -> Any:
    """Result of `own` once it and all `others` are done; the first exception of any ends the wait at once."""
    mine = asyncio.ensure_future(own)
    tasks: list[asyncio.Future[Any]] = [mine, *others]
    started = time.monotonic()
    done, pending = await asyncio.wait(tasks, timeout=max(0.0, deadline - started), return_when=asyncio.FIRST_EXCEPTION)
    for task in others:  # an engine's own words before the broken connection they leave here
        if task in done:
            task.result()
    if mine in done:
        mine.result()
    if pending:
        for task in pending:
            task.cancel()
        raise DeadlineExceeded(what, time.monotonic() - started, f"{len(pending)} of {len(tasks)} sides did not finish")
    return mine.result()


def _task(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(call)
