"""Moving bytes between processes: NIXL one-sided writes, and torch.distributed sends and receives.

Imported by the engine's plugin and by the trainer, so nothing but torch, NIXL and the standard library here. What is
sent where is the callers'.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

_POLL_SECONDS = 2e-4

Region = tuple[int, int, int]
"""Address, bytes, number of the CUDA device (0 for host memory)."""


class TransportError(Exception):
    """A transfer that did not happen, or not completely."""


def nixl_api() -> Any:
    """NIXL's Python API from the wheel that fits this torch; TransportError says what to install."""
    newer = int((torch.version.cuda or "12").split(".")[0]) >= 13
    names = ("nixl_cu13", "nixl_cu12") if newer else ("nixl_cu12", "nixl_cu13")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    errors = []
    for name in names:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            errors.append(f"{name}: {error}")
            continue
        api.logger.setLevel("WARNING")
        return api
    raise TransportError(f"NIXL cannot be imported ({'; '.join(errors)}): install {names[0].replace('_', '-')}")


@dataclass(frozen=True)
class Job:
    """One-sided writes to one peer. `key`: of everything but the bytes, so that a prepared job is used again; `once`:
    it is not."""

    key: tuple[Any, ...]
    metadata: bytes
    local: Sequence[Region]
    remote: Sequence[Region]
    remote_cuda: bool
    once: bool = False


_Prepared = tuple[str, Any, list[Any]]
"""Peer's name, handle, both sides' lists of regions."""


class Nixl:
    """A NIXL agent over UCX. Memory is registered once; peers are known by their metadata. Not for several threads."""

    def __init__(self, name: str):
        api = nixl_api()
        config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent = api.nixl_agent(name, config)
        except Exception as error:
            raise TransportError(f"NIXL has no UCX backend here: {type(error).__name__}: {error}") from error
        self._cuda = False
        self._registered: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._ready: dict[tuple[Any, ...], _Prepared] = {}
        self._adrift: list[tuple[tuple[Any, ...], _Prepared]] = []  # given up, and perhaps still under way

    def register(self, regions: Sequence[Region], *, cuda: bool) -> None:
        """Make memory reachable for peers and sendable from here."""
        self._cuda = cuda
        described = [(*region, "") for region in regions]
        self._registered.append(self._agent.register_memory(described, mem_type=_memory(cuda)))

    def metadata(self) -> bytes:
        """What a peer needs to write here; changes when memory is registered."""
        return self._agent.get_agent_metadata()

    def write(
        self, jobs: Sequence[Job], timeout: float, meanwhile: Callable[[], None] = lambda: None
    ) -> list[str | None]:
        """Write all jobs side by side; for each one None, or why it did not complete within `timeout` seconds.

        meanwhile: called once, when all are on their way. What was not done in time may still arrive: `unsettled`.
        """
        deadline = time.monotonic() + timeout
        errors: list[str | None] = [None] * len(jobs)
        running: dict[int, Any] = {}
        for i, job in enumerate(jobs):
            try:
                handle = self._prepared(job)
                if self._agent.transfer(handle) != "DONE":
                    running[i] = handle
            except Exception as error:
                errors[i] = self._failed(job, error)
        meanwhile()
        while running:
            for i, handle in list(running.items()):
                try:
                    state = self._agent.check_xfer_state(handle)
                    if state == "ERR":
                        raise TransportError("the write failed")
                    if state == "DONE":
                        del running[i]
                    elif time.monotonic() > deadline:
                        del running[i]
                        self._adrift.append((jobs[i].key, self._ready.pop(jobs[i].key)))
                        errors[i] = f"TransportError: the write was not done after {timeout:g} s"
                except Exception as error:
                    del running[i]
                    errors[i] = self._failed(jobs[i], error)
            if running:
                time.sleep(_POLL_SECONDS)
        for job in jobs:
            if job.once:
                self._forget(job.key)
        return errors

    def unsettled(self) -> list[tuple[Any, ...]]:
        """Keys of the writes that were given up and have neither arrived nor failed since.

        Releasing such a write does not stop it: over TCP, all bytes landed after that. So it is kept and looked at.
        """
        left = []
        for key, prepared in self._adrift:
            try:
                over = self._agent.check_xfer_state(prepared[1]) in ("DONE", "ERR")
            except Exception:  # the connection broke
                over = True
            if over:
                self._release(prepared)
            else:
                left.append((key, prepared))
        self._adrift = left
        return [key for key, _ in left]

    def close(self) -> None:
        """Let go of peers and registrations."""
        for key in list(self._ready):
            self._forget(key)
        adrift, self._adrift = self._adrift, []
        for _, prepared in adrift:
            self._release(prepared)
        for region in self._registered:
            self._agent.deregister_memory(region)
        self._registered.clear()

    def _prepared(self, job: Job) -> Any:
        ready = self._ready.get(job.key)
        if ready is not None and self._peers.get(ready[0]) == job.metadata:
            return ready[1]
        if ready is not None:
            self._forget(job.key)
        name = self._connect(job.metadata)
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", list(job.local), mem_type=_memory(self._cuda))
        remote = self._agent.prep_xfer_dlist(name, list(job.remote), mem_type=_memory(job.remote_cuda))
        index = list(range(len(job.local)))
        handle = self._agent.make_prepped_xfer("WRITE", local, index, remote, index)
        self._ready[job.key] = (name, handle, [local, remote])
        return handle

    def _connect(self, metadata: bytes) -> str:
        known = next((name for name, seen in self._peers.items() if seen == metadata), None)
        if known is not None:
            return known
        name = self._agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        self._peers[name] = metadata
        return name

    def _failed(self, job: Job, error: Exception) -> str:
        self._forget(job.key)
        return f"{type(error).__name__}: {error}"

    def _forget(self, key: tuple[Any, ...]) -> None:
        prepared = self._ready.pop(key, None)
        if prepared is not None:
            self._release(prepared)

    def _release(self, prepared: _Prepared) -> None:
        name, handle, sides = prepared
        for release in (handle, *sides):
            try:
                release.release()
            except Exception:  # an active transfer that cannot be cancelled keeps its handle
                continue
        if not any(other[0] == name for other in [*self._ready.values(), *(p for _, p in self._adrift)]):
            self._peers.pop(name, None)
            try:
                self._agent.remove_remote_agent(name)
            except Exception:
                return


