"""Shortcuts beside the chain: the cheapest way for late readers, the delta for others, and what retention keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_disagg.domain.errors import CheckpointError, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.anchors import AnchorPolicy
from miles_disagg.publish.disk import Published, publish_version
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.inspect import verify_lineage
from miles_disagg.store.leases import take_lease
from miles_disagg.store.retention import collect
from miles_disagg.store.versions import VersionStore
from tests.fakes.publishing import FakeTrainer, Tensors, on_disk, raw, step, tiny_tensors, write_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", tiny_tensors())
    return tmp_path / "base"


async def chain(tmp_path: Path, base: Path, versions: int, every: int, density: float = 0.02) -> list[Tensors]:
    """Versions 1.. of a run with shortcuts every `every`; the weights of each, base first."""
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", 2)
    await trainer.claim()
    states = [tiny_tensors()]

    async def wanted(published: Published) -> bool:
        return published.ref.version % every == 0

    for version in range(1, versions + 1):
        states.append(step(states[-1], version, density))
        trainer.stage(states[-1])
        await publish_version(trainer.ledger, trainer.sources, lambda _: "sparse", shortcuts_after=wanted)
    return states


def reader(tmp_path: Path, base: Path, name: str = "replica") -> DiskStager:
    store = VersionStore(open_store(str(tmp_path / "store")))
    return DiskStager(store, tmp_path / name, base, reader=name, workers=1)


async def test_a_late_reader_takes_the_folded_delta_and_one_in_step_only_the_new_delta(
    tmp_path: Path, base: Path
) -> None:
    states = await chain(tmp_path, base, versions=5, every=2)
    store = VersionStore(open_store(str(tmp_path / "store")))
    assert (store.shortcuts("run", "folded"), store.shortcuts("run", "anchors")) == ([2, 4], [2, 4])
    late = store.plan(VersionRef("run", 5))
    assert [d.key for d in late.deltas] == ["run/folded/weight_v000004", "run/weight_v000005"]
    behind = store.plan(VersionRef("run", 5), VersionRef("run", 3))
    assert (behind.start, [d.key for d in behind.deltas]) == ("held", ["run/weight_v000004", "run/weight_v000005"])
    stager = reader(tmp_path, base)
    assert on_disk((await stager.materialize(VersionRef("run", 5))).path) == raw(states[5])
    stager.close()


async def test_an_anchor_is_an_ordinary_checkpoint_and_the_way_where_everything_changed(
    tmp_path: Path, base: Path
) -> None:
    states = await chain(tmp_path, base, versions=4, every=4, density=1.0)
    anchor = tmp_path / "store" / "run" / "anchors" / "weight_v000004"
    assert on_disk(anchor) == raw(states[4])
    assert {"config.json", "tokenizer.json"} <= {p.name for p in anchor.iterdir()}
    store = VersionStore(open_store(str(tmp_path / "store")))
    for other in ("weight_v000001", "weight_v000002"):
        (tmp_path / "store" / "run" / other / "model.safetensors.index.json").unlink()
    (tmp_path / "store" / "run" / "folded" / "weight_v000004" / "model.safetensors.index.json").unlink(missing_ok=True)
    assert store.plan(VersionRef("run", 4)).start == "anchor"
    stager = reader(tmp_path, base)
    assert on_disk((await stager.materialize(VersionRef("run", 4))).path) == raw(states[4])
    stager.close()


async def test_retention_removes_the_chain_below_shortcuts_but_nothing_that_is_leased(
    tmp_path: Path, base: Path
) -> None:
    states = await chain(tmp_path, base, versions=6, every=2)
    store = VersionStore(open_store(str(tmp_path / "store")))
    take_lease(store.objects, "run", "slow", target=3, have=1)
    assert collect(store, "run", keep=1).versions == (1, 4, 5)
    (tmp_path / "store" / "run" / "leases" / "slow.json").unlink()
    done = collect(store, "run", keep=1)
    assert done.versions == (2, 3)
    assert store.shortcuts("run", "folded") == [6]
    stager = reader(tmp_path, base)
    assert on_disk((await stager.materialize(VersionRef("run", 6))).path) == raw(states[6])
    stager.close()


@pytest.mark.parametrize("kind", ["folded", "anchors"])
async def test_verify_recomputes_shortcuts_too_and_names_the_bad_tensor(tmp_path: Path, base: Path, kind: str) -> None:
    await chain(tmp_path, base, versions=2, every=2)
    store = VersionStore(open_store(str(tmp_path / "store")))
    refs = list(verify_lineage(store, VersionRef("run", 2), base, tmp_path / "one", 1))
    assert [ref.version for ref in refs] == [0, 1, 2]
    shard = next((tmp_path / "store" / "run" / kind / "weight_v000002").glob("*.safetensors"))
    body = bytearray(shard.read_bytes())
    body[-1] ^= 1
    shard.write_bytes(body)
    with pytest.raises(CheckpointError, match="weight_v000002") as found:
        list(verify_lineage(store, VersionRef("run", 2), base, tmp_path / "two", 1))
    assert found.value.tensor is not None


async def test_a_shortcut_that_fails_leaves_the_version_published(tmp_path: Path, base: Path) -> None:
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", 1)
    await trainer.claim()

    async def broken(_: Published) -> bool:
        raise OSError("disk full")

    trainer.stage(step(tiny_tensors(), 1))
    with pytest.raises(PublicationFailed, match="weight_v000001 is published; its shortcuts.*disk full"):
        await publish_version(trainer.ledger, trainer.sources, lambda _: "sparse", shortcuts_after=broken)
    assert trainer.store.latest() == VersionRef("run", 1)
    second = step(step(tiny_tensors(), 1), 2)
    await trainer.publish(second, "sparse")
    stager = reader(tmp_path, base)
    assert on_disk((await stager.materialize(VersionRef("run", 2))).path) == raw(second)
    stager.close()


def test_anchors_come_every_n_or_when_what_readers_had_to_read_exceeds_one() -> None:
    nobody = frozenset[str]()
    assert [AnchorPolicy(3).due(v, 1, 100, nobody) for v in range(1, 7)] == [False, False, True] * 2
    assert not any(AnchorPolicy(None).due(v, 99, 1, nobody) for v in range(9))
    auto = AnchorPolicy("auto")
    assert [auto.due(v, 40, 100, nobody) for v in range(1, 7)] == [False, False, True] * 2
    joins = AnchorPolicy("auto")
    names = [frozenset("a"), frozenset("ab"), frozenset("abc")]
    assert [joins.due(v, 20, 100, seen) for v, seen in enumerate(names)] == [False, False, True]
