"""Every codec on any tensor: bit-exact, bounded, and it knows what it changed."""

import numba
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.codecs import (
    BLOCK_BYTES,
    DELTA_ENCODINGS,
    apply_frame,
    codec_hasher,
    encode_frame,
    get_codec,
    vector,
)
from miles_disagg.weights.digest import CHECKSUM_FORMATS, digest
from miles_disagg.weights.dtypes import BITS, OF_TORCH, count_non_finite, element_size, tensor_nbytes, unsigned
from miles_disagg.weights.gpu_delta import encode_on_device

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
SIXTEEN = [torch.float16, torch.bfloat16]
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def updates(draw):
    """(dtype, old, new): any dtype, any size, any density, small moves or arbitrary bits (NaN payloads included)."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    elements = draw(st.one_of(st.integers(0, 3), st.integers(4, 300), st.integers(4_000, 40_000)))
    elements = -(-elements // 8) * 8 if BITS[dtype] < 8 else elements
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = unsigned(dtype)
    nbytes = tensor_nbytes(dtype, (elements,))
    if draw(st.booleans()) and dtype in ("BF16", "F16", "F32"):
        values = (rng.standard_normal(elements) * 0.02).astype(np.float32)
        old = {"BF16": lambda: (values.view(np.uint32) >> 16).astype("<u2"),
               "F16": lambda: values.astype("<f2").view("<u2"), "F32": lambda: values.view("<u4")}[dtype]()  # fmt: skip
    else:
        old = rng.integers(0, 256, nbytes, dtype=np.uint8).view(kind)
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0]))
    mask = rng.random(old.size) < density
    new = old.copy()
    if draw(st.booleans()):
        new[mask] += rng.choice([1, -1], int(mask.sum())).astype(np.int64).astype(kind)
    else:
        new[mask] = rng.integers(0, 256, int(mask.sum()) * kind.itemsize, dtype=np.uint8).view(kind)
    return dtype, old.view(np.uint8), new.view(np.uint8)


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
@RELAXED
@given(update=updates())
def test_a_frame_turns_base_into_target_bit_for_bit(encoding, update):
    dtype, old, new = update
    codec, hasher = get_codec(encoding), xxhash.xxh3_128()
    frame, stats = encode_frame(codec, old, new, dtype, hasher)
    mask = old.view(unsigned(dtype)) != new.view(unsigned(dtype))
    assert stats.changed == mask.sum()
    assert stats.non_finite == count_non_finite(new.view(unsigned(dtype))[mask], dtype)
    assert hasher.hexdigest() == xxhash.xxh3_128(new).hexdigest()
    target, after = old.copy(), xxhash.xxh3_128()
    apply_frame(codec, frame, target, dtype, after)
    np.testing.assert_array_equal(target, new)
    assert after.hexdigest() == hasher.hexdigest()


@pytest.mark.parametrize("dtype", [*FP8, *SIXTEEN], ids=str)
def test_every_code_counts_as_non_finite_exactly_where_torch_says_so(dtype):
    name, bits = OF_TORCH[str(dtype)], 8 * dtype.itemsize
    codes = torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.uint16)
    bad = ~codes.view(dtype).float().isfinite()
    assert [count_non_finite(code, name) for code in codes.numpy().reshape(-1, 1)] == bad.int().tolist()
    new = codes.view(torch.uint8).numpy()
    old = new ^ np.tile(np.array([1, *[0] * (dtype.itemsize - 1)], np.uint8), codes.numel())
    for encoding in DELTA_ENCODINGS:
        assert encode_frame(get_codec(encoding), old, new, name)[1].non_finite == int(bad.sum())
    pair = (torch.from_numpy(array).view(dtype) for array in (old, new))
    assert encode_on_device(*pair, name, lambda _: None).non_finite == int(bad.sum())


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
@pytest.mark.parametrize("checksum_format", CHECKSUM_FORMATS)
@RELAXED
@given(update=updates(), before=st.sampled_from([0, 1, 1023, 1024, 2048]))
def test_the_digest_that_kernels_compute_on_their_way_is_the_format_s_own(encoding, checksum_format, update, before):
    dtype, old, new = update
    hashers, prefix = [codec_hasher(checksum_format) for _ in range(2)], bytes(before)
    for hasher in hashers:  # a hasher may have seen other bytes, ending at a chunk or not
        hasher.update(prefix)
    frame, _ = encode_frame(get_codec(encoding), old, new, dtype, hashers[0])
    apply_frame(get_codec(encoding), frame, old.copy(), dtype, hashers[1])
    assert {h.hexdigest() for h in hashers} == {digest(prefix + new.tobytes(), checksum_format)}


@RELAXED
@given(size=st.integers(0, 5000), cuts=st.lists(st.integers(0, 5000), max_size=6), seed=st.integers(0, 9))
def test_our_xxh3_is_xxh3_however_the_input_is_cut(size, cuts, seed):
    data, hasher = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8), codec_hasher("xxh3-128")
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    for begin, end in zip(edges, edges[1:], strict=False):
        hasher.update(data[begin:end])
    assert hasher.hexdigest() == xxhash.xxh3_128(data).hexdigest()


@pytest.mark.parametrize("features", [{"bmi2": True}, {}])
def test_the_nth_bit_is_found_with_and_without_the_instruction_for_it(features, monkeypatch):
    if features and not vector.get_host_cpu_features().get("bmi2"):
        pytest.skip("this processor has no BMI2")
    monkeypatch.setattr(vector, "get_host_cpu_features", lambda: features)
    find = numba.njit(lambda mask, rank: vector.nth_bit(mask, rank))
    rng = np.random.default_rng(0)
    for mask in rng.integers(1, 1 << 64, 200, dtype=np.uint64) & rng.integers(1, 1 << 64, 200, dtype=np.uint64):
        for rank, bit in enumerate(b for b in range(64) if int(mask) >> b & 1):
            assert find(mask, rank) == bit


@pytest.mark.parametrize("encoding", ["sparse", "sparse-max"])
@RELAXED
@given(update=updates())
def test_a_sparse_frame_never_exceeds_the_raw_bytes_by_more_than_one_percent(encoding, update):
    dtype, old, new = update
    frame, _ = encode_frame(get_codec(encoding), old, new, dtype)
    assert len(frame) <= 1.01 * new.size + 128


@RELAXED
@given(update=updates())
def test_either_sparse_level_reads_the_other(update):
    dtype, old, new = update
    frame, _ = encode_frame(get_codec("sparse-max"), old, new, dtype)
    target = old.copy()
    apply_frame(get_codec("sparse"), frame, target, dtype)
    np.testing.assert_array_equal(target, new)


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_tensors_of_several_blocks_with_a_ragged_tail(encoding, dtype):
    rng = np.random.default_rng(1)
    size = 2 * BLOCK_BYTES + 12 * element_size(dtype)
    old = np.tile(rng.integers(0, 256, 1 << 16, dtype=np.uint8), size // (1 << 16) + 1)[:size].copy()
    new = old.copy()
    at = np.unique(np.concatenate([rng.integers(0, size, 5000), [0, BLOCK_BYTES - 1, BLOCK_BYTES, size - 1]]))
    at = at[(at < BLOCK_BYTES) | (at >= 2 * BLOCK_BYTES - 1)]  # one block stays unchanged
    new[at] ^= 1
    frame, _ = encode_frame(get_codec(encoding), old, new, dtype)
    target = old.copy()
    apply_frame(get_codec(encoding), frame, target, dtype)
    assert np.array_equal(target, new)
    assert len(frame) < size / 20


@pytest.mark.parametrize("encoding", ["sparse", "sparse-max"])
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_views_of_a_mapped_file_are_fine(encoding, offset):
    rng = np.random.default_rng(2)
    backing = rng.integers(0, 256, 200_008, dtype=np.uint8)
    old, new = backing[offset : offset + 200_000], backing.copy()[offset : offset + 200_000]
    new.view(np.uint8)[::97] ^= 5
    frame, _ = encode_frame(get_codec(encoding), old, new, "F32")
    target = backing.copy()[offset : offset + 200_000]
    apply_frame(get_codec(encoding), frame, target, "F32")
    assert np.array_equal(target, new)


def test_overwrite_is_idempotent_and_xor_is_not():
    old, new = np.zeros(100, np.uint8), np.arange(100, dtype=np.uint8)
    for encoding, expected in (("overwrite", new), ("xor", old)):
        frame, _ = encode_frame(get_codec(encoding), old, new, "U8")
        target = old.copy()
        apply_frame(get_codec(encoding), frame, target, "U8")
        apply_frame(get_codec(encoding), frame, target, "U8")
        np.testing.assert_array_equal(target, expected)


def test_a_rare_change_deep_in_a_large_tensor_uses_wide_gaps():
    old = np.zeros(6 << 20, np.uint8)
    new = old.copy()
    new[[5, 700_001, 4 << 20, (6 << 20) - 1]] = 1
    for encoding in ("sparse", "sparse-max"):
        frame, stats = encode_frame(get_codec(encoding), old, new, "U8")
        target = old.copy()
        apply_frame(get_codec(encoding), frame, target, "U8")
        assert np.array_equal(target, new)
        assert stats.changed == 4
        assert len(frame) < 300


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_lengths_that_differ_are_refused(encoding):
    with pytest.raises(CheckpointError, match="cannot change a shape"):
        encode_frame(get_codec(encoding), np.zeros(8, np.uint8), np.zeros(6, np.uint8), "U8")


def test_overwrite_refuses_a_tensor_of_four_gib_by_size_and_names_the_remedy():
    with pytest.raises(CheckpointError, match=r"4 GiB.*sparse"):
        get_codec("overwrite").decoder(b"", 1 << 32, "BF16")


def test_an_unknown_encoding_lists_the_known_ones():
    with pytest.raises(CheckpointError, match="sparse-max"):
        get_codec("gzip")


def test_sparse_max_beats_sparse_and_sparse_halves_xor_on_an_adam_like_update():
    rng = np.random.default_rng(4)
    master = rng.standard_normal(2 << 20, dtype=np.float32) * 0.02

    def bf16(x):
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)

    old, new = bf16(master), bf16(master + 2.6e-7 * rng.choice([-1, 1], master.size).astype(np.float32))
    sizes = {e: len(encode_frame(get_codec(e), old, new, "BF16")[0]) for e in ("xor", "sparse", "sparse-max")}
    assert sizes["sparse"] < sizes["xor"] / 2
    assert sizes["sparse-max"] < sizes["xor"] / 2.8
