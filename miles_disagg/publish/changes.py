"""Which elements of a staged bucket changed, as a bucket of its own: encoding `indices` on its way to an engine.

For each changed tensor two entries, `<name>:positions` (int32 or int64 [n], ascending) and `<name>:values` (the
tensor's dtype, [n]); or, where that would be larger, the tensor itself. Buckets on a device are compared there, and the
result stays there. The receiver's half is `engine.embedded.weights`.
"""

from __future__ import annotations

import math

import torch

from miles_disagg.weights.device_diff import as_integers, changes_of
from miles_disagg.weights.dtypes import OF_TORCH
from miles_disagg.weights.indices import POSITIONS, VALUES, diff_indices

Metas = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def changed_bucket(old: torch.Tensor, new: torch.Tensor, metas: Metas) -> tuple[torch.Tensor, Metas, int]:
    """(flat uint8 bucket, its entries, number of changed elements) between two flat buckets (uint8 [n], one device).

    Where nothing changed, the first element that there is: an engine takes a version only with a bucket.
    """
    parts: list[torch.Tensor] = []
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    changed, at = 0, 0

    def add(name: str, dtype: torch.dtype, positions: torch.Tensor, values: torch.Tensor) -> None:
        parts.extend((positions.view(torch.uint8), values))
        count = (positions.numel(),)
        entries.append((name + POSITIONS, positions.dtype, count))
        entries.append((name + VALUES, dtype, count))

    first: tuple[str, torch.dtype, int] | None = None
    for (name, dtype, shape), (positions, values) in zip(metas, _compare(old, new, metas), strict=True):
        size = math.prod(shape) * dtype.itemsize
        if first is None and size:
            first = (name, dtype, at)
        piece = new[at : at + size]
        at += size
        changed += positions.numel()
        if positions.numel() and positions.nbytes + values.nbytes >= size:
            parts.append(piece)
            entries.append((name, dtype, shape))
        elif positions.numel():
            add(name, dtype, positions, values)
    if not changed and first is not None:
        name, dtype, begin = first
        nothing = torch.zeros(1, dtype=torch.int32, device=new.device)
        add(name, dtype, nothing, new[begin : begin + dtype.itemsize])
    return torch.cat(parts), tuple(entries), changed


def _compare(old: torch.Tensor, new: torch.Tensor, metas: Metas) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(positions, new bytes of those) of each tensor in two buckets."""
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in metas]
    pieces = list(zip(torch.split(old, sizes), torch.split(new, sizes), metas, strict=True))
    if new.device.type == "cpu":
        on_host = [diff_indices(a.numpy(), b.numpy(), OF_TORCH[str(dtype)]) for a, b, (_, dtype, _) in pieces]
        return [(torch.from_numpy(found.positions), torch.from_numpy(found.values)) for found in on_host]
    pairs = [(as_integers(a, dtype.itemsize), as_integers(b, dtype.itemsize)) for a, b, (_, dtype, _) in pieces]
    return [(found.positions, found.after.view(torch.uint8)) for found in changes_of(pairs)]
