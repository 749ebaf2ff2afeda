"""Prompts, samples, groups and sources made up for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_disagg.domain.samples import Prompt, Sample, SampleGroup
from miles_disagg.domain.versions import TokenSpan


def make_prompt(index: int = 0, epoch: int = 0, label: str | None = "7") -> Prompt:
    return Prompt(index, epoch, f"{index}+0=", (1, 2, 3), label)


def make_sample(
    prompt: Prompt | None = None, version: int = 0, *, text: str = "7", index: int = 0, **changes
) -> Sample:
    prompt = prompt or make_prompt()
    values: dict[str, Any] = {
        "sample_id": f"{prompt.key}#1/{index}",
        "group_id": f"{prompt.key}#1",
        "prompt": prompt,
        "tokens": (5, 6),
        "logprobs": (-0.1, -0.2),
        "text": text,
        "finish_reason": "stop",
        "version_start": version,
        "version_end": version,
        "spans": (TokenSpan(0, version),),
        "replica_id": "r0",
        "reward": 1.0,
    }
    return Sample(**{**values, **changes})


def make_group(index: int = 0, version: int = 0, n: int = 2, epoch: int = 0) -> SampleGroup:
    prompt = make_prompt(index, epoch)
    samples = tuple(make_sample(prompt, version, index=i) for i in range(n))
    return SampleGroup(f"{prompt.key}#1", prompt, samples)


class CountingSource:
    """Prompts 0, 1, 2, ... up to `limit` (None: without end)."""

    def __init__(self, limit: int | None = None):
        self.limit, self.next = limit, 0

    def next_prompt(self) -> Prompt | None:
        if self.limit is not None and self.next >= self.limit:
            return None
        self.next += 1
        return make_prompt(self.next - 1)

    def prompt(self, key: str) -> Prompt:
        return make_prompt(int(key.partition(":")[2]))

    def state(self) -> Mapping[str, Any]:
        return {"next": self.next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]
