"""The port every delta encoding implements, and the block size they share.

A frame says how one tensor's bytes change. Codecs see raw bytes and a dtype string, never files, names or versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zstandard

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs.scratch import idle
from miles_disagg.weights.digest import Hasher

BLOCK_BYTES = 8 << 20
"""Tensors are encoded and applied in blocks of this many raw bytes (the last is shorter); a multiple of 8."""

Sink = Callable[[Any], object]
"""Takes the next bytes of a frame."""


@dataclass(frozen=True)
class EncodeStats:
    """changed: elements that differ. non_finite: changed elements whose new value is NaN or Inf."""

    changed: int
    non_finite: int


class Decoder(Protocol):
    """One frame being applied, block by block in order."""

    def step(self, block: np.ndarray, hasher: Hasher | None = None) -> None:
        """Turn the next BLOCK_BYTES (or the tail) of the tensor from base to target state, in place (uint8).

        `hasher` takes the result, while it is in cache where the codec can arrange that.
        """
        ...

    def finish(self) -> None:
        """CheckpointError unless the frame is used up exactly."""
        ...


class Codec(Protocol):
    """One `delta_encoding`."""

    name: str

    def encode(
        self, old: np.ndarray, new: np.ndarray, dtype: str, sink: Sink, hasher: Hasher | None = None
    ) -> EncodeStats:
        """Send the frame that turns `old` into `new` (uint8, equal length) to `sink`; feed all of `new` to `hasher`."""
        ...

    def decoder(self, frame: Any, nbytes: int, dtype: str) -> Decoder:
        """Start applying `frame` to a tensor of `nbytes` bytes. Memory is bounded by blocks, whatever it claims."""
        ...


def encode_frame(
    codec: Codec, old: np.ndarray, new: np.ndarray, dtype: str, hasher: Hasher | None = None
) -> tuple[bytes, EncodeStats]:
    """The whole frame in memory, and its statistics."""
    chunks: list[bytes] = []
    stats = codec.encode(old, new, dtype, chunks.append, hasher)
    return b"".join(chunks), stats


def apply_frame(codec: Codec, frame: Any, target: np.ndarray, dtype: str, hasher: Hasher | None = None) -> None:
    """Apply `frame` to `target` (uint8 [n], holding the base state) in place, feeding the result to `hasher`.

    A malformed frame raises CheckpointError and may leave `target` half-changed: stage or journal.
    """
    decoder = codec.decoder(frame, target.nbytes, dtype)
    for begin in range(0, target.nbytes, BLOCK_BYTES):
        decoder.step(target[begin : begin + BLOCK_BYTES], hasher)
    decoder.finish()


def check_pair(old: np.ndarray, new: np.ndarray) -> None:
    """CheckpointError unless both are contiguous uint8 [n] of one length."""
    for array in (old, new):
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise CheckpointError(f"tensor bytes must be a contiguous 1-D uint8 array, got {array.dtype} {array.shape}")
    if old.size != new.size:
        raise CheckpointError(f"base has {old.size} bytes, target has {new.size}: a delta cannot change a shape")


def _has_small_window(frame: memoryview) -> bool:
    """Whether a decompressor may be kept after this frame: it keeps as much memory as the frame asked for."""
    try:
        return zstandard.get_frame_parameters(frame).window_size <= 1 << 20
    except zstandard.ZstdError:  # not a frame: reading it says so
        return False


class FrameReader:
    """Exact reads from one zstd frame with bounded memory; every defect is a CheckpointError."""

    _AHEAD_BYTES = 4096
    _WINDOW_BYTES = 16 << 20  # what a frame may make us allocate; ours need 2 MiB, zstd -19 needs 8

    def __init__(self, frame: Any):
        view = memoryview(frame)
        self._keep = _has_small_window(view)
        contexts = idle.decompressors if self._keep else []
        self._context = contexts.pop() if contexts else zstandard.ZstdDecompressor(max_window_size=self._WINDOW_BYTES)
        self._reader = self._context.stream_reader(view, read_across_frames=False)
        self._ahead = b""  # decompressed, not yet asked for

    def take(self, length: int) -> bytes:
        """The next `length` decompressed bytes, where they are few."""
        if len(self._ahead) < length:
            self._ahead += self._valid(self._reader.read, self._AHEAD_BYTES)
            if len(self._ahead) < length:
                raise CheckpointError(f"frame ends {length - len(self._ahead)} bytes early (truncated?)")
        taken, self._ahead = self._ahead[:length], self._ahead[length:]
        return taken

    def read(self, length: int) -> np.ndarray:
        """The next `length` decompressed bytes, uint8; CheckpointError if the frame has fewer."""
        out = np.empty(length, np.uint8)
        self.read_into(out)
        return out

    def read_into(self, out: np.ndarray) -> None:
        """Fill `out` (contiguous, any dtype) with the next decompressed bytes."""
        view, got = out.data.cast("B") if out.size else memoryview(b""), 0
        if self._ahead:
            got = min(len(self._ahead), len(view))
            view[:got] = self._ahead[:got]
            self._ahead = self._ahead[got:]
        while got < len(view):
            count = self._valid(self._reader.readinto, view[got:])
            if not count:
                raise CheckpointError(f"frame ends {len(view) - got} bytes early (truncated?)")
            got += count

    def skip(self, length: int) -> None:
        """Drop the next `length` decompressed bytes."""
        while length:
            step = min(length, 1 << 20)
            self.read(step)
            length -= step

    def finish(self) -> None:
        """CheckpointError if anything is left. The reader is of no use afterwards."""
        if self._ahead or self._valid(self._reader.read, 1):
            raise CheckpointError("frame has more data than the tensor")
        if self._keep:
            idle.decompressors.append(self._context)
            self._keep = False

    def _valid(self, read: Callable[[Any], Any], what: Any) -> Any:
        try:
            return read(what)
        except zstandard.ZstdError as error:
            raise CheckpointError(f"frame is not valid zstd: {error}") from None
