"""Comparing on a device: torch's way and the Triton kernels find what numpy finds."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_the_kernels_give_the_hosts_bytes_in_tritons_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.interpreted_kernels"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip().endswith("the same"), done.stderr


@pytest.mark.parametrize("kernel", ["_compare", "_gather"])
def test_the_kernels_compile_for_a_gpu_and_read_sixteen_bytes_at_a_time(kernel):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from miles_disagg.weights import triton_diff

    function, values = getattr(triton_diff, kernel), {"ELEMENT": triton.language.int16, "ALIGN": 16, "BLOCK": 8192}
    pointers = {"blocks": "*i64", "words": "*i32", "counts": "*i32", "ends": "*i64", "positions": "*i32"}
    signature = {n: "constexpr" if n in values else pointers.get(n, "*i16") for n in function.arg_names}
    source = triton.compiler.ASTSource(
        function,
        signature,
        {n: v for n, v in values.items() if n in signature},
        {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert compiled.asm["cubin"]
    assert kernel != "_compare" or "v4.b32" in compiled.asm["ptx"]
