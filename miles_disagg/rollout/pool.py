"""HTTP client of the one rollout endpoint: a request under a version constraint in, an attributed sample out.

Refusals are waited out here (409, 429, 503 by Retry-After, a lost connection by backing off), always under the same
request id, so that no answer is counted twice. Whether a failed sample is tried anew is the producer's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp

from miles_disagg.domain.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestError,
    SampleRejected,
    WeightVersionGone,
)
from miles_disagg.domain.samples import FinishReason, Prompt, Sample
from miles_disagg.domain.versions import Constraint, TokenSpan, normalise_spans
from miles_disagg.rollout.base import Interrupted, SamplingOptions

_RETRIED = {409, 429, 502, 503, 504}
_MAX_PAUSE = 10.0


class RolloutClient:
    """Generates through one gateway (or replica) URL. `timeout`: overall seconds for one sample, refusals included.
    run_id: the only run whose samples are wanted; a service may still be at an earlier one.

    Close it (or use it as an async context manager). Connections are not limited: the producer bounds that.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        least_pause: float = 0.05,
        run_id: str | None = None,
    ):
        self.url = url.rstrip("/")
        self._timeout, self._least_pause = timeout, least_pause
        self._run_id = run_id
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if run_id is not None:
            self._headers["x-run-id"] = run_id
        self._session: aiohttp.ClientSession | None = None
        self.refusals = 0

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; a request in flight is cut off (its engine is freed)."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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
        """One sample of `prompt` under `constraint`, without reward.

        SampleRejected names what is wrong with an answer; WeightVersionGone and InvalidRequest are final;
        DeadlineExceeded says what the endpoint last answered.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt.tokens),
            "sampling_params": sampling.to_json(seed),
            "return_logprob": True,
            "rid": rid,
        }
        if (wanted := constraint.to_json()) is not None:
            body["weight_version"] = wanted
        headers = {"x-session-id": session_id} if session_id else {}
        submitted, begin = time.time(), time.monotonic()
        answer, generate = await self._post("/generate", body, headers, constraint)
        self._check_run(answer)
        total = time.monotonic() - begin
        timings = {
            "submitted": submitted,
            "finished": submitted + total,
            "queue": max(0.0, total - generate),
            "generate": generate,
        }
        return sample_from_answer(answer, prompt, constraint, sample_id, group_id, timings)

    def _check_run(self, answer: Any) -> None:
        """Versions of different runs have nothing to do with each other, though their numbers may fit."""
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        run = meta.get("run_id") if isinstance(meta, Mapping) else None
        if self._run_id is not None and run not in (None, self._run_id):
            raise SampleRejected("wrong_run", f"asked for run {self._run_id}, answered by run {run}")

    async def server_info(self) -> dict[str, Any]:
        """`GET /server_info` of the endpoint."""
        async with self._open().get(f"{self.url}/server_info", timeout=aiohttp.ClientTimeout(total=30)) as response:
            response.raise_for_status()
            return await response.json()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            )
        return self._session

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], constraint: Constraint
    ) -> tuple[Any, float]:
        """The answer and the seconds that the last, successful request took."""
        last, pause = "no answer yet", self._least_pause
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    begin = time.monotonic()
                    try:
                        async with self._open().post(self.url + path, json=body, headers=headers) as response:
                            if response.status == 200:
                                return await response.json(), time.monotonic() - begin
                            error = await _error_of(response)
                            last = f"{response.status} {error[0]}: {error[1]}"
                            if response.status not in _RETRIED:
                                raise _final(response.status, *error, constraint)
                            wait = _retry_after(response, pause)
                    except (aiohttp.ContentTypeError, ValueError) as error:
                        raise SampleRejected("malformed_answer", str(error)) from error
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                        last, wait = f"{type(error).__name__} {error}", pause
                    self.refusals += 1
                    await asyncio.sleep(wait)
                    pause = min(_MAX_PAUSE, pause * 1.5)
        except TimeoutError:
            raise DeadlineExceeded(
                f"a sample of {constraint} from {self.url}", self._timeout, f"last: {last}"
            ) from None


async def _error_of(response: aiohttp.ClientResponse) -> tuple[str, str]:
    """`(error.type, message)` of an error body, whatever it looks like."""
    text = await response.text()
    try:
        error = (await response.json(content_type=None))["error"]
        return str(error.get("type", "unknown")), str(error.get("message", text))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "unknown", text[:300]


def _retry_after(response: aiohttp.ClientResponse, pause: float) -> float:
    try:
        return min(_MAX_PAUSE, max(float(response.headers["Retry-After"]), 0.01))
    except (KeyError, ValueError):
        return pause


def _final(status: int, kind: str, message: str, constraint: Constraint) -> RequestError:
    if status == 410 and constraint.exact_version is not None:
        return WeightVersionGone(constraint.exact_version, None)
    return InvalidRequest(f"the rollout endpoint answered {status} {kind}: {message}")


def sample_from_answer(
    answer: Any, prompt: Prompt, constraint: Constraint, sample_id: str, group_id: str, timings: Mapping[str, float]
) -> Sample:
    """Check an answer of `/generate` (PROTOCOL 2) field by field, make it a Sample. SampleRejected names the fault."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("meta_info"), Mapping):
        raise SampleRejected("malformed_answer", "no meta_info")
    meta = answer["meta_info"]
    finish = (meta.get("finish_reason") or {}).get("type")
    ended = str(meta["finish_reason"].get("message", "the engine ended it")) if finish == "abort" else ""
    if finish == "abort" and not meta.get("output_token_logprobs"):
        raise SampleRejected("aborted", ended)
    tokens, logprobs = _tokens_and_logprobs(answer, meta)
    if finish not in ("stop", "length", "abort"):
        raise SampleRejected("malformed_answer", f"meta_info.finish_reason is {meta.get('finish_reason')!r}")
    if not tokens:
        raise SampleRejected("empty_completion", "no output token")
    spans = _spans(meta, len(tokens))
    for span in spans:
        if not constraint.satisfied_by(span.version):
            raise SampleRejected(
                "wrong_version", f"asked for {constraint}, token {span.first_token} is by {span.version}"
            )
    sample = Sample(
        sample_id=sample_id,
        group_id=group_id,
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        text=str(answer.get("text", "")),
        finish_reason=cast(FinishReason, finish),
        version_start=spans[0].version,
        version_end=spans[-1].version,
        spans=spans,
        replica_id=str(meta.get("replica_id", "")),
        timings=dict(timings),
    )
    if finish == "abort":
        raise Interrupted(sample, ended)
    return sample


