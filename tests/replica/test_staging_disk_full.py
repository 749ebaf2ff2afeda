"""A full disk: the old version stays, the message says so, and space heals it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_disagg.domain.errors import PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.local import LocalStore
from miles_disagg.store.versions import VersionStore
from tests.fakes.publishing import FakeTrainer, on_disk, raw, step, tiny_tensors, write_base


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(directory: Path, leave: int) -> Path:
    """Take all space but `leave` bytes."""
    filler = directory / "filler"
    stat = os.statvfs(directory)
    filler.write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - leave)))
    return filler


@pytest.mark.parametrize("encoding", ["xor", "sparse", None])
async def test_a_full_disk_on_the_rollout_host_leaves_the_old_version(
    tmp_path: Path, small_disk: Path, encoding: str | None
) -> None:
    base = tiny_tensors(size=96)
    write_base(tmp_path / "base", base)
    trainer = FakeTrainer(LocalStore(tmp_path / "store"), tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    local = small_disk / "local"
    stager = DiskStager(VersionStore(LocalStore(tmp_path / "store")), local, tmp_path / "base", reader="r", workers=1)
    held = await stager.materialize(VersionRef("run", 0))
    tensors = step(base, 1, density=0.6)
    ref = (await trainer.publish(tensors, encoding)).ref
    filler = fill(small_disk, leave=8192)
    with pytest.raises(
        OSError, match=r"disk full while building run/weight_v000001, run/weight_v000000 stays"
    ) as caught:
        await stager.materialize(ref)
    assert caught.value.errno == errno.ENOSPC
    assert stager.held() == VersionRef("run", 0)
    assert on_disk(held.path) == raw(base)
    filler.unlink()
    assert on_disk((await stager.materialize(ref)).path) == raw(tensors)


async def test_a_full_disk_under_the_store_leaves_the_pointer(tmp_path: Path, small_disk: Path) -> None:
    base = tiny_tensors(size=96)
    write_base(tmp_path / "base", base)
    trainer = FakeTrainer(LocalStore(small_disk / "store"), tmp_path / "base", "run", ranks=1)
    await trainer.claim()
    first = step(base, 1)
    await trainer.publish(first)
    stager = DiskStager(trainer.store, tmp_path / "local", tmp_path / "base", reader="r", workers=1)
    held = await stager.materialize(VersionRef("run", 1))
    filler = fill(small_disk, leave=8192)
    with pytest.raises(PublicationFailed, match=r"no space left in .*small/store.* for run/weight_v000002.* stays"):
        await trainer.publish(step(first, 2, density=0.6))
    assert trainer.store.latest() == VersionRef("run", 1)
    assert on_disk(held.path) == raw(first)
    filler.unlink()
    second = step(first, 3)
    ref = (await trainer.publish(second)).ref
    assert on_disk((await stager.materialize(ref)).path) == raw(second)
