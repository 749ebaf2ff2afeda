#!/usr/bin/env python3
"""Every trainer layout against every way of updating weights: engines compared bit for bit, one killed, one replaced.

A cell is LAYOUT:MODE. It trains a tiny model on two-digit addition; after every update each tensor is read back from
each engine and compared with the trainer's export (`matrix_cell.py`). On four GPUs the trainer has two and the engines
two, and a second, short run with random weights of an 8B shape (`--time-model`) gives the seconds and the pause of an
update. With fewer GPUs, or none, the same layouts run with gloo ranks on the CPU, and what that leaves out is said.

Each run is a process of its own with its log under `--output`; `results.json` there is written after each one. Exit
status 1 if anything differs, fails or passes its deadline, and if nothing was run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miles_disagg.config.machine import Machine

HERE = Path(__file__).resolve().parent
JUDGED_FROM = 20  # steps from which on the reward has to rise: fewer say nothing
Part = Literal["run", "time"]


@dataclass(frozen=True)
class Layout:
    """Trainer and engines of a cell. flags: of the trainer's two ranks; engines: how many, ranks: of each."""

    flags: tuple[str, ...]
    engines: int
    ranks: int
    experts: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of trainer and engines together."""
        return 2 + self.engines * self.ranks


LAYOUTS = {
    "tp2-2xtp1": Layout(("--tensor-model-parallel-size", "2"), 2, 1),
    "tp2-1xtp2": Layout(("--tensor-model-parallel-size", "2"), 1, 2),
    "pp2-2xtp1": Layout(("--pipeline-model-parallel-size", "2"), 2, 1),
    "dp2-2xtp1": Layout((), 2, 1),
    "ep2-2xtp1": Layout(("--expert-model-parallel-size", "2"), 2, 1, experts=True),
}
_MODE, _ACTIVATION = "--update-weight-transfer-mode", "--activation"
MODES: dict[str, tuple[str, ...]] = {
    "broadcast": (_MODE, "broadcast"),
    "disk-full": (_MODE, "disk-full"),
    "disk-delta-reload": (_MODE, "disk-delta", _ACTIVATION, "reload"),
    "disk-delta-in-place": (_MODE, "disk-delta", _ACTIVATION, "in-place"),
    "p2p": (_MODE, "p2p"),
}
# Small enough to leave most bf16 weights where they are: denser patches are reloaded, whatever the activation.
_LEARNING_RATE = {"disk-delta-in-place": "1e-5"}


@dataclass(frozen=True)
class Host:
    """What cells run on. cuda: four GPUs are there and used; python: of SGLang's environment."""

    cuda: bool
    gpus: int
    engine: Literal["embedded", "sglang"]
    python: str | None


@dataclass(frozen=True)
class Options:
    """steps: of a run; strikes: kill and replace engines; time_model: shape of the timed run, None: not timed;
    deadline: seconds of one run's process; extra: further flags of the training runs."""

    output: Path
    steps: int
    strikes: bool
    time_model: str | None
    deadline: float
    extra: tuple[str, ...]


def why_not(layout: str, part: Part, host: Host, options: Options) -> str | None:
    """Why a run cannot be made here; None if it can."""
    if part == "time" and options.time_model is None:
        return "no --time-model" if host.cuda else f"{host.gpus} GPU(s): an 8B model is timed on four"
    if LAYOUTS[layout].ranks > 1 and host.engine == "embedded":
        return "an embedded engine has one rank"
    return None


def runs(cells: Sequence[str], host: Host, options: Options) -> Iterator[dict[str, Any]]:
    """Every run that was asked for, as an empty row: status `planned`, or `not run` with the reason."""
    for cell in cells:
        layout, mode = cell.split(":")
        parts: tuple[Part, ...] = ("run", "time") if host.cuda or options.time_model else ("run",)
        for part in parts:
            reason = why_not(layout, part, host, options)
            status = "planned" if reason is None else "not run"
            yield {"layout": layout, "mode": mode, "part": part, "status": status, "reason": reason}