def _tokens_and_logprobs(
    answer: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and behaviour logprobs, equally long, finite, never above zero."""
    pairs = meta.get("output_token_logprobs")
    ids = answer.get("output_ids")
    if not isinstance(pairs, Sequence) or (not pairs and ids):
        raise SampleRejected("missing_logprobs", "meta_info.output_token_logprobs is missing")
    tokens: list[int] = []
    logprobs: list[float] = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or len(pair) < 2 or pair[0] is None or not isinstance(pair[1], int):
            raise SampleRejected("missing_logprobs", f"token {i} has {pair!r}")
        if not isinstance(pair[0], (int, float)) or not math.isfinite(pair[0]):
            raise SampleRejected("nonfinite_logprobs", f"token {i} has logprob {pair[0]!r}")
        tokens.append(pair[1])
        logprobs.append(float(pair[0]))
    if ids is not None and list(ids) != tokens:
        raise SampleRejected("logprob_mismatch", f"{len(ids)} output_ids against {len(tokens)} logprobs, or other ids")
    return tuple(tokens), tuple(logprobs)


def _spans(meta: Mapping[str, Any], n_tokens: int) -> tuple[TokenSpan, ...]:
    """Version spans covering [0, n): from `weight_version_spans`, else one span when start and end agree."""
    start, end, raw = (meta.get(f"weight_version_{name}") for name in ("start", "end", "spans"))
    if not _is_version(start) or not _is_version(end):
        raise SampleRejected("missing_version", f"meta_info.weight_version_start/_end are {start!r}/{end!r}")
    if not raw:
        if start != end:
            raise SampleRejected("missing_version", f"versions {start} to {end} without weight_version_spans")
        return (TokenSpan(0, cast(int, start)),)
    try:
        spans = [TokenSpan(first, version) for first, version in raw]
        ordered = all(a.first_token <= b.first_token and a.version <= b.version for a, b in zip(spans, spans[1:]))  # noqa: B905
        legal = all(_is_version(s.first_token) and _is_version(s.version) for s in spans)
    except (TypeError, ValueError):
        spans, ordered, legal = [], False, False
    if not legal or not ordered or spans[0].first_token != 0:
        raise SampleRejected("malformed_spans", f"meta_info.weight_version_spans is {raw!r} for {n_tokens} tokens")
    return normalise_spans([s for s in spans if s.first_token < n_tokens], n_tokens)


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
