"""The snapshot on the trainer's device: the same bytes as from host memory, also after a publication that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_disagg.domain.errors import ConfigError, NonFiniteWeights
from miles_disagg.publish.device import choose_device
from miles_disagg.publish.disk import DiskSource, Published, publish_version
from miles_disagg.store.base import open_store
from miles_disagg.weights.checkpoint import open_checkpoint
from tests.fakes.publishing import FakeTrainer, LocalSource, step, tiny_tensors, write_base

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


async def files(tmp_path: Path, base: Path, name: str, device: str | None, encoding: str) -> dict[str, bytes]:
    """Every published byte of a run of four versions, one refused publication and a shortcut among them."""
    objects = open_store(str(tmp_path / name))
    trainer = FakeTrainer(objects, base, "run", 1)
    place = torch.device(device) if device else None
    trainer.sources = [LocalSource(DiskSource(objects, base, device=place, workers=1))]
    await trainer.claim()

    async def at_the_third(published: Published) -> bool:
        return published.ref.version == 3

    state = tiny_tensors()
    for seed in range(1, 5):
        state = step(state, seed, 0.03 if seed != 2 else 0.7)
        if seed == 3:
            bad = {n: t.clone() for n, t in step(state, 99, 0.1).items()}
            bad["model.norm.weight"][3] = float("nan")
            trainer.stage({n: t.to(device) for n, t in bad.items()} if device else bad)
            with pytest.raises(NonFiniteWeights, match="norm"):
                await publish_version(trainer.ledger, trainer.sources, lambda _: encoding)
        trainer.stage({n: t.to(device) for n, t in state.items()} if device else state)
        await publish_version(trainer.ledger, trainer.sources, lambda _: encoding, shortcuts_after=at_the_third)
    return {i.key: objects.get(i.key) for i in objects.list("run") if "weight_v" in i.key}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["sparse", "sparse-max"])
async def test_a_device_publishes_the_bytes_that_the_host_would(tmp_path: Path, device: str, encoding: str) -> None:
    write_base(tmp_path / "base", tiny_tensors())
    host = await files(tmp_path, tmp_path / "base", "host", None, encoding)
    there = await files(tmp_path, tmp_path / "base", "device", device, encoding)
    assert any("folded" in key for key in host)
    assert any("anchors" in key for key in host)
    assert there == host


def test_the_device_is_chosen_and_cuda_without_cuda_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base", tiny_tensors())
    with open_checkpoint(tmp_path / "base") as base:
        assert choose_device("cpu", "sparse", base) is None
        if torch.cuda.is_available():
            assert choose_device("auto", "sparse", base) is not None
            assert choose_device("auto", "xor", base) is None
        else:
            assert choose_device("auto", "sparse", base) is None
            with pytest.raises(ConfigError, match="--update-weight-snapshot-device cuda"):
                choose_device("cuda", "sparse", base)
