"""Rollout and evaluation loggers: the best answer of each step, and every evaluation, as lines of text.

`--custom-rollout-log-function-path examples.log.best_answer`
`--custom-eval-rollout-log-function-path examples.log.evaluation`
"""

from collections.abc import Mapping
from pathlib import Path

from miles_disagg.buffer.base import Batch
from miles_disagg.domain.samples import flatten


def best_answer(step: int, batch: Batch, metrics: Mapping[str, float], run_dir: Path) -> None:
    """Called by the driver after each step with what was trained on and what was logged."""
    best = max(flatten(batch.groups), key=lambda sample: sample.reward or 0.0)
    line = f"step {step}, {metrics['rollout/reward_mean']:.2f} on average: {best.prompt.text!r} {best.text!r}"
    _append(run_dir / "best_answers.txt", line)


def evaluation(step: int, version: int, metrics: Mapping[str, float], run_dir: Path) -> None:
    """Called by the driver when an evaluation is finished; `step` and `version` are those it belongs to."""
    _append(run_dir / "evaluations.txt", f"step {step}, version {version}: {metrics['eval/accuracy']:.2f}")


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
