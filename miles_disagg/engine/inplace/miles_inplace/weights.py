"""The live weights in checkpoint terms: mapping a patch, comparing with a checkpoint, writing one out.

Built from what `recorder` found; `memory` does the addressing. Reads files by memory map; nothing is changed here
except by `scatter`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .memory import INTEGERS, Arena, logical, pieces, samples
from .patch import PatchReader
from .recorder import Row, Slot, TensorHeader, Unmappable, read_headers, record


@dataclass
class Staged:
    """A patch on the device, by element size: flat indices (int64) and integer values; `added`: to the fingerprint."""

    index: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    added: int
    elements: int
    changed: int


class LiveWeights:
    """The mapped weights of one rank. headers: the checkpoint's tensors (shapes and dtypes are every version's)."""

    def __init__(self, model: Any, directory: str):
        self.headers = read_headers(directory)
        self.slots, self.rows = record(model, self.headers)
        used = sorted({row.slot for rows in self.rows.values() for row in rows})
        if not used:
            raise Unmappable("the loader loaded nothing")
        # Matrices only: what has one dimension or none may well keep its initial value (scales of a KV cache, say).
        matrices = {p.untyped_storage().data_ptr() for _, p in model.named_parameters() if p.dim() > 1}
        reached = set(used)
        self.unreached = [s.name for i, s in enumerate(self.slots) if i not in reached and s.pointer in matrices]
        groups: dict[int, list[Slot]] = {}
        for slot in (self.slots[i] for i in used):
            groups.setdefault(slot.dtype.itemsize, []).append(slot)
        if len({slot.device for slots in groups.values() for slot in slots}) > 1:
            raise Unmappable("parameters lie on several devices of this rank")
        self.arenas = {size: Arena(slots, size) for size, slots in groups.items()}
        self.device = next(iter(self.arenas.values())).device
        self._patches = PatchReader(self.headers, self.rows, self.slots, self.arenas)
        self._parameters = [p for _, p in model.named_parameters()]
        self._pointers = [p.data_ptr() for p in self._parameters]

    def describe(self) -> dict[str, Any]:
        """For a status answer: numbers, and the weight matrices that no tensor of the checkpoint is loaded into."""
        rows = [row for rows in self.rows.values() for row in rows]
        elements = sum(row.numel for row in rows)
        return {"tensors": len(self.rows), "rows": len(rows), "elements": elements, "unreached": self.unreached}

    def unmoved(self) -> bool:
        """True if every parameter still lies where it was recorded."""
        return self._pointers == [p.data_ptr() for p in self._parameters]

    def fingerprint(self) -> int:
        """Of everything mapped; see `Arena.fingerprint`."""
        return sum(arena.fingerprint() for arena in self.arenas.values()) % 2**64

    # --- a patch ------------------------------------------------------------------------------------

    def stage(self, path: str) -> Staged:
        """Read a patch file, map it and put it on the device. ValueError if it does not fit this model."""
        index: dict[int, list[torch.Tensor]] = {}
        values: dict[int, list[torch.Tensor]] = {}
        for size, where, what in self._patches.read(path):
            index.setdefault(size, []).append(where)
            values.setdefault(size, []).append(what)
        elements = sum(part.numel() for parts in index.values() for part in parts)
        joined = {size: torch.cat(parts) for size, parts in index.items()}
        index.clear()
        new = {size: torch.cat(parts) for size, parts in values.items()}
        changes = [self.arenas[size].change(joined[size], new[size]) for size in joined]
        return Staged(joined, new, sum(a for a, _ in changes) % 2**64, elements, sum(c for _, c in changes))

    def scatter(self, staged: Staged) -> None:
        """One scatter per element size, read back and compared. RuntimeError if it is not there afterwards."""
        for size, index in staged.index.items():
            self.arenas[size].flat.index_put_((index,), staged.values[size])
        right = [(self.arenas[s].flat[i] == staged.values[s]).all() for s, i in staged.index.items()]
        if not all(bool(flag) for flag in right):
            raise RuntimeError("the live weights do not hold what was scattered into them")

    # --- comparison with a checkpoint ---------------------------------------------------------------

    def probe(self, directory: str, limit: int) -> str | None:
        """The first tensor of which one of up to `limit` sampled elements a row differs from the checkpoint's."""
        headers = read_headers(directory)
        for name, rows in self.rows.items():
            source = read(headers[name])
            for row in rows:
                there, here = logical(row, samples(row, limit, torch.device("cpu")))
                slot = self.slots[row.slot]
                arena = self.arenas[slot.dtype.itemsize]
                expected = source[there].to(slot.dtype).view(INTEGERS[arena.size])
                live = arena.flat[(here + arena.start(slot)).to(self.device)].cpu()
                if not torch.equal(expected, live):
                    return name
        return None

    def compare(self, directory: str) -> dict[str, int]:
        """Elements that differ from the checkpoint, by tensor; everything is compared."""
        headers = read_headers(directory)
        wrong: dict[str, int] = {}
        for name, rows in self.rows.items():
            source = read(headers[name])
            for row in rows:
                for expected, live in self._pieces(row, source):
                    bad = int((expected.to(live.device).to(live.dtype).view(INTEGERS[live.itemsize])
                               != live.view(INTEGERS[live.itemsize])).sum())  # fmt: skip
                    if bad:
                        wrong[name] = wrong.get(name, 0) + bad
        return wrong

    def export(self, path: str, begins: dict[str, int]) -> list[str]:
        """Write this rank's elements into a file laid out as {tensor: byte offset}, in the checkpoint's dtypes.

        Names of the tensors whose live dtype is another (their values were converted).
        """
        converted = []
        out = np.memmap(path, np.uint8, "r+")
        for name, rows in self.rows.items():
            header = self.headers[name]
            target = _tensor(out[begins[name] : begins[name] + header.end - header.begin], header.dtype)
            for row in rows:
                for part, live in self._pieces(row, target):
                    part.copy_(live.cpu())
                if self.slots[row.slot].dtype != header.dtype:
                    converted.append(name)
        out.flush()
        return converted

    def _pieces(self, row: Row, source: torch.Tensor) -> Any:
        slot = self.slots[row.slot]
        arena = self.arenas[slot.dtype.itemsize]
        typed = arena.flat.view(slot.dtype)
        for sizes, there, source_offset, here, slot_offset in pieces(row):
            yield (
                source.as_strided(sizes, there, source_offset),
                typed.as_strided(sizes, here, arena.start(slot) + slot_offset),
            )


def read(header: TensorHeader) -> torch.Tensor:
    """A checkpoint tensor, flat, memory-mapped."""
    if header.begin == header.end:
        return torch.empty(0, dtype=header.dtype)
    return _tensor(np.memmap(header.file, np.uint8, "r", header.begin, (header.end - header.begin,)), header.dtype)


def _tensor(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a read-only map; nobody writes to it
        flat = torch.from_numpy(raw)
    if raw.ctypes.data % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)
