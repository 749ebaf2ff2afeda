"""Partial rollouts: a generation that was interrupted goes on later, on its own tokens.

What ends a generation early is the engine (a weight update in mode `abort`); its tokens so far become the prompt of the
next request, and every token keeps the version and logprob it was written with. Requests are `pool`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import Prompt, Sample
from miles_disagg.domain.versions import Constraint, TokenSpan, normalise_spans
from miles_disagg.rollout.base import GenerationClient, Interrupted, SamplingOptions

_FRUITLESS = 100  # interruptions in a row before any token, until it is a fault like another


class ContinuingClient:
    """A `GenerationClient` over another one that continues what is interrupted. Exact versions are not continued."""

    def __init__(self, client: GenerationClient):
        self._client = client

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
        """See `GenerationClient.generate`."""
        parts: list[Sample] = []
        legs = fruitless = 0
        while True:
            tokens = tuple(t for part in parts for t in part.tokens)
            try:
                last = await self._client.generate(
                    dataclasses.replace(prompt, tokens=(*prompt.tokens, *tokens)),
                    dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(tokens)),
                    constraint,
                    sample_id=sample_id,
                    group_id=group_id,
                    rid=rid if legs == 0 else f"{rid}-part{legs}",
                    session_id=session_id,
                    seed=None if seed is None else (seed + legs) & 0x7FFFFFFF,
                )
                return joined(prompt, [*parts, last])
            except SampleRejected as error:
                if error.reason != "aborted" or constraint.exact_version is not None or fruitless >= _FRUITLESS:
                    raise
                legs += 1
                if not isinstance(error, Interrupted):
                    fruitless += 1
                    continue
                fruitless = 0
                parts.append(error.partial)
                if len(tokens) + len(error.partial.tokens) >= sampling.max_new_tokens:
                    return dataclasses.replace(joined(prompt, parts), finish_reason="length")


def joined(prompt: Prompt, parts: Sequence[Sample]) -> Sample:
    """One sample of the parts, in order."""
    if len(parts) == 1:
        return dataclasses.replace(parts[0], prompt=prompt)
    spans: list[TokenSpan] = []
    begin = 0
    for part in parts:
        spans += [TokenSpan(begin + s.first_token, s.version) for s in part.spans]
        begin += len(part.tokens)
    first, last = parts[0], parts[-1]
    seconds = {name: sum(p.timings.get(name, 0.0) for p in parts) for name in ("queue", "generate")}
    return dataclasses.replace(
        last,
        prompt=prompt,
        tokens=tuple(t for p in parts for t in p.tokens),
        logprobs=tuple(x for p in parts for x in p.logprobs),
        text="".join(p.text for p in parts),
        version_start=first.version_start,
        spans=normalise_spans(spans, begin),
        timings={**last.timings, **seconds, "submitted": first.timings.get("submitted", 0.0)},
        metadata={**last.metadata, "parts": len(parts)},
    )


def only_newest(sample: Sample) -> Sample:
    """The sample with every token masked that an older version wrote than its last one."""
    written, mask = sample.token_versions(), sample.loss_mask or (1,) * len(sample.tokens)
    newest = written[-1]
    kept = tuple(m if v == newest else 0 for m, v in zip(mask, written, strict=True))
    return sample if kept == mask else dataclasses.replace(sample, loss_mask=kept)
