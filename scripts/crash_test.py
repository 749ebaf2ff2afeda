#!/usr/bin/env python
"""Kill a real process (SIGKILL) at random points of publish, materialize, switch and gc, and check what is left.

Each round forks a process that publishes, materializes or collects on one store and one staging directory, and kills
itself at a random file-system call or is killed after a random time. Then, with the process gone:

* the pointer must name a complete version whose bytes are right;
* the staging directory must hold the old or the new version, bit for bit (`torn` counts where it does not);
* one retry must succeed and leave the right bytes, and a collection must leave no stray file (`unhealed` otherwise).

The last line of stdout with --json: {"rounds", "torn", "unhealed", ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.disk import DiskSource, Published, publish_version
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.base import open_store
from miles_disagg.store.ledger import VersionLedger
from miles_disagg.store.retention import collect
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import checkpoint_digest, open_checkpoint, write_checkpoint

RUN, OWNER = "crash", "crash-owner"
ENCODINGS = ("xor", "overwrite", "sparse", "sparse-max", None)
FILE_EVENTS = ("open", "os.", "mmap.", "shutil.")


class World:
    """One store, one trainer cache, one staging directory, and what every version must contain."""

    def __init__(self, root: Path, seed: int):
        self.root, self.seed = root, seed
        self.base, self.url = root / "base", str(root / "store")
        self.base.mkdir(parents=True)
        tensors = self.tensors(0)
        rows = ((n, "BF16", tuple(t.shape), t.view(torch.uint8).reshape(-1).numpy()) for n, t in tensors.items())
        write_checkpoint(self.base, rows, max_shard_bytes=3000)
        (self.base / "config.json").write_text("{}")
        self.base_digest = checkpoint_digest(self.base, 1)

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Weights of a version, bf16: the base, with 5 % of the elements moved by every version so far."""
        rng = np.random.default_rng(self.seed)
        out = {}
        for i in range(6):
            value = rng.standard_normal(1500 if i else 40_000).astype(np.float32)
            for v in range(1, version + 1):
                step = np.random.default_rng((self.seed, i, v))
                at = step.integers(0, value.size, value.size // 20)
                value[at] = step.standard_normal(at.size)
            out[f"model.layers.{i}.weight"] = torch.from_numpy(value).bfloat16()
        return out

    def expected(self, version: int) -> dict[str, bytes]:
        """Raw bytes of a version by tensor name."""
        return {n: t.view(torch.uint8).numpy().tobytes() for n, t in self.tensors(version).items()}

    def store(self) -> VersionStore:
        return VersionStore(open_store(self.url))

    def stager(self, name: str) -> DiskStager:
        return DiskStager(self.store(), self.root / name, self.base, reader=name, workers=1)

    def materialize(self, name: str = "replica") -> Path:
        """The replica's operation: the newest version, built here."""
        stager = self.stager(name)
        try:
            latest = self.store().latest()
            return stager.materialize_blocking(latest or VersionRef(RUN, 0)).path
        finally:
            stager.close()

    def publish(self) -> None:
        """The trainer's operation, as after a resume: claim, rebuild the snapshot, publish the next version."""
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        store = self.store()
        ledger = VersionLedger(RUN, store)
        await ledger.claim(self.base_digest, owner=OWNER)
        latest = await ledger.latest()
        assert latest is not None
        source = DiskSource(store.objects, self.base, published=self.materialize("trainer"), workers=1)
        source.open(1)
        source.stage(list(self.tensors(latest.version + 1).items()))

        async def shortcuts(published: Published) -> bool:
            return published.ref.version % 3 == 0

        await publish_version(
            ledger,
            [_InThread(source)],
            lambda r: ENCODINGS[(self.seed + r.version) % len(ENCODINGS)],
            shortcuts_after=shortcuts,
        )

    def collect(self) -> None:
        """Retention's operation."""
        store = self.store()
        if store.latest() is not None:
            collect(store, RUN, keep=2, acknowledged=None)


class _InThread:
    def __init__(self, source: DiskSource):
        self.source = source

    async def encode(self, ref, encoding, kind="version"):
        return self.source.encode(ref, encoding, kind)

    async def write(self, plan):
        return self.source.write(plan)

    async def settle(self, published):
        self.source.settle(published)


def bytes_of(path: Path) -> dict[str, bytes]:
    """Raw bytes of a checkpoint directory."""
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.bytes(name).tobytes() for name in checkpoint.tensors}


