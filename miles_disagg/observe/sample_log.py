"""The consumed samples of each step in `<run-dir>/samples/`, for reading: text, reward, and who wrote what when.

Token ids and logprobs stay out: they are large, and a checkpoint's buffer snapshot keeps those that matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_disagg.domain.samples import Sample, SampleGroup


class SampleLog:
    """Writes `step_000001.jsonl` (1-based), one JSON object a sample."""

    def __init__(self, directory: Path):
        self._directory = directory

    def write(self, step: int, groups: Sequence[SampleGroup], trainer_version: int) -> None:
        """Write the batch that `step` (0-based) consumed while the trainer was at `trainer_version`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(_row(sample, trainer_version)) for group in groups for sample in group.samples]
        (self._directory / f"step_{step + 1:06d}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(sample: Sample, trainer_version: int) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_key": sample.prompt.key,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "label": sample.prompt.label,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "response_tokens": len(sample.tokens),
        "weight_version_start": sample.version_start,
        "weight_version_end": sample.version_end,
        "weight_version_spans": [[span.first_token, span.version] for span in sample.spans],
        "lag": sample.lag(trainer_version),
        "replica_id": sample.replica_id,
        "timings": dict(sample.timings),
    }
