"""`sparse` and `sparse-max` frames from tensors that live on a device; the same bytes as the CPU codec.

Comparison, compaction, class ranks and differences run in torch where the tensors are; only positions and values of
changed elements cross to the host, which packs and compresses them. The checksum of the target is not computed here:
hash a host mirror after applying the frame to it (`codecs.apply_frame` with a hasher), or the exported bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs import sparse_format as sparse
from miles_disagg.weights.codecs.base import BLOCK_BYTES, EncodeStats, Sink
from miles_disagg.weights.dtypes import count_non_finite, element_size, unsigned

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_on_device(
    old: torch.Tensor, new: torch.Tensor, dtype: str, sink: Sink, *, by_class: bool = False
) -> EncodeStats:
    """Send the frame that turns `old` into `new` (contiguous, same device, same shape) to `sink`.

    by_class: write the `sparse-max` form. dtype: the tensors' safetensors dtype string. Scratch device memory is about
    20 bytes per element of one block (BLOCK_BYTES), whatever the tensor's size.
    """
    if old.shape != new.shape or old.dtype != new.dtype or not (old.is_contiguous() and new.is_contiguous()):
        raise CheckpointError(f"{old.dtype} {tuple(old.shape)} and {new.dtype} {tuple(new.shape)} are no delta pair")
    width = element_size(dtype)
    a, b = (t.detach().reshape(-1).view(torch.uint8).view(_SIGNED[width]) for t in (old, new))
    out = sparse.Compressor(sink)
    sparse.write_header(out, dtype, a.numel() * width)
    changed = non_finite = 0
    step = BLOCK_BYTES // width
    for begin in range(0, a.numel(), step):
        count, bad = _encode_block(a[begin : begin + step], b[begin : begin + step], dtype, by_class, out)
        changed, non_finite = changed + count, non_finite + bad
    out.finish()
    return EncodeStats(changed, non_finite)


def _encode_block(
    old: torch.Tensor, new: torch.Tensor, dtype: str, by_class: bool, out: sparse.Compressor
) -> tuple[int, int]:
    positions = torch.nonzero(old != new).reshape(-1)
    n, elements = positions.numel(), old.numel()
    if not n:
        sparse.write_empty(out)
        return 0, 0
    after = _to_host(new[positions], dtype)
    bad = count_non_finite(after, dtype)
    if 2 * n > elements:
        sparse.write_dense(out, sparse.byte_planes(_zigzag(_to_host(old, dtype), _to_host(new, dtype))), n)
        return n, bad
    before = _to_host(old[positions], dtype)
    values = _zigzag(before, after)
    thresholds = np.zeros(1, np.uint64)
    if by_class:
        sample = torch.cat([old[part] for part in sparse.sample_parts(elements)])
        thresholds = sparse.thresholds_of(_to_host(sample, dtype), elements, dtype)
    if thresholds.size == 1:
        gaps, counts = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1, np.array([n])
    else:
        gaps, order, counts = _class_gaps(old, positions, thresholds)
        values = values[order.cpu().numpy()]
    sparse.write_sparse(out, thresholds, counts, gaps.cpu().numpy().astype(np.uint32), values)
    return n, bad


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


def _to_host(values: torch.Tensor, dtype: str) -> np.ndarray:
    return values.cpu().numpy().view(unsigned(dtype))


def _zigzag(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Differences with the sign in the lowest bit, as unsigned integers; see `kernels.scan`."""
    moved = after - before
    return (moved << 1) ^ -(moved >> (8 * moved.itemsize - 1))
