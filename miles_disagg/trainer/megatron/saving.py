"""A checkpoint on its way to disk: copied out of the model at once, written while training goes on.

Megatron's `dist_checkpointing` plans a save and hands its writer the tensors. Here that writer keeps copies in host
memory (`HostCopies.receiving`), so that the collective part of a save ends with the copy-out. `PendingSave.write` then
puts them into files from any thread, without a collective, and rank 0 describes the whole in `PendingSave.finish`.
What is saved, and how it is loaded, is `checkpoint`.

Megatron's own asynchronous saving forks or spawns a writer process and ends with collectives that have to fit between
the training step's; and its writers take the live tensors where these are on the CPU already.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.storage import WriteResult

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.trainer.base import Written
from miles_disagg.weights.digest import new_hasher
from miles_disagg.weights.safetensors_file import sync_directory


class HostCopies:
    """Host memory that one model's state is copied into, kept from save to save (pinned for CUDA tensors)."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self.idle = threading.Event()
        self.idle.set()
        self.buckets: list[Any] = []
        self.transforms: Any = None
        self.described: tuple[Any, Any] | None = None

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Have a `dist_checkpointing.save` in this block copy to here instead of writing. One at a time a process."""
        self.buckets, self.described = [], None
        hooks = {
            "preload_tensors": staticmethod(self._copy),
            "write_preloaded_data_multiproc": staticmethod(self._keep),  # Megatron-core before 0.19
            "write_preloaded_data_multithread": staticmethod(self._keep),
            "finish": self._describe(),
        }
        before = {name: vars(FileSystemWriterAsync).get(name) for name in hooks}
        # Made by Megatron, it is a manager's: a process that imports the main module again.
        filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
        try:
            for name, hook in hooks.items():
                setattr(FileSystemWriterAsync, name, hook)
            yield
        finally:
            for name, original in before.items():
                if original is None:
                    delattr(FileSystemWriterAsync, name)
                else:
                    setattr(FileSystemWriterAsync, name, original)

    def _copy(self, buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        """In place of Megatron's copy to the host, which leaves tensors alone that are there already."""
        out, devices = [], set()
        for path, key, (raw, tensors) in buckets:
            copies = []
            for index, (item, tensor) in enumerate(tensors):
                copy = self._memory.get((key, index))
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                    self._memory[key, index] = copy
                copy.copy_(tensor, non_blocking=True)
                copies.append((item, copy))
                if tensor.is_cuda:
                    devices.add(tensor.device)
            out.append((path, key, (raw, copies)))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return out

    def _keep(self, transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
        """In place of Megatron's writing: nothing is written, and it is told so, item by item."""
        (self.transforms,), self.buckets = transforms, buckets
        results.put(
            {
                number: [WriteResult(item.index, 0, _StorageInfo(key, 0, 0)) for item, _ in (*raw, *tensors)]
                for number, (_, key, (raw, tensors)) in enumerate(buckets)
            }
        )

    def _describe(self) -> Any:
        def finish(writer: Any, metadata: Any, results: Any) -> None:
            self.described = (writer, metadata)

        return finish


class PendingSave:
    """One model's checkpoint between its copy-out and its rename. `host` must stay as it is until it is written."""

    def __init__(self, partial: Path, target: Path, host: HostCopies):
        self._partial, self._target, self._host = partial, target, host
        host.idle.clear()

    def write(self) -> Written:
        """Write and sync this rank's files. CheckpointError names the file that could not be written."""
        files: dict[str, tuple[int, str]] = {}
        entries: list[Any] = []
        try:
            for path, key, (raw, tensors) in self._host.buckets:
                try:
                    with _Hashed(path) as stream:
                        for item, data in (*raw, *tensors):
                            entries.append(_write_item(
                                self._host.transforms, stream, data, item, key,
                                serialization_format=SerializationFormat.TORCH_SAVE,
                            ))  # fmt: skip
                        stream.sync()
                except (OSError, RuntimeError) as error:  # torch's writer wraps what the file raises
                    raise CheckpointError(f"could not be written: {error}", file=str(path)) from error
                files[f"{self._target.name}/{Path(path).name}"] = (stream.size, stream.digest())
            sync_directory(self._partial)
        finally:
            self._host.buckets = []
            self._host.idle.set()
        return Written(files, {self._target.name: pickle.dumps(entries)})

    def finish(self, ranks: Sequence[Written]) -> None:
        """On rank 0, with what every rank wrote: describe it, then let the directory appear under its name."""
        assert self._host.described is not None
        writer, metadata = self._host.described
        FileSystemWriterAsync.finish(writer, metadata, [pickle.loads(w.entries[self._target.name]) for w in ranks])
        sync_directory(self._partial)
        os.rename(self._partial, self._target)
        sync_directory(self._target.parent)

    def abandon(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._partial, ignore_errors=True)


class PendingCheckpoint:
    """A trainer rank's models, copied out together (the policy last: it makes the checkpoint complete)."""

    def __init__(self, parts: Sequence[PendingSave]):
        self._parts = list(parts)

    def write(self) -> Written:
        """See PendingSave.write; of all models."""
        done = [part.write() for part in self._parts]
        files = {name: facts for one in done for name, facts in one.files.items()}
        return Written(files, {name: entries for one in done for name, entries in one.entries.items()})

    def finish(self, ranks: Sequence[Written]) -> None:
        """See PendingSave.finish."""
        for part in self._parts:
            part.finish(ranks)

    def abandon(self) -> None:
        """See PendingSave.abandon."""
        for part in self._parts:
            part.abandon()


class _Hashed(io.RawIOBase):
    """A file that is only written to, and hashed on the way."""

    def __init__(self, path: str):
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self._hasher, self.size = new_hasher(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hasher.update(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def sync(self) -> None:
        """Have everything on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def digest(self) -> str:
        """xxh3-128 of what was written."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
