"""A patch file as indices and values of the live weights.

Read in windows of many tensors at once: a mixture of experts has thousands, and each operation costs microseconds
while the scheduler wants the interpreter too. What a position in a checkpoint tensor means here is `memory`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .memory import INTEGERS, Arena, Places, map_positions
from .recorder import Row, Slot, TensorHeader, read_header

POSITIONS, VALUES = ":positions", ":values"  # suffixes in a patch file
_WINDOW = 1 << 22  # elements


@dataclass(frozen=True)
class _Part:
    """Some positions and values of one tensor for one row: where their bytes begin in the file, and how many they are
    (`places.count`)."""

    positions: int
    values: int
    places: Places


@dataclass(frozen=True)
class _Kind:
    """Parts that are mapped together. whole: the row is all of its tensor."""

    live: torch.dtype
    own: torch.dtype
    positions: torch.dtype
    dims: int
    whole: bool


class PatchReader:
    """Reads patches for one rank. headers: the checkpoint's tensors; rows: of those that are here."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        rows: Mapping[str, Sequence[Row]],
        slots: Sequence[Slot],
        arenas: Mapping[int, Arena],
    ):
        self._headers, self._rows, self._slots, self._arenas = headers, rows, slots, arenas
        self._device = next(iter(arenas.values())).device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, path: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Pieces of (element size, indices into the arena of that size: int64, values as integers of that size), on the
        device. ValueError if the patch does not fit this model; at the latest after the last piece."""
        alike = self._parts(read_header(path))
        whole_file = torch.from_numpy(np.memmap(path, np.uint8, "c"))  # private: nobody writes to it
        inside: list[torch.Tensor] = []
        for kind, parts in alike.items():
            for window in _windows(parts, kind):
                positions = self._gathered(whole_file, [(p.positions, p.places.count) for p in window], kind.positions)
                keep, index = map_positions([p.places for p in window], positions)
                raw = self._gathered(whole_file, [(p.values, p.places.count) for p in window], kind.own)
                if kind.whole:
                    inside.append(keep.all())
                else:
                    index, raw = index[keep], raw[keep]
                size = kind.live.itemsize
                yield size, index, raw.to(kind.live).view(INTEGERS[size])
        if inside and not bool(torch.stack(inside).all()):
            raise ValueError("there are positions outside of their tensors")

    def _parts(self, header: Mapping[str, TensorHeader]) -> dict[_Kind, list[_Part]]:
        alike: dict[_Kind, list[_Part]] = {}
        for name in (key.removesuffix(POSITIONS) for key in header if key.endswith(POSITIONS)):
            own = self._headers.get(name)
            if own is None:
                raise ValueError(f"{name} is not in the checkpoint that was recorded")
            where, what = header[name + POSITIONS], header[name + VALUES]
            count = (where.end - where.begin) // where.dtype.itemsize
            if count * own.dtype.itemsize != what.end - what.begin:
                raise ValueError(f"{name}: {count} positions, {what.end - what.begin} bytes of values")
            elements = (own.end - own.begin) // own.dtype.itemsize
            for row in self._rows.get(name, ()):  # a reload ignores the others on this rank too
                slot = self._slots[row.slot]
                kind = _Kind(slot.dtype, own.dtype, where.dtype, len(row.dims), row.numel == elements)
                start = self._arenas[slot.dtype.itemsize].start(slot)
                alike.setdefault(kind, []).append(_Part(where.begin, what.begin, Places(row, start, count)))
        return alike

    def _gathered(self, file: torch.Tensor, runs: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        """Runs of (first byte, elements) of the file, one behind the other, on the device."""
        pieces = [file[begin : begin + count * dtype.itemsize] for begin, count in runs]
        if self._device.type == "cpu":
            return torch.cat(pieces).view(dtype)
        nbytes = sum(piece.numel() for piece in pieces)
        if self._buffer.numel() < nbytes:  # pinned, and kept: fresh memory costs more than the copies
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        torch.cat(pieces, out=self._buffer[:nbytes])
        return self._buffer[:nbytes].to(self._device).view(dtype)


def _windows(parts: list[_Part], kind: _Kind) -> Iterator[list[_Part]]:
    """The parts, cut and put together to `_WINDOW` elements at most."""
    window: list[_Part] = []
    room = _WINDOW
    for part in parts:
        done, count = 0, part.places.count
        while done < count:
            take = min(room, count - done)
            places = Places(part.places.row, part.places.start, take)
            at = part.positions + done * kind.positions.itemsize, part.values + done * kind.own.itemsize
            window.append(_Part(*at, places))
            done, room = done + take, room - take
            if not room:
                yield window
                window, room = [], _WINDOW
    if window:
        yield window
