"""The trainer's snapshot on its own device: the diff runs there, and only changed elements cross to the host.

Three copies of a source's share of the weights: published and staged on the device, and a mirror of the published
bytes in host memory, which every frame is applied to, for the checksum of the target and for what the host must read.
The state machine of a publication is `disk`.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from miles_disagg.domain.errors import ConfigError
from miles_disagg.weights.checkpoint import Checkpoint
from miles_disagg.weights.codecs import EncodeStats, apply_frame, get_codec
from miles_disagg.weights.codecs.base import Sink
from miles_disagg.weights.digest import Hasher
from miles_disagg.weights.gpu_delta import encode_on_device

DEVICE_ENCODINGS = ("sparse", "sparse-max")
_SPARE_BYTES = 1 << 30


def choose_device(wanted: str, encoding: str | None, base: Checkpoint) -> torch.device | None:
    """Device of the snapshot; None for host memory.

    wanted: --update-weight-snapshot-device. `auto` takes the current GPU if two copies of the checkpoint fit into what
    is free beside 1 GiB; `cuda` without CUDA is a ConfigError.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--update-weight-snapshot-device cuda: the trainer's process sees no CUDA device; use auto"])
    if wanted == "cpu" or encoding not in DEVICE_ENCODINGS or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    fits = free >= 2 * base.nbytes + _SPARE_BYTES
    return torch.device("cuda", torch.cuda.current_device()) if wanted == "cuda" or fits else None


class DeviceSnapshot:
    """Published and staged tensors by name on one device. `stage`, then `encode` or `fetch` of each, then `settle`."""

    def __init__(self, base: Checkpoint, device: torch.device):
        self._base, self.device = base, device
        self._published: dict[str, torch.Tensor] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._mirror: dict[str, torch.Tensor] = {}
        self._ahead: set[str] = set()  # names whose mirror holds the staged bytes
        self._lock = threading.Lock()

    def stage(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; its host mirror, uint8 [n], which `encode` or `fetch` brings up to date."""
        copy = self._spare.pop(name, None)
        if copy is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self._staged[name] = copy.copy_(tensor, non_blocking=True)
        if name not in self._mirror:
            raw = torch.empty(copy.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            raw.numpy()[:] = self._base.bytes(name)
            self._mirror[name] = raw
            self._published[name] = torch.empty_like(copy)
            _flat(self._published[name]).copy_(raw)
        return self._mirror[name]

    def encode(self, encoding: str, name: str, dtype: str, sink: Sink, hasher: Hasher) -> EncodeStats:
        """Send the frame from published to staged to `sink`, all target bytes to `hasher`. One frame is in memory."""
        chunks: list[bytes] = []
        aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # not behind the training step
        with torch.cuda.stream(aside):  # type: ignore[arg-type]
            old, new = self._published[name], self._staged[name]
            stats = encode_on_device(old, new, dtype, chunks.append, by_class=encoding == "sparse-max")
        frame = b"".join(chunks)
        with self._lock:
            self._ahead.add(name)
        apply_frame(get_codec(encoding), np.frombuffer(frame, np.uint8), self._mirror[name].numpy(), dtype, hasher)
        sink(frame)
        return stats

    def fetch(self) -> None:
        """Bring every mirror to the staged bytes (for a full version)."""
        for name in set(self._staged) - self._ahead:
            self._ahead.add(name)
            self._mirror[name].copy_(_flat(self._staged[name]))

    def settle(self, published: bool) -> None:
        """What was staged is now published, or forgotten."""
        if published:
            self._spare, self._published = self._published, {**self._published, **self._staged}
            self._spare = {name: self._spare[name] for name in self._staged}
        else:
            for name in self._ahead:
                self._mirror[name].copy_(_flat(self._published[name]))
            self._spare = self._staged
        self._staged, self._ahead = {}, set()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
