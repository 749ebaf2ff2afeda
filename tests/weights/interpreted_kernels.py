"""Run by a test with TRITON_INTERPRET=1: the real Triton kernels on the CPU against what the host finds and writes."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import torch

from miles_disagg.weights import device_diff, triton_diff
from miles_disagg.weights.indices import diff_indices
from tests.weights.test_gpu_delta import same_frames

DTYPES = {1: "I8", 2: "BF16", 4: "F32", 8: "I64"}
SIZES = ((1, 1.0), (31, 0.5), (8191, 0.0), (8192, 1.0), (8193, 0.5), (3 * 8192, 0.001), (40_000, 0.05))


def pair(rng: np.random.Generator, width: int, elements: int, density: float, offset: int) -> list[np.ndarray]:
    """(old, new) as raw bytes, `offset` elements behind an aligned address; what changes may change in any bit."""
    old = rng.integers(0, 256, (elements + offset) * width, dtype=np.uint8)[offset * width :]
    new = old.copy() if not offset else np.concatenate([np.zeros(offset * width, np.uint8), old])[offset * width :]
    mask = rng.random(elements) < density
    new.view(f"<u{width}")[mask] ^= rng.integers(1, 1 << 8 * width, int(mask.sum()), dtype=f"u{width}")
    return [old, new]


def compare_compaction() -> None:
    """All in one call: every width, aligned and not, both kinds of positions."""
    rng, pairs, wanted = np.random.default_rng(0), [], []
    for width, dtype in DTYPES.items():
        for elements, density in SIZES:
            for offset in (0, 1):
                old, new = pair(rng, width, elements, density, offset)
                pairs.append(tuple(torch.from_numpy(raw.view(f"<i{width}")) for raw in (old, new)))
                wanted.append((old.view(f"<i{width}"), diff_indices(old, new, dtype)))
    kinds = [torch.int64 if i % 3 else torch.int32 for i in range(len(pairs))]
    for kind, found, (old, expected) in zip(kinds, triton_diff.compact(pairs, kinds), wanted, strict=True):
        positions, before, after = found
        assert positions.dtype == kind
        np.testing.assert_array_equal(positions.numpy(), expected.positions)
        np.testing.assert_array_equal(before.numpy(), old[expected.positions])
        assert after.numpy().tobytes() == expected.values.tobytes()


def compare_frames() -> None:
    """Through the encoder of a trainer with its snapshot on a GPU: the bytes that the host's encoder writes."""
    kernels = []
    compact = triton_diff.compact

    def counted(*arguments):  # type: ignore[no-untyped-def]
        kernels.append(1)
        return compact(*arguments)

    triton_diff.compact = counted
    device_diff._has_kernels = lambda device: True
    cases = list(itertools.product(("BF16", "F32", "F8_E4M3"), (0.003, 0.8), (False, True)))
    for dtype, density, by_class in cases:
        same_frames(dtype, 20_000, density, by_class, "cpu")
    assert len(kernels) == len(cases)


if __name__ == "__main__":
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()  # there is no CUDA here
    compare_compaction()
    compare_frames()
    print("the same")
