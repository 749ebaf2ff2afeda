"""Which elements of a staged bucket changed, as a bucket of its own: encoding `indices` on its way to an engine.

For each changed tensor two entries, `<name>:positions` (int32 or int64 [n], ascending) and `<name>:values` (the
tensor's dtype, [n]); or, where that would be larger, the tensor itself. The receiver's half is
`engine.embedded.weights`.
"""

from __future__ import annotations

import numpy as np
import torch

from miles_disagg.weights.dtypes import OF_TORCH
from miles_disagg.weights.indices import POSITIONS, VALUES, diff_indices

Metas = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
_POSITION_DTYPES = {4: torch.int32, 8: torch.int64}


def changed_bucket(old: torch.Tensor, new: torch.Tensor, metas: Metas) -> tuple[torch.Tensor, Metas, int]:
    """(flat uint8 bucket, its entries, number of changed elements) between two flat buckets (uint8 [n], host memory).

    Where nothing changed, the first element that there is: an engine takes a version only with a bucket.
    """
    a, b = old.numpy(), new.numpy()
    parts: list[np.ndarray] = []
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    changed, at = 0, 0

    def add(name: str, dtype: torch.dtype, positions: np.ndarray, values: np.ndarray) -> None:
        parts.extend((positions.view(np.uint8), values))
        count = (positions.size,)
        entries.append((name + POSITIONS, _POSITION_DTYPES[positions.itemsize], count))
        entries.append((name + VALUES, dtype, count))

    first: tuple[str, torch.dtype, int] | None = None
    for name, dtype, shape in metas:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if first is None and size:
            first = (name, dtype, at)
        piece = b[at : at + size]
        found = diff_indices(a[at : at + size], piece, OF_TORCH[str(dtype)])
        at += size
        changed += found.positions.size
        if found.positions.size and found.positions.nbytes + found.values.nbytes >= size:
            parts.append(piece)
            entries.append((name, dtype, shape))
        elif found.positions.size:
            add(name, dtype, found.positions, found.values)
    if not changed and first is not None:
        name, dtype, begin = first
        add(name, dtype, np.zeros(1, np.int32), b[begin : begin + dtype.itemsize])
    return torch.from_numpy(np.concatenate(parts)), tuple(entries), changed
