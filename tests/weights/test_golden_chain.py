"""Byte compatibility with miles and slime, both ways, against code that shares nothing with ours."""

import glob
import io
import json
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from blake3 import blake3

from miles_disagg.weights.chain import apply_chain, build_patch
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.delta import open_delta, write_delta

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(p.name for p in GOLDEN.glob("weight_v*"))


def golden_state(version):
    states = np.load(GOLDEN / "states.npz")
    return {k.partition("/")[2]: states[k] for k in states.files if k.startswith(f"{version}/")}


def foreign_apply(state, folder):
    """Their receiver in a few lines: every file in the folder, checksums from __metadata__."""
    meta = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert meta["compression_format"] == "zstd"
    assert int(meta["base_version"]) == int(meta["version"]) - 1
    hashes = {
        "xxh3-128": lambda b: xxhash.xxh3_128(b).hexdigest(),
        "blake3": lambda b: blake3(b).hexdigest(),
        "adler32": lambda b: f"{zlib.adler32(b):08x}",
    }
    for file in glob.glob(str(folder / "*.safetensors")):
        blob = Path(file).read_bytes()
        (size,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + size])
        sums = header.pop("__metadata__")
        for name, info in header.items():
            begin, end = info["data_offsets"]
            frame, target = blob[8 + size + begin : 8 + size + end], state[name]
            if meta["delta_encoding"] == "xor":
                target ^= np.frombuffer(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame)).read(), np.uint8)
            else:
                raw = zstandard.ZstdDecompressor().decompress(frame)
                count = int.from_bytes(raw[:4], "little")
                target[np.frombuffer(raw[4 : 4 + 4 * count], "<u4")] = np.frombuffer(raw[4 + 4 * count :], np.uint8)
            assert hashes[meta["checksum_format"]](target.tobytes()) == sums[name]


def test_a_chain_written_in_their_format_is_applied_version_by_version(tmp_path):
    shutil.copytree(GOLDEN / "base", tmp_path / "local")
    with open_checkpoint(tmp_path / "local", writable=True) as checkpoint:
        for version, name in enumerate(VERSIONS, 1):
            apply_chain(checkpoint, [open_delta(GOLDEN / name)])
            for tensor, expected in golden_state(version).items():
                np.testing.assert_array_equal(checkpoint.bytes(tensor), expected)


def test_a_chain_written_in_their_format_is_folded_in_one_pass(tmp_path):
    shutil.copytree(GOLDEN / "base", tmp_path / "local")
    with open_checkpoint(tmp_path / "local", writable=True) as checkpoint:
        apply_chain(checkpoint, [open_delta(GOLDEN / name) for name in VERSIONS])
        for tensor, expected in golden_state(len(VERSIONS)).items():
            np.testing.assert_array_equal(checkpoint.bytes(tensor), expected)


def test_their_index_lists_our_metadata_keys_and_nothing_else(tmp_path):
    old = np.arange(64, dtype=np.uint8)
    write_delta(tmp_path / "weight_v000001", 1, 0, [("w", "BF16", (32,), old, old[::-1].copy())], "xor")
    ours = json.loads((tmp_path / "weight_v000001" / "model.safetensors.index.json").read_text())
    theirs = json.loads((GOLDEN / VERSIONS[0] / "model.safetensors.index.json").read_text())
    assert ours["metadata"] == theirs["metadata"]
    assert list(ours) == list(theirs)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_a_receiver_written_for_them_applies_a_chain_written_by_us(tmp_path, encoding, checksum):
    rng = np.random.default_rng(3)
    shapes = {"a": ("BF16", (50, 40)), "b": ("F32", (33,)), "scalar": ("F32", ()), "empty": ("BF16", (0, 8))}
    sizes = {"a": 4000, "b": 132, "scalar": 4, "empty": 0}
    states = [{n: rng.integers(0, 64, sizes[n], dtype=np.uint8) for n in shapes}]
    for version in range(1, 4):
        new = {n: a.copy() for n, a in states[-1].items()}
        for array in new.values():
            array[rng.random(array.size) < 0.1] ^= 3
        tensors = [(n, *shapes[n], states[-1][n], new[n]) for n in shapes]
        write_delta(tmp_path / f"weight_v{version:06d}", version, version - 1, tensors, encoding, checksum)
        states.append(new)
    state = {n: a.copy() for n, a in states[0].items()}
    for version in range(1, 4):
        foreign_apply(state, tmp_path / f"weight_v{version:06d}")
        for name, expected in states[version].items():
            np.testing.assert_array_equal(state[name], expected)


def test_a_patch_from_a_golden_chain_is_verified_before_anything_is_written(tmp_path):
    shutil.copytree(GOLDEN / "base", tmp_path / "local")
    with open_checkpoint(tmp_path / "local") as checkpoint:
        patch = build_patch(
            checkpoint, [open_delta(GOLDEN / name) for name in VERSIONS], tmp_path / "patch.safetensors"
        )
        assert patch.tensors == 4
        for tensor, expected in golden_state(0).items():
            np.testing.assert_array_equal(checkpoint.bytes(tensor), expected)
