"""Hooks for mounts that note when they were called, for runs in other processes."""

import tempfile
import time
from pathlib import Path

from miles_disagg.domain.versions import VersionRef


def notes(run_id: str) -> Path:
    """The file that the hooks of a run append to."""
    return Path(tempfile.gettempdir()) / f"miles-disagg-hooks-{run_id}"


def _note(kind: str, ref: VersionRef) -> None:
    with notes(ref.run_id).open("a") as file:
        file.write(f"{kind} {ref.version}\n")


def post_write(ref: VersionRef) -> None:
    """--custom-update-weight-post-write-path."""
    _note("wrote", ref)


def pre_read(ref: VersionRef) -> None:
    """--custom-update-weight-pre-read-path."""
    _note("reads", ref)


def hangs_once(ref: VersionRef) -> None:
    """A mount that never comes back from its first push of version 2."""
    before = notes(ref.run_id).read_text().splitlines() if notes(ref.run_id).exists() else []
    _note("wrote", ref)
    if ref.version == 2 and "wrote 2" not in before:
        time.sleep(3600)


def broken(ref: VersionRef) -> None:
    """A mount that is gone."""
    raise OSError("the mount is gone")
