#!/usr/bin/env python3
"""The asynchronous schedule against the synchronous one, in one run on one machine.

Trains the quickstart's model twice with the same batches, optimizer and engine: generate, train, publish, repeat
(`--schedule sync`) and all of it overlapped (`--schedule async`). Prints samples per second, seconds per step and the
reward of each, and their ratio; with `--json` one object on the last line.

Trainer and engine share this machine's cores here, but not where the system is meant to run: so the engine keeps a
fixed token rate (`--decode-interval`, seconds per decode step) that leaves its core idle in between, as an accelerator
elsewhere would. `--decode-interval 0` measures the bare machine.

`--long-tail` gives every sample a lognormal length (`examples/long_tail.py`), which a synchronous schedule has to wait
for, and compares both schedules over `--seeds` seeds: their final rewards must agree within one standard deviation.
`--keep DIR` writes what each run gave to a file there; called again, only the runs that are missing are made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miles_disagg.config.model import quickstart_directory
from miles_disagg.prompts.quickstart import make_quickstart

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # steps that are not counted: first compilations, first connections, an empty pipeline
LAST = 10  # steps whose mean reward is the final one
LONG_TAIL = (
    *("--custom-generate-function-path", "examples.long_tail.generate", "--rollout-max-response-len", "160"),
    *("--rollout-batch-size", "16", "--max-weight-staleness", "4"),
)


def longer_model(directory: Path) -> Path:
    """The quickstart's model, with room for the long tail: its positions are rotary, so only the limit changes."""
    model = directory / "model"
    make_quickstart(quickstart_directory())
    shutil.copytree(quickstart_directory(), model)
    body = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**body, "max_position_embeddings": 256}))
    return model


def measure(schedule: str, steps: int, flags: list[str], run_dir: Path) -> dict[str, float]:
    """Run one schedule; samples per second, seconds per step and reward over the steps after the warm-up."""
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
        "reward_last": fmean(row["rollout/reward_mean"] for row in counted[-LAST:]),
        "accuracy_last": next(row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row),
        "version_lag_mean": fmean(row["rollout/version_lag_mean"] for row in counted),
        "version_lag_max": max(row["rollout/version_lag_max"] for row in counted),
        "stale_groups": counted[-1].get("rollout/fully_async/stale_groups_filtered", 0.0),
        "steps": len(counted),
    }


def kept(file: Path | None, settings: list[str], make: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `make` gives, or what an earlier call with the same settings left in `file`."""
    if file is not None and file.exists():
        found = json.loads(file.read_text())
        if found["settings"] != settings:
            raise SystemExit(f"--keep: {file} is of another benchmark, {found['settings']}: give an empty directory")
        return found["row"]
    row = make()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"settings": settings, "row": row}) + "\n")
    return row


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means over the seeds, the ratio of the samples per second, and whether the final rewards agree."""
    out: dict[str, Any] = {name: {k: fmean(row[k] for row in rows) for k in rows[0]} for name, rows in runs.items()}
    out["speedup"] = out["async"]["samples_per_second"] / out["sync"]["samples_per_second"]
    rewards = {name: [row["reward_last"] for row in rows] for name, rows in runs.items()}
    if len(rewards["sync"]) > 1:
        out["rewards"] = rewards
        out["reward_difference"] = fmean(rewards["async"]) - fmean(rewards["sync"])
        out["reward_deviation"] = max(stdev(values) for values in rewards.values())
        out["rewards_agree"] = abs(out["reward_difference"]) <= out["reward_deviation"]
    return out


def main() -> None:
    """Parse the command line, run both schedules, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"steps of each run, the first {WARM_UP} not counted")
    parser.add_argument("--decode-interval", type=float, default=0.05, help="least seconds per decode step")
    parser.add_argument("--long-tail", action="store_true", help="lognormal lengths (sigma 1), 16 groups a step, K = 4")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each schedule, with seeds 1, 2, ...")
    parser.add_argument("--keep", type=Path, help="directory of finished runs, which are not made again")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args, flags = parser.parse_known_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: give more than {WARM_UP}")
    flags = [*flags, "--rollout-decode-interval", str(args.decode_interval)]
    runs: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory(prefix="bench-async-") as directory:
        model = []
        if args.long_tail:
            flags = [*LONG_TAIL, *flags]
            model = ["--hf-checkpoint", str(longer_model(Path(directory)))]
        for seed in range(1, args.seeds + 1):
            seeded = [*flags, "--rollout-seed", str(seed)] if args.seeds > 1 else flags
            for name, rows in runs.items():
                run = partial(measure, name, args.steps, [*model, *seeded], Path(directory) / f"{name}-{seed}")
                file = args.keep / f"{name}-{seed}.json" if args.keep else None
                rows.append(kept(file, [str(args.steps), *seeded], run))
                print(f"{name:5} seed {seed}: " + "  ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), flush=True)
    result = compared(runs)
    print(f"asynchronous / synchronous samples per second: {result['speedup']:.2f}x")
    if "rewards_agree" in result:
        difference, deviation = result["reward_difference"], result["reward_deviation"]
        print(f"final reward, asynchronous - synchronous: {difference:+.3f}, standard deviation {deviation:.3f}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
