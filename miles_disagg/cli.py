"""The command line: `miles-disagg COMMAND ...`. Parses and checks; what a command does lives where its module says.

Nothing heavy is imported before the command line has been understood.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_disagg.domain.errors import ConfigError, MilesDisaggError

USAGE_ERROR = 2
FAILED = 1
INTERRUPTED = 130


def train(argv: Sequence[str]) -> int:
    """Check a run and start it; with --dry-run, print its placement instead."""
    from miles_disagg.config.flags import parse_run
    from miles_disagg.config.machine import Machine
    from miles_disagg.config.model import QUICKSTART
    from miles_disagg.config.placement import plan_placement
    from miles_disagg.config.resolve import joins_cluster, resolve

    config = parse_run(argv)
    if config.model.hf_checkpoint == QUICKSTART:
        _make_quickstart(config.checkpoint)
    machine = None if joins_cluster(config) else Machine.local()
    from miles_disagg.cluster.preflight import preflight

    problems = preflight(config, machine)
    if problems:
        raise ConfigError(problems)
    config = resolve(config, machine.gpus if machine else None)
    if config.output.dry_run:
        engines = config.engines
        print("The configuration is sound. Nothing was started.")
        print(f"run {config.run_id} in {config.run_dir}, {engines.topology} topology")
        print(f"weights: {config.weights.mode} over {config.weights.transport}, versions in {config.version_store}")
        print(plan_placement(config).describe())
        if machine is None:
            print("joins a Ray cluster: its resources are checked at start, within --placement-timeout")
        return 0
    from miles_disagg.train_async import run

    return run(config)


def _make_quickstart(path: Path) -> None:
    """Make the quickstart's model if it is not there yet."""
    from miles_disagg.prompts.quickstart import make_quickstart

    if not path.is_dir():
        print(f"making the quickstart's model in {path} (about half a minute, once)", file=sys.stderr, flush=True)
    make_quickstart(path)


COMMANDS = {
    "train": "train a policy (`train --dry-run` only checks)",
    "doctor": "look at a deployment before a run: addresses, settings, paths, room, tokens",
    "engine": "run one embedded engine by itself",
    "gateway": "run the rollout endpoint of a fleet by itself",
    "replica": "put a running SGLang-compatible server into a rollout fleet",
    "serve": "run a rollout service on Ray: gateways and a fleet that scales (`serve --dry-run` only checks)",
    "plan": "print which trainer rank sends what to which engine rank (p2p), or simulate it",
    "store": "look into a version store, verify and export versions",
}
MODULES = {
    "doctor": "miles_disagg.cluster.doctor",
    "engine": "miles_disagg.engine.embedded.__main__",
    "gateway": "miles_disagg.gateway.command",
    "replica": "miles_disagg.rollout.command",
    "serve": "miles_disagg.cluster.service",
    "plan": "miles_disagg.cluster.plan_command",
    "store": "miles_disagg.store.inspect",
}
"""Modules whose `main(argv)` is a command; imported when it is called."""


def usage() -> str:
    """What is printed for --help."""
    lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
    return f"usage: miles-disagg COMMAND [--help] ...\n\ncommands:\n{lines}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 the run failed, 2 the command line or configuration is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else USAGE_ERROR
    name, *rest = argv
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        print(
            f"miles-disagg: no command {name!r}" + (f"; perhaps you meant {near[0]}" if near else ""), file=sys.stderr
        )
        print(usage(), file=sys.stderr)
        return USAGE_ERROR
    return run_command(train if name == "train" else importlib.import_module(MODULES[name]).main, rest)


def run_command(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Run `command`, printing expected errors without a traceback."""
    try:
        return command(argv) or 0
    except ConfigError as error:
        print(f"{len(error.problems)} problem(s), nothing was started:\n{error}", file=sys.stderr)
        return USAGE_ERROR
    except MilesDisaggError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
