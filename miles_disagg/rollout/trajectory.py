"""What a plugged-in generate function works on: one sample that grows turn by turn, as token ids.

The policy's tokens go out and come back as ids, never as text, so nothing is tokenized twice and the logprobs belong to
exactly the tokens that are trained on. What the environment adds is masked. One request is `pool`'s; examples are in
`examples/`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import FinishReason, Prompt, Sample
from miles_disagg.domain.versions import Constraint, TokenSpan, normalise_spans
from miles_disagg.rollout.base import GenerationClient, SamplingOptions


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn. finish_reason: `stop` (its end, or a stop string) or `length`."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Request:
    """What stays the same over a sample's turns."""

    constraint: Constraint
    sample_id: str
    group_id: str
    rid: str
    seed: int | None


class Trajectory:
    """One sample under construction.

    prompt, sampling: what the sample is made from; `sampling.max_new_tokens` bounds the whole response, with what the
    environment adds. metadata: whatever the function wants to keep with the sample (JSON-able).
    """

    def __init__(
        self, client: GenerationClient, tokenizer: Any, prompt: Prompt, sampling: SamplingOptions, request: _Request
    ):
        self.prompt, self.sampling, self.tokenizer = prompt, sampling, tokenizer
        self.metadata: dict[str, Any] = {}
        self.turns: list[Turn] = []
        self._client, self._request = client, request
        self._samples: list[Sample] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[int] = []
        self._text: list[str] = []
        self._spans: list[TokenSpan] = []
        self._finish: FinishReason | None = None  # where it is not the last turn's
        self._submitted = time.time()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Response tokens so far, the environment's included."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """The response so far."""
        return "".join(self._text)

    @property
    def seed(self) -> int | None:
        """This sample's own seed, made of --rollout-seed and its name."""
        return self._request.seed

    @property
    def remaining(self) -> int:
        """Tokens that the response may still get."""
        return self.sampling.max_new_tokens - len(self._tokens)

    async def generate(
        self, *, max_new_tokens: int | None = None, stop: Sequence[str] | None = None, ignore_eos: bool = False
    ) -> Turn:
        """Let the policy go on. `stop` replaces the run's stop strings for this turn; `ignore_eos`: only length ends
        it.

        SampleRejected when nothing remains to be written, or the answer is unusable; errors of the endpoint pass.
        """
        room = min(self.remaining, max_new_tokens or self.remaining)
        if room < 1:
            raise SampleRejected("no_room", f"all {self.sampling.max_new_tokens} tokens of the response are used")
        sampling = dataclasses.replace(self.sampling, max_new_tokens=room, ignore_eos=ignore_eos)
        if stop is not None:
            sampling = dataclasses.replace(sampling, stop=tuple(stop))
        ask, number = self._request, len(self.turns)
        sample = await self._client.generate(
            dataclasses.replace(self.prompt, tokens=(*self.prompt.tokens, *self._tokens)),
            sampling,
            ask.constraint,
            sample_id=ask.sample_id,
            group_id=ask.group_id,
            rid=ask.rid if number == 0 else f"{ask.rid}-turn{number}",
            session_id=ask.rid,
            seed=ask.seed if ask.seed is None else (ask.seed + number) & 0x7FFFFFFF,
        )
        begin = len(self._tokens)
        self._spans += [TokenSpan(begin + s.first_token, s.version) for s in sample.spans]
        self._add(sample.tokens, sample.text, 1, sample.logprobs)
        self._samples.append(sample)
        turn = Turn(sample.tokens, sample.text, sample.finish_reason)
        self.turns.append(turn)
        return turn

    def append(self, tokens: Sequence[int], text: str) -> None:
        """Add what the environment says (a tool's result): never trained on. ValueError if it does not fit."""
        if len(tokens) > self.remaining:
            raise ValueError(f"{len(tokens)} tokens do not fit, {self.remaining} remain: look at `remaining` first")
        self._add(tokens, text, 0, [0.0] * len(tokens))

    def append_text(self, text: str) -> bool:
        """`append` text of the environment; False, and nothing added, if it does not leave room for one more token."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= self.remaining:
            return False
        self.append(tokens, text)
        return True

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens of the response, at least one; the sample then ends with reason `stop`."""
        if not 1 <= n <= len(self._tokens):
            raise ValueError(f"cannot keep {n} of {len(self._tokens)} tokens")
        del self._tokens[n:], self._logprobs[n:], self._mask[n:]
        kept = self.tokenizer.decode(self._tokens, skip_special_tokens=self.sampling.skip_special_tokens)
        self._text, self._finish = [kept], "stop"
        self._spans = [s for s in self._spans if s.first_token < n]

    def _add(self, tokens: Sequence[int], text: str, mask: int, logprobs: Sequence[float]) -> None:
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._mask.extend([mask] * len(tokens))
        self._text.append(text)

    def sample(self) -> Sample:
        """The finished sample. SampleRejected if the policy wrote nothing.

        The environment's tokens count as written by the version of the turn before them.
        """
        if not self._samples:
            raise SampleRejected("empty_completion", "the generate function never called trajectory.generate()")
        last = self._samples[-1]
        first = TokenSpan(0, self._spans[0].version)  # also for what the environment said before the first turn
        spans = normalise_spans([first, *self._spans[1:]], len(self._tokens))
        now = time.time()
        return Sample(
            sample_id=last.sample_id,
            group_id=last.group_id,
            prompt=self.prompt,
            tokens=self.tokens,
            logprobs=tuple(self._logprobs),
            text=self.text,
            finish_reason=self._finish or last.finish_reason,
            version_start=first.version,
            version_end=max(s.version for s in spans),
            spans=spans,
            replica_id=last.replica_id,
            loss_mask=None if all(self._mask) else tuple(self._mask),
            timings={
                "submitted": self._submitted,
                "finished": now,
                "queue": sum(s.timings.get("queue", 0.0) for s in self._samples),
                "generate": sum(s.timings.get("generate", 0.0) for s in self._samples),
            },
            metadata={**last.metadata, **self.metadata},
        )


GenerateFunction = Callable[[Trajectory], Awaitable[None]]
"""What --custom-generate-function-path names: builds one sample by calling the trajectory's methods."""


class PluggedClient:
    """A `GenerationClient` that makes each sample with a generate function over another client."""

    def __init__(self, client: GenerationClient, function: GenerateFunction, tokenizer: Any):
        self._client, self._function, self._tokenizer = client, function, tokenizer
        self._name = getattr(function, "__qualname__", type(function).__name__)

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
        """See `GenerationClient.generate`. Whatever the function raises by itself is a SampleRejected that names it."""
        request = _Request(constraint, sample_id, group_id, rid, seed)
        trajectory = Trajectory(self._client, self._tokenizer, prompt, sampling, request)
        try:
            await self._function(trajectory)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            detail = f"{self._name} raised {type(error).__name__}: {error}"
            raise SampleRejected("generate_function_error", detail) from error
        return trajectory.sample()
