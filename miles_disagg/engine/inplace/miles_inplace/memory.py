"""All live weights of one element size as one flat tensor, and the arithmetic on positions in it.

Parameters are separate allocations; one integer view over the whole range of addresses from the first to the last of
them lets a single gather or scatter reach all of them. Only addresses inside a slot are ever touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .recorder import Row, Slot

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TYPESTR = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}
_CHUNK = 1 << 24  # elements at once: few operations, and scratch of about 0.5 GiB
_K = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd, from xxHash's primes


class Arena:
    """Slots of one element size (bytes) on one device. `flat`: int [elements from the first address to the last]."""

    def __init__(self, slots: Sequence[Slot], size: int):
        self.slots, self.size, self.device = slots, size, slots[0].device
        self._first = min(slot.pointer for slot in slots)
        last = max(slot.pointer + slot.nbytes for slot in slots)
        if any((slot.pointer - self._first) % size for slot in slots):
            raise ValueError("parameters are not aligned to their elements")
        self.flat = _view(self._first, (last - self._first) // size, size, self.device)

    def start(self, slot: Slot) -> int:
        """Index of a slot's first element."""
        return (slot.pointer - self._first) // self.size

    def fingerprint(self) -> int:
        """Sum over all elements of a keyed mix of (index, value), modulo 2**64; reads everything once."""
        total = 0
        for slot in self.slots:
            begin, count = self.start(slot), slot.nbytes // self.size
            for at in range(begin, begin + count, _CHUNK):
                stop = min(at + _CHUNK, begin + count)
                index = torch.arange(at, stop, device=self.device)
                total += int(mix(index, self.flat[at:stop]))
        return total % 2**64

    def change(self, index: torch.Tensor, values: torch.Tensor) -> tuple[int, int]:
        """(what writing `values` at `index` adds to the fingerprint, how many elements it changes)."""
        added = changed = 0
        for at in range(0, index.numel(), _CHUNK):
            where, new = index[at : at + _CHUNK], values[at : at + _CHUNK]
            old = self.flat[where]
            added += int(mix(where, new) - mix(where, old))
            changed += int((new != old).sum())
        return added % 2**64, changed


def mix(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keyed mix of int64 indices and integer values, summed: int64 scalar, wrapping."""
    x = index.mul(_K[0])
    x ^= (values.to(torch.int64) + 1) * _K[1]
    x ^= x >> 31
    x *= _K[2]
    x ^= x >> 29
    return x.sum()


@dataclass(frozen=True)
class Places:
    """Where positions in a tensor go: the tensor's row, the arena index of its slot's first element, how many they
    are."""

    row: Row
    start: int
    count: int


def map_positions(places: Sequence[Places], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat checkpoint positions, one place's after another's (rows of equally many dims) -> (which of them the rows
    hold: bool; their indices in the arena: int64, of the others without meaning)."""
    counts: torch.Tensor | None = None

    def each(numbers: list[int]) -> Any:
        nonlocal counts
        if len(set(numbers)) == 1:
            return numbers[0]
        if counts is None:
            counts = torch.tensor([place.count for place in places], device=positions.device)
        spread = torch.tensor(numbers, device=positions.device)
        return torch.repeat_interleave(spread, counts, output_size=positions.numel())

    rest = positions.to(torch.int64) - each([place.row.source_offset for place in places])
    keep = rest >= 0
    index = torch.zeros_like(rest) + each([place.start + place.row.slot_offset for place in places])
    for dim in range(len(places[0].row.dims)):
        size, source, slot = (each([place.row.dims[dim][part] for place in places]) for part in range(3))
        step = rest if isinstance(source, int) and source == 1 else torch.div(rest, source, rounding_mode="floor")
        keep &= step < size
        index += step * slot
        rest = rest - step * source
    keep &= rest == 0
    return keep, index


def samples(row: Row, limit: int, device: torch.device) -> torch.Tensor:
    """Numbers of at most `limit` elements of a row, int64: its first and last ones and others all over it."""
    count = row.numel
    if count <= limit:
        return torch.arange(count, device=device)
    spread = torch.arange(limit // 2, device=device)
    step = count // (limit // 2)
    spread = spread * step + (spread * 40503) % step
    edge = torch.arange(limit // 4, device=device)
    return torch.cat([edge, spread, count - 1 - edge])


def logical(row: Row, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(checkpoint position, slot element) of the row's elements `numbers`, counted in order of its dims."""
    source, slot = torch.full_like(numbers, row.source_offset), torch.full_like(numbers, row.slot_offset)
    rest = numbers
    for size, there, here in reversed(row.dims):
        step = rest % size
        source += step * there
        slot += step * here
        rest = torch.div(rest, size, rounding_mode="floor")
    return source, slot


def pieces(
    row: Row, limit: int = 1 << 25
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int]]:
    """A row cut along its first dimension into strided pieces of about `limit` elements at most:
    (sizes, checkpoint strides, checkpoint offset, slot strides, slot offset)."""
    dims = row.dims or ((1, 1, 1),)
    inner = row.numel // dims[0][0]
    step = max(1, limit // inner)
    there, here = tuple(d[1] for d in dims), tuple(d[2] for d in dims)
    for at in range(0, dims[0][0], step):
        sizes = (min(step, dims[0][0] - at), *(d[0] for d in dims[1:]))
        yield sizes, there, row.source_offset + at * there[0], here, row.slot_offset + at * here[0]


def _view(address: int, elements: int, size: int, device: torch.device) -> torch.Tensor:
    """An integer tensor over memory that others own."""
    if device.type == "cpu":
        raw = (ctypes.c_char * (elements * size)).from_address(address)
        return torch.frombuffer(raw, dtype=INTEGERS[size])
    with torch.cuda.device(device):
        return torch.as_tensor(_Foreign(address, elements, size), device=device)


class _Foreign:
    def __init__(self, address: int, elements: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (elements,), "typestr": _TYPESTR[size], "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip
