"""Store and staging as a state machine: publish, materialize, crash, forget, collect, resume, in any order."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_disagg.domain.errors import ChainBroken, ChecksumMismatch, VersionNotFound
from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.disk import DiskSource
from miles_disagg.replica import staging
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.leases import take_lease
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description
from miles_disagg.store.retention import collect
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import INDEX_FILE
from miles_disagg.weights.delta import plan_shards
from tests.fakes.publishing import Tensors, on_disk, raw, step, write_base

ENCODINGS = st.sampled_from(["xor", "overwrite", "sparse", None])


class Crash(BaseException):
    """Stands for SIGKILL: nothing below may catch it and carry on. (Real kills: scripts/crash_test.py.)"""


class StoreAndStaging(RuleBasedStateMachine):
    """The model: `weights[v]` is what version v must be, `held` what the replica last reported."""

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        g = torch.Generator().manual_seed(0)
        self.weights: list[Tensors] = [
            {"a": torch.randn(40, generator=g).bfloat16(), "b": torch.randn(6, 5, generator=g), "c": torch.tensor(1.0)}
        ]
        self.digest = write_base(self.root / "base", self.weights[0])
        self.objects = LocalStore(self.root / "store")
        self.store = VersionStore(self.objects)
        self.owner = self.store.claim("run", self.digest).owner
        self.stager = self.open_stager()
        self.held: int | None = None
        self.leased: dict[str, frozenset[str]] = {}

    def open_stager(self) -> DiskStager:
        store = VersionStore(LocalStore(self.root / "store"))
        return DiskStager(store, self.root / "local", self.root / "base", reader="r", workers=1)

    @property
    def latest(self) -> int:
        return len(self.weights) - 1

    def source(self) -> DiskSource:
        snapshot = self.root / f"snapshot-{self.latest}"
        if not snapshot.exists():
            write_base(snapshot, self.weights[-1])
        return DiskSource(self.objects, snapshot, workers=1)

    def write(self, tensors: Tensors, encoding: str | None):
        ref = VersionRef("run", self.latest + 1)
        source = self.source()
        self.store.begin(ref)
        source.open(1)
        source.stage(list(tensors.items()))
        receipt = source.write(plan_shards([source.encode(ref, encoding)])[0])
        source.settle(True)
        return ref, Description(encoding, ref.version - 1), [receipt]

    @rule(encoding=ENCODINGS, density=st.sampled_from([0.0, 0.1, 1.0]))
    def publish(self, encoding: str | None, density: float) -> None:
        tensors = step(self.weights[-1], self.latest + 1, density)
        self.store.commit(*self.write(tensors, encoding))
        self.weights.append(tensors)

    @rule(encoding=ENCODINGS)
    def publish_up_to_the_index_and_resume(self, encoding: str | None) -> None:
        """The publisher dies after the index, before the pointer; its successor has the owner token."""
        ref, description, receipts = self.write(step(self.weights[-1], 999), encoding)
        point, self.store._point = self.store._point, self.die  # type: ignore[method-assign]
        try:
            self.store.commit(ref, description, receipts)
        except Crash:
            self.store._point = point  # type: ignore[method-assign]
        self.store = VersionStore(self.objects)
        self.store.claim("run", self.digest, owner=self.owner)
        assert self.store.published == VersionRef("run", self.latest)

    @staticmethod
    def die(*_: object, **__: object) -> None:
        raise Crash

    @rule(back=st.integers(0, 3))
    def materialize(self, back: int) -> None:
        target = max(0, self.latest - back)
        try:
            built = self.stager.materialize_blocking(VersionRef("run", target))
        except (ChainBroken, VersionNotFound):
            assert target not in self.buildable()
            return
        assert on_disk(built.path) == raw(self.weights[target])
        self.held = target

    @rule(point=st.sampled_from(["half-applied", "_write_marker", "apply_patch", "_clean", "build_patch"]))
    def fall_behind_and_crash(self, point: str) -> None:
        """From the newest version to the next one, by a delta."""
        self.materialize(0)
        self.publish("xor", 0.5)
        self.materialize_and_crash(point)

    @rule(point=st.sampled_from(["_write_marker", "apply_patch", "_clean", "build_patch"]))
    def materialize_and_crash(self, point: str) -> None:
        """Die at a given point, forget the process, open the directory again: old or new, and a retry heals."""
        target = VersionRef("run", self.latest)
        original = {name: getattr(staging, name) for name in ("apply_patch", "build_patch")}
        if point == "half-applied":

            def half(checkpoint, path):
                """Every second half of a tensor is still old."""
                old = {name: checkpoint.bytes(name).copy() for name in checkpoint.tensors}
                original["apply_patch"](checkpoint, path)
                for name, before in old.items():
                    checkpoint.bytes(name)[before.size // 2 :] = before[before.size // 2 :]
                raise Crash

            staging.apply_patch = half
        elif point.startswith("_"):
            setattr(self.stager, point, self.die)
        else:
            setattr(staging, point, self.die)
        try:
            self.stager.materialize_blocking(target)
        except Crash:
            pass
        except (ChainBroken, VersionNotFound, ChecksumMismatch):
            raise AssertionError("the newest version must always be buildable") from None
        finally:
            for name, function in original.items():
                setattr(staging, name, function)
        self.stager.close()
        self.stager = self.open_stager()
        self.check_held()
        built = self.stager.materialize_blocking(target)
        assert on_disk(built.path) == raw(self.weights[-1])
        self.held = self.latest

    @rule()
    def restart_the_replica(self) -> None:
        self.stager.close()
        self.stager = self.open_stager()
        self.check_held()

    @rule()
    def lose_the_directory(self) -> None:
        self.stager.close()
        shutil.rmtree(self.root / "local")
        self.stager = self.open_stager()
        assert self.stager.held() is None
        self.held = None

    @rule(keep=st.integers(1, 3), acknowledged=st.integers(0, 9))
    def collect(self, keep: int, acknowledged: int) -> None:
        before, acknowledged = self.buildable(), min(acknowledged, self.latest)
        collect(self.store, "run", keep=keep, acknowledged=acknowledged, stale_after=0)
        for version in sorted(v for v in before if v > 0)[-keep:]:
            if version >= acknowledged:  # every reader has at least that
                self.store.plan(VersionRef("run", version), VersionRef("run", acknowledged))
        for needed in self.leased.values():
            assert all(self.objects.size(f"{key}/{INDEX_FILE}") for key in needed), "a live reader reads these"

    @rule(reader=st.sampled_from("xy"), back=st.integers(0, 3), behind=st.integers(0, 3))
    def another_reader_begins(self, reader: str, back: int, behind: int) -> None:
        """It says what it holds and what it builds, and takes its time."""
        target = max(0, self.latest - back)
        have = max(0, target - behind)
        take_lease(self.objects, "run", reader, target=target, have=have)
        try:
            plan = self.store.plan(VersionRef("run", target), VersionRef("run", have))
            self.leased[reader] = plan.needed
        except (ChainBroken, VersionNotFound):
            self.leased.pop(reader, None)

    @rule(reader=st.sampled_from("xy"))
    def another_reader_is_done(self, reader: str) -> None:
        self.objects.delete(f"run/leases/{reader}.json")
        self.leased.pop(reader, None)

    @precondition(lambda self: self.held is not None)
    @rule(bit=st.integers(0, 7))
    def damage_the_marker(self, bit: int) -> None:
        """A marker that cannot be read is no marker: the directory is rebuilt."""
        self.stager.close()
        marker = self.root / "local" / "marker.json"
        marker.write_bytes(marker.read_bytes()[: -1 - bit])
        self.stager = self.open_stager()
        assert self.stager.held() is None
        self.held = None

    def buildable(self) -> set[int]:
        out = set()
        for version in range(len(self.weights)):
            try:
                self.store.plan(VersionRef("run", version))
                out.add(version)
            except (ChainBroken, VersionNotFound):
                continue
        return out

    def check_held(self) -> None:
        held = self.stager.held()
        self.held = held.version if held else None
        if held is not None:
            marker = json.loads((self.root / "local" / "marker.json").read_text())
            assert on_disk(self.root / "local" / marker["directory"]) == raw(self.weights[held.version])

    @invariant()
    def the_pointer_names_a_version_that_can_be_built(self) -> None:
        if hasattr(self, "store"):
            assert self.store.latest() == VersionRef("run", self.latest)
            self.store.plan(VersionRef("run", self.latest))

    def teardown(self) -> None:
        if hasattr(self, "stager"):
            self.stager.close()
            shutil.rmtree(self.root)


StoreAndStaging.TestCase.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreAndStaging = StoreAndStaging.TestCase
