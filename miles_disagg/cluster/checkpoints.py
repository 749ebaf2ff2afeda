"""Checkpoints of a run on disk: complete or absent, verified before they are used.

    RUN_DIR/checkpoints/step_000010/trainer/     what the trainer ranks wrote together
    RUN_DIR/checkpoints/step_000010/state.json   everything else, and size and digest of every trainer file

A checkpoint is written beside its place and renamed last, so a directory with the right name is whole. What is in
`trainer/` is `trainer.megatron.checkpoint`'s; when one is saved and what is done with it is `run` and `resume`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.weights.digest import new_hasher
from miles_disagg.weights.safetensors_file import sync_directory, write_durably

FORMAT = 1
STATE = "state.json"
TRAINER = "trainer"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class RunState:
    """What a run needs besides the trainer's own state.

    step: steps done. version: newest version that had been copied out. identity: flags that must not change, by name
    (see `resume.identity`). accuracies: (version, accuracy) of the evaluations so far. producer: `Producer.state()`,
    that is prompt cursor, ledger, buffer contents and prompts to hand out again.
    """

    run_id: str
    step: int
    version: int
    identity: Mapping[str, Any]
    accuracies: tuple[tuple[int, float], ...] = ()
    producer: Mapping[str, Any] = field(default_factory=dict, repr=False)


def place(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def complete(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. One that is being written has another name."""
    directory = run_dir / "checkpoints"
    if not directory.is_dir():
        return []
    found = [(int(m[1]), path) for path in directory.iterdir() if (m := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def begin(run_dir: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into; FileExistsError if there is one already."""
    target = place(run_dir, step)
    if target.exists():
        raise FileExistsError(f"{target} exists: a checkpoint is never overwritten")
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(
    run_dir: Path,
    state: RunState,
    keep: int | None = None,
    written: Mapping[str, tuple[int, str]] | None = None,
) -> Path:
    """Verify and describe what was written into `begin`'s directory, make it durable, rename it; drop all but `keep`.

    written: size and digest of files as their writers know them. CheckpointError names a file that reads otherwise.
    """
    target = place(run_dir, state.step)
    partial = _partial(target)
    files = {name: _describe(partial / name) for name in _files(partial)}
    for name, facts in (written or {}).items():
        if name not in files:
            why = "is not here: trainer ranks on several hosts need a RUN_DIR that all of them and the driver see"
            raise CheckpointError(f"a file that a trainer rank wrote {why}", file=str(partial / name))
        if files[name] != tuple(facts):
            message = f"reads back as {files[name]} (bytes, xxh3-128), written was {tuple(facts)}: check the disk"
            raise CheckpointError(message, file=str(partial / name))
    body = {"format": FORMAT, **asdict(state), "files": files}
    write_durably(partial / STATE, [json.dumps(body).encode()])
    os.rename(partial, target)
    sync_directory(target.parent)
    if keep is not None:
        for old in complete(run_dir)[:-keep]:
            doomed = _partial(old)
            os.rename(old, doomed)  # never half a checkpoint under a whole one's name
            shutil.rmtree(doomed)
    return target


def read(path: Path) -> RunState:
    """The state of a checkpoint whose files are all as they were written; CheckpointError names one that is not."""
    remedy = "remove the directory to go back to the checkpoint before it"
    try:
        body = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint has no readable state ({error}); {remedy}", file=str(path / STATE)
        ) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"not a checkpoint of format {FORMAT}", file=str(path / STATE))
    for name, (size, digest) in body["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"a file of the checkpoint is missing; {remedy}", file=str(file))
        if file.stat().st_size != size or _describe(file)[1] != digest:
            raise CheckpointError(f"not what was written: damaged or truncated; {remedy}", file=str(file))
    return RunState(
        run_id=body["run_id"],
        step=body["step"],
        version=body["version"],
        identity=body["identity"],
        accuracies=tuple((int(version), float(value)) for version, value in body["accuracies"]),
        producer=body["producer"],
    )


def remove_partial(run_dir: Path) -> None:
    """Remove what a crash left half-written."""
    for path in (run_dir / "checkpoints").glob(".step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def _describe(path: Path) -> tuple[int, str]:
    """Size and xxh3-128, of what is on disk: the file is synced first."""
    hasher, size = new_hasher(), 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(8 << 20):
            hasher.update(block)
            size += len(block)
    return size, hasher.hexdigest()
