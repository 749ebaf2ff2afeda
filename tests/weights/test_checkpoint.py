"""Checkpoint directories: legal oddities are read, lies are refused with the file's and the tensor's name."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.checkpoint import (
    INDEX_FILE,
    checkpoint_digest,
    open_checkpoint,
    parse_index,
    tensor_digests,
    write_checkpoint,
)
from miles_disagg.weights.digest import digest
from miles_disagg.weights.dtypes import tensor_nbytes

ODDITIES = {
    "scalar": ("F32", ()),
    "empty": ("BF16", (0,)),
    "empty2": ("BF16", (0, 7)),
    "fp32": ("F32", (3, 5)),
    "bf16": ("BF16", (4, 6)),
    "fp8": ("F8_E4M3", (9,)),
    "fp8.scale_inv": ("F32", (1, 1)),
    "模型.层.权重": ("F16", (2, 2)),
    "n" * 300: ("I64", (2,)),
    "../../etc/passwd": ("U8", (3,)),
}


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return [
        (name, dtype, shape, rng.integers(0, 256, tensor_nbytes(dtype, shape), dtype=np.uint8))
        for name, (dtype, shape) in ODDITIES.items()
    ]


def raw_file(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_legal_oddities_are_written_and_read_back(tmp_path):
    write_checkpoint(tmp_path, tensors(), max_shard_bytes=60)
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(tmp_path.glob("*-of-00004.safetensors"))
        for name, dtype, shape, data in tensors():
            info = checkpoint.tensors[name]
            assert (info.dtype, info.shape) == (dtype, shape)
            np.testing.assert_array_equal(checkpoint.bytes(name), data)
            assert checkpoint.checksums()[name] == digest(data)


def test_the_reference_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 2), np.float16),
    }
    kinds = {"a": "F32", "b": "I64", "c": "F16"}
    write_checkpoint(
        tmp_path / "ours", [(n, kinds[n], a.shape, a.reshape(-1).view(np.uint8)) for n, a in arrays.items()]
    )
    back = load_file(tmp_path / "ours" / "model-00000-of-00001.safetensors")
    (tmp_path / "theirs").mkdir()
    save_file(arrays, tmp_path / "theirs" / "model.safetensors")
    with open_checkpoint(tmp_path / "theirs") as checkpoint:
        for name, array in arrays.items():
            np.testing.assert_array_equal(back[name], array)
            np.testing.assert_array_equal(checkpoint.bytes(name), np.frombuffer(array.tobytes(), np.uint8))


def test_the_digest_does_not_depend_on_sharding_but_on_every_byte_name_dtype_and_shape(tmp_path):
    write_checkpoint(tmp_path / "one", tensors())
    write_checkpoint(tmp_path / "many", reversed(tensors()), max_shard_bytes=16)
    reference = checkpoint_digest(tmp_path / "one")
    assert reference == checkpoint_digest(tmp_path / "many")
    assert reference.startswith("xxh3-128:")
    variants = [tensors(seed=1), [(n + "x", *rest) for n, *rest in tensors()]]
    variants.append([(n, d, s[::-1] if n == "fp32" else s, a) for n, d, s, a in tensors()])
    variants.append([(n, "F16" if n == "bf16" else d, s, a) for n, d, s, a in tensors()])
    for i, variant in enumerate(variants):
        write_checkpoint(tmp_path / f"v{i}", variant)
        assert checkpoint_digest(tmp_path / f"v{i}") != reference


def test_writes_through_a_writable_checkpoint_reach_the_file_and_a_read_only_one_refuses(tmp_path):
    write_checkpoint(tmp_path, tensors())
    with open_checkpoint(tmp_path, writable=True) as checkpoint:
        checkpoint.bytes("bf16")[0] ^= 1
        checkpoint.sync()
        changed = tensor_digests(checkpoint)["bf16"]
    with open_checkpoint(tmp_path) as checkpoint:
        assert tensor_digests(checkpoint)["bf16"] == changed != checkpoint.checksums()["bf16"]
        with pytest.raises(ValueError, match="read-only"):
            checkpoint.bytes("bf16")[0] = 0


def test_stray_files_are_ignored_and_thousands_of_shards_do_not_exhaust_descriptors(tmp_path):
    weight_map = {f"t{i}": f"model-{i:05d}-of-01500.safetensors" for i in range(1500)}
    for i, (name, file) in enumerate(weight_map.items()):
        raw_file(tmp_path / file, {name: entry("U8", [4], 0, 4)}, bytes([i % 256] * 4))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "stray.safetensors").write_bytes(b"junk")
    with open_checkpoint(tmp_path) as checkpoint:
        assert all(checkpoint.bytes(name)[0] == i % 256 for i, name in enumerate(weight_map))


ONE = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
BAD_HEADERS = {
    "too short": (b"", b"", None, "header claims 0 bytes"),
    "two gigabytes": (b"{}", b"", 2 << 30, "header claims 2147483648"),
    "longer than the file": (b"{}", b"", 4096, "does not fit"),
    "not json": (b"{nope}", b"", None, "not JSON"),
    "not an object": (b"[1,2]", b"", None, "not a JSON object"),
    "deep nesting": (b"[" * 100_000, b"", None, "JSON"),
    "duplicate": (b"{" + ONE + b"," + ONE + b"}", b"x", None, "twice"),
    "unknown dtype": ({"a": entry("Q7", [1], 0, 1)}, b"x", None, "unknown safetensors dtype"),
    "dtype is a list": ({"a": entry(["U8"], [1], 0, 1)}, b"x", None, "unknown safetensors dtype"),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, bytes(6), None, "overlaps"),
    "hole": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5), None, "hole"),
    "out of range": ({"a": entry("U8", [9], 0, 9)}, bytes(4), None, "truncated"),
    "trailing": ({"a": entry("U8", [2], 0, 2)}, bytes(4), None, "the file has"),
    "wrong size": ({"a": entry("BF16", [3], 0, 4)}, bytes(4), None, "needs 6 bytes"),
    "negative": ({"a": entry("U8", [-2, -2], 0, 4)}, bytes(4), None, "non-negative"),
    "float shape": ({"a": entry("U8", [4.0], 0, 4)}, bytes(4), None, "non-negative"),
    "reversed": ({"a": entry("U8", [0], 4, 0)}, bytes(4), None, "give -4"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4), None, "data_offsets"),
    "entry is a list": ({"a": [1]}, b"", None, "data_offsets"),
    "metadata": ({"__metadata__": {"x": 1}}, b"", None, "__metadata__"),
    "huge shape": ({"a": entry("U8", [1 << 62, 1 << 62], 0, 4)}, bytes(4), None, "needs"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_malformed_header_is_refused_by_the_files_name(tmp_path, case):
    header, data, length, message = BAD_HEADERS[case]
    raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", None, 3, "..", "a\0.safetensors"]
)  # fmt: skip
def test_an_index_may_name_only_plain_safetensors_files(file):
    with pytest.raises(CheckpointError, match="not a plain"):
        parse_index(json.dumps({"weight_map": {"w": file}}).encode())


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"weight_map": []}', b"{" * 9999, b'{"metadata": 3, "weight_map": {}}']
)
def test_a_malformed_index_is_refused(raw):
    with pytest.raises(CheckpointError, match="malformed"):
        parse_index(raw)


def rewrite_index(path, change):
    index = json.loads((path / INDEX_FILE).read_text())
    change(index["weight_map"])
    (path / INDEX_FILE).write_text(json.dumps(index))


def test_an_index_that_lies_is_refused(tmp_path):
    write_checkpoint(tmp_path, tensors(), max_shard_bytes=60)
    original = (tmp_path / INDEX_FILE).read_bytes()
    lies = {
        "does not have it": lambda m: m.update(ghost=m["bf16"]),
        "the index puts it in None": lambda m: m.pop("fp8"),
        "the index names this tensor, the file does not": lambda m: m.update(fp32=m["bf16"]),
        "shard is missing": lambda m: m.update(bf16="nowhere.safetensors"),
    }
    for message, lie in lies.items():
        (tmp_path / INDEX_FILE).write_bytes(original)
        rewrite_index(tmp_path, lie)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


def test_a_truncated_or_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path, tensors(), max_shard_bytes=60)
    shard = tmp_path / "model-00001-of-00004.safetensors"
    whole = shard.read_bytes()
    for cut in (0, 5, 30, len(whole) - 1):
        shard.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="model-00001-of-00004"):
            open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"missing.*model-00001-of-00004"):
        open_checkpoint(tmp_path)


def test_a_directory_without_a_checkpoint_says_what_it_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)


def test_a_tensor_given_twice_or_with_the_wrong_size_is_not_written(tmp_path):
    twice = [("a", "U8", (2,), np.zeros(2, np.uint8))] * 2
    with pytest.raises(CheckpointError, match="added twice"):
        write_checkpoint(tmp_path / "x", twice)
    with pytest.raises(CheckpointError, match="does not have 2 bytes"):
        write_checkpoint(tmp_path / "y", [("a", "BF16", (2,), np.zeros(2, np.uint8))])
    assert not list(tmp_path.glob("*/*"))
