"""Frames that lie: truncated, flipped, bombs, impossible counts. Refused by name, with bounded memory."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.domain.errors import CheckpointError, ChecksumMismatch
from miles_disagg.weights.chain import apply_chain, build_patch
from miles_disagg.weights.checkpoint import open_checkpoint, write_checkpoint
from miles_disagg.weights.codecs import BLOCK_BYTES, DELTA_ENCODINGS, apply_frame, encode_frame, get_codec
from miles_disagg.weights.delta import open_delta, write_delta

HEADER, BLOCK = struct.Struct("<4sBBHIQ"), struct.Struct("<BBHI")


def frame_of(encoding, n=20_000, dtype="BF16", seed=0):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, n, dtype=np.uint8)
    new = old.copy()
    new[rng.random(n) < 0.02] ^= 1
    return encode_frame(get_codec(encoding), old, new, dtype)[0], old, new


def sparse_frame(body, nbytes=20_000, width=2):
    return zstandard.compress(HEADER.pack(b"MDSP", 2, width, 0, BLOCK_BYTES, nbytes) + body)


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_a_frame_cut_anywhere_is_refused(encoding):
    frame, old, _ = frame_of(encoding)
    for cut in [0, 1, 4, 10, *range(20, len(frame) - 1, 37)]:
        with pytest.raises(CheckpointError, match="frame|gaps"):
            apply_frame(get_codec(encoding), frame[:cut], old.copy(), "BF16")


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 1 << 20), bit=st.integers(0, 7), seed=st.integers(0, 3))
def test_a_flipped_bit_never_writes_outside_the_tensor_and_never_fails_in_another_way(encoding, position, bit, seed):
    frame, old, _ = frame_of(encoding, seed=seed)
    bad = bytearray(frame)
    bad[position % len(bad)] ^= 1 << bit
    guarded = np.full(old.size + 2 * 4096, 0xA5, np.uint8)  # kernels work on addresses
    target = guarded[4096:-4096]
    target[:] = old
    with contextlib.suppress(CheckpointError):
        apply_frame(get_codec(encoding), bytes(bad), target, "BF16")
    assert np.all(guarded[:4096] == 0xA5)
    assert np.all(guarded[-4096:] == 0xA5)


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_a_decompression_bomb_is_refused_in_bounded_memory(encoding):
    # 16 GiB of zeros in about half a megabyte
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    zeros, parts = bytes(64 << 20), []
    if encoding.startswith("sparse"):
        parts.append(compressor.compress(HEADER.pack(b"MDSP", 2, 2, 0, BLOCK_BYTES, 20_000)))
    parts += [compressor.compress(zeros) for _ in range(16)]
    bomb = b"".join([*parts, compressor.flush()])
    old = np.zeros(20_000, np.uint8)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more data than the tensor"):
        apply_frame(get_codec(encoding), bomb, old, "BF16")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_frame_that_asks_for_a_huge_window_is_refused():
    raw = bytes.fromhex("28b52ffd" + "00" + "a0" + "010000")  # window descriptor a0: 1 GiB; an empty last block
    assert zstandard.get_frame_parameters(raw).window_size == 1 << 30
    with pytest.raises(CheckpointError, match="zstd"):
        apply_frame(get_codec("xor"), raw, np.zeros(20_000, np.uint8), "BF16")


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_a_frame_of_another_tensor_is_refused(encoding):
    frame, _, _ = frame_of(encoding)
    with pytest.raises(CheckpointError):
        apply_frame(get_codec(encoding), frame, np.zeros(8_000, np.uint8), "BF16")


FAR = b"\xff\xf0" * 40 + b"\xfe" * 10 + bytes(100)


def class_row(count, gap_bytes, wide=0, threshold=0, bits=0, large=0):
    return struct.pack("<QIIIHH", threshold, count, gap_bytes, large, wide, bits)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BLOCK.pack(1, 1, 0, 0xFFFFFFFF), "claims 4294967295 changes"),
        (BLOCK.pack(7, 1, 0, 5), "form 7"),
        (BLOCK.pack(0, 0, 0, 5), "form 0"),
        (BLOCK.pack(1, 200, 0, 5), "200 classes"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(4, 4), "does not add up"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(5, 0xFFFFFFF0), "cannot hold"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(5, 5, wide=9), "cannot hold"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(5, 4) + bytes(4), "cannot hold"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(5, 6) + bytes(16), "not well-formed"),
        (BLOCK.pack(1, 1, 0, 5) + class_row(5, 5) + b"\xff" * 5 + bytes(10), "not well-formed"),
        (BLOCK.pack(1, 1, 0, 1) + class_row(1, 41) + b"\xff" * 40 + b"\0" + bytes(2), "not well-formed"),
        (BLOCK.pack(1, 1, 0, 50) + class_row(50, 90) + FAR, "beyond the block"),
        (BLOCK.pack(1, 1, 0, 1) + class_row(1, 1, bits=3) + bytes(3), "3 bits"),
        (BLOCK.pack(1, 1, 0, 1) + class_row(1, 1, bits=4, large=1) + bytes(4), "1 of them large"),
        (BLOCK.pack(1, 1, 0, 1) + class_row(1, 1, bits=5, large=2) + bytes(6), "2 of them large"),
        (BLOCK.pack(1, 1, 0, 2) + class_row(2, 2, bits=5) + b"\0\0\xff", "values are not well-formed"),
        (BLOCK.pack(1, 1, 0, 2) + class_row(2, 2, bits=5, large=1) + b"\0\0\x00" + bytes(2), "values are not well"),
        (BLOCK.pack(1, 2, 0, 2) + class_row(1, 1) + class_row(1, 1, threshold=1 << 40), "does not add up"),
        (BLOCK.pack(1, 2, 0, 2) + class_row(1, 1) + class_row(1, 1), "does not add up"),
        (BLOCK.pack(1, 2, 0, 1) + class_row(0, 0) + class_row(1, 1, threshold=0x7000) + bytes(3), "beyond the block"),
    ],
)  # fmt: skip
def test_a_sparse_block_with_impossible_numbers_is_refused(body, message):
    with pytest.raises(CheckpointError, match=message):
        apply_frame(get_codec("sparse"), sparse_frame(body), np.zeros(20_000, np.uint8), "BF16")


def test_a_sparse_frame_of_another_format_or_element_size_is_refused():
    with pytest.raises(CheckpointError, match="not a `sparse` frame"):
        get_codec("sparse").decoder(zstandard.compress(b"MDSP\x01" + bytes(40)), 20_000, "BF16")
    with pytest.raises(CheckpointError, match="2-byte elements"):
        get_codec("sparse").decoder(sparse_frame(b""), 20_000, "F32")


@pytest.mark.parametrize(
    ("positions", "message"),
    [([5, 5], "ascend"), ([9, 3], "ascend"), ([20_000], "ascend below"), ([0xFFFFFFFF], "below")],
)
def test_overwrite_positions_must_ascend_inside_the_tensor(positions, message):
    raw = np.array([len(positions), *positions], "<u4").tobytes() + bytes(len(positions))
    with pytest.raises(CheckpointError, match=message):
        apply_frame(get_codec("overwrite"), zstandard.compress(raw), np.zeros(20_000, np.uint8), "BF16")


def test_an_overwrite_frame_that_claims_more_bytes_than_the_tensor_is_refused():
    raw = np.array([0xFFFFFFFF], "<u4").tobytes() + bytes(100)
    with pytest.raises(CheckpointError, match="claims 4294967295"):
        get_codec("overwrite").decoder(zstandard.compress(raw), 20_000, "BF16")


@pytest.fixture
def published(tmp_path):
    rng = np.random.default_rng(1)
    old = {name: rng.integers(0, 100, 4_000, dtype=np.uint8) for name in ("a", "b")}
    new = {name: data.copy() for name, data in old.items()}
    for data in new.values():
        data[::50] += 1
    write_checkpoint(tmp_path / "base", [(n, "BF16", (2_000,), d) for n, d in old.items()])
    tensors = [(n, "BF16", (2_000,), old[n], new[n]) for n in old]
    write_delta(tmp_path / "weight_v000001", 1, 0, tensors, "sparse")
    return tmp_path, old


def corrupt(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x40
    path.write_bytes(bytes(raw))


def test_a_flipped_byte_in_a_published_shard_names_file_and_tensor_and_leaves_the_base(published):
    root, old = published
    shard = root / "weight_v000001" / "model-00000-of-00001.safetensors"
    corrupt(shard, -30)
    with open_checkpoint(root / "base") as checkpoint:
        with pytest.raises(CheckpointError, match=r"weight_v000001/model-00000-of-00001.*tensor '[ab]'"):
            build_patch(checkpoint, [open_delta(root / "weight_v000001")], root / "patch.safetensors")
        for name, data in old.items():
            assert np.array_equal(checkpoint.bytes(name), data)
    assert not (root / "patch.safetensors").exists()
    assert not list(root.glob(".*tmp"))


def test_a_delta_on_the_wrong_base_is_told_apart_by_the_target_checksum(published):
    root, _ = published
    with open_checkpoint(root / "base", writable=True) as checkpoint:
        checkpoint.bytes("b")[3] ^= 1
        with pytest.raises(ChecksumMismatch, match="tensor 'b'") as caught:
            apply_chain(checkpoint, [open_delta(root / "weight_v000001")])
    assert caught.value.expected != caught.value.actual


@pytest.mark.parametrize("encoding", ["sparse", "sparse-max"])
def test_what_a_thread_keeps_between_frames_survives_one_that_fails(encoding):
    codec, (frame, old, new) = get_codec(encoding), frame_of(encoding)

    def full(_):
        raise OSError("no space left on device")

    for _ in range(3):
        with pytest.raises(CheckpointError):
            apply_frame(codec, frame[:-9], old.copy(), "BF16")
        with pytest.raises(OSError, match="no space"):
            codec.encode(old, new, "BF16", full)
        assert encode_frame(codec, old, new, "BF16")[0] == frame
        decoders, targets = [codec.decoder(frame, old.nbytes, "BF16") for _ in range(2)], [old.copy(), old.copy()]
        for decoder, target in zip(decoders, targets, strict=True):  # two frames open at once
            decoder.step(target)
        for decoder, target in zip(decoders, targets, strict=True):
            decoder.finish()
            assert np.array_equal(target, new)