def flags(row: dict[str, Any], host: Host, options: Options, model: Path, run_dir: Path) -> list[str]:
    """Flags of a row's training run."""
    layout, timed = LAYOUTS[row["layout"]], row["part"] == "time"
    out = ["--hf-checkpoint", str(model), "--task", "addition", "--run-dir", str(run_dir), "--use-tis"]
    out += ["--actor-num-gpus-per-node", "2", *layout.flags, "--rollout-max-response-len", "8"]
    out += ["--max-weight-staleness", "2", "--pause-generation-mode", "in_place", "--max-tokens-per-gpu", "4096"]
    if timed:  # random weights earn nothing: an entropy bonus moves them
        out += ["--num-rollout", "5", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
        out += ["--entropy-coef", "0.01", "--lr", "1e-6"]
    else:
        out += ["--num-rollout", str(options.steps), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"]
        out += ["--lr", _LEARNING_RATE.get(row["mode"], "2e-4"), "--eps-clip-high", "0.28"]
    if host.cuda:
        out += ["--trainer-device", "cuda", "--train-dtype", "bf16", "--use-distributed-optimizer"]
        out += ["--rollout-num-gpus", str(layout.engines * layout.ranks)]
        out += ["--rollout-num-gpus-per-engine", str(layout.ranks)]
        out += ["--sglang-mem-fraction-static", "0.5"] if host.engine == "sglang" else []
        if row["mode"] == "p2p":
            out += ["--update-weight-p2p-staging", "always"]
    else:
        out += ["--trainer-device", "cpu", "--train-dtype", "fp32", "--num-rollout-engines", str(layout.engines)]
        out += ["--rollout-num-gpus-per-engine", str(layout.ranks)]
    out += ["--rollout-engine", host.engine, *(("--sglang-python", host.python) if host.python else ())]
    return [*out, *MODES[row["mode"]], *options.extra]


def command(row: dict[str, Any], host: Host, options: Options, model: Path, run_dir: Path) -> list[str]:
    """What is executed for a row."""
    own = ["--every", "1"] if row["part"] == "run" else ["--every", "100"]
    own += ["--strikes"] if row["part"] == "run" and options.strikes else []
    return [sys.executable, str(HERE / "matrix_cell.py"), *own, "--", *flags(row, host, options, model, run_dir)]


# --- models -----------------------------------------------------------------------------------------


def model_of(row: dict[str, Any], options: Options) -> Path:
    """Where the checkpoint of a row lies."""
    experts = "experts" if LAYOUTS[row["layout"]].experts else "dense"
    return options.output / "models" / (experts if row["part"] == "run" else f"{options.time_model}-{experts}")


def make_model(row: dict[str, Any], options: Options, device: str) -> None:
    """Make a row's checkpoint unless it is there: one that learns, or a large one at random."""
    path, experts = model_of(row, options), LAYOUTS[row["layout"]].experts
    if row["part"] == "run":
        from miles_disagg.prompts.quickstart import Recipe, make_quickstart

        hidden = 256 if device == "cuda" else 128  # four heads: of 64 elements, the least that SGLang takes on CUDA
        made = make_quickstart(path, Recipe(hidden_size=hidden, layers=4, experts=8 if experts else 0))
        print(f"{path}: {made.parameters:,} parameters, accuracy {made.greedy_accuracy:.2f}", file=sys.stderr)
        return
    if path.exists():
        return
    from bench_activation import MIXTURE_OF
    from bench_activation import make_model as make_random

    from miles_disagg.prompts.quickstart import make_tokenizer

    assert options.time_model is not None
    work = path.with_name(f".{path.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_random(MIXTURE_OF[options.time_model] if experts else options.time_model, work, device)
    make_tokenizer().save_pretrained(work)
    work.rename(path)


def prepared(row: dict[str, Any], host: Host, options: Options) -> bool:
    """Make the row's checkpoint in a process of its own, which gives its memory back; False: the row has failed."""
    device = "cuda" if host.cuda else "cpu"
    process = multiprocessing.get_context("spawn").Process(target=make_model, args=(row, options, device))
    process.start()
    process.join(options.deadline)
    if process.exitcode:
        row |= {"status": "failed", "reason": f"{model_of(row, options)} could not be made, see above"}
    elif process.exitcode is None:
        process.kill()
        row |= {"status": "timeout", "reason": f"{model_of(row, options)} was not made in {options.deadline:g} s"}
    return process.exitcode == 0


# --- running ----------------------------------------------------------------------------------------


def execute(row: dict[str, Any], host: Host, options: Options) -> None:
    """Run a row's process to its end or its deadline, and judge it."""
    name = f"{row['layout']}-{row['mode']}-{row['part']}"
    log, run_dir = options.output / f"{name}.log", options.output / "runs" / f"{name}-{time.strftime('%H%M%S')}"
    row |= {"log": str(log), "status": "failed"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if not host.cuda:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv, begun = command(row, host, options, model_of(row, options), run_dir), time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            process.wait(options.deadline)
        except subprocess.TimeoutExpired:
            row |= {"status": "timeout", "reason": f"no end within {options.deadline:g} s"}
        finally:
            end(process)
    row["wall_s"] = round(time.monotonic() - begun, 1)
    lines = log.read_text(errors="replace").splitlines()
    with contextlib.suppress(ValueError, IndexError):
        row |= {k: v for k, v in json.loads(lines[-1]).items() if k != "status"}
    if row["status"] != "timeout":
        judge(row, process.returncode, options, lines)
    shutil.rmtree(run_dir / "replicas", ignore_errors=True)
    shutil.rmtree(run_dir / "weights", ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the run to end in order; kill what is left of its process group."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.terminate()  # not SIGINT, which is ignored below a shell's background job
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60.0)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10.0)


def judge(row: dict[str, Any], returncode: int, options: Options, lines: list[str]) -> None:
    """`passed`, or `failed` with the reason."""
    if returncode or row.get("error") or "versions_compared" not in row:
        row["reason"] = row.get("error") or f"exit status {returncode}: {(lines or ['no output'])[-1][-200:]}"
        return
    row["reward_rose"] = (row["reward_last"] or 0.0) > (row["reward_first"] or 0.0)
    row["status"] = "passed"
    if row["mode"] == "disk-delta-in-place" and not sum(loader["in_place"] for loader in row["loader"] if loader):
        row |= {"status": "failed", "reason": "every tensor was equal, but no version was activated in place"}
    if row["part"] == "run" and options.steps >= JUDGED_FROM and not row["reward_rose"]:
        row |= {"status": "failed", "reason": "every tensor was equal, but the reward did not rise"}


# --- showing ----------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table."""

    def number(row: dict[str, Any], key: str, digits: int) -> str:
        return "" if row.get(key) is None else f"{row[key]:.{digits}f}"

    def loss(row: dict[str, Any], key: str) -> str:
        found = row.get(key)
        return "" if found is None else f"{found['back_s']:.1f} s, {found['answers_of_others']} answers"

    def in_place(row: dict[str, Any]) -> str:
        loaders = [loader for loader in row.get("loader") or () if loader]
        return "/".join(f"{x['in_place']} of {x['in_place'] + x['reloads']}" for x in loaders)

    heads = ("layout", "mode", "run", "result", "versions x tensors equal", "in place", "reward")
    heads += ("update s", "pause ms", "killed: back", "replaced: back")
    out = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        result = row["status"] if row["reason"] is None else f"{row['status']}: {row['reason']}"
        equal = f"{row['versions_compared']} x {row['tensors']}" if row.get("versions_compared") else ""
        reward = f"{row['reward_first']:.2f} -> {row['reward_last']:.2f}" if row.get("reward_first") is not None else ""
        cells = [row["layout"], row["mode"], row["part"], result.replace("|", "/"), equal, in_place(row)]
        cells += [reward if row["part"] == "run" else "", number(row, "update_s_p50", 2)]
        cells += [number(row, "pause_ms_p50", 0), loss(row, "killed"), loss(row, "replaced")]
        out.append("| " + " | ".join(cells) + " |")
    return out


def pick(only: Sequence[str]) -> list[str]:
    """Cells that match; LAYOUT, MODE and `*` alone are allowed. SystemExit names what matches nothing."""
    cells = [f"{layout}:{mode}" for layout in LAYOUTS for mode in MODES]
    chosen: set[str] = set()
    for pattern in only:
        layout, _, mode = pattern.partition(":")
        found = {c for c in cells if layout in (c.split(":")[0], "*") and mode in (c.split(":")[1], "*", "")}
        if not found:
            raise SystemExit(f"--only {pattern}: layouts are {', '.join(LAYOUTS)}; modes are {', '.join(MODES)}")
        chosen |= found
    return [c for c in cells if c in chosen] if only else cells


def host_of(args: argparse.Namespace) -> Host:
    """What this machine allows, or --device says."""
    gpus = Machine.local().gpus
    wanted = max(layout.gpus for layout in LAYOUTS.values())
    if args.device == "cuda" and gpus < wanted:
        raise SystemExit(f"--device cuda: the layouts take {wanted} GPUs, here are {gpus}")
    cuda = args.device == "cuda" or (args.device == "auto" and gpus >= wanted)
    engine = args.engine or ("sglang" if cuda else "embedded")
    return Host(cuda, gpus, engine, args.sglang_python if engine == "sglang" else None)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, last line")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their commands, and run none")
    parser.add_argument("--only", nargs="+", default=[], help="cells LAYOUT:MODE, either may be * (default: all)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--engine", choices=["embedded", "sglang"], help="default: sglang on GPUs, embedded on a CPU")
    parser.add_argument("--sglang-python", help="python of SGLang's environment (default: this one)")
    parser.add_argument("--steps", type=int, default=30, help=f"of a run; the reward is judged from {JUDGED_FROM} on")
    parser.add_argument("--no-strikes", action="store_true", help="kill and replace no engine")
    parser.add_argument("--time-model", help="shape of the timed run; default: 8B on GPUs, none on a CPU")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds of one run, start and end included")
    parser.add_argument("--output", type=Path, default=Path("build/matrix"), help="models, logs and results.json")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the training runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended too
    host = host_of(args)
    time_model = args.time_model or ("8B" if host.cuda else None)
    options = Options(
        args.output.resolve(), args.steps, not args.no_strikes, time_model, args.deadline, tuple(args.flags)
    )
    where = "four GPUs, NCCL" if host.cuda else f"the CPU, gloo ({host.gpus} GPU(s) here)"
    print(f"cells run on {where}, engine {host.engine}", file=sys.stderr)
    rows = list(runs(pick(args.only), host, options))
    if args.dry_run:
        for row in rows:
            what = row["reason"] or " ".join(command(row, host, options, model_of(row, options), Path("RUN_DIR")))
            print(f"{row['layout']}:{row['mode']} {row['part']}: {row['status']}: {what}")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["status"] == "planned":
            if prepared(row, host, options):
                execute(row, host, options)
            said = f": {row['reason']}" if row["reason"] else ""
            print(f"{row['layout']}:{row['mode']} {row['part']}: {row['status']}{said}", file=sys.stderr, flush=True)
        (options.output / "results.json").write_text(json.dumps({"host": vars(host), "results": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))
    if args.json:
        print(json.dumps({"host": vars(host), "results": rows}))
    done = [row["status"] for row in rows if row["status"] != "not run"]
    return 0 if done and all(status == "passed" for status in done) else 1


if __name__ == "__main__":
    sys.exit(main())
