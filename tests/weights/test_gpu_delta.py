"""The device path gives the CPU codec's bytes; on CPU tensors here, on CUDA where there is one."""

import numpy as np
import pytest
import torch

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights import gpu_delta
from miles_disagg.weights.codecs import BLOCK_BYTES, encode_frame, get_codec
from miles_disagg.weights.gpu_delta import encode_on_device

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I64": torch.int64,
}


def update(dtype, elements, density, seed=0):
    rng = np.random.default_rng(seed)
    old = (torch.from_numpy(rng.standard_normal(elements).astype(np.float32)) * 0.05).to(TORCH[dtype])
    raw = old.view(torch.uint8).numpy().copy()
    new = raw.view(f"<u{old.element_size()}")
    mask = rng.random(new.size) < density
    new[mask] += rng.integers(1, 4, int(mask.sum())).astype(new.dtype)
    return old, torch.from_numpy(raw).view(TORCH[dtype])


def same_frames(dtype, elements, density, by_class, device):
    old, new = update(dtype, elements, density)
    chunks = []
    stats = encode_on_device(old.to(device), new.to(device), dtype, chunks.append, by_class=by_class)
    a, b = (t.view(torch.uint8).numpy() for t in (old, new))
    frame, expected = encode_frame(get_codec("sparse-max" if by_class else "sparse"), a, b, dtype)
    assert stats == expected
    assert b"".join(chunks) == frame


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.8])
@pytest.mark.parametrize("dtype", TORCH)
def test_a_device_frame_equals_the_cpu_frame(dtype, density, by_class):
    same_frames(dtype, 40_000, density, by_class, "cpu")


@pytest.mark.parametrize("by_class", [False, True])
def test_blocks_and_ragged_tails_are_the_same_too(by_class):
    same_frames("BF16", BLOCK_BYTES // 2 + 77, 0.01, by_class, "cpu")


@pytest.mark.parametrize("density", [0.001, 0.7])
def test_what_is_compared_at_a_time_does_not_show_in_the_frame(density, monkeypatch):
    monkeypatch.setattr(gpu_delta, "_SLAB_BLOCKS", 1)
    same_frames("I64", BLOCK_BYTES // 4 + 5, density, False, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("by_class", [False, True])
def test_a_cuda_frame_equals_the_cpu_frame(by_class):
    same_frames("BF16", BLOCK_BYTES + 77, 0.01, by_class, "cuda")


def test_tensors_that_are_no_pair_are_refused():
    with pytest.raises(CheckpointError, match="no delta pair"):
        encode_on_device(torch.zeros(3), torch.zeros(4), "F32", print)
