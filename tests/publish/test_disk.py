"""The trainer side of a disk publication: from live tensors to a committed version that a replica materializes."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore
from tests.fakes.publishing import FakeTrainer, Tensors, on_disk, raw, step, tiny_tensors, write_base


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
