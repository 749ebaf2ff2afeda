#!/usr/bin/env python3
"""A training run whose parts are killed at random, again and again, and which has to come out right.

For `--minutes` it sends SIGKILL to an engine's process, the actor beside it, the gateway, the rollout producer, the
version store's process, a trainer rank, the head's raylet or the driver of a run (the quickstart's, with checkpoints),
every few seconds, and starts the driver again with `--resume auto` whenever it has ended. Then it leaves the run alone
for `--steps` more steps, and checks: the ledger balances, and did at every step; the version numbers are contiguous and
no published version's bytes ever changed; every step was done once; the accuracy on held-out prompts reached
`--reward`.

With `--json` the last line is one object with `kills`, `ledger_balanced`, `versions_contiguous`, `accuracy_last` and
more. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from miles_disagg.store.base import open_store
from miles_disagg.store.versions import VersionStore

ROOT = Path(__file__).resolve().parent.parent
VICTIMS = {
    "engine": "miles_disagg.engine.embedded",
    "replica": "ray::RolloutEngine",
    "gateway": "ray::GatewayActor",
    "producer": "ray::RolloutProducer",
    "store": "ray::VersionStoreActor",
    "trainer": "ray::TrainerActor",
    "head": "ray/raylet/raylet ",
    "driver": "",
}
DEADLINE = 600.0  # seconds for the driver to start, or to end


class Chaos:
    """One run directory, the driver that works on it at the moment, and what was done to it."""

    def __init__(self, run_dir: Path, seed: int, flags: list[str]):
        self.run_dir, self.flags, self.rng = run_dir, flags, random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.starts = 0
        self.driver: subprocess.Popen[bytes] | None = None
        self.digests: dict[int, str] = {}  # of every version's index, as it was first seen
        self.changed: list[int] = []

    def start(self, steps: int) -> None:
        """Start the driver, or continue the run."""
        command = [
            *(sys.executable, str(ROOT / "train_async.py"), "--config", str(ROOT / "configs/quickstart.yaml")),
            *("--run-dir", str(self.run_dir), "--run-id", "chaos", "--resume", "auto", "--num-rollout", str(steps)),
            *("--save-interval", "5", "--save-total-limit", "3", "--save-on-interrupt", "--skip-eval-before-train"),
            *self.flags,
        ]
        self.starts += 1
        with (self.run_dir.parent / f"driver-{self.starts}.log").open("wb") as log:
            self.driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def steps_done(self) -> int:
        """Steps with a row in the metrics."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            rows = (self.run_dir / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(row)["step"] + 1 for row in rows if "perf/step_seconds" in row), default=0)
        return 0

    def strike(self) -> None:
        """Kill one part that lives, at random."""
        assert self.driver is not None
        who = self.rng.choice(list(VICTIMS))
        if who == "driver":
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait(30)
            self.kills[who] += 1
            return
        with contextlib.suppress(psutil.Error):
            below = {p: " ".join(p.cmdline()) for p in psutil.Process(self.driver.pid).children(recursive=True)}
            found = [p for p, command in below.items() if VICTIMS[who] in command and "guard.py" not in command]
            if found:
                self.rng.choice(found).kill()
                self.kills[who] += 1

    def watch_versions(self) -> list[int]:
        """Versions published so far; remembers their indices, and which changed."""
        url = self.run_dir / "weights"
        if not url.exists():
            return []
        store = VersionStore(open_store(str(url)))
        versions = store.versions("chaos")
        for version in versions:
            with contextlib.suppress(FileNotFoundError):
                body = (url / "chaos" / f"weight_v{version:06d}" / "model.safetensors.index.json").read_bytes()
                digest = hashlib.sha256(body).hexdigest()
                if self.digests.setdefault(version, digest) != digest:
                    self.changed.append(version)
        return versions


def run_chaos(chaos: Chaos, minutes: float, interval: float) -> None:
    """Kill and restart until the time is up; then end the driver in order."""
    end = time.monotonic() + minutes * 60
    chaos.start(100_000)
    while time.monotonic() < end:
        time.sleep(chaos.rng.uniform(0.3, 1.7) * interval)
        assert chaos.driver is not None
        chaos.watch_versions()
        if chaos.driver.poll() is not None:
            chaos.start(100_000)
        elif chaos.steps_done():
            chaos.strike()
    assert chaos.driver is not None
    if chaos.driver.poll() is None:
        chaos.driver.send_signal(signal.SIGINT)
    chaos.driver.wait(DEADLINE)


def finish(chaos: Chaos, steps: int) -> int:
    """Leave the run alone for `steps` more steps; its exit status."""
    chaos.start(chaos.steps_done() + steps)
    assert chaos.driver is not None
    return chaos.driver.wait(DEADLINE + 60.0 * steps)


def balanced_row(row: dict[str, Any]) -> bool:
    """The conservation law in one step's metrics."""
    parts = ("trained", "queued", "dropped", "in_flight")
    return row["rollout/ledger/generated"] == sum(row[f"rollout/ledger/{part}"] for part in parts)


def judged(chaos: Chaos, status: int, reward: float) -> dict[str, Any]:
    """The verdict."""
    summary = json.loads((chaos.run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    dropped, failed = sum(ledger["dropped"].values()), sum(ledger["failed"].values())
    generated = ledger["trained"] + ledger["queued"] + ledger["in_flight"] + dropped
    versions = chaos.watch_versions()
    rows = [json.loads(row) for row in (chaos.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "perf/step_seconds" in row]
    accuracy = next((row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row), 0.0)
    out = {
        "kills": dict(chaos.kills),
        "starts": chaos.starts,
        "steps": len(steps),
        "ledger_balanced": ledger["generated"] == generated
        and ledger["handed_out"] == ledger["generating"] + ledger["generated"] + failed,
        "trained_as_counted": ledger["trained"] == 32 * len(steps),
        "steps_once": steps == list(range(len(steps))),
        "versions_contiguous": versions == list(range(versions[0], versions[-1] + 1)) if versions else False,
        "versions_unchanged": not chaos.changed,
        "ledger_balanced_at_every_step": all(balanced_row(row) for row in rows if "rollout/ledger/generated" in row),
        "lag_max": max(row.get("rollout/version_lag_max", 0.0) for row in rows),
        "accuracy_last": accuracy,
        "ledger": ledger,
    }
    checks = [v for v in out.values() if isinstance(v, bool)]
    out["passed"] = status == 0 and all(checks) and accuracy >= reward
    return out


def main() -> int:
    """Parse the command line, do the damage, print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="how long to kill")
    parser.add_argument("--interval", type=float, default=12.0, help="mean seconds between kills")
    parser.add_argument("--steps", type=int, default=20, help="steps of the run after the last kill")
    parser.add_argument("--reward", type=float, default=0.5, help="accuracy to be reached in the end")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: the driver is ended too
    with tempfile.TemporaryDirectory(prefix="chaos-run-", ignore_cleanup_errors=True) as directory:
        chaos = Chaos(Path(directory) / "run", args.seed, flags)
        try:
            run_chaos(chaos, args.minutes, args.interval)
            status = finish(chaos, args.steps)
        finally:
            if chaos.driver is not None and chaos.driver.poll() is None:
                os.killpg(chaos.driver.pid, signal.SIGKILL)
        if status:
            print((Path(directory) / f"driver-{chaos.starts}.log").read_text()[-3000:], file=sys.stderr)
        verdict = judged(chaos, status, args.reward)
    for name, value in verdict.items():
        print(f"{name}: {value}")
    if args.json:
        print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
