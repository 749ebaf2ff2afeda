"""What a person sees during a run: a live table on a terminal, one line a step elsewhere, and a closing summary.

Reads step metrics only; it never asks an actor anything.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("lag", "rollout/version_lag_mean", "{:.1f}"),
    ("max", "rollout/version_lag_max", "{:.0f}"),
    ("tok/s", "perf/tokens_per_second", "{:,.0f}"),
    ("step s", "perf/step_seconds", "{:.2f}"),
    ("pause ms", "replica/pause_seconds", "{:.0f}"),
    ("|dlogp|", "train/rollout_logprob_abs_diff", "{:.4f}"),
)


def waits_for(values: Mapping[str, float]) -> str:
    """In plain words, what the step waited for most."""
    step = max(values.get("perf/step_seconds", 0.0), 1e-9)
    shares = {
        "generation": values.get("perf/wait_for_rollout_seconds", 0.0) / step,
        "the previous publication": values.get("perf/wait_for_publication_seconds", 0.0) / step,
        "copying weights out": values.get("perf/update_weights_trainer_stall_seconds", 0.0) / step,
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    return f"{name} {share:.0%}" if share >= 0.05 else "nothing (trainer busy)"


@dataclass
class RunConsole:
    """Shows a run. `begin`, then `step` for every step, then `end`; usable as a context manager."""

    title: str
    total_steps: int
    rows: int = 14
    _recent: deque[tuple[int, int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=14))
    _live: Live | None = None
    _accuracy: float | None = None

    def __post_init__(self) -> None:
        self._console = Console(file=sys.stdout, soft_wrap=True)
        self._recent = deque(maxlen=self.rows)

    def begin(self) -> None:
        """Start the live table when standard output is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def say(self, text: str) -> None:
        """Print one line of news with the time of day."""
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False)

    def step(self, step: int, version: int, values: Mapping[str, float]) -> None:
        """Show a finished step."""
        self._recent.append((step, version, values))
        if self._live is not None:
            self._live.update(self._table())
            return
        cells = [f"{label} {self._cell(name, form, values)}" for label, name, form in _COLUMNS if name in values]
        self.say(
            f"step {step + 1}/{self.total_steps} v{version}  " + "  ".join(cells) + f"  waits: {waits_for(values)}"
        )

    def end(self) -> None:
        """Stop the live table; later output is plain."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _cell(self, name: str, form: str, values: Mapping[str, float]) -> str:
        value = values.get(name)
        if value is None:
            return "-"
        return form.format(value * 1000 if name == "replica/pause_seconds" else value)

    def _table(self) -> Table:
        table = Table(title=self.title, expand=False)
        for heading in ("step", "version", *(label for label, _, _ in _COLUMNS), "waits for"):
            table.add_column(heading, justify="right", no_wrap=True)
        for step, version, values in self._recent:
            cells = [self._cell(name, form, values) for _, name, form in _COLUMNS]
            table.add_row(f"{step + 1}/{self.total_steps}", f"v{version}", *cells, waits_for(values))
        return table


@dataclass(frozen=True)
class Summary:
    """`summary.json` of PROTOCOL.md section 5, and the sentences printed at the end."""

    status: str
    steps: int
    seconds: float
    final_version: int
    accuracy_first: float | None
    accuracy_last: float | None
    ledger: Mapping[str, Any]
    run_dir: Path
    reason: str = ""
    lag_mean: float | None = None
    pause_ms: float | None = None
    evaluations_skipped: int = 0

    def to_json(self) -> dict[str, object]:
        """The file's content."""
        return {
            "status": self.status,
            "reason": self.reason,
            "steps": self.steps,
            "eval/accuracy_first": self.accuracy_first,
            "eval/accuracy_last": self.accuracy_last,
            "seconds": round(self.seconds, 3),
            "final_version": self.final_version,
            "ledger": dict(self.ledger),
        }

    def sentences(self) -> list[str]:
        """What happened, in plain words, and where to look."""
        minutes = f"{self.seconds / 60:.1f} minutes" if self.seconds >= 90 else f"{self.seconds:.0f} seconds"
        if self.status == "completed":
            out = [f"Trained {self.steps} steps in {minutes}; the policy is now at version {self.final_version}."]
        else:
            out = [f"The run {self.status} after {self.steps} steps and {minutes}, at version {self.final_version}."]
        if self.reason:
            out.append(f"Reason: {self.reason}")
        if self.accuracy_first is not None and self.accuracy_last is not None:
            out.append(f"Held-out accuracy went from {self.accuracy_first:.2f} to {self.accuracy_last:.2f}.")
        if self.evaluations_skipped:
            out.append(f"{self.evaluations_skipped} evaluation(s) were skipped: evaluations.jsonl has the reasons.")
        if self.lag_mean is not None:
            pause = (
                "" if self.pause_ms is None else f", and an update paused an engine for {self.pause_ms:.0f} ms (median)"
            )
            out.append(f"Samples were {self.lag_mean:.1f} versions old on average when they were trained on{pause}.")
        if self.ledger:
            out.append(f"Prompts: {_ledger_in_words(self.ledger)}.")
        if given_up := self.ledger.get("given_up"):
            out.append(f"{len(given_up)} prompt(s) failed every time and were given up: summary.json lists them.")
        out.append(f"Look at {self.run_dir}: metrics.jsonl, events.jsonl, summary.json, config.yaml, logs/.")
        out.append(f"Charts: tensorboard --logdir {self.run_dir / 'tensorboard'}")
        return out


def _ledger_in_words(totals: Mapping[str, Any]) -> str:
    """`generated 70 = trained 64 + queued 2 + dropped 3 (stopped 3) + in flight 1`."""
    dropped: Mapping[str, int] = totals["dropped"]
    reasons = f" ({', '.join(f'{reason} {n}' for reason, n in dropped.items())})" if dropped else ""
    return (
        f"generated {totals['generated']} = trained {totals['trained']} + queued {totals['queued']} + "
        f"dropped {sum(dropped.values())}{reasons} + in flight {totals['in_flight']}"
    )
