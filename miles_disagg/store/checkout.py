"""From a lineage plan to a checkpoint directory: fetch exactly the named files, seed, apply, verify.

Builds beside, never in place: the crash-safe switch between versions on a rollout host is `replica.staging`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

from miles_disagg.domain.errors import BaseMismatch, ChecksumMismatch
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.base import ObjectStore
from miles_disagg.store.leases import leased
from miles_disagg.store.lineage import Plan, VersionIndex
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.chain import apply_chain
from miles_disagg.weights.checkpoint import INDEX_FILE, Checkpoint, checkpoint_digest, open_checkpoint, tensor_digests
from miles_disagg.weights.delta import DeltaVersion, open_delta
from miles_disagg.weights.digest import DEFAULT_CHECKSUM
from miles_disagg.weights.safetensors_file import sync_directory

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def fetch_version(objects: ObjectStore, index: VersionIndex, incoming: Path) -> int:
    """Copy a version's index and exactly the files it names to `incoming/<version>`; bytes read."""
    directory = incoming / index.ref.directory
    directory.mkdir(parents=True, exist_ok=True)
    total = len(index.raw) + sum(objects.download(f"{index.key}/{file}", directory / file) for file in index.files)
    (directory / INDEX_FILE).write_bytes(index.raw)
    return total


def fetch_plan(objects: ObjectStore, plan: Plan, incoming: Path) -> int:
    """Fetch every version that a plan needs; bytes read."""
    return sum(fetch_version(objects, index, incoming) for index in plan.indexes)


def open_deltas(plan: Plan, incoming: Path) -> list[DeltaVersion]:
    """The plan's fetched deltas, validated, ascending."""
    return [open_delta(incoming / delta.ref.directory) for delta in plan.deltas]


def build_beside(
    plan: Plan, incoming: Path, base: Path, base_digest: str, directory: Path, workers: int | None = None
) -> None:
    """Make `directory` the plan's target from fetched files, verified and synced; removed again on any error.

    base: the run's base checkpoint here; its config and tokenizer files go along. For plans that start at the base
    (BaseMismatch unless it has `base_digest`) or at an anchor, whose fetched files are moved.
    """
    try:
        if plan.anchor is not None:
            _adopt_anchor(plan.anchor, incoming / plan.anchor.ref.directory, base, directory, workers)
        else:
            seed_from_base(base, base_digest, directory, workers)
        if plan.deltas:
            with open_checkpoint(directory, writable=True) as checkpoint:
                apply_chain(checkpoint, open_deltas(plan, incoming), workers)
                checkpoint.sync()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def check_out(
    store: VersionStore,
    target: VersionRef,
    base: Path,
    directory: Path,
    workers: int | None = None,
    *,
    lease: bool = True,
) -> Plan:
    """Build `target` from nothing in `directory`, which must not exist; how it was done.

    lease: keep what is read from retention meanwhile, which needs the right to write to the store.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; give a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if lease:
            reader = f"checkout-{uuid.uuid4().hex[:16]}"
            stack.enter_context(leased(store.objects, target.run_id, reader, target.version, None))
        return _check_out(store, target, base, directory, workers)


def _check_out(store: VersionStore, target: VersionRef, base: Path, directory: Path, workers: int | None) -> Plan:
    plan = store.plan(target)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=directory.parent) as incoming:
        fetch_plan(store.objects, plan, Path(incoming))
        digest = store.claim_of(target.run_id).base_digest
        build_beside(plan, Path(incoming), base, digest, directory, workers)
    return plan


def seed_from_base(base: Path, base_digest: str, directory: Path, workers: int | None = None) -> None:
    """Copy the base checkpoint, with its config and tokenizer; BaseMismatch unless the copy has `base_digest`."""
    with open_checkpoint(base) as checkpoint:
        weights = [*checkpoint.headers, *([INDEX_FILE] if (base / INDEX_FILE).is_file() else [])]
    copy_files(base, directory, [*weights, *companion_files(base)])
    found = checkpoint_digest(directory, workers)
    if found != base_digest:
        raise BaseMismatch(base_digest, found, str(base))


def verify_full(checkpoint: Checkpoint, workers: int | None = None) -> None:
    """ChecksumMismatch naming file and tensor unless a full version has the bytes it was published with."""
    published = checkpoint.checksums()
    found = tensor_digests(checkpoint, str(checkpoint.metadata.get("checksum_format", DEFAULT_CHECKSUM)), workers)
    for name, info in checkpoint.tensors.items():
        if name in published and published[name] != found[name]:
            raise ChecksumMismatch(
                published[name], found[name], file=f"{checkpoint.path.name}/{info.file}", tensor=name
            )


def companion_files(directory: Path) -> list[str]:
    """Config, tokenizer and other small files of a checkpoint: everything at its top level that holds no weights."""
    return sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.is_file() and not entry.name.endswith(_WEIGHT_SUFFIXES) and entry.name[0] != "."
    )


def copy_files(source: Path, target: Path, names: list[str]) -> None:
    """Copy `names` from one directory to another, which is made; durable when this returns."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    sync_files(target)


def sync_files(directory: Path) -> None:
    """fsync every file of a directory, and the directory."""
    for entry in directory.iterdir():
        with open(entry, "rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _adopt_anchor(anchor: VersionIndex, fetched: Path, base: Path, directory: Path, workers: int | None) -> None:
    with open_checkpoint(fetched) as checkpoint:
        verify_full(checkpoint, workers)
    copy_files(base, fetched, companion_files(base))
    os.rename(fetched, directory)
    sync_directory(directory.parent)
