"""Frozen servers that say how likely each sampled token is to them: teachers of a distillation, the KL's reference.

Any server that speaks SGLang's `/generate` (SGLang itself, the embedded engine); nothing is ever written to it. What
the logprobs do to advantages and loss is `trainer.losses`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from miles_disagg.domain.errors import SampleRejected
from miles_disagg.domain.samples import Prompt, Sample
from miles_disagg.domain.versions import Constraint
from miles_disagg.rollout.base import GenerationClient, SamplingOptions

_PAUSE = 0.5  # seconds before one whose connection is lost is asked again
_PROBES = 256  # tokens of the vocabulary, evenly spread, that a teacher must tokenize as the policy does


@dataclass(frozen=True)
class TeacherSpec:
    """urls: by name, `default` for samples that name none. key: of the prompt's metadata with the name (None: any of
    the urls, in turn: they serve one model). timeout: s. role: what it is to the run; the flags are for messages."""

    urls: Mapping[str, str]
    key: str | None
    timeout: float
    role: Literal["teacher", "reference"] = "teacher"
    flag: str = "--opd-teacher-urls"
    timeout_flag: str = "--opd-timeout"


class Teachers:
    """Asks for the logprobs of given tokens. Close it, or use it as an async context manager."""

    def __init__(self, spec: TeacherSpec):
        self._spec = spec
        self._turns = itertools.cycle(spec.urls.values())
        self._session: aiohttp.ClientSession | None = None

    @property
    def role(self) -> str:
        """What they are to the run."""
        return self._spec.role

    async def __aenter__(self) -> Teachers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def check(self, tokenizer: Any) -> list[str]:
        """Problems, by URL: a teacher that does not answer, or that does not tokenize as `tokenizer` does.

        A token means something to both only if both have the same vocabulary, so a text of tokens from all over the
        policy's vocabulary is sent, and the ids that the teacher makes of it are compared.
        """
        size = max(tokenizer.get_vocab().values()) + 1
        ids = sorted({i * (size - 1) // max(1, _PROBES - 1) for i in range(_PROBES)})
        text = "".join(tokenizer.decode([i], skip_special_tokens=True) for i in ids)
        ours, problems = list(tokenizer.encode(text)), []
        for url in self._spec.urls.values():
            try:
                pairs = await self._ask(url, {"text": text})
            except SampleRejected as error:
                problems.append(f"{self._spec.flag} {url}: {error.detail}")
                continue
            theirs = [token for _, token in pairs]
            if (at := _differ_at(ours, theirs)) is not None:
                problems.append(
                    f"{self._spec.flag} {url}: the {self._spec.role} has another vocabulary (of "
                    f"{len(ours)} tokens of a test text, number "
                    f"{at} is {ours[at : at + 1]} here and {theirs[at : at + 1]} there); serve a model with the "
                    "tokenizer of --hf-checkpoint"
                )
        return problems

    async def logprobs(self, prompt: Prompt, tokens: Sequence[int]) -> tuple[float, ...]:
        """Natural log-probability of each of `tokens` after the prompt and those before it, at temperature 1.

        SampleRejected (the role) for one that does not answer so, or that nobody gave. One whose connection is lost
        is asked again until the timeout: it may be on its way back.
        """
        if not tokens:
            return ()
        url, role = self._url(prompt), self._spec.role
        sent = [*prompt.tokens, *tokens]
        pairs = await self._ask(url, {"input_ids": sent}, patient=True)
        if _differ_at(sent, [token for _, token in pairs]) is not None:
            raise SampleRejected(role, f"{url} scored other tokens than it was given")
        out = tuple(logprob for logprob, _ in pairs[len(prompt.tokens) :])
        if not all(logprob is not None and math.isfinite(logprob) for logprob in out):
            raise SampleRejected(role, f"{url} gave a logprob that is missing or not finite")
        return out  # pyright: ignore[reportReturnType]

    def _url(self, prompt: Prompt) -> str:
        if self._spec.key is None:
            return next(self._turns)
        name = str(prompt.metadata.get(self._spec.key, "default"))
        url = self._spec.urls.get(name, self._spec.urls.get("default"))
        if url is None:
            raise SampleRejected("teacher", f"prompt {prompt.key} wants teacher {name!r}, and there is no `default`")
        return url

    async def _ask(
        self, url: str, given: Mapping[str, Any], *, patient: bool = False
    ) -> list[tuple[float | None, int]]:
        """(logprob, id) of every token that was sent; the first has no logprob. patient: wait for one that is gone."""
        body = {
            **given,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        role, last = self._spec.role, ""
        try:
            async with asyncio.timeout(self._spec.timeout):
                while True:
                    try:
                        answer = await self._post(url, body)
                        break
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                        if not patient:
                            raise
                        last = f"; last: {type(error).__name__}: {error}"
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            waited = self._spec.timeout
            flag = self._spec.timeout_flag
            raise SampleRejected(role, f"{url} gave no answer within {waited:g} s ({flag}){last}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise SampleRejected(role, f"{url}: {type(error).__name__}: {error}") from error
        try:
            return [(entry[0], int(entry[1])) for entry in answer["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise SampleRejected(role, f"{url}: no meta_info.input_token_logprobs in its answer") from error

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        async with self._session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                detail = (await response.text())[:200]
                raise SampleRejected(self._spec.role, f"{url} answered {response.status}: {detail}")
            return await response.json()


def _differ_at(sent: Sequence[int], scored: Sequence[int]) -> int | None:
    """The first place where a teacher scored another token than it was sent; None where it scored what was sent.

    SGLang writes 0 for the last id of its vocabulary (and for ids beyond it, which stand for images); that id can only
    be the largest that was sent.
    """
    largest = max(sent, default=0)
    for i, (ours, theirs) in enumerate(zip(sent, scored, strict=False)):
        if theirs != ours and not (theirs == 0 and ours == largest):
            return i
    return None if len(sent) == len(scored) else min(len(sent), len(scored))


class TaughtClient:
    """A `GenerationClient` whose samples come with the logprobs of their tokens under each of `scorers`."""

    def __init__(self, client: GenerationClient, *scorers: Teachers):
        self._client, self._scorers = client, scorers

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
        """See `GenerationClient.generate`. SampleRejected (`teacher`, `reference`) where one does not answer."""
        sample = await self._client.generate(
            prompt, sampling, constraint, sample_id=sample_id, group_id=group_id, rid=rid, session_id=session_id,
            seed=seed,
        )  # fmt: skip
        found = await asyncio.gather(*(scorer.logprobs(prompt, sample.tokens) for scorer in self._scorers))
        named = {f"{scorer.role}_logprobs": values for scorer, values in zip(self._scorers, found, strict=True)}
        return dataclasses.replace(sample, **named)
