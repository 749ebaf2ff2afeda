"""Comparing on a device: torch's way and the Triton kernels find what numpy finds."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from miles_disagg.weights.device_diff import as_integers, changes, changes_of
from miles_disagg.weights.indices import diff_indices

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.int64: "I64"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_are_those_that_numpy_finds(device, dtype, density):
    rng = np.random.default_rng(1)
    pairs, expected = [], []
    for elements in (0, 1, 8191, 8193, 50_000):
        old = rng.integers(0, 256, elements * dtype.itemsize, dtype=np.uint8)
        new = old.copy()
        new.reshape(elements, dtype.itemsize)[rng.random(elements) < density] ^= 0x81  # sign and lowest bit
        tensors = [torch.from_numpy(raw.view(f"<i{dtype.itemsize}")).view(dtype).to(device) for raw in (old, new)]
        pairs.append(tuple(as_integers(t, dtype.itemsize) for t in tensors))
        expected.append((old, diff_indices(old, new, DTYPES[dtype])))
    for found, (old, wanted) in zip(changes_of(pairs), expected, strict=True):
        np.testing.assert_array_equal(found.positions.cpu().numpy(), wanted.positions)
        assert found.after.cpu().numpy().tobytes() == wanted.values.tobytes()
        integers = old.view(f"<i{dtype.itemsize}")
        np.testing.assert_array_equal(found.before.cpu().numpy(), integers[wanted.positions])


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_at_an_odd_offset_is_compared_all_the_same(device):
    raw = torch.arange(101, dtype=torch.uint8, device=device)
    other = raw.clone()
    other[5] += 1
    found = changes(as_integers(raw[1:], 2), as_integers(other[1:], 2))
    assert found.positions.tolist() == [2]


KERNELS = """
import contextlib, sys
import torch
from miles_disagg.weights import triton_diff
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
pairs = []
for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
    for elements, share in ((1, 1.0), (8191, 0.0), (8193, 1.0), (40_000, 0.05)):
        old = torch.randint(-100, 100, (elements,)).to(dtype)
        pairs.append((old, torch.where(torch.rand(elements) < share, old + 1, old)))
kinds = [torch.int64 if i % 3 else torch.int32 for i in range(len(pairs))]
for (old, new), kind, found in zip(pairs, kinds, triton_diff.compact(pairs, kinds), strict=True):
    positions, before, after = found
    expected = torch.nonzero(old != new).reshape(-1)
    assert positions.dtype == kind and positions.tolist() == expected.tolist(), (old.dtype, old.numel())
    assert torch.equal(before, old[expected]) and torch.equal(after, new[expected]), (old.dtype, old.numel())
print("same")
"""


def test_the_kernels_are_right_in_tritons_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == "same", done.stderr
