"""Accuracy on held-out prompts, at a policy version that is known."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from miles_disagg.domain.errors import DeadlineExceeded, MilesDisaggError, WeightVersionGone
from miles_disagg.domain.samples import Prompt, Sample
from miles_disagg.domain.versions import Constraint
from miles_disagg.prompts.base import Reward
from miles_disagg.rollout.base import GenerationClient, SamplingOptions


@dataclass(frozen=True)
class Evaluation:
    """accuracy: mean reward over the answered prompts. versions: samples by the oldest version that wrote them.

    failures: prompts without an answer, by error; they are not in the mean, so look at them. num_gone: those among them
    that came too late for an exact version.
    """

    accuracy: float
    num_prompts: int
    num_failed: int
    versions: dict[int, int]
    failures: dict[str, int]
    mean_tokens: float
    seconds: float
    num_gone: int = 0

    @property
    def version(self) -> int:
        """The oldest version that any answer came from: what the accuracy can be claimed for."""
        return min(self.versions)

    def metrics(self) -> dict[str, float]:
        """`eval/*` by their stable names."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/weight_version": float(self.version),
            "eval/seconds": self.seconds,
            "eval/failed": float(self.num_failed),
        }


async def evaluate(
    client: GenerationClient,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    constraint: Constraint,
    reward: Reward,
    *,
    name: str,
    max_concurrent: int = 64,
    timeout: float = 600.0,
) -> Evaluation:
    """Answer every prompt once under `constraint` and score it. Pass `sampling.greedy()` for greedy accuracy.

    `name` makes request ids unique to this evaluation (for instance the run and the step). DeadlineExceeded after
    `timeout` seconds; a MilesDisaggError when nothing at all was answered.
    """
    if not prompts:
        raise ValueError("nothing to evaluate: the held-out set is empty")
    gone = 0
    slots, failures, begin = asyncio.Semaphore(max_concurrent), Counter[str](), time.monotonic()

    async def one(i: int, prompt: Prompt) -> tuple[Sample, float] | None:
        nonlocal gone
        async with slots:
            sample_id = f"eval-{name}/{i}"
            try:
                sample = await client.generate(
                    prompt, sampling, constraint, sample_id=sample_id, group_id=f"eval-{name}", rid=sample_id
                )
                return sample, await reward(sample)
            except MilesDisaggError as error:
                gone += isinstance(error, WeightVersionGone)
                failures[f"{type(error).__name__}: {error}"] += 1
                return None

    try:
        async with asyncio.timeout(timeout):
            results = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
    except TimeoutError:
        raise DeadlineExceeded(f"evaluation {name} of {len(prompts)} prompts under {constraint}", timeout) from None
    scored = [r for r in results if r is not None]
    if not scored and gone and constraint.exact_version is not None:
        raise WeightVersionGone(constraint.exact_version, None)
    if not scored:
        raise MilesDisaggError(
            f"evaluation {name}: none of {len(prompts)} prompts was answered: {next(iter(failures))}"
        )
    return Evaluation(
        accuracy=sum(r for _, r in scored) / len(scored),
        num_prompts=len(prompts),
        num_failed=len(prompts) - len(scored),
        versions=dict(Counter(s.oldest_version for s, _ in scored)),
        failures=dict(failures),
        mean_tokens=sum(len(s.tokens) for s, _ in scored) / len(scored),
        seconds=time.monotonic() - begin,
        num_gone=gone,
    )
