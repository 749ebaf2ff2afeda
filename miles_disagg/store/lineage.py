"""What a version's index says, and how a version is built from what a reader holds: pure rules over index files.

Beside its chain a run may have shortcuts, so that an up-to-date reader never downloads more than the chain and a late
one need not: under `<run>/anchors/` a version in full, under `<run>/folded/` many deltas as one.

Reading and writing them is `versions`; the payload format is `weights.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_disagg.domain.errors import ChainBroken, CheckpointError, VersionNotFound
from miles_disagg.domain.versions import VersionRef
from miles_disagg.weights.checkpoint import INDEX_FILE, parse_index
from miles_disagg.weights.delta import DeltaIndex

Kind = Literal["version", "folded", "anchors"]
SHORTCUTS: tuple[Kind, ...] = ("folded", "anchors")


def version_key(ref: VersionRef, kind: Kind = "version") -> str:
    """Key prefix of a version's files: of the version itself, or of a shortcut to it."""
    return str(ref) if kind == "version" else f"{ref.run_id}/{kind}/{ref.directory}"


@dataclass(frozen=True)
class VersionIndex:
    """The index of one version, or of a shortcut to it. base_version: what a delta applies on, None if it is full."""

    ref: VersionRef
    base_version: int | None
    metadata: Mapping[str, Any] = field(repr=False)
    weight_map: Mapping[str, str] = field(repr=False)
    raw: bytes = field(repr=False)
    kind: Kind = "version"

    @property
    def key(self) -> str:
        """Key prefix of its files."""
        return version_key(self.ref, self.kind)

    @property
    def is_full(self) -> bool:
        """True for an anchor."""
        return self.base_version is None

    @property
    def encoding(self) -> str:
        """Delta encoding, or `full`."""
        return str(self.metadata.get("delta_encoding", "full"))

    @property
    def files(self) -> tuple[str, ...]:
        """Payload files to read, ascending; nothing else in the directory is ever read."""
        return tuple(sorted(set(self.weight_map.values())))


def parse_version_index(ref: VersionRef, raw: bytes, kind: Kind = "version") -> VersionIndex:
    """Parse the index of `ref`; CheckpointError naming the field for one that is malformed or belongs elsewhere."""
    metadata, weight_map = parse_index(raw)
    if "delta_encoding" not in metadata:
        if not weight_map:
            raise CheckpointError(f"full version {ref} names no tensor", file=INDEX_FILE)
        return VersionIndex(ref, None, metadata, weight_map, raw, kind)
    delta = DeltaIndex.from_json(metadata, weight_map)
    if delta.version != ref.version:
        raise CheckpointError(f"index of {ref} says it is version {delta.version}", file=INDEX_FILE)
    return VersionIndex(ref, delta.base_version, metadata, weight_map, raw, kind)


@dataclass(frozen=True)
class Plan:
    """How to build `target`: begin at `start` and apply `deltas`, ascending.

    start: `held` (what the reader has), `base` (the run's base checkpoint) or `anchor` (a full version, `anchor`).
    """

    target: VersionRef
    start: Literal["held", "base", "anchor"]
    start_version: int
    deltas: tuple[VersionIndex, ...] = ()
    anchor: VersionIndex | None = None

    @property
    def indexes(self) -> tuple[VersionIndex, ...]:
        """What this plan reads, in order."""
        return (*([self.anchor] if self.anchor else []), *self.deltas)

    @property
    def needed(self) -> frozenset[str]:
        """Key prefixes of the files that this plan reads."""
        return frozenset(index.key for index in self.indexes)


def plan_lineage(
    target: VersionRef,
    have: int | None,
    boot_version: int,
    index: Callable[[int], VersionIndex | None],
    shortcut: Callable[[int], VersionIndex | None] = lambda _: None,
) -> Plan:
    """The way to `target` going back from it: to what is held, to an anchor, or to the base.

    have: version of the same run that the reader holds, None for nothing. index(version): its index, None if it does
    not exist; shortcut(version): what to take instead. VersionNotFound if the target does not exist, ChainBroken
    naming the first version missing below it.
    """
    deltas: list[VersionIndex] = []
    version = target.version
    while True:
        if version == have:
            return Plan(target, "held", version, tuple(reversed(deltas)))
        if version == boot_version:
            return Plan(target, "base", version, tuple(reversed(deltas)))
        found = (shortcut(version) or index(version)) if version > boot_version else None
        if found is None:
            if not deltas:
                raise VersionNotFound(target, "the store", "never published, or removed by retention")
            raise ChainBroken(target, VersionRef(target.run_id, version))
        if found.base_version is None:
            return Plan(target, "anchor", version, tuple(reversed(deltas)), found)
        deltas.append(found)
        version = found.base_version
