"""A checkpoint on the rollout host that cannot be torn: fetch, verify, journal, apply, switch.

`DiskStager` keeps one directory:

    marker.json               what is here: run, version, base digest, which weights directory, and a patch under way
    weights-<nonce>/          the checkpoint that the engine loads
    patch-000007.safetensors  positions and absolute new values of every element that version 7 changes
    incoming/                 files being fetched; worthless after a crash

A delta is verified in full and written, synced, as a patch *before* the first byte of the checkpoint changes. The
marker then names the patch, the patch is scattered, the marker names the new version. Scattering absolute values is
idempotent, so a crash at any instruction is healed by doing it again; until the marker names the patch, nothing has
happened. What is built anew (base, anchor) is built beside and switched to by the marker. Which version is wanted is
`reconciler`; loading it into the engine is `activation`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from miles_disagg.domain.errors import CheckpointError, ChecksumMismatch, ClaimConflict
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.base import Materialized
from miles_disagg.store.base import ObjectNotFound
from miles_disagg.store.checkout import build_beside, fetch_plan, open_deltas
from miles_disagg.store.claims import json_field, load_json_object
from miles_disagg.store.leases import leased
from miles_disagg.store.lineage import Plan
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.chain import apply_patch, build_patch
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import new_hasher
from miles_disagg.weights.safetensors_file import write_durably

MARKER = "marker.json"


@dataclass(frozen=True)
class Pending:
    """A patch under way: the version it leads to, its file, size and xxh3-128."""

    version: int
    patch: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Marker:
    """What a staging directory holds. base_digest: digest of the run's base checkpoint."""

    run_id: str
    version: int
    base_digest: str
    directory: str
    pending: Pending | None = None

    @property
    def ref(self) -> VersionRef:
        """The version in `directory` (with `pending` applied, that one's)."""
        return VersionRef(self.run_id, self.version)

    def to_json(self) -> bytes:
        """Body of marker.json."""
        return json.dumps({"format": 1, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> Marker:
        """Parse marker.json; CheckpointError naming the field."""
        body = load_json_object(raw, where)
        pending = body.get("pending")
        if pending is not None:
            fields = {"version": int, "patch": str, "nbytes": int, "digest": str}
            pending = Pending(**{name: json_field(pending, name, kind, where) for name, kind in fields.items()})
        return cls(
            json_field(body, "run_id", str, where),
            json_field(body, "version", int, where),
            json_field(body, "base_digest", str, where),
            json_field(body, "directory", str, where),
            pending,
        )


class DiskStager:
    """`replica.base.Stager` that builds versions from a version store in `root`, which it owns alone.

    base: the run's base checkpoint on this host. reader: name of this reader for leases (legal as a run id).
    foreign: what to do with a directory that another run or base left, `reseed` or `refuse`.
    pre_read: called before each read of the store (for mounts that need a refresh). workers: threads (None: cores).
    """

    def __init__(
        self,
        store: VersionStore,
        root: Path,
        base: Path,
        *,
        reader: str,
        foreign: str = "reseed",
        pre_read: Callable[[VersionRef], None] | None = None,
        workers: int | None = None,
    ):
        self._store, self._root, self._base, self._reader = store, Path(root).absolute(), Path(base), reader
        self._foreign, self._pre_read, self._workers = foreign, pre_read, workers
        self._mutex = threading.Lock()
        self._distrusted: VersionRef | None = None
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self._root / ".lock", "w")  # noqa: SIM115 - held as long as this object
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise ClaimConflict(
                str(self._root), "another replica on this host", f"replica {reader}",
                "Give each replica its own --update-weight-local-checkpoint-dir.",
            ) from None  # fmt: skip

    def close(self) -> None:
        """Give the directory up. The checkpoint stays."""
        self._lock_file.close()

    async def materialize(self, target: VersionRef) -> Materialized:
        """See Stager. Runs in a thread; calls are serialised."""
        return await asyncio.to_thread(self.materialize_blocking, target)

    def materialize_blocking(self, target: VersionRef) -> Materialized:
        """`materialize` for callers without an event loop."""
        with self._mutex:
            return self._materialize(target)

    def held(self) -> VersionRef | None:
        """What is here now, after healing what a crash left; None for nothing usable."""
        with self._mutex:
            marker = self._recover()
            return marker.ref if marker else None

    # --- the way to a version ---------------------------------------------------------------------

    def _materialize(self, target: VersionRef) -> Materialized:
        marker = self._usable(self._recover(), target)
        if marker is not None and marker.ref == target:
            return Materialized(
                target, self._root / marker.directory, marker.ref, None, {"fetch": 0.0, "materialize": 0.0}
            )
        distrusted, self._distrusted = self._distrusted, None
        have = marker.ref if marker is not None and marker.ref != distrusted else None
        reading = leased(self._store.objects, target.run_id, self._reader, target.version, have and have.version)
        try:
            with reading:
                try:
                    return self._build(target, have, marker)
                except (ObjectNotFound, CheckpointError):
                    # Removed by a gc that had not seen our lease, or damaged on the way: plan and fetch once more.
                    self._clear_incoming()
                    return self._build(target, have, marker)
        except ChecksumMismatch:
            self._distrusted = have  # the published delta or what we hold is damaged: next time build from nothing
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            kept = f"{have} stays" if have else "nothing was built"
            raise OSError(errno.ENOSPC, f"disk full while building {target}, {kept}", str(self._root)) from error
        finally:
            self._clear_incoming()

    def _build(self, target: VersionRef, have: VersionRef | None, marker: Marker | None) -> Materialized:
        if self._pre_read is not None:
            self._pre_read(target)
        started = time.monotonic()
        plan = self._store.plan(target, have)
        wire_bytes = fetch_plan(self._store.objects, plan, self._incoming)
        fetched = time.monotonic()
        if plan.start == "held" and marker is not None:
            path, previous, patch = self._root / marker.directory, marker.ref, self._patch(marker, target, plan)
        else:
            path, previous, patch = self._build_beside(target, plan), None, None
        seconds = {"fetch": fetched - started, "materialize": time.monotonic() - fetched}
        return Materialized(target, path, previous, patch, seconds, wire_bytes)

    def _patch(self, marker: Marker, target: VersionRef, plan: Plan) -> Path:
        """Held state -> target, in place, through a synced patch."""
        patch = self._root / f"patch-{target.version:06d}.safetensors"
        with open_checkpoint(self._root / marker.directory) as checkpoint:
            built = build_patch(checkpoint, open_deltas(plan, self._incoming), patch, workers=self._workers)
        pending = Pending(target.version, patch.name, built.written.nbytes, built.written.digest)
        self._write_marker(replace(marker, pending=pending))
        self._clean(self._apply_pending(replace(marker, pending=pending)))
        return patch

    def _build_beside(self, target: VersionRef, plan: Plan) -> Path:
        """A new weights directory from the base or an anchor, switched to by the marker."""
        base_digest = self._store.claim_of(target.run_id).base_digest
        directory = self._root / f"weights-{uuid.uuid4().hex[:12]}"
        build_beside(plan, self._incoming, self._base, base_digest, directory, self._workers)
        marker = Marker(target.run_id, target.version, base_digest, directory.name)
        self._write_marker(marker)
        self._clean(marker)
        return directory

    # --- what is on this host ---------------------------------------------------------------------

    def _usable(self, marker: Marker | None, target: VersionRef) -> Marker | None:
        """The marker if its checkpoint can lead to `target`; else None (reseed), or ClaimConflict (refuse)."""
        if marker is None:
            return None
        base_digest = self._store.claim_of(target.run_id).base_digest
        if marker.run_id == target.run_id and marker.base_digest == base_digest:
            return marker
        if self._foreign == "refuse":
            raise ClaimConflict(
                str(self._root), f"{marker.ref} on base {marker.base_digest}", f"{target} on base {base_digest}",
                "Empty it, or give another --update-weight-local-checkpoint-dir.",
            )  # fmt: skip
        return None

    def _recover(self) -> Marker | None:
        """Read the marker, finish a patch that a crash interrupted, remove what is no longer named."""
        path = self._root / MARKER
        try:
            marker: Marker | None = Marker.from_json(path.read_bytes(), str(path))
        except (FileNotFoundError, CheckpointError):
            marker = None
        if marker is not None and not (self._root / marker.directory).is_dir():
            marker = None
        if marker is not None and marker.pending is not None:
            marker = self._apply_pending(marker) if self._patch_is_whole(marker.pending) else None
        self._clean(marker)
        return marker

    def _apply_pending(self, marker: Marker) -> Marker:
        pending = marker.pending
        assert pending is not None
        with open_checkpoint(self._root / marker.directory, writable=True) as checkpoint:
            apply_patch(checkpoint, self._root / pending.patch)
            checkpoint.sync()
        done = replace(marker, version=pending.version, pending=None)
        self._write_marker(done)
        return done

    def _patch_is_whole(self, pending: Pending) -> bool:
        hasher = new_hasher()
        try:
            with open(self._root / pending.patch, "rb") as file:
                while block := file.read(8 << 20):
                    hasher.update(block)
        except FileNotFoundError:
            return False
        return hasher.hexdigest() == pending.digest

    def _write_marker(self, marker: Marker) -> None:
        write_durably(self._root / MARKER, [marker.to_json()])

    def _clean(self, marker: Marker | None) -> None:
        """Remove everything in the directory that the marker does not vouch for."""
        keep = {MARKER, ".lock"} | ({marker.directory, f"patch-{marker.version:06d}.safetensors"} if marker else set())
        for entry in self._root.iterdir():
            if entry.name not in keep and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in keep:
                entry.unlink()

    @property
    def _incoming(self) -> Path:
        return self._root / "incoming"

    def _clear_incoming(self) -> None:
        shutil.rmtree(self._incoming, ignore_errors=True)
