"""`miles-disagg store {ls,show,verify,gc,export} URL`: looking into a version store, and checking it, from outside.

Each command is a plain function; `main` parses, prints and turns errors into exit codes. Only `gc` deletes anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import (
    ChainBroken,
    ChecksumMismatch,
    InvalidVersionRef,
    MilesDisaggError,
    VersionNotFound,
)
from miles_disagg.domain.versions import VersionRef, parse_version_directory
from miles_disagg.store.base import ObjectNotFound, open_store
from miles_disagg.store.checkout import check_out, fetch_version, seed_from_base, verify_full
from miles_disagg.store.leases import live_leases
from miles_disagg.store.lineage import SHORTCUTS, VersionIndex, version_key
from miles_disagg.store.retention import STALE_SECONDS, Collected, collect, needed_versions
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.chain import apply_chain, verify_target
from miles_disagg.weights.checkpoint import open_checkpoint, tensor_digests
from miles_disagg.weights.delta import open_delta
from miles_disagg.weights.digest import DEFAULT_CHECKSUM


@dataclass(frozen=True)
class Entry:
    """One version in a listing. nbytes: of its payload files; tensors: changed ones for a delta."""

    ref: str
    kind: str
    base_version: int | None
    nbytes: int
    tensors: int
    files: int
    published: bool


def runs(store: VersionStore) -> list[str]:
    """Run ids with a claim, ascending."""
    keys = (info.key.split("/") for info in store.objects.list(""))
    return sorted(parts[0] for parts in keys if len(parts) == 2 and parts[1] == "run.json")


def entries(store: VersionStore, run_id: str) -> list[Entry]:
    """Versions of a run with their sizes, from index files and a listing."""
    sizes: dict[tuple[int, str], int] = {}
    for info in store.objects.list(run_id):
        _, *rest = info.key.split("/")
        with suppress(InvalidVersionRef):  # a stray directory
            if len(rest) == 2:
                sizes[(parse_version_directory(rest[0]), rest[1])] = info.size
    latest, out = store.latest(), []
    for version in store.versions(run_id):
        index = store.index(VersionRef(run_id, version))
        if index is None:
            continue
        nbytes, shape = sum(sizes.get((version, f), 0) for f in index.files), (len(index.weight_map), len(index.files))
        published = latest is not None and (latest.run_id != run_id or version <= latest.version)
        out.append(Entry(str(index.ref), index.encoding, index.base_version, nbytes, *shape, published))
    return out


def overview(store: VersionStore) -> dict[str, Any]:
    """What `ls` prints: the pointer, and every run with its claim and versions."""
    latest, now = store.latest(), time.time()
    out: dict[str, Any] = {"url": store.objects.url, "latest": latest and str(latest), "runs": []}
    for run_id in runs(store):
        claim = store.claim_of(run_id)
        out["runs"].append(
            {
                "run_id": run_id,
                "boot_version": claim.boot_version,
                "base_digest": claim.base_digest,
                "live": claim.is_live(now),
                "created": claim.created,
                "versions": [asdict(e) for e in entries(store, run_id)],
                "shortcuts": [
                    version_key(VersionRef(run_id, v), k) for k in SHORTCUTS for v in store.shortcuts(run_id, k)
                ],
                "leases": [asdict(lease) for lease in live_leases(store.objects, run_id, now)],
            }
        )
    return out


def show(store: VersionStore, ref: VersionRef) -> dict[str, Any]:
    """What `show` prints: one version's index, and the shortest way to build it."""
    index = store.index(ref)
    if index is None:
        raise VersionNotFound(ref, store.objects.url)
    plan = store.plan(ref)
    return {
        "version": str(ref),
        "metadata": dict(index.metadata),
        "weight_map": dict(index.weight_map),
        "plan": {"start": plan.start, "at": plan.start_version, "deltas": [d.key for d in plan.deltas]},
    }


