"""`sparse` and `sparse-max` frames from tensors that live on a device; the same bytes as the CPU codec.

Comparison, compaction, class ranks and differences run where the tensors are; only positions and differences of changed
elements cross to the host, which packs and compresses them. The checksum of the target is not computed here: hash a
host mirror after applying the frame to it (`codecs.apply_frame` with a hasher), or the exported bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs import sparse_format as sparse
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, Sink
from miles_disagg.weights.codecs.scratch import scratch
from miles_disagg.weights.device_diff import as_integers, changes
from miles_disagg.weights.dtypes import element_size, non_finite_test, unsigned

_SLAB_BLOCKS = 64
"""Blocks compared at a time: enough work for a GPU, 512 MiB of each tensor."""


def encode_on_device(
    old: torch.Tensor, new: torch.Tensor, dtype: str, sink: Sink, *, by_class: bool = False
) -> EncodeStats:
    """Send the frame that turns `old` into `new` (contiguous, same device, same shape) to `sink`.

    by_class: write the `sparse-max` form. dtype: the tensors' safetensors dtype string. Scratch device memory is
    bounded by what changes in 512 MiB, for `by_class` by about 30 bytes per element of one block, whatever the
    tensor's size.
    """
    if old.shape != new.shape or old.dtype != new.dtype or not (old.is_contiguous() and new.is_contiguous()):
        raise CheckpointError(f"{old.dtype} {tuple(old.shape)} and {new.dtype} {tuple(new.shape)} are no delta pair")
    width = element_size(dtype)
    a, b = as_integers(old, width), as_integers(new, width)
    out = sparse.Compressor(sink)
    sparse.write_header(out, dtype, a.numel() * width)
    changed = non_finite = 0
    step = BLOCK_BYTES // width
    for begin in range(0, a.numel(), step * _SLAB_BLOCKS):
        slab = slice(begin, begin + step * _SLAB_BLOCKS)
        found = _Found.of(a[slab], b[slab], dtype)
        changed, non_finite = changed + found.positions.size, non_finite + found.non_finite
        for at in range(0, a[slab].numel(), step):
            block = slice(begin + at, min(begin + at + step, a.numel(), slab.stop))
            _write_block(a[block], b[block], dtype, by_class, found.within(at, at + step), out)
    out.finish()
    return EncodeStats(changed, non_finite)


class _Found(NamedTuple):
    """On the host: positions (int64 [n], ascending), zigzag differences (unsigned [n]), how many are NaN or Inf."""

    positions: np.ndarray
    values: np.ndarray
    non_finite: int

    @classmethod
    def of(cls, old: torch.Tensor, new: torch.Tensor, dtype: str) -> _Found:
        """Compare on the device; two transfers to the host."""
        positions, before, after = changes(old, new)
        moved = after - before
        values = (moved << 1) ^ (moved >> (8 * moved.element_size() - 1))
        mask, pattern = (_signed(bits, dtype) for bits in non_finite_test(dtype))
        bad = int(((after & mask) == pattern).sum()) if mask else 0
        return cls(positions.cpu().numpy().astype(np.int64), values.cpu().numpy().view(unsigned(dtype)), bad)

    def within(self, begin: int, end: int) -> _Found:
        """The changes of elements [begin, end), counted from begin."""
        low, high = np.searchsorted(self.positions, (begin, end))
        return _Found(self.positions[low:high] - begin, self.values[low:high], 0)


def _write_block(
    old: torch.Tensor, new: torch.Tensor, dtype: str, by_class: bool, found: _Found, out: sparse.Compressor
) -> None:
    scratch.begin()
    positions, values = found.positions, found.values
    n, elements = positions.size, old.numel()
    if not n:
        sparse.write_empty(out)
        return
    if 2 * n > elements:
        every = np.zeros(elements, values.dtype)
        every[positions] = values
        sparse.write_dense(out, sparse.byte_planes(every), n)
        return
    thresholds = np.zeros(1, np.uint64)
    if by_class:
        sample = torch.cat([old[part] for part in sparse.sample_parts(elements)])
        thresholds = sparse.thresholds_of(sample.cpu().numpy().view(unsigned(dtype)), elements, dtype)
    if thresholds.size == 1:
        gaps, counts = np.diff(positions, prepend=-1) - 1, np.array([n])
    else:
        on_device = torch.from_numpy(positions).to(old.device)
        ranks, order, counts = _class_gaps(old, on_device, thresholds)
        gaps, values = ranks.cpu().numpy(), values[order.cpu().numpy()]
    sparse.write_sparse(out, thresholds.tolist(), counts.tolist(), gaps.astype(np.uint32), values)


def _class_gaps(
    old: torch.Tensor, positions: torch.Tensor, thresholds: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """(gaps in class order, index of each among `positions`, changes per class); see `class_kernels.class_gaps`."""
    bits = 8 * old.element_size()
    magnitude = old.to(torch.int64) & ((1 << (bits - 1)) - 1)
    bounds = torch.tensor(thresholds[1:].astype(np.int64), device=old.device)
    classes = torch.bucketize(magnitude, bounds, right=True)
    own = classes[positions]
    gaps, order, counts = [], [], np.zeros(thresholds.size, np.int64)
    for c in range(thresholds.size):
        members = torch.nonzero(own == c).reshape(-1)
        counts[c] = members.numel()
        if counts[c]:
            rank = torch.cumsum(classes == c, 0)[positions[members]]  # 1 for the first element of the class
            gaps.append(torch.diff(rank, prepend=rank.new_zeros(1)) - 1)
            order.append(members)
    return torch.cat(gaps), torch.cat(order), counts


def _signed(bits: int, dtype: str) -> int:
    """The integer that a device's signed elements call `bits`."""
    size = 8 * element_size(dtype)
    return bits - (1 << size) if bits >> (size - 1) else bits
