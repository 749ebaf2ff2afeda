"""The checkpoint on the rollout host: right bit for bit, or still the old one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_disagg.domain.errors import (
    BaseMismatch,
    ChainBroken,
    CheckpointError,
    ChecksumMismatch,
    ClaimConflict,
    VersionNotFound,
)
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import ObjectStore, StoreError
from miles_disagg.store.leases import take_lease
from miles_disagg.store.local import LocalStore
from miles_disagg.store.retention import collect
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import INDEX_FILE
from tests.fakes.publishing import FakeTrainer, Tensors, on_disk, raw, step, tiny_tensors, write_base


class World:
    """A trainer, its store, and the weights of every version it published."""

    def __init__(self, root: Path, run_id: str = "run", seed: int = 0, ranks: int = 2):
        self.root, self.run_id = root, run_id
        self.versions: list[Tensors] = [tiny_tensors(seed, size=32)]
        self.base = root / f"base-{run_id}"
        if not self.base.exists():
            write_base(self.base, self.versions[0])
        self.trainer = FakeTrainer(LocalStore(root / "store"), self.base, run_id, ranks)

    async def publish(self, *encodings: str | None) -> VersionRef:
        for encoding in encodings:
            self.versions.append(step(self.versions[-1], len(self.versions)))
            await self.trainer.publish(self.versions[-1], encoding)
        return self.ref(len(self.versions) - 1)

    def ref(self, version: int) -> VersionRef:
        return VersionRef(self.run_id, version)

    def stager(self, name: str = "r0", objects: ObjectStore | None = None, **kwargs) -> DiskStager:
        store = VersionStore(objects or LocalStore(self.root / "store"))
        return DiskStager(store, self.root / name, self.base, reader=name, workers=1, **kwargs)

    def expected(self, version: int) -> dict[str, bytes]:
        return raw(self.versions[version])


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await world.trainer.claim()
    return world


async def test_the_base_is_seeded_with_config_and_tokenizer(world: World) -> None:
    built = await world.stager().materialize(world.ref(0))
    assert on_disk(built.path) == world.expected(0)
    assert sorted(p.name for p in built.path.iterdir() if "safetensors" not in p.name) == [
        "config.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "sparse", "sparse-max"])
async def test_a_replica_behind_catches_up_in_one_go(world: World, encoding: str) -> None:
    replica = world.stager()
    await replica.materialize(world.ref(0))
    ref = await world.publish(*[encoding] * 4)
    built = await replica.materialize(ref)
    assert on_disk(built.path) == world.expected(4)
    assert built.previous == world.ref(0)
    assert built.patch is not None
    assert built.wire_bytes > 0
    assert set(built.seconds) == {"fetch", "materialize"}


async def test_a_chain_of_all_encodings_and_an_anchor(world: World) -> None:
    ref = await world.publish("xor", "sparse", None, "overwrite", "sparse-max")
    late = world.stager("late")
    built = await late.materialize(ref)
    assert on_disk(built.path) == world.expected(5)
    assert (built.previous, built.patch) == (None, None)
    assert (built.path / "tokenizer.json").is_file()
    slow = world.stager("slow")
    for version in range(6):
        assert on_disk((await slow.materialize(world.ref(version))).path) == world.expected(version)


async def test_what_is_held_is_not_fetched_again(world: World) -> None:
    ref = await world.publish("xor")
    replica = world.stager()
    first = await replica.materialize(ref)
    again = await replica.materialize(ref)
    assert (again.path, again.wire_bytes) == (first.path, 0)


async def test_an_older_version_is_built_exactly(world: World) -> None:
    ref = await world.publish("xor", "xor", "xor")
    replica = world.stager()
    await replica.materialize(ref)
    built = await replica.materialize(world.ref(1))
    assert on_disk(built.path) == world.expected(1)


async def test_a_version_in_which_nothing_changed_is_a_version(world: World) -> None:
    replica = world.stager()
    await replica.materialize(world.ref(0))
    world.versions.append(world.versions[0])
    await world.trainer.publish(world.versions[1])
    built = await replica.materialize(world.ref(1))
    assert replica.held() == world.ref(1)
    assert on_disk(built.path) == world.expected(1)


async def test_a_restarted_replica_goes_on_from_what_is_on_disk(world: World) -> None:
    replica = world.stager()
    await replica.materialize(await world.publish("xor"))
    replica.close()
    restarted = world.stager()
    assert restarted.held() == world.ref(1)
    built = await restarted.materialize(await world.publish("xor"))
    assert built.previous == world.ref(1)
    assert on_disk(built.path) == world.expected(2)


async def test_two_replicas_cannot_share_a_directory(world: World) -> None:
    first = world.stager()
    with pytest.raises(ClaimConflict, match="--update-weight-local-checkpoint-dir"):
        world.stager()
    first.close()
    world.stager().close()


# --- other runs, other bases ---------------------------------------------------------------------------


async def test_a_directory_of_another_run_is_reseeded_or_refused(world: World, tmp_path: Path) -> None:
    replica = world.stager()
    await replica.materialize(await world.publish("xor"))
    replica.close()
    await world.trainer.ledger.release()
    other = World(tmp_path, "other", seed=7)
    await other.trainer.claim()
    ref = await other.publish("xor")
    refusing = other.stager(foreign="refuse")
    with pytest.raises(ClaimConflict, match="run/weight_v000001"):
        await refusing.materialize(ref)
    assert refusing.held() == world.ref(1)
    refusing.close()
    reseeding = other.stager()
    built = await reseeding.materialize(ref)
    assert on_disk(built.path) == other.expected(1)
    assert len(list((tmp_path / "r0").glob("weights-*"))) == 1


async def test_a_host_with_another_base_is_told_before_anything_is_applied(world: World, tmp_path: Path) -> None:
    ref = await world.publish("xor")
    write_base(tmp_path / "wrong", tiny_tensors(99, size=32))
    world.base = tmp_path / "wrong"
    replica = world.stager()
    with pytest.raises(BaseMismatch, match="wrong"):
        await replica.materialize(ref)
    assert replica.held() is None
    assert list((tmp_path / "r0").glob("weights-*")) == []


# --- bad versions ---------------------------------------------------------------------------------------


def shard_of(world: World, version: int) -> Path:
    return sorted((world.root / "store" / str(world.ref(version))).glob("*.safetensors"))[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 41):
        data[at] ^= 0x55
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def huge_header(path: Path) -> None:
    path.write_bytes((2 << 30).to_bytes(8, "little") + path.read_bytes()[8:])


def remove(path: Path) -> None:
    path.unlink()


def swap_with_other_version(path: Path) -> None:
    shutil.copy(path.parent.parent / "weight_v000001" / path.name, path)


@pytest.mark.parametrize("damage", [flip, truncate, huge_header, remove, swap_with_other_version])
@pytest.mark.parametrize("encoding", ["xor", "sparse"])
async def test_a_bad_version_leaves_the_old_one_untouched(
    world: World, damage: Callable[[Path], None], encoding: str
) -> None:
    replica = world.stager()
    held = await replica.materialize(await world.publish(encoding))
    ref = await world.publish(encoding)
    intact = shard_of(world, 2).read_bytes()
    damage(shard_of(world, 2))
    with pytest.raises((CheckpointError, StoreError), match="model-0000|no object"):
        await replica.materialize(ref)
    assert replica.held() == world.ref(1)
    assert on_disk(held.path) == world.expected(1)
    (world.root / "store" / str(ref) / "model-00000-of-00002.safetensors").write_bytes(intact)
    assert on_disk((await replica.materialize(ref)).path) == world.expected(2)


async def test_a_damaged_local_checkpoint_is_rebuilt_on_the_second_try(world: World) -> None:
    """The target checksums find it; the next attempt starts from the base, so a retry heals by itself."""
    replica = world.stager()
    built = await replica.materialize(world.ref(0))
    ref = await world.publish("xor")
    for shard in built.path.glob("*.safetensors"):
        flip(shard)
    with pytest.raises(ChecksumMismatch):
        await replica.materialize(ref)
    assert on_disk((await replica.materialize(ref)).path) == world.expected(1)


async def test_an_index_that_names_a_path_reads_nothing_outside(world: World, tmp_path: Path) -> None:
    ref = await world.publish("xor")
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    index = world.root / "store" / str(ref) / INDEX_FILE
    body = json.loads(index.read_text())
    body["weight_map"] = dict.fromkeys(body["weight_map"], "../../../secret.safetensors")
    index.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="secret"):
        await world.stager().materialize(ref)


async def test_stray_files_beside_a_version_are_not_read(world: World) -> None:
    ref = await world.publish("xor")
    (world.root / "store" / str(ref) / "model-00002-of-00003.safetensors").write_bytes(b"not a safetensors file")
    (world.root / "store" / str(ref) / "evil.py").write_text("raise SystemExit")
    built = await world.stager().materialize(ref)
    assert on_disk(built.path) == world.expected(1)
    assert not (built.path / "evil.py").exists()


async def test_a_version_that_was_never_published_and_a_broken_chain_are_told_apart(world: World) -> None:
    ref = await world.publish("xor", "xor", "xor")
    with pytest.raises(VersionNotFound):
        await world.stager("r1").materialize(world.ref(9))
    (world.root / "store" / str(world.ref(2)) / INDEX_FILE).unlink()
    with pytest.raises(ChainBroken, match="weight_v000002"):
        await world.stager("r2").materialize(ref)


# --- retention -------------------------------------------------------------------------------------------


async def test_a_lease_keeps_a_chain_and_its_end_frees_it(world: World) -> None:
    await world.publish("xor", "xor", None, "xor", None)
    store, objects = VersionStore(LocalStore(world.root / "store")), LocalStore(world.root / "store")
    take_lease(objects, "run", "reader", target=2, have=0, ttl=100)
    assert collect(store, "run", keep=1).versions == (3, 4)
    assert on_disk((await world.stager().materialize(world.ref(2))).path) == world.expected(2)
    assert collect(store, "run", keep=1, now=time.time() + 103).versions == (1, 2)
    assert store.versions("run") == [5]
    assert on_disk((await world.stager("late").materialize(world.ref(5))).path) == world.expected(5)
