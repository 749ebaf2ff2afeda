"""Continuing a run: what it left in its directory, who may use that directory, and what must not have changed.

    RUN_DIR/.lock        held by the driver; the kernel lets go of it however the driver ends
    RUN_DIR/run.json     the owner token of the claim on the version store, and the highest version number given out

Checkpoints themselves are `checkpoints`. A continued run starts the trainer at its newest checkpoint, or at the base
checkpoint if it was stopped before the first one, and publishes those weights as the version after the highest one
that was ever given out. So no version number stands for two sets of weights. With deltas, the sources compare them with
the version published last, which `published_weights` builds from the store.

    RUN_DIR/published/weight_v000017/    what it built, for as long as the run lasts
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_disagg.cluster import checkpoints
from miles_disagg.cluster.checkpoints import RunState
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import ConfigError, MilesDisaggError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.store.actor import import_hook
from miles_disagg.store.base import open_store
from miles_disagg.store.checkout import check_out
from miles_disagg.store.ledger import PRE_READ
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.safetensors_file import write_durably

_PUBLISHED = "published"


class Lineage:
    """`run.json`: what a later start needs to go on numbering where this one stopped."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "run.json"
        self.owner: str | None = None
        self.version = 0
        if self._path.exists():
            body = json.loads(self._path.read_bytes())
            self.owner, self.version = body["owner"], int(body["version"])

    def claimed(self, owner: str | None) -> None:
        """Keep the owner token of the claim on the version store (None without one)."""
        self.owner = owner
        self._write()

    def given_out(self, version: int) -> None:
        """Keep that `version` may exist somewhere from now on."""
        self.version = max(self.version, version)
        self._write()

    def _write(self) -> None:
        write_durably(self._path, [json.dumps({"owner": self.owner, "version": self.version}).encode()])


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory against other drivers on this host; ConfigError if one has it."""
    with (run_dir / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise ConfigError([f"--run-dir {run_dir} is in use by {who}: wait for its end, or stop it"]) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


@dataclass(frozen=True)
class Continuation:
    """What a start goes on from. checkpoint, state: None if the run was stopped before its first checkpoint."""

    checkpoint: Path | None
    state: RunState | None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.step if self.state else 0


def identity(config: RunConfig, base_digest: str) -> dict[str, Any]:
    """Flags that a checkpoint is bound to. (Prompts and their order are checked by the prompt source itself.)"""
    return {
        "--hf-checkpoint": base_digest,
        "--train-dtype": config.trainer.train_dtype,
        "--use-distributed-optimizer": config.trainer.use_distributed_optimizer,
    }


def find(config: RunConfig, base_digest: str) -> Continuation | None:
    """What this start continues, verified; None for a new run. CheckpointError for damage, ConfigError for a mismatch.

    Metrics of steps after the checkpoint move to `metrics.superseded.jsonl`: those steps are done again.
    """
    if config.output.load is None:
        return None
    run_dir = config.run_dir
    checkpoints.remove_partial(run_dir)
    found = checkpoints.complete(run_dir)
    if not found:
        _set_back_metrics(run_dir, 0)
        return Continuation(None, None)
    state = checkpoints.read(found[-1])
    check_identity(state, identity(config, base_digest))
    _set_back_metrics(run_dir, state.step)
    return Continuation(found[-1], state)


def published_weights(config: RunConfig, newest: VersionRef, say: Callable[[str], None]) -> Path | None:
    """Build the verified checkpoint of the version published last from the store, for the trainer's sources.

    None where it is the base, or where it cannot be built (which is said): the next version then goes out in full.
    Blocks; `forget_published_weights` removes it.
    """
    forget_published_weights(config)  # of a start that was killed
    if newest.version == 0 or config.weights.transport != "disk" or config.weights.encoding is None:
        return None
    directory = config.run_dir / _PUBLISHED / newest.directory
    try:
        hook = import_hook(config.weights.custom_update_weight_pre_read_path, PRE_READ)
        if hook is not None:
            hook(newest)
        check_out(VersionStore(open_store(config.version_store)), newest, config.checkpoint, directory)
    except (MilesDisaggError, OSError) as error:
        say(f"{newest} cannot be rebuilt from {config.version_store}, so the next version is published whole: {error}")
        return None
    return directory


def forget_published_weights(config: RunConfig) -> None:
    """Remove what `published_weights` built; sources that have it open keep it."""
    shutil.rmtree(config.run_dir / _PUBLISHED, ignore_errors=True)


def check_identity(state: RunState, now: Mapping[str, Any]) -> None:
    """ConfigError naming every flag that is not what the checkpoint was made with."""
    problems = [
        f"{name} is {value}, the checkpoint was made with {state.identity.get(name)}: set it back, or start a new run"
        for name, value in now.items()
        if state.identity.get(name) != value
    ]
    if problems:
        raise ConfigError(problems)


def problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with --load, seen before anything is started."""
    if config.output.load is None:
        return
    run_dir = Path(config.output.load).expanduser()
    found = checkpoints.complete(run_dir)
    if not found and config.output.resume != "auto":
        yield (
            f"--load {run_dir}: there is no complete checkpoint in {run_dir / 'checkpoints'} (see --save-interval); "
            "--resume auto starts such a run over"
        )
    if found and config.rollout.num_rollout is not None:
        done = int(found[-1].name.removeprefix("step_"))
        if done >= config.rollout.num_rollout:
            yield f"--num-rollout {config.rollout.num_rollout}: the run has done {done} steps; raise it to go on"


def _set_back_metrics(run_dir: Path, step: int) -> None:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    kept, superseded = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            (kept if json.loads(line)["step"] < step else superseded).append(line + "\n")
        except (ValueError, KeyError):
            superseded.append(line + "\n")  # the last line, cut off by a crash
    if superseded:
        with (run_dir / "metrics.superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(superseded)
        write_durably(path, [line.encode() for line in kept])
