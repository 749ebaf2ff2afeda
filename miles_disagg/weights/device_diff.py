"""Which elements of two tensors on a device differ: ascending positions, old and new values.

On CUDA by two Triton kernels that read both copies once (`triton_diff`); elsewhere by torch, with the same result. What
becomes of the changes is `gpu_delta` and `publish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_GROUP_BYTES = 1 << 30  # of one copy: bounds the memory of what is found, which may be everything
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """positions: int32 [n], int64 from 2**31 elements on, ascending; before, after: signed integers [n]."""

    positions: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def as_integers(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A contiguous tensor as a flat view of signed integers of `width` bytes; a copy where bytes are not aligned."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % width or flat.data_ptr() % width:
        flat = flat.clone()
    return flat.view(_INTEGERS[width])


def changes_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Changes]:
    """Changed elements of each (old, new), flat integer tensors of one size on one device (see `as_integers`).

    On CUDA the host waits once for every GiB, so give many pairs at a time.
    """
    found: list[Changes] = []
    group, size = [], 0
    for number, pair in enumerate(pairs):
        group.append(pair)
        size += pair[0].nbytes
        if size >= _GROUP_BYTES or number == len(pairs) - 1:
            found += _changes_of_group(group)
            group, size = [], 0
    return found


def changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """`changes_of` one pair."""
    return changes_of([(old, new)])[0]


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _changes_of_group(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Changes]:
    kinds = [torch.int64 if old.numel() > 1 << 31 else torch.int32 for old, _ in pairs]
    compared: dict[int, Changes] = {}
    if _has_kernels(pairs[0][0].device):
        from miles_disagg.weights import triton_diff

        full = [i for i, (old, _) in enumerate(pairs) if old.numel()]
        rows = triton_diff.compact([pairs[i] for i in full], [kinds[i] for i in full]) if full else []
        compared = {i: Changes(*row) for i, row in zip(full, rows, strict=True)}
    found = []
    for i, ((old, new), kind) in enumerate(zip(pairs, kinds, strict=True)):
        if i in compared:
            found.append(compared[i])
        else:
            positions = torch.nonzero(old != new).reshape(-1)
            found.append(Changes(positions.to(kind), old[positions], new[positions]))
    return found