def _memory(cuda: bool) -> str:
    return "VRAM" if cuda else "DRAM"


class Pairs:
    """A torch.distributed group for sends and receives between its ranks; joined for one update and left."""

    def __init__(self, *, address: str, port: int, rank: int, world: int, name: str, backend: str, timeout: float):
        from torch.distributed.distributed_c10d import (
            Backend,
            PrefixStore,
            _new_process_group_helper,
            _world,
            rendezvous,
        )

        limit = timedelta(seconds=timeout)
        host = f"[{address}]" if ":" in address else address
        try:
            store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, world, timeout=limit))
            store.set_timeout(limit)
            group, _ = _new_process_group_helper(
                world,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]
                timeout=limit,
            )
        except Exception as error:
            raise TransportError(f"rank {rank} of {world} did not meet the others at {host}:{port}: {error}") from error
        self._group: Any = group
        _world.pg_group_ranks[self._group] = {i: i for i in range(world)}

    def send(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send each tensor (contiguous) to a rank; returns when all have gone."""
        self._wait([self._group.send([tensor], to, 0) for to, tensor in tensors])

    def receive(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Receive into each tensor (contiguous) from a rank, in the order they were sent."""
        self._wait([self._group.recv([tensor], frm, 0) for frm, tensor in tensors])

    def leave(self) -> None:
        """Destroy this side of the group."""
        torch.distributed.destroy_process_group(self._group)

    @staticmethod
    def _wait(works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise TransportError(str(error).splitlines()[0]) from error
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def region(tensor: torch.Tensor) -> Region:
    """Address, bytes and device of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes, tensor.device.index or 0


def area_sums(flat: torch.Tensor, areas: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sum (wrapping) of the 8-byte words of each area [begin, begin + bytes) of a uint8 tensor: int64 [areas].

    Begins and sizes are multiples of 8. Neighbours of one size are summed by one operation: in the engine's thread each
    operation may have to wait for the scheduler.
    """
    runs: list[list[int]] = []  # begin, bytes of one area, areas
    for begin, size in areas:
        if runs and runs[-1][1] == size and runs[-1][0] + size * runs[-1][2] == begin:
            runs[-1][2] += 1
        else:
            runs.append([begin, size, 1])
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    parts = [words[b // 8 : (b + n * count) // 8].view(count, n // 8).sum(1) for b, n, count in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=flat.device)


def element_sum(view: torch.Tensor, integer: torch.dtype) -> torch.Tensor:
    """Sum of a tensor's elements read as integers of their size: int64 scalar."""
    return view.view(integer).sum(dtype=torch.int64)
