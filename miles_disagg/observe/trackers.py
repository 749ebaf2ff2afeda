"""Where step metrics go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for.

Metric names are declared in `metrics`; this module only carries them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miles_disagg.domain.errors import ConfigError
from miles_disagg.observe.metrics import check_declared


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at `step`."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class JsonlTracker:
    """`metrics.jsonl`: one object a step with `step`, `time` and metrics by name (PROTOCOL.md section 5)."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; a non-finite number is written as null so that every line is strict JSON."""
        row = {k: (v if not isinstance(v, float) or math.isfinite(v) else None) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars below `<run-dir>/tensorboard`."""

    def __init__(self, directory: Path):
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, counts: Mapping[int, int]) -> None:
        """Add a distribution of whole numbers."""
        self._writer.add_histogram(name, np.repeat(list(counts), list(counts.values())), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases; offline when no API key is set."""

    def __init__(self, directory: Path, run_id: str, config: Mapping[str, Any]):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(["--use-wandb: wandb is not installed; pip install 'miles-disagg[wandb]'"]) from None
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(project="miles-disagg", name=run_id, dir=str(directory), config=dict(config), mode=mode)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackers:
    """Fans metrics out to every tracker, after checking that each name is declared."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = list(trackers)

    def log(
        self, step: int, version: int, values: Mapping[str, float], histograms: Mapping[str, Mapping[int, int]] = {}
    ) -> None:
        """Record one step's metrics; `version` is the trainer's policy version after the step.

        histograms: counts by whole number, for the trackers that can hold them (metrics.jsonl and TensorBoard).
        """
        check_declared({**values, **histograms})
        for tracker in self._trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.log(step, {"weight_version": version, **values, **histograms})
            else:
                tracker.log(step, values)
            if isinstance(tracker, TensorBoardTracker):
                for name, counts in histograms.items():
                    tracker.histogram(step, name, counts)

    def close(self) -> None:
        """Close every tracker."""
        for tracker in self._trackers:
            tracker.close()
