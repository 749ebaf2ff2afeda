"""The version store: claims, publication, the pointer and lineage on top of an object store (PROTOCOL.md section 1).

Every method blocks on the store: call it in a thread from an event loop. One `VersionStore` with a claim has one
writing caller (the store actor); readers use as many as they like. What may be deleted is `retention`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from miles_disagg.domain.errors import (
    BaseMismatch,
    ChainBroken,
    ClaimConflict,
    InvalidVersionRef,
    PointerConflict,
    PublicationFailed,
    VersionNotFound,
)
from miles_disagg.domain.versions import VersionRef, check_run_id, parse_version_directory
from miles_disagg.store.base import CasConflict, ObjectNotFound, ObjectStore, StoreError
from miles_disagg.store.claims import MAX_JSON_BYTES, Claim, Holder, json_field, load_json_object
from miles_disagg.store.lineage import (
    SHORTCUTS,
    Kind,
    Plan,
    VersionIndex,
    parse_version_index,
    plan_lineage,
    version_key,
)
from miles_disagg.store.publication import Description, Receipt, merge_receipts, told_when_full, verify_files
from miles_disagg.weights.checkpoint import INDEX_FILE, MAX_INDEX_BYTES

POINTER = "latest.json"
DEFAULT_TTL = 120.0


@dataclass(frozen=True)
class _Pointer:
    ref: VersionRef
    token: str
    nonce: str


class VersionStore:
    """Versions of runs in one publication directory or S3 prefix."""

    def __init__(self, objects: ObjectStore):
        self.objects = objects
        self._claim: Claim | None = None
        self._claim_token = ""
        self._pointer: _Pointer | None = None
        self._renewing = threading.Lock()

    # --- reading ----------------------------------------------------------------------------------

    def latest(self) -> VersionRef | None:
        """The version the pointer names, None before the first claim."""
        pointer = self._read_pointer()
        return pointer.ref if pointer else None

    def wait_newer(self, than: VersionRef | None, timeout: float) -> VersionRef | None:
        """The pointer's version as soon as it differs from `than`; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        delay = 0.02
        while True:
            found = self.latest()
            if found is not None and found != than:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, delay * random.uniform(0.75, 1.25)))
            delay = min(1.0, delay * 1.5)

    def claim_of(self, run_id: str) -> Claim:
        """The claim of a run; ObjectNotFound if it never claimed this store."""
        key = f"{check_run_id(run_id)}/run.json"
        return Claim.from_json(self.objects.get(key, MAX_JSON_BYTES), key)

    def index(self, ref: VersionRef, kind: Kind = "version") -> VersionIndex | None:
        """The index of a version or of a shortcut, None if it does not exist (whatever files its directory has)."""
        try:
            raw = self.objects.get(f"{version_key(ref, kind)}/{INDEX_FILE}", MAX_INDEX_BYTES)
        except ObjectNotFound:
            return None
        return parse_version_index(ref, raw, kind)

    def versions(self, run_id: str) -> list[int]:
        """Versions that have an index, ascending. The base has none, and one above the pointer is not published."""
        found = []
        for info in self.objects.list(check_run_id(run_id)):
            parts = info.key.split("/")
            if len(parts) == 3 and parts[2] == INDEX_FILE:
                try:
                    found.append(parse_version_directory(parts[1]))
                except InvalidVersionRef:
                    continue  # a stray directory
        return sorted(found)

    def shortcuts(self, run_id: str, kind: Kind) -> list[int]:
        """Versions that have a shortcut of this kind with an index, ascending."""
        found = []
        for info in self.objects.list(f"{check_run_id(run_id)}/{kind}"):
            parts = info.key.split("/")
            if len(parts) == 4 and parts[3] == INDEX_FILE:
                with suppress(InvalidVersionRef):
                    found.append(parse_version_directory(parts[2]))
        return sorted(found)

    def plan(self, target: VersionRef, have: VersionRef | None = None) -> Plan:
        """How to build `target` from `have` (ignored if of another run), read from index files only.

        The chain from `have` if it is whole, else whichever way reads the fewest bytes: by deltas alone, by a folded
        delta, by an anchor. Raises VersionNotFound, or ChainBroken naming the missing version.
        """
        run_id, boot = target.run_id, self.claim_of(target.run_id).boot_version
        held = have.version if have and have.run_id == run_id else None
        seen: dict[int, VersionIndex | None] = {}

        def index(version: int) -> VersionIndex | None:
            if version not in seen:
                seen[version] = self.index(VersionRef(run_id, version))
            return seen[version]

        plans: list[Plan] = []
        broken: ChainBroken | VersionNotFound | None = None
        try:
            plans.append(plan_lineage(target, held, boot, index))
            if plans[0].start == "held":
                return plans[0]
        except (ChainBroken, VersionNotFound) as error:
            broken = error
        for kind in SHORTCUTS:
            there = set(self.shortcuts(run_id, kind))

            def shortcut(version: int, kind: Kind = kind, there: set[int] = there) -> VersionIndex | None:
                return self.index(VersionRef(run_id, version), kind) if version in there else None

            with suppress(ChainBroken, VersionNotFound):
                plans.append(plan_lineage(target, held, boot, index, shortcut))
        if not plans and broken is not None:
            raise broken
        if all(plan.needed == plans[0].needed for plan in plans):
            return plans[0]
        sizes = {info.key: info.size for info in self.objects.list(run_id)}
        return min(plans, key=lambda p: sum(sizes.get(f"{i.key}/{file}", 0) for i in p.indexes for file in i.files))

    # --- claiming ---------------------------------------------------------------------------------

    def claim(
        self,
        run_id: str,
        base_digest: str,
        *,
        boot_version: int = 0,
        owner: str | None = None,
        ttl: float = DEFAULT_TTL,
        epoch: int | None = None,
    ) -> Claim:
        """Claim the store for `run_id`; the pointer then names its newest version (its boot version if it is new).

        base_digest: digest of the base checkpoint, which is version `boot_version`. owner: token of an earlier claim
        of this run, to resume it; writers of that earlier claim are fenced off. ttl: seconds until the claim lapses
        unless renewed. epoch: of the claim that a process of this run held when it died; a claim that somebody else
        took since, and may still hold, is not taken back. Raises StoreError if the store cannot decide races,
        ClaimConflict if another live run publishes here or the run id is taken, BaseMismatch if a resumed run has
        another base.
        """
        check_run_id(run_id)
        self.objects.check()
        now = time.time()
        pointer = self._read_pointer()
        self._refuse_live_rival(run_id, pointer, now)
        key = f"{run_id}/run.json"
        try:
            stamped = self.objects.read(key)
        except ObjectNotFound:
            stamped = None
        claim = Claim(run_id, owner or uuid.uuid4().hex, base_digest, boot_version, now, now + ttl, 0, Holder.me())
        if stamped is not None:
            old = Claim.from_json(stamped.data, key)
            if epoch is not None and old.epoch != epoch and not old.holder.is_known_dead():
                raise ClaimConflict(
                    f"{self.objects.url}/{run_id}", f"{old.describe()}, claim {old.epoch}", f"its claim {epoch}",
                    "The run was resumed elsewhere: stop this process.",
                )  # fmt: skip
            if self._is_resume(old, owner, base_digest, pointer, now):
                claim = dataclasses.replace(claim, boot_version=old.boot_version, created=old.created)
            claim = dataclasses.replace(claim, epoch=old.epoch + 1)
        try:
            token = self.objects.compare_and_swap(key, stamped.token if stamped else None, claim.to_json())
        except CasConflict as error:
            raise ClaimConflict(f"{self.objects.url}/{run_id}", "a process that was faster", f"run {run_id}") from error
        try:
            self._point(self._newest(claim, pointer), pointer)
        except BaseException as error:
            if stamped is None:
                with suppress(StoreError):  # a claim without a pointer would only be in the way
                    self.objects.delete(key)
            if isinstance(error, PointerConflict):
                raise ClaimConflict(self.objects.url, f"run of {error.actual}", f"run {run_id}") from error
            raise
        self._claim, self._claim_token = claim, token
        return claim

    def renew(self, ttl: float = DEFAULT_TTL) -> None:
        """Keep the claim alive for `ttl` seconds from now; ClaimConflict if somebody re-claimed the run."""
        with self._renewing:
            claim = dataclasses.replace(self._held(), expires=time.time() + ttl)
            key = f"{claim.run_id}/run.json"
            try:
                self._claim_token = self.objects.compare_and_swap(key, self._claim_token, claim.to_json())
            except CasConflict as error:
                raise self._fenced() from error
            self._claim = claim if ttl > 0 else None

    def release(self) -> None:
        """End the claim: another run may take over at once. ClaimConflict if it was lost before."""
        if self._claim is not None:
            self.renew(0.0)

    # --- publishing -------------------------------------------------------------------------------

    @property
    def published(self) -> VersionRef:
        """What the pointer names, as this writer left it."""
        self._held()
        assert self._pointer is not None
        return self._pointer.ref

    def begin(self, ref: VersionRef) -> str:
        """Clear what a crashed publication of `ref` left and return its key prefix, where source ranks upload to.

        `ref` must be the version after the pointer's, else PointerConflict.
        """
        self._check_next(ref)
        self.discard(ref)
        return str(ref)

    def commit(
        self, ref: VersionRef, description: Description, receipts: Sequence[Receipt], *, read_back: bool = True
    ) -> VersionIndex:
        """Make `ref` the published version: verify the receipts, write the index, move the pointer.

        Repeating a commit that succeeded is harmless. On any error the pointer still names the version before.
        Raises PublicationFailed, ChecksumMismatch, PointerConflict, ClaimConflict.
        """
        raw = merge_receipts(ref, description, receipts)
        index = parse_version_index(ref, raw)
        if self._pointer is not None and self._pointer.ref == ref and self.objects.get(f"{ref}/{INDEX_FILE}") == raw:
            return index
        self._check_next(ref)
        if index.base_version is not None and index.base_version != self.published.version:
            raise PublicationFailed(f"{ref} applies on version {index.base_version}, published is {self.published}")
        verify_files(self.objects, str(ref), receipts, read_back=read_back)
        with told_when_full(ref, self.objects.url):
            self.objects.put(f"{ref}/{INDEX_FILE}", raw)
            self._point(ref, self._pointer)
        return index

    def commit_shortcut(
        self, ref: VersionRef, kind: Kind, description: Description, receipts: Sequence[Receipt]
    ) -> VersionIndex:
        """Make a shortcut to the published version exist: verify the receipts, write its index.

        PublicationFailed, ChecksumMismatch; then there is no shortcut and the version stands as it was.
        """
        if ref != self.published:
            raise PublicationFailed(f"a shortcut to {ref}: {self.published} is published")
        raw = merge_receipts(ref, description, receipts)
        index = parse_version_index(ref, raw, kind)
        verify_files(self.objects, index.key, receipts, read_back=True)
        self.objects.put(f"{index.key}/{INDEX_FILE}", raw)
        return index

    def discard(self, ref: VersionRef) -> None:
        """Remove every file of an unpublished version, its index first."""
        if self._pointer is not None and ref.run_id == self._pointer.ref.run_id and ref <= self._pointer.ref:
            raise PublicationFailed(f"{ref} is published; only retention may remove it")
        remove_version(self.objects, ref)

    # --- inside -----------------------------------------------------------------------------------

    def _read_pointer(self) -> _Pointer | None:
        try:
            stamped = self.objects.read(POINTER)
        except ObjectNotFound:
            return None
        body = load_json_object(stamped.data[:MAX_JSON_BYTES], POINTER)
        ref = VersionRef(json_field(body, "run_id", str, POINTER), json_field(body, "version", int, POINTER))
        return _Pointer(ref, stamped.token, json_field(body, "nonce", str, POINTER))

    def _point(self, ref: VersionRef, expected: _Pointer | None) -> None:
        nonce = uuid.uuid4().hex
        body = json.dumps({"run_id": ref.run_id, "version": ref.version, "nonce": nonce}).encode()
        try:
            token = self.objects.compare_and_swap(POINTER, expected.token if expected else None, body)
        except CasConflict as error:
            actual = self._read_pointer()
            raise PointerConflict(expected and expected.ref, actual and actual.ref, ref) from error
        self._pointer = _Pointer(ref, token, nonce)

    def _refuse_live_rival(self, run_id: str, pointer: _Pointer | None, now: float) -> None:
        if pointer is None or pointer.ref.run_id == run_id:
            return
        try:
            rival = self.claim_of(pointer.ref.run_id)
        except ObjectNotFound:
            return
        if rival.is_live(now):
            raise ClaimConflict(self.objects.url, rival.describe(), f"run {run_id}")

    def _is_resume(self, old: Claim, owner: str | None, base_digest: str, pointer: _Pointer | None, now: float) -> bool:
        """False if the old claim is dead and published nothing, so that the run id is free again."""
        if owner is None and not old.is_live(now):
            boot = VersionRef(old.run_id, old.boot_version)
            moved = pointer is not None and pointer.ref.run_id == old.run_id and pointer.ref != boot
            if not moved and not self.versions(old.run_id):
                return False
        where = f"{self.objects.url}/{old.run_id}"
        if owner != old.owner:
            raise ClaimConflict(where, old.describe(), "a run that does not have its owner token")
        if base_digest != old.base_digest:
            raise BaseMismatch(old.base_digest, base_digest, f"the claim of {where}")
        return True

    def _newest(self, claim: Claim, pointer: _Pointer | None) -> VersionRef:
        if pointer is not None and pointer.ref.run_id == claim.run_id and pointer.ref.version >= claim.boot_version:
            return pointer.ref
        return VersionRef(claim.run_id, max([claim.boot_version, *self.versions(claim.run_id)]))

    def _held(self) -> Claim:
        if self._claim is None:
            raise ClaimConflict(self.objects.url, "nobody", "this process", "Claim the run before publishing.")
        return self._claim

    def _fenced(self) -> ClaimConflict:
        claim = self._held()
        try:
            holder = self.claim_of(claim.run_id).describe()
        except ObjectNotFound:
            holder = "nobody (run.json was removed)"
        return ClaimConflict(
            f"{self.objects.url}/{claim.run_id}", holder, f"process {claim.holder.pid}",
            "It was resumed elsewhere: stop this process.",
        )  # fmt: skip

    def _check_next(self, ref: VersionRef) -> None:
        claim, published = self._held(), self.published
        if ref.run_id != claim.run_id or ref != published.next():
            raise PointerConflict(published, published, ref, f"The next version of this run is {published.next()}.")


def remove_version(objects: ObjectStore, ref: VersionRef, kind: Kind = "version") -> int:
    """Delete a version or a shortcut, its index first so that it does not exist from then on; objects removed."""
    prefix = version_key(ref, kind)
    index = f"{prefix}/{INDEX_FILE}"
    keys = [info.key for info in objects.list(prefix)]
    for key in sorted(keys, key=lambda k: k != index):
        objects.delete(key)
    return len(keys)
