"""What may be deleted from a store without breaking a chain that somebody needs.

Needed are: the newest `keep` versions and everything they are built from, what live leases are building, the newest
version's chain from its anchor or the base, and the newest shortcuts. Files above the pointer belong to an open
publication, shortcuts at the pointer may be being written.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_disagg.domain.errors import ChainBroken, InvalidVersionRef, VersionNotFound
from miles_disagg.domain.versions import VersionRef, parse_version_directory
from miles_disagg.store.base import PROBES, store_time
from miles_disagg.store.leases import drop_lapsed, live_leases
from miles_disagg.store.lineage import SHORTCUTS, version_key
from miles_disagg.store.versions import VersionStore, remove_version

STALE_SECONDS = 6 * 3600.0


@dataclass(frozen=True)
class Collected:
    """What a collection removed: versions, leftovers of crashed publications, unfinished writes."""

    versions: tuple[int, ...] = ()
    leftovers: int = 0
    unfinished: int = 0
    shortcuts: tuple[str, ...] = ()


def needed_versions(store: VersionStore, run_id: str, latest: int, keep: int, now: float) -> set[str]:
    """Key prefixes of versions and shortcuts whose files must stay. now: by the store's clock."""
    wanted = [(version, None) for version in store.versions(run_id) if version <= latest][-max(1, keep) :]
    wanted += [(lease.target, lease.have) for lease in live_leases(store.objects, run_id, now)]
    needed = {version_key(VersionRef(run_id, v), k) for k in SHORTCUTS for v in store.shortcuts(run_id, k)[-1:]}
    for target, have in wanted:
        held = None if have is None else VersionRef(run_id, have)
        try:
            plan = store.plan(VersionRef(run_id, target), held)
        except (ChainBroken, VersionNotFound):
            continue  # broken already: keeping its parts helps nobody
        needed |= plan.needed
    return needed


def collect(
    store: VersionStore,
    run_id: str,
    *,
    keep: int,
    acknowledged: int | None = None,
    keep_files: bool = False,
    stale_after: float = STALE_SECONDS,
    now: float | None = None,
) -> Collected:
    """Remove what nobody needs; safe beside readers and a publisher, and after a crash of itself.

    keep: how many of the newest versions stay buildable. acknowledged: newest version that every reader serves or has
    passed: full versions up to it go even within `keep` (never the newest). keep_files: remove no version at all, only
    leftovers. stale_after: age in seconds from which an unfinished write counts as left by a crash. now: another time
    than the store's clock shows.
    """
    now = store_time(store.objects) if now is None else now
    pointer = store.latest()
    unfinished = store.objects.sweep(stale_after) + _old_probes(store, now - stale_after)
    if pointer is None or pointer.run_id != run_id:
        return Collected(unfinished=unfinished)
    drop_lapsed(store.objects, run_id, now)
    removed: list[int] = []
    shortcuts: list[str] = []
    if not keep_files:
        needed = needed_versions(store, run_id, pointer.version, keep, now)
        if acknowledged is not None:
            needed = _without_acknowledged(store, run_id, pointer.version, needed, acknowledged, now)
        for version in store.versions(run_id):
            if version < pointer.version and str(VersionRef(run_id, version)) not in needed:
                remove_version(store.objects, VersionRef(run_id, version))
                removed.append(version)
        for kind in SHORTCUTS:
            refs = (VersionRef(run_id, version) for version in store.shortcuts(run_id, kind))
            for ref in [r for r in refs if version_key(r, kind) not in needed]:
                remove_version(store.objects, ref, kind)
                shortcuts.append(version_key(ref, kind))
    return Collected(tuple(removed), _leftovers(store, run_id, pointer.version), unfinished, tuple(shortcuts))


def _old_probes(store: VersionStore, before: float) -> int:
    old = [info.key for info in store.objects.list(PROBES) if info.modified <= before]
    for key in old:
        store.objects.delete(key)
    return len(old)


def _without_acknowledged(
    store: VersionStore, run_id: str, latest: int, needed: set[str], acknowledged: int, now: float
) -> set[str]:
    """Drop full versions that every reader has loaded and that nothing newer or leased is built from."""
    loaded = set()
    for version in store.versions(run_id):
        index = store.index(VersionRef(run_id, version)) if version <= acknowledged else None
        if index is not None and index.is_full:
            loaded.add(index.key)
    return needed - (loaded - needed_versions(store, run_id, latest, 1, now))


def _leftovers(store: VersionStore, run_id: str, latest: int) -> int:
    """Remove payload files without an index at or below the pointer: a removal or a shortcut that crashed half-way."""
    existing = {str(VersionRef(run_id, version)) for version in store.versions(run_id)}
    existing |= {version_key(VersionRef(run_id, v), kind) for kind in SHORTCUTS for v in store.shortcuts(run_id, kind)}
    removed = 0
    for info in list(store.objects.list(run_id)):
        prefix, _, _ = info.key.rpartition("/")
        *above, directory = prefix.split("/")
        try:
            version = parse_version_directory(directory)
        except InvalidVersionRef:
            continue
        of_shortcut = above[1:] in [[kind] for kind in SHORTCUTS]
        below = version < latest if of_shortcut else above[1:] == [] and version <= latest
        if below and prefix not in existing:
            store.objects.delete(info.key)
            removed += 1
    return removed
