"""Prompts, samples and groups, with the versions that wrote them.

Plain data that crosses process boundaries. How samples are made is `rollout`; how they are consumed is `trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_disagg.domain.versions import TokenSpan, token_versions

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One entry of a data set, tokenized. `index` is its position in the source, `epoch` counts passes over it."""

    index: int
    epoch: int
    text: str
    tokens: tuple[int, ...]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Stable ledger key: `epoch:index`."""
        return f"{self.epoch}:{self.index}"


@dataclass(frozen=True)
class Sample:
    """One completed generation, attributed token by token.

    tokens: response token ids, length n. logprobs: log-probability of each token under the policy version that
    wrote it (behaviour policy), length n, natural log. spans: which version wrote which tokens, covering [0, n).
    loss_mask: 1 for tokens the policy wrote and is trained on, length n (None: all ones).
    teacher_logprobs, reference_logprobs: of each token under the teacher of a distillation and under a served
    reference, length n (None: nobody was asked).
    timings: seconds by name (`queue`, `generate`, `reward`) and `submitted`/`finished` as Unix times.
    """

    sample_id: str
    group_id: str
    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    version_start: int
    version_end: int
    spans: tuple[TokenSpan, ...]
    replica_id: str
    reward: float | None = None
    loss_mask: tuple[int, ...] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    teacher_logprobs: tuple[float, ...] | None = None
    reference_logprobs: tuple[float, ...] | None = None

    @property
    def oldest_version(self) -> int:
        """The oldest version among this sample's tokens (its start version if it has none)."""
        return min((s.version for s in self.spans), default=self.version_start)

    def lag(self, trainer_version: int) -> int:
        """Trainer's version minus the oldest version among the tokens, when consumed at `trainer_version`."""
        return trainer_version - self.oldest_version

    def token_versions(self) -> list[int]:
        """Version of every response token, length n."""
        return token_versions(self.spans, len(self.tokens))


@dataclass(frozen=True)
class SampleGroup:
    """The `n_samples_per_prompt` samples of one prompt; the unit of admission to the buffer and of advantages."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int:
        """The oldest version among all tokens of the group."""
        return min(s.oldest_version for s in self.samples)

    def lag(self, trainer_version: int) -> int:
        """Largest lag of any token in the group at `trainer_version`."""
        return trainer_version - self.oldest_version

    @property
    def rewards(self) -> list[float]:
        """Rewards in sample order; a sample without one is an error upstream, so this raises."""
        out = []
        for sample in self.samples:
            if sample.reward is None:
                raise ValueError(f"sample {sample.sample_id} has no reward")
            out.append(sample.reward)
        return out


def flatten(groups: Sequence[SampleGroup]) -> list[Sample]:
    """Samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]
