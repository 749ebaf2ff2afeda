"""What a version's index says, and how a version is built from what a reader holds: pure rules over index files.

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


@dataclass(frozen=True)
class VersionIndex:
    """The index of one version. base_version: what a delta applies on, None for a full version (an anchor)."""

    ref: VersionRef
    base_version: int | None
    metadata: Mapping[str, Any] = field(repr=False)
    weight_map: Mapping[str, str] = field(repr=False)
    raw: bytes = field(repr=False)

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


def parse_version_index(ref: VersionRef, raw: bytes) -> VersionIndex:
    """Parse the index of `ref`; CheckpointError naming the field for one that is malformed or belongs elsewhere."""
    metadata, weight_map = parse_index(raw)
    if "delta_encoding" not in metadata:
        if not weight_map:
            raise CheckpointError(f"full version {ref} names no tensor", file=INDEX_FILE)
        return VersionIndex(ref, None, metadata, weight_map, raw)
    delta = DeltaIndex.from_json(metadata, weight_map)
    if delta.version != ref.version:
        raise CheckpointError(f"index of {ref} says it is version {delta.version}", file=INDEX_FILE)
    return VersionIndex(ref, delta.base_version, metadata, weight_map, raw)


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
    def needed(self) -> frozenset[int]:
        """Versions whose files this plan reads."""
        return frozenset([d.ref.version for d in self.deltas] + ([self.anchor.ref.version] if self.anchor else []))


def plan_lineage(
    target: VersionRef,
    have: int | None,
    boot_version: int,
    index: Callable[[int], VersionIndex | None],
) -> Plan:
    """The shortest way to `target` going back from it: to what is held, to an anchor, or to the base.

    have: version of the same run that the reader holds, None for nothing. index(version): its index, None if it does
    not exist. VersionNotFound if the target does not exist, ChainBroken naming the first version missing below it.
    """
    deltas: list[VersionIndex] = []
    version = target.version
    while True:
        if version == have:
            return Plan(target, "held", version, tuple(reversed(deltas)))
        if version == boot_version:
            return Plan(target, "base", version, tuple(reversed(deltas)))
        found = index(version) if version > boot_version else None
        if found is None:
            if not deltas:
                raise VersionNotFound(target, "the store", "never published, or removed by retention")
            raise ChainBroken(target, VersionRef(target.run_id, version))
        if found.base_version is None:
            return Plan(target, "anchor", version, tuple(reversed(deltas)), found)
        deltas.append(found)
        version = found.base_version