def verify_lineage(
    store: VersionStore, target: VersionRef, base: Path | None, scratch: Path, workers: int | None = None
) -> Iterator[VersionRef]:
    """Recompute every version up to `target` in `scratch` (one copy of the model), yielding each that is right.

    Starts at the base if `base` is given, else at the oldest anchor. The first tensor whose bytes are not what was
    published raises ChecksumMismatch naming file and tensor; a gap raises ChainBroken.
    """
    claim, run_id = store.claim_of(target.run_id), target.run_id
    store.plan(target)
    current, incoming, at = scratch / "checkpoint", scratch / "incoming", None
    if base is not None:
        seed_from_base(base, claim.base_digest, current, workers)
        at = claim.boot_version
        yield VersionRef(run_id, at)
    for version in store.versions(run_id):
        ref = VersionRef(run_id, version)
        index = store.index(ref) if version <= target.version else None
        if index is None or (at is None and not index.is_full):
            continue
        if not index.is_full and index.base_version != at:
            raise ChainBroken(ref, VersionRef(run_id, index.base_version or 0))
        fetch_version(store.objects, index, incoming)
        if index.is_full:
            shutil.rmtree(current, ignore_errors=True)
            current = incoming / ref.directory
            with open_checkpoint(current) as checkpoint:
                verify_full(checkpoint, workers)
        else:
            with open_checkpoint(current, writable=True) as checkpoint:
                apply_chain(checkpoint, [open_delta(incoming / ref.directory)], workers)
            shutil.rmtree(incoming / ref.directory)
        at = version
        start = None if base is None else (base, claim.boot_version)
        _verify_shortcuts(store, ref, current, incoming, workers, start)
        yield ref
    if at is None:
        raise VersionNotFound(target, store.objects.url, "its chain starts at the base checkpoint: give --base DIR")


def _verify_shortcuts(
    store: VersionStore,
    ref: VersionRef,
    current: Path,
    incoming: Path,
    workers: int | None,
    start: tuple[Path, int] | None,
) -> None:
    """ChecksumMismatch unless every shortcut to `ref` leads to the bytes in `current`. start: base and its version."""
    found = [index for kind in SHORTCUTS if (index := store.index(ref, kind)) is not None]
    for index in found:
        fetch_version(store.objects, index, incoming / "shortcut")
        fetched = incoming / "shortcut" / ref.directory
        try:
            _verify_shortcut(index, fetched, current, workers)
            if start is not None and index.base_version == start[1]:
                verify_target(start[0], [open_delta(fetched)], workers)
        finally:
            shutil.rmtree(incoming / "shortcut")


def _verify_shortcut(index: VersionIndex, fetched: Path, current: Path, workers: int | None) -> None:
    if index.is_full:
        with open_checkpoint(fetched) as anchor:
            verify_full(anchor, workers)
            promised = tensor_digests(anchor, str(index.metadata.get("checksum_format", DEFAULT_CHECKSUM)), workers)
    else:
        delta = open_delta(fetched)
        promised = {name: delta.checksum(name) for name in delta.names}
    with open_checkpoint(current) as checkpoint:
        actual = tensor_digests(checkpoint, str(index.metadata.get("checksum_format", DEFAULT_CHECKSUM)), workers)
    for name, checksum in promised.items():
        if actual.get(name) != checksum:
            raise ChecksumMismatch(checksum, actual.get(name, "no such tensor"), file=index.key, tensor=name)


def gc(
    store: VersionStore, run_id: str, *, keep: int, stale_after: float = STALE_SECONDS, dry_run: bool = False
) -> Collected:
    """Remove what neither the newest `keep` versions nor a live lease needs. dry_run: only say what would go."""
    if not dry_run:
        return collect(store, run_id, keep=keep, stale_after=stale_after)
    latest = store.latest()
    if latest is None or latest.run_id != run_id:
        return Collected()
    needed = needed_versions(store, run_id, latest.version, keep, time.time())
    refs = (VersionRef(run_id, version) for version in store.versions(run_id))
    return Collected(tuple(r.version for r in refs if r < latest and str(r) not in needed))


def export(
    store: VersionStore, target: VersionRef, base: Path, output: Path, workers: int | None = None, lease: bool = True
) -> str:
    """Write `target` as a plain Hugging Face checkpoint to the new directory `output`; how it was built.

    lease: see check_out.
    """
    plan = check_out(store, target, base, output, workers, lease=lease)
    return f"{plan.start} {plan.start_version} + {len(plan.deltas)} deltas"


