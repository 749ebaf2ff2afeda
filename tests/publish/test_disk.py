"""The trainer side of a disk publication: from live tensors to a committed version that a replica materializes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_disagg.domain.errors import CheckpointError, DeadlineExceeded, NonFiniteWeights, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.disk import DiskSource, Published, publish_version
from miles_disagg.publish.movement import MovementWatch
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.checkout import check_out
from miles_disagg.store.inspect import verify_lineage
from miles_disagg.store.ledger import VersionLedger
from miles_disagg.store.versions import VersionStore
from tests.fakes.publishing import FakeTrainer, LocalSource, Tensors, on_disk, raw, step, tiny_tensors, write_base


@pytest.fixture
def base_tensors() -> Tensors:
    return tiny_tensors()


@pytest.fixture
def base(tmp_path: Path, base_tensors: Tensors) -> Path:
    write_base(tmp_path / "base", base_tensors)
    return tmp_path / "base"


@pytest.fixture
async def trainer(tmp_path: Path, base: Path) -> FakeTrainer:
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run")
    await trainer.claim()
    return trainer


def stager(trainer: FakeTrainer, tmp_path: Path, name: str = "replica0") -> DiskStager:
    store = VersionStore(open_store(trainer.objects.url))
    return DiskStager(store, tmp_path / name, trainer.base, reader=name, workers=1)


@pytest.mark.parametrize("encoding", ["xor", "overwrite", None])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_the_trainer_exports_is_what_the_replica_holds_bit_for_bit(
    tmp_path: Path, base: Path, base_tensors: Tensors, encoding: str | None, ranks: int
) -> None:
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", ranks)
    await trainer.claim()
    replica = stager(trainer, tmp_path)
    tensors = base_tensors
    for version in range(1, 4):
        tensors = step(tensors, version)
        published = await trainer.publish(tensors, encoding)
        assert published.ref == VersionRef("run", version)
        built = await replica.materialize(published.ref)
        assert on_disk(built.path) == raw(tensors)
        assert (built.path / "config.json").is_file()
        assert (built.path / "tokenizer.json").is_file()


async def test_the_trainer_may_go_on_as_soon_as_its_tensors_are_staged(
    trainer: FakeTrainer, tmp_path: Path, base_tensors: Tensors
) -> None:
    tensors = step(base_tensors, 1)
    wanted = raw(tensors)
    live = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.stage(live)
    for tensor in live.values():
        tensor.zero_()
    published = await publish_version(trainer.ledger, trainer.sources, lambda _: "xor")
    assert on_disk((await stager(trainer, tmp_path).materialize(published.ref)).path) == wanted


async def test_an_export_that_is_not_contiguous_is_published_as_it_reads(tmp_path: Path) -> None:
    base = {"w": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)}
    write_base(tmp_path / "base", base)
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    transposed = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3).t()
    published = await trainer.publish({"w": transposed})
    built = await stager(trainer, tmp_path).materialize(published.ref)
    assert on_disk(built.path) == raw({"w": transposed.contiguous()})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("encoding", ["xor", None])
async def test_nan_or_inf_stops_the_publication_and_names_the_tensor(
    trainer: FakeTrainer, tmp_path: Path, base_tensors: Tensors, value: float, encoding: str | None
) -> None:
    good = step(base_tensors, 1)
    await trainer.publish(good)
    bad = step(good, 2)
    bad["model.norm.weight"] = bad["model.norm.weight"].clone()
    bad["model.norm.weight"][3] = value
    with pytest.raises(NonFiniteWeights, match="model.norm.weight"):
        await trainer.publish(bad, encoding)
    assert trainer.store.latest() == VersionRef("run", 1)
    assert list(trainer.objects.list("run/weight_v000002")) == []
    assert on_disk((await stager(trainer, tmp_path).materialize(VersionRef("run", 1))).path) == raw(good)
    better = step(good, 3)
    assert (await trainer.publish(better)).ref == VersionRef("run", 2)
    assert on_disk((await stager(trainer, tmp_path, "r1").materialize(VersionRef("run", 2))).path) == raw(better)


async def test_an_export_that_does_not_fit_the_base_is_refused_by_name(
    trainer: FakeTrainer, base_tensors: Tensors
) -> None:
    source = trainer.sources[0].source
    name = "model.norm.weight"
    source.open(1)
    with pytest.raises(CheckpointError, match="lm_head"):
        source.stage([("lm_head.weight", torch.zeros(2))])
    with pytest.raises(CheckpointError, match="BF16"):
        source.stage([(name, base_tensors[name].bfloat16())])
    with pytest.raises(CheckpointError, match=r"\[63\]"):
        source.stage([(name, base_tensors[name][1:])])
    source.stage([(name, base_tensors[name])])
    with pytest.raises(CheckpointError, match="twice"):
        source.stage([(name, base_tensors[name])])


async def test_a_second_export_waits_for_the_first_publication(trainer: FakeTrainer, base_tensors: Tensors) -> None:
    source = trainer.sources[0].source
    assert source.open(1) < 1
    with pytest.raises(DeadlineExceeded, match="previous weight publication"):
        source.open(0.05)
    source.settle(False)
    source.open(1)


async def test_a_failed_commit_forgets_what_was_staged(
    trainer: FakeTrainer, tmp_path: Path, base_tensors: Tensors
) -> None:
    """The next delta must be against what was published, not against what was nearly published."""

    class Unlucky(VersionLedger):
        async def commit(self, *args, **kwargs) -> None:
            raise PublicationFailed("the store is gone")

    first = step(base_tensors, 1)
    await trainer.publish(first)
    ledger, trainer.ledger = trainer.ledger, Unlucky("run", trainer.store)
    trainer.ledger._latest = VersionRef("run", 1)
    with pytest.raises(PublicationFailed, match="gone"):
        await trainer.publish(step(first, 2, density=0.5))
    trainer.ledger = ledger
    third = step(first, 3)
    published = await trainer.publish(third)
    assert on_disk((await stager(trainer, tmp_path).materialize(published.ref)).path) == raw(third)


async def test_tied_tensors_on_several_ranks_are_written_once(
    tmp_path: Path, base: Path, base_tensors: Tensors
) -> None:
    tied = "model.embed_tokens.weight"
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", 2, tied=[tied])
    await trainer.claim()
    tensors = step(base_tensors, 1)
    published = await trainer.publish(tensors)
    assert sum(tied in r.checksums for r in published.receipts) == 1
    assert on_disk((await stager(trainer, tmp_path).materialize(published.ref)).path) == raw(tensors)


async def test_copies_on_two_ranks_that_differ_stop_the_publication(
    tmp_path: Path, base: Path, base_tensors: Tensors
) -> None:
    tied = "model.embed_tokens.weight"
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", 2, tied=[tied])
    await trainer.claim()
    for rank, handle in enumerate(trainer.sources):
        handle.source.open(1)
        handle.source.stage([(tied, step(base_tensors, rank + 1)[tied])])
    with pytest.raises(PublicationFailed, match="embed_tokens"):
        await publish_version(trainer.ledger, trainer.sources, lambda _: "xor")
    assert trainer.store.latest() == VersionRef("run", 0)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
async def test_a_resumed_trainer_publishes_against_what_the_store_has(
    tmp_path: Path, trainer: FakeTrainer, base: Path, base_tensors: Tensors, device: torch.device | None
) -> None:
    first = step(base_tensors, 1)
    await trainer.publish(first)
    check_out(trainer.store, VersionRef("run", 1), base, tmp_path / "published")
    resumed = FakeTrainer(trainer.objects, base, "run", ranks=1)
    source = DiskSource(trainer.objects, base, published=tmp_path / "published", device=device, workers=1)
    resumed.sources = [LocalSource(source)]
    await resumed.claim(owner=trainer.store.claim_of("run").owner)

    async def always(_: Published) -> bool:
        return True

    second = step(first, 2)
    resumed.stage(second)
    published = await publish_version(resumed.ledger, resumed.sources, lambda _: "sparse", shortcuts_after=always)
    assert published.ref == VersionRef("run", 2)
    refs = verify_lineage(trainer.store, published.ref, base, tmp_path / "verified", 1)
    assert [ref.version for ref in refs] == [0, 1, 2], "a delta on version 1, a folded one on the base"
    assert on_disk((await stager(trainer, tmp_path).materialize(published.ref)).path) == raw(second)


async def test_a_full_version_is_an_ordinary_checkpoint_directory(trainer: FakeTrainer, base_tensors: Tensors) -> None:
    tensors = step(base_tensors, 1)
    published = await trainer.publish(tensors, None)
    directory = Path(trainer.objects.url) / str(published.ref)
    assert on_disk(directory) == raw(tensors)
    assert {"config.json", "tokenizer.json"} <= {p.name for p in directory.iterdir()}
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]


async def test_what_is_measured_has_the_protocols_names(trainer: FakeTrainer, base_tensors: Tensors) -> None:
    published = await trainer.publish(step(base_tensors, 1, density=0.1))
    names = {"export_seconds", "encode_seconds", "write_seconds", "commit_seconds", "density", "wire_bytes"}
    assert set(published.metrics) == {f"perf/update_weights_{name}" for name in names}
    assert published.metrics["perf/update_weights_density"] == pytest.approx(0.1, rel=0.2)
    shards = (Path(trainer.objects.url) / str(published.ref)).glob("*.safetensors")
    assert published.metrics["perf/update_weights_wire_bytes"] == sum(p.stat().st_size for p in shards)
    scratch = Path(trainer.objects.url) / ".store" / "tmp"
    assert list(scratch.iterdir()) == []


async def test_the_post_write_hook_sees_the_files_but_not_yet_the_version(
    tmp_path: Path, base: Path, base_tensors: Tensors
) -> None:
    trainer = FakeTrainer(open_store(str(tmp_path / "store")), base, "run", 1)
    await trainer.claim()
    seen = []

    def hook(ref: VersionRef) -> None:
        seen.append((ref, [i.key.rsplit("/")[-1] for i in trainer.objects.list(str(ref))], trainer.store.latest()))

    trainer.sources = [LocalSource(DiskSource(trainer.objects, base, post_write=hook, workers=1))]
    await trainer.publish(step(base_tensors, 1))
    assert seen == [(VersionRef("run", 1), ["model-00000-of-00001.safetensors"], VersionRef("run", 0))]


# --- a policy that does not move ----------------------------------------------------------------------


async def test_two_publications_without_a_changed_byte_raise_the_alarm(
    trainer: FakeTrainer, base_tensors: Tensors
) -> None:
    watch = MovementWatch()
    alarms = []
    moved = step(base_tensors, 1)
    for tensors in (moved, moved, moved, step(moved, 2)):
        published = await trainer.publish(tensors)
        alarms.append(watch.observe(published.ref, learning_rate=1e-6, changed_elements=published.changed_elements))
    assert [bool(a) for a in alarms] == [False, False, True, False]
    assert "weight_v000003" in alarms[2]


async def test_the_same_full_version_twice_raises_the_alarm(trainer: FakeTrainer, base_tensors: Tensors) -> None:
    watch = MovementWatch()
    alarms = []
    for tensors in (base_tensors, base_tensors, step(base_tensors, 1)):
        published = await trainer.publish(tensors, None)
        assert published.changed_elements is None
        alarms.append(watch.observe(published.ref, learning_rate=1e-6, fingerprint=published.fingerprint))
    assert [bool(a) for a in alarms] == [False, True, False]


def test_without_a_learning_rate_nothing_is_expected_to_move() -> None:
    watch = MovementWatch()
    ref = VersionRef("run", 1)
    assert not any(watch.observe(ref, learning_rate=0.0, changed_elements=0) for _ in range(5))