def run_killed(operation: Callable[[], None], countdown: int, delay: float) -> str:
    """Run `operation` in a fork that dies at its `countdown`-th file-system event or after `delay` seconds.

    `killed`, `done` if it was faster, or the traceback it ended with.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            _arm(countdown, delay)
            operation()
            os._exit(0)
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    return "done" if os.WEXITSTATUS(status) == 0 else message.decode() or "failed"


def _arm(countdown: int, delay: float) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if delay > 0:

        def later() -> None:
            time.sleep(delay)
            die()

        threading.Thread(target=later, daemon=True).start()
        return
    left = [countdown]

    def hook(event: str, _: object) -> None:
        if event.startswith(FILE_EVENTS):
            left[0] -= 1
            if left[0] == 0:
                die()

    sys.addaudithook(hook)


def check(world: World, name: str = "replica") -> list[str]:
    """What is wrong with what a killed process left, before anything heals it (a reader recovers by opening)."""
    problems = []
    store = world.store()
    latest = store.latest()
    if latest is not None and latest.version > 0:
        index = store.index(latest)
        if index is None:
            problems.append(f"the pointer names {latest}, which has no index")
        else:
            missing = [f for f in index.files if not (Path(world.url) / str(latest) / f).is_file()]
            problems += [f"{latest} lacks {f}" for f in missing]
    for reader in (name, "trainer"):
        stager = world.stager(reader)
        held = stager.held()
        stager.close()
        if held is not None:
            marker = json.loads((world.root / reader / "marker.json").read_text())
            if bytes_of(world.root / reader / marker["directory"]) != world.expected(held.version):
                problems.append(f"{reader} says it holds {held}, its bytes are not")
    return problems


def heal(world: World, operation: Callable[[], object]) -> list[str]:
    """Retry once, materialize, collect: then everything must be right and nothing be left over."""
    problems = []
    operation()
    path = world.materialize()
    latest = world.store().latest()
    version = latest.version if latest else 0
    if bytes_of(path) != world.expected(version):
        problems.append(f"after a retry the replica does not hold version {version}")
    if latest is not None:
        collect(world.store(), RUN, keep=2, stale_after=0, now=time.time() + 1e6)
    strays = [p for p in (Path(world.url) / ".store" / "tmp").glob("*")]
    strays += [p for pattern in ("leases/*", "_probes/*") for p in Path(world.url).rglob(pattern)]
    strays += [p for p in (world.root / "replica").iterdir() if not _belongs(p, path)]
    strays += [p for p in path.iterdir() if p.name.startswith(".")]
    return problems + [f"left over: {p.relative_to(world.root)}" for p in strays]


def _belongs(entry: Path, weights: Path) -> bool:
    return entry.name in ("marker.json", ".lock", weights.name) or entry.name.startswith("patch-")


def run(rounds: int, seed: int, root: Path, verbose: bool) -> dict[str, object]:
    """All rounds; a world is left behind after 25 versions so that chains stay short."""
    rng = random.Random(seed)
    torn, unhealed, outcomes = 0, 0, Counter()
    world: World | None = None
    for number in range(rounds):
        if world is None or ((latest := world.store().latest()) is not None and latest.version >= 12):
            if world is not None:
                shutil.rmtree(world.root)
            world = World(root / f"world-{number}", rng.randrange(1 << 30))
            world.publish()
        kind = rng.choice(["publish", "publish", "materialize", "materialize", "collect"])
        operation = {
            "publish": world.publish,
            "materialize": lambda w=world: w.materialize(),
            "collect": world.collect,
        }[kind]
        if kind == "materialize" and rng.random() < 0.8:
            world.publish()
        by_time = rng.random() < 0.4
        outcome = run_killed(operation, 1 + int(rng.expovariate(1 / 60)), rng.uniform(0.0005, 0.06) if by_time else 0.0)
        outcomes[f"{kind}: {outcome if outcome in ('killed', 'done') else 'error'}"] += 1
        bad = check(world)
        torn += bool(bad)
        try:
            sick = heal(world, operation) if outcome in ("killed", "done") else [outcome]
        except Exception:
            sick = [traceback.format_exc()]
        unhealed += bool(sick)
        if bad or sick:
            print(f"round {number} ({kind}, {outcome[:10]}): " + "\n  ".join(bad + sick), file=sys.stderr)
            world = None
        elif verbose and number % 100 == 99:
            print(f"{number + 1} rounds, torn {torn}, unhealed {unhealed}", file=sys.stderr)
    return {"rounds": rounds, "torn": torn, "unhealed": unhealed, "outcomes": dict(sorted(outcomes.items()))}


def main(argv: list[str] | None = None) -> int:
    """Parse, run, print; 1 if anything was torn or not healed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--dir", help="where to work (default: memory, if there is any)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # SIGKILL loses no page: syncing to disk is waiting
    with tempfile.TemporaryDirectory(prefix="crash-test-", dir=arguments.dir or memory) as root:
        result = run(arguments.rounds, arguments.seed, Path(root), verbose=True) | {"seed": arguments.seed}
    print(json.dumps(result) if arguments.json else f"{result}")
    return 1 if result["torn"] or result["unhealed"] else 0


if __name__ == "__main__":
    sys.exit(main())