# --- command line -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run one command. 0: done; 1: the store is damaged or something is missing; 2: bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](VersionStore(open_store(arguments.url)), arguments)
    except (MilesDisaggError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "miles-disagg store", description="look into a version store", formatter_class=plain
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "ls": "runs and versions",
        "show": "one version's index and how it is built",
        "verify": "recompute a lineage; names the first bad tensor",
        "gc": "remove what nobody needs",
        "export": "write a version as a plain Hugging Face checkpoint",
    }.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("url", help="directory, file:// or s3:// of the store (--update-weight-disk-dir)")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name != "ls":
            command.add_argument("--run-id", help="default: the run that the pointer names")
        if name in ("show", "verify", "export"):
            command.add_argument("--version", type=int, help="default: the newest")
        if name in ("verify", "export"):
            needed = name == "export"
            command.add_argument("--base", type=Path, required=needed, help="the run's base checkpoint on this host")
            command.add_argument("--workers", type=int, help="threads (default: cores)")
    commands.choices["verify"].add_argument("--scratch", type=Path, help="where one copy of the model fits")
    commands.choices["export"].add_argument("--output", type=Path, required=True, help="new directory")
    commands.choices["export"].add_argument(
        "--no-lease", action="store_true", help="for a store that may only be read: a gc may interrupt the export"
    )
    commands.choices["gc"].add_argument("--keep", type=int, required=True, help="newest versions to keep buildable")
    commands.choices["gc"].add_argument("--dry-run", action="store_true")
    parser.epilog = "".join(command.format_usage() for command in commands.choices.values())
    return parser


def _target(store: VersionStore, arguments: argparse.Namespace) -> VersionRef:
    latest = store.latest()
    run_id = arguments.run_id or (latest.run_id if latest else None)
    if run_id is None:
        raise ObjectNotFound("latest.json", store.objects.url)
    version = getattr(arguments, "version", None)
    if version is None:
        same = latest is not None and latest.run_id == run_id
        version = (
            latest.version if latest and same else max([store.claim_of(run_id).boot_version, *store.versions(run_id)])
        )
    return VersionRef(run_id, version)


def _ls(store: VersionStore, arguments: argparse.Namespace) -> int:
    found = overview(store)
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(f"{found['url']}: latest {found['latest']}")
    for run in found["runs"]:
        print(f"{run['run_id']}  {'live' if run['live'] else 'ended'}  base {run['base_digest']}")
        for v in run["versions"]:
            on = "full" if v["base_version"] is None else f"{v['kind']} on {v['base_version']}"
            state = "" if v["published"] else "  (not published)"
            print(f"  {v['ref']}  {on}  {v['nbytes']:,} bytes  {v['tensors']} tensors  {v['files']} files{state}")
        for key in run["shortcuts"]:
            print(f"  shortcut {key}")
        for lease in run["leases"]:
            print(f"  lease of {lease['reader']}: {lease['have']} -> {lease['target']}")
    return 0


def _show(store: VersionStore, arguments: argparse.Namespace) -> int:
    print(json.dumps(show(store, _target(store, arguments)), indent=None if arguments.json else 1, ensure_ascii=False))
    return 0


def _verify(store: VersionStore, arguments: argparse.Namespace) -> int:
    target, good = _target(store, arguments), []
    with tempfile.TemporaryDirectory(prefix="verify-", dir=arguments.scratch) as scratch:
        try:
            for ref in verify_lineage(store, target, arguments.base, Path(scratch), arguments.workers):
                good.append(str(ref))
                if not arguments.json:
                    print(f"{ref}  right")
        except MilesDisaggError as error:
            if arguments.json:
                print(json.dumps({"right": good, "error": str(error), "tensor": getattr(error, "tensor", None)}))
            raise
    if arguments.json:
        print(json.dumps({"right": good, "error": None, "tensor": None}))
    return 0


def _gc(store: VersionStore, arguments: argparse.Namespace) -> int:
    result = gc(store, _target(store, arguments).run_id, keep=arguments.keep, dry_run=arguments.dry_run)
    verb = "would remove" if arguments.dry_run else "removed"
    text = (
        f"{verb} versions {list(result.versions)}, {result.leftovers} leftovers, {result.unfinished} unfinished writes"
    )
    print(json.dumps(asdict(result)) if arguments.json else text)
    return 0


def _export(store: VersionStore, arguments: argparse.Namespace) -> int:
    target = _target(store, arguments)
    how = export(store, target, arguments.base, arguments.output, arguments.workers, not arguments.no_lease)
    result = {"version": str(target), "output": str(arguments.output), "built_from": how}
    print(json.dumps(result) if arguments.json else f"{target} written to {arguments.output} (from {how})")
    return 0


_COMMANDS = {"ls": _ls, "show": _show, "verify": _verify, "gc": _gc, "export": _export}


if __name__ == "__main__":
    sys.exit(main())
