"""Options and ports of the rollout side.

`pool` speaks HTTP to the gateway, `pacing` decides how much may be started, `producer` keeps it in flight, `evaluate`
measures. Prompts and rewards are `prompts`, the queue is `buffer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import Prompt, Sample, SampleGroup
from miles_disagg.domain.versions import Constraint


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn, in SGLang's terms. `seed`: when given, every sample draws from its own seed made of it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None

    def to_json(self, seed: int | None = None) -> dict[str, Any]:
        """SGLang's `sampling_params`; `seed` is the sample's own."""
        out: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "skip_special_tokens": self.skip_special_tokens,
        }
        if self.stop:
            out["stop"] = list(self.stop)
        if self.stop_token_ids:
            out["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            out["ignore_eos"] = True
        if seed is not None:
            out["sampling_seed"] = seed
        return out

    def greedy(self) -> SamplingOptions:
        """The same limits, always the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, seed=None)


@dataclass(frozen=True)
class RolloutOptions:
    """What the producer keeps in flight.

    batch_groups: prompts of one optimizer step. max_staleness: K, in versions (None: unbounded).
    groups_per_version: groups consumed between two published versions (batch_groups x update interval).
    max_concurrent_samples: bound on samples in flight. granularity: start a group when all of its samples fit
    (`group`) or when the next one does (`sample`). sample_attempts: generations tried for one sample before its group
    is given up. prompt_attempts: groups of one prompt that fail before it is skipped for good and listed.
    unused: whether a stale group's prompt is handed out again. failed_sample: what a sample that failed for good does
    to its group. over_sampling_groups: groups started for one batch under the synchronous schedule (0: batch_groups).
    partial: what is left of them goes on and counts for the next batch, instead of being ended. mask_old: train only
    on the tokens that a sample's last version wrote. put_timeout: seconds that a full buffer is waited for before
    production ends with an error.
    """

    batch_groups: int
    n_samples_per_prompt: int
    max_concurrent_samples: int
    max_staleness: int | None = 1
    groups_per_version: int = 0
    granularity: Literal["sample", "group"] = "group"
    sample_attempts: int = 3
    prompt_attempts: int = 3
    unused: Literal["drop", "retry"] = "drop"
    failed_sample: Literal["drop_group", "shrink_group"] = "drop_group"
    over_sampling_groups: int = 0
    partial: bool = False
    mask_old: bool = False
    put_timeout: float = 3600.0

    def __post_init__(self) -> None:
        if self.groups_per_version == 0:
            object.__setattr__(self, "groups_per_version", self.batch_groups)
        for name in ("batch_groups", "n_samples_per_prompt", "sample_attempts", "prompt_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.over_sampling_groups == 0:
            object.__setattr__(self, "over_sampling_groups", self.batch_groups)
        if self.over_sampling_groups < self.batch_groups:
            raise ValueError(
                f"--over-sampling-batch-size {self.over_sampling_groups} is less than one batch of {self.batch_groups}"
            )
        if self.groups_per_version < self.batch_groups:
            raise ValueError(
                f"groups_per_version {self.groups_per_version} is less than one batch of {self.batch_groups}"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"--max-weight-staleness must be 0 or more, got {self.max_staleness}")
        least = self.n_samples_per_prompt if self.granularity == "group" else 1
        if self.max_concurrent_samples < least:
            raise ValueError(
                f"--async-max-concurrent-samples {self.max_concurrent_samples} is less than the {least} that "
                f"--rollout-submission-granularity {self.granularity} starts at once"
            )


class Interrupted(SampleRejected):
    """The engine ended a generation early; `partial` is what there is (at least one token, finish reason `abort`)."""

    def __init__(self, partial: Sample, detail: str):
        self.partial = partial
        super().__init__("aborted", detail)


class GenerationClient(Protocol):
    """Turns a prompt into a sample."""

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingOptions,
        constraint: Constraint,
        *,
        sample_id: str,
        group_id: str,
        rid: str,
        session_id: str | None = None,
        seed: int | None = None,
    ) -> Sample:
        """One attributed sample without reward. SampleRejected, DeadlineExceeded or RequestError when there is none."""
        ...


GroupFilter = Callable[[SampleGroup], str | None]
"""A reason to drop a scored group (dynamic sampling), or None to keep it."""
