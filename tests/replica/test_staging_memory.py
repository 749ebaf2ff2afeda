"""Materializing needs memory for blocks, not for the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import asyncio, json, sys, threading, time
from pathlib import Path
import numpy as np
from miles_disagg.domain.versions import VersionRef
from miles_disagg.replica.staging import DiskStager
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description, Receipt
from miles_disagg.store.versions import VersionStore
from miles_disagg.weights.checkpoint import checkpoint_digest, write_checkpoint
from miles_disagg.weights.delta import ShardWriter, plan_shards

root, nbytes = Path(sys.argv[1]), int(sys.argv[2])

def anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

old = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
shape = (nbytes // 2,)
(root / "base").mkdir()
write_checkpoint(root / "base", [("w", "U16", shape, old)])
digest = checkpoint_digest(root / "base", 1)
store = VersionStore(LocalStore(root / "store"))
store.claim("run", digest)
new = old.copy()
for version, encoding in enumerate(["sparse", "xor", None], start=1):
    before, new = new, new.copy()
    new[:: 200 + version] ^= 3
    ref = VersionRef("run", version)
    store.begin(ref)
    with ShardWriter(root / "scratch", encoding, workers=1) as writer:
        writer.add("w", "U16", shape, new, before if encoding else None)
        summary = writer.summary()
        written = writer.finish(plan_shards([summary])[0])
    store.objects.put(f"{ref}/{written.file}", root / "scratch" / written.file, consume=True)
    receipt = Receipt(written.file, written.nbytes, written.digest, summary.checksums, nbytes)
    store.commit(ref, Description(encoding, version - 1), [receipt])
wanted = new.tobytes()
del old, new, before, wanted
stager = DiskStager(store, root / "local", root / "base", reader="r", workers=1)
stager.materialize_blocking(VersionRef("run", 0))
peak, started, stop = [0], anonymous(), threading.Event()

def watch() -> None:
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
found = {}
for version in (1, 2, 3):
    peak[0] = 0
    stager.materialize_blocking(VersionRef("run", version))
    found[version] = peak[0] - started
stop.set()
watcher.join()
print(json.dumps(found))
"""


def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    nbytes = 384 << 20
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(nbytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(found) == {"1", "2", "3"}
    assert all(extra < 160 << 20 for extra in found.values()), found
