"""Delta versions: several source ranks, chains in one pass, patches that are verified first and heal by repetition."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

from miles_disagg.domain.errors import (
    ChainBroken,
    CheckpointError,
    ChecksumMismatch,
    NonFiniteWeights,
    PublicationFailed,
)
from miles_disagg.weights.chain import apply_chain, apply_patch, build_patch, fold_chain, verify_target
from miles_disagg.weights.checkpoint import INDEX_FILE, checkpoint_digest, open_checkpoint, write_checkpoint
from miles_disagg.weights.codecs import DELTA_ENCODINGS
from miles_disagg.weights.delta import (
    DeltaIndex,
    ShardPlan,
    ShardWriter,
    merge_weight_maps,
    open_delta,
    parse_delta_index,
    plan_shards,
    write_delta,
    write_version_index,
)
from miles_disagg.weights.digest import digest
from miles_disagg.weights.dtypes import tensor_nbytes

SHAPES = {
    "embed": ("BF16", (300, 40)),
    "norm": ("F32", (40,)),
    "scale": ("F32", ()),
    "empty": ("BF16", (0, 4)),
    "fp8": ("F8_E4M3", (99, 3)),
    "frozen": ("BF16", (16,)),
}


def chain(root, encodings, seed=0, checksum="xxh3-128"):
    """Write base and one delta per encoding below `root`; every state, newest last."""
    rng = np.random.default_rng(seed)
    states = [{n: rng.integers(0, 60, tensor_nbytes(d, s), dtype=np.uint8) for n, (d, s) in SHAPES.items()}]
    write_checkpoint(root / "base", [(n, *SHAPES[n], states[0][n]) for n in SHAPES], max_shard_bytes=8_000)
    for version, encoding in enumerate(encodings, 1):
        new = {n: a.copy() for n, a in states[-1].items()}
        for name, array in new.items():
            if name != "frozen" and array.size and not (name == "norm" and version == len(encodings)):
                array[rng.integers(0, array.size, max(1, array.size // 30))] ^= 1
        tensors = [(n, *SHAPES[n], states[-1][n], new[n]) for n in SHAPES]
        write_delta(root / f"weight_v{version:06d}", version, version - 1, tensors, encoding, checksum)
        states.append(new)
    return states, [open_delta(root / f"weight_v{v:06d}") for v in range(1, len(encodings) + 1)]


def assert_state(checkpoint, state):
    for name, expected in state.items():
        np.testing.assert_array_equal(checkpoint.bytes(name), expected)


MIXED = ["sparse", "xor", "sparse-max", "overwrite", "sparse"]


def test_a_chain_of_mixed_encodings_is_applied_in_one_pass(tmp_path):
    states, deltas = chain(tmp_path, MIXED)
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        names = apply_chain(checkpoint, deltas)
        assert_state(checkpoint, states[-1])
    assert set(names) == set(SHAPES) - {"frozen", "empty"}


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_a_patch_is_verified_first_then_redone_and_undone_any_number_of_times(tmp_path, checksum):
    states, deltas = chain(tmp_path, MIXED, checksum=checksum)
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        redo = build_patch(checkpoint, deltas, tmp_path / "redo.safetensors", metadata={"run": "r"})
        undo = build_patch(checkpoint, deltas, tmp_path / "undo.safetensors", undo=True)
        assert_state(checkpoint, states[0])
        for _ in range(2):
            apply_patch(checkpoint, redo.path)
            apply_patch(checkpoint, redo.path)
            assert_state(checkpoint, states[-1])
            apply_patch(checkpoint, undo.path)
            assert_state(checkpoint, states[0])
    changed = sum(int(np.count_nonzero(states[0][n] != states[-1][n])) for n in ("fp8",))
    assert load_file(redo.path)["fp8:positions"].numel() == changed
    assert redo.changed_elements == undo.changed_elements > changed


def test_a_half_applied_patch_heals_when_it_is_applied_again(tmp_path):
    states, deltas = chain(tmp_path, ["sparse"])
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        build_patch(checkpoint, deltas, tmp_path / "redo.safetensors")
        checkpoint.bytes("embed")[:12_000] = states[1]["embed"][:12_000]  # what a crash left
        apply_patch(checkpoint, tmp_path / "redo.safetensors")
        assert_state(checkpoint, states[1])


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_a_folded_chain_does_what_the_chain_does_in_fewer_bytes(tmp_path, encoding):
    states, deltas = chain(tmp_path, ["sparse"] * 6)
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        summary = fold_chain(checkpoint, deltas, tmp_path / "fold", encoding)
        folded = open_delta(tmp_path / "fold")
        assert (folded.index.base_version, folded.index.version) == (0, 6)
        apply_chain(checkpoint, [folded])
        assert_state(checkpoint, states[-1])
    if encoding.startswith("sparse"):
        assert summary.frame_bytes < sum(d.nbytes for d in deltas)


def test_a_chain_with_a_gap_is_refused_and_names_the_missing_version(tmp_path):
    _, deltas = chain(tmp_path, ["sparse"] * 3)
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint, pytest.raises(ChainBroken) as caught:
        apply_chain(checkpoint, [deltas[0], deltas[2]])
    assert (caught.value.target, caught.value.missing) == (3, 2)


def test_a_tensor_that_the_base_lacks_is_named(tmp_path):
    _, deltas = chain(tmp_path, ["sparse"])
    write_checkpoint(tmp_path / "other", [("norm", "F32", (40,), np.zeros(160, np.uint8))])
    with open_checkpoint(tmp_path / "other") as checkpoint, pytest.raises(CheckpointError, match="does not have"):
        build_patch(checkpoint, deltas, tmp_path / "p.safetensors")


def test_verify_names_the_first_bad_tensor_of_a_lineage(tmp_path):
    _, deltas = chain(tmp_path, ["sparse"] * 2)
    assert "embed" in verify_target(tmp_path / "base", deltas)
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        checkpoint.bytes("fp8")[17] ^= 128
    with pytest.raises(ChecksumMismatch, match="'fp8'"):
        verify_target(tmp_path / "base", deltas)


def test_source_ranks_number_their_files_without_gaps_and_publish_each_tensor_once(tmp_path):
    rng = np.random.default_rng(0)
    tied_old, tied_new = rng.integers(0, 9, 800, dtype=np.uint8), rng.integers(0, 9, 800, dtype=np.uint8)
    other = rng.integers(0, 9, 80, dtype=np.uint8)
    per_rank = [
        {"embed": (tied_new, tied_old), "l0": (other + 1, other)},
        {"l1": (other, other)},  # nothing changed: no file
        {"embed": (tied_new, tied_old)},  # the tied copy only: no file either
        {"embed": (tied_new, tied_old), "l3": (other + 2, other)},
    ]
    writers = [ShardWriter(tmp_path / "v", "sparse", workers=1) for _ in per_rank]
    for writer, tensors in zip(writers, per_rank, strict=True):
        for name, (new, old) in tensors.items():
            writer.add(name, "U8", (new.size,), new, old)
    summaries = [w.summary() for w in writers]
    plans = plan_shards(summaries)
    assert [p.file for p in plans] == [
        "model-00000-of-00002.safetensors",
        None,
        None,
        "model-00001-of-00002.safetensors",
    ]
    written = [w.finish(p) for w, p in zip(writers, plans, strict=True)]
    weight_map = merge_weight_maps(summaries, plans)
    write_version_index(tmp_path / "v", DeltaIndex(1, 0, "sparse", "xxh3-128", weight_map))
    delta = open_delta(tmp_path / "v")
    assert sorted(delta.names) == ["embed", "l0", "l3"]
    assert delta.checksum("embed") == digest(tied_new)
    assert written[0].nbytes == os.path.getsize(tmp_path / "v" / plans[0].file)
    assert written[0].digest == digest((tmp_path / "v" / plans[0].file).read_bytes())
    for writer in writers:
        writer.close()
    assert sorted(p.name for p in (tmp_path / "v").iterdir()) == sorted({*weight_map.values(), INDEX_FILE})


def test_replicas_that_differ_abort_the_publication(tmp_path):
    old = np.zeros(64, np.uint8)
    summaries = []
    for rank in range(2):
        with ShardWriter(tmp_path / str(rank), "sparse", workers=1) as writer:
            writer.add("embed", "U8", (64,), old + 1 + rank, old)
            summaries.append(writer.summary())
    with pytest.raises(PublicationFailed, match=r"'embed' differs between source ranks 0 and 1"):
        plan_shards(summaries)


def test_a_version_in_which_nothing_changed_has_an_index_and_no_files(tmp_path):
    data = np.arange(32, dtype=np.uint8)
    summary = write_delta(tmp_path / "v", 3, 2, [("w", "BF16", (16,), data, data.copy())], "sparse")
    assert summary.changed_elements == 0
    assert [p.name for p in (tmp_path / "v").iterdir()] == [INDEX_FILE]
    assert open_delta(tmp_path / "v").names == []


@pytest.mark.parametrize("encoding", [*DELTA_ENCODINGS, None])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_becomes_non_finite_stops_the_publication_by_name(tmp_path, encoding, value):
    old = np.ones(500, np.float32)
    new = old.copy()
    new[[7, 123]] = value
    base = old.view(np.uint8) if encoding else None
    with ShardWriter(tmp_path / "v", encoding) as writer:
        writer.add("layers.3.w", "F32", (500,), new.view(np.uint8), base)
        with pytest.raises(NonFiniteWeights, match="'layers.3.w'") as caught:
            writer.summary()
    assert caught.value.count == 2
    assert not list((tmp_path / "v").iterdir())


def test_a_mask_of_infinities_that_does_not_change_is_published_around(tmp_path):
    old = np.array([-np.inf, 1, 2], np.float32)
    new = np.array([-np.inf, 1, 3], np.float32)
    summary = write_delta(tmp_path, 1, 0, [("mask", "F32", (3,), old.view(np.uint8), new.view(np.uint8))], "sparse")
    assert summary.changed_elements == 1


def test_a_full_version_is_written_by_the_same_moves_and_read_as_a_checkpoint(tmp_path):
    data = np.arange(80, dtype=np.uint8)
    with ShardWriter(tmp_path / "v", None) as writer:
        writer.add("w", "U8", (8, 10), data)
        summary = writer.summary()
        plans = plan_shards([summary])
        writer.finish(plans[0])
    body = {"metadata": {}, "weight_map": merge_weight_maps([summary], plans)}
    (tmp_path / "v" / INDEX_FILE).write_text(json.dumps(body))
    with open_checkpoint(tmp_path / "v") as checkpoint:
        assert checkpoint.tensors["w"].shape == (8, 10)
        assert checkpoint.checksums() == {"w": digest(data)}
        assert checkpoint.headers[plans[0].file].metadata["format"] == "pt"


def test_a_delta_directory_is_not_a_checkpoint_and_a_checkpoint_is_not_a_delta(tmp_path):
    chain(tmp_path, ["sparse"])
    with pytest.raises(CheckpointError, match="delta version, not a full"):
        open_checkpoint(tmp_path / "weight_v000001")
    with pytest.raises(CheckpointError, match="full checkpoint, not a delta"):
        open_delta(tmp_path / "base")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 3), ("version", "-3"), ("version", "3.0"), ("version", "٣"), ("version", None),
        ("base_version", "000003"), ("base_version", "000009"), ("delta_encoding", "gzip"),
        ("compression_format", "lz4"), ("checksum_format", "md5"), ("checksum_format", None),
    ],
)  # fmt: skip
def test_a_malformed_delta_index_names_the_field(field, value):
    metadata = DeltaIndex(3, 2, "sparse", "xxh3-128", {}).metadata() | {field: value}
    with pytest.raises(CheckpointError, match=field):
        parse_delta_index(json.dumps({"metadata": metadata, "weight_map": {}}).encode())


def test_a_payload_without_a_checksum_is_refused(tmp_path):
    data = np.arange(32, dtype=np.uint8)
    with ShardWriter(tmp_path / "v", "sparse") as writer:
        writer.add("w", "U8", (32,), data + 1, data)
        writer.summary()
        writer._spool.finish("model-00000-of-00001.safetensors", {})
    index = DeltaIndex(1, 0, "sparse", "xxh3-128", {"w": "model-00000-of-00001.safetensors"})
    write_version_index(tmp_path / "v", index)
    with pytest.raises(CheckpointError, match=r"no checksum.*'w'"):
        open_delta(tmp_path / "v")


def test_finish_with_a_plan_that_gives_no_file_writes_none(tmp_path):
    with ShardWriter(tmp_path / "v", "sparse") as writer:
        writer.add("w", "U8", (4,), np.ones(4, np.uint8), np.zeros(4, np.uint8))
        assert writer.finish(ShardPlan(None, frozenset({"w"}))) is None
    assert list((tmp_path / "v").iterdir()) == []


LIMITED = """
import resource, sys
import numpy as np
from miles_disagg.weights.chain import build_patch, apply_patch
from miles_disagg.weights.checkpoint import checkpoint_digest, open_checkpoint
from miles_disagg.weights.delta import open_delta, write_delta
root, encoding = sys.argv[1], sys.argv[2]
old = np.memmap(root + "/old.bin", np.uint8, "r")
new = np.memmap(root + "/new.bin", np.uint8, "r")
write_delta(root + "/warm", 1, 0, [("w", "BF16", (50,), np.zeros(100, np.uint8), np.ones(100, np.uint8))], encoding)
limit = int(open("/proc/self/statm").read().split()[5]) * 4096 + (112 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
write_delta(root + "/v", 1, 0, [("w", "BF16", (old.size // 2,), old, new)], encoding, workers=1)
with open_checkpoint(root + "/base", writable=True) as base:
    build_patch(base, [open_delta(root + "/v")], root + "/p.safetensors", workers=1)
    apply_patch(base, root + "/p.safetensors")
"""


@pytest.mark.parametrize("encoding", DELTA_ENCODINGS)
def test_memory_is_bounded_by_blocks_not_by_the_tensor(tmp_path, encoding):
    """One 192 MiB tensor is encoded, verified and applied with 112 MiB of private memory (RLIMIT_DATA)."""
    size = 192 << 20
    rng = np.random.default_rng(0)
    old = np.memmap(tmp_path / "old.bin", np.uint8, "w+", shape=(size,))
    old[:] = np.tile(rng.integers(0, 60, 1 << 20, dtype=np.uint8), size >> 20)
    new = np.memmap(tmp_path / "new.bin", np.uint8, "w+", shape=(size,))
    new[:] = old
    new[:: 2 * 211] ^= 1
    write_checkpoint(tmp_path / "base", [("w", "BF16", (size // 2,), old)])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), encoding], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with open_checkpoint(tmp_path / "base") as checkpoint:
        assert digest(checkpoint.bytes("w")) == digest(new)
    for file in tmp_path.rglob("*.*"):
        file.unlink()


def test_importing_checkpoints_does_not_import_numba_or_torch():
    code = "import sys, miles_disagg.weights.delta; print([m for m in ('numba', 'torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_digest_of_a_staged_checkpoint_follows_the_chain(tmp_path):
    states, deltas = chain(tmp_path, ["sparse", "xor"])
    write_checkpoint(tmp_path / "expected", [(n, *SHAPES[n], states[-1][n]) for n in SHAPES])
    with open_checkpoint(tmp_path / "base", writable=True) as checkpoint:
        apply_chain(checkpoint, deltas)
    assert checkpoint_digest(tmp_path / "base") == checkpoint_digest(tmp_path / "expected")
