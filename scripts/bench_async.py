#!/usr/bin/env python3
"""The asynchronous schedule against the synchronous one, in one run on one machine.

Trains the quickstart's model twice with the same batches, optimizer and engine: generate, train, publish, repeat
(`--schedule sync`) and all of it overlapped (`--schedule async`). Prints samples per second, seconds per step and the
reward of each, and their ratio; with `--json` one object on the last line.

Trainer and engine share this machine's cores here, but not where the system is meant to run: so the engine keeps a
fixed token rate (`--decode-interval`, seconds per decode step) that leaves its core idle in between, as an accelerator
elsewhere would. `--decode-interval 0` measures the bare machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # steps that are not counted: first compilations, first connections, an empty pipeline


def measure(schedule: str, steps: int, flags: list[str], directory: Path) -> dict[str, float]:
    """Run one schedule; samples per second, seconds per step and reward over the steps after the warm-up."""
    run_dir = directory / schedule
    command = [
        *(sys.executable, str(ROOT / "train_async.py"), "--config", str(ROOT / "configs/quickstart.yaml")),
        *("--schedule", schedule, "--num-rollout", str(steps), "--run-dir", str(run_dir)),
        *("--skip-eval-before-train", "--eval-interval", str(steps)),
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if "perf/step_seconds" in row][WARM_UP:]
    seconds = sum(row["perf/step_seconds"] for row in counted)
    samples = sum(row["rollout/samples_per_second"] * row["perf/step_seconds"] for row in counted)
    return {
        "samples_per_second": samples / seconds,
        "step_seconds_mean": seconds / len(counted),
        "step_seconds_median": median(row["perf/step_seconds"] for row in counted),
        "train_wait_seconds_mean": fmean(row["perf/wait_for_rollout_seconds"] for row in counted),
        "reward_last": fmean(row["rollout/reward_mean"] for row in counted[-5:]),
        "version_lag_mean": fmean(row["rollout/version_lag_mean"] for row in counted),
        "steps": len(counted),
    }


def main() -> None:
    """Parse the command line, run both schedules, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"steps of each run, the first {WARM_UP} not counted")
    parser.add_argument("--decode-interval", type=float, default=0.05, help="least seconds per decode step")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args, flags = parser.parse_known_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: give more than {WARM_UP}")
    with tempfile.TemporaryDirectory(prefix="bench-async-") as directory:
        flags += ["--rollout-decode-interval", str(args.decode_interval)]
        results = {name: measure(name, args.steps, flags, Path(directory)) for name in ("sync", "async")}
    speedup = results["async"]["samples_per_second"] / results["sync"]["samples_per_second"]
    print(f"asynchronous / synchronous samples per second: {speedup:.2f}x")
    for name, row in results.items():
        print(f"  {name:5} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    if args.json:
        print(json.dumps({"speedup": speedup, **results}))


if __name__ == "__main__":
    main()
