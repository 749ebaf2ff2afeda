"""Sampling parameters in SGLang's form, and drawing one token per row from a batch of logits.

Parsing refuses what this engine does not implement instead of ignoring it. Stop conditions are `scheduler`'s.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from miles_disagg.domain.errors import InvalidRequest

TOP_K_ALL = 1 << 30
_GREEDY_BELOW = 1e-6
# Accepted from SGLang's form when they say "nothing special"; anything else would silently change the distribution.
_UNSUPPORTED_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
}


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters, validated. `max_new_tokens` None: up to the context length."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    sampling_seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def scale(self) -> float:
        """What logits are divided by. Greedy at temperature 0 reports logprobs at temperature 1, as SGLang does."""
        return 1.0 if self.temperature < _GREEDY_BELOW else self.temperature

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p cut the distribution."""
        return self.top_k < TOP_K_ALL or self.top_p < 1.0 or self.min_p > 0.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None) -> SamplingParams:
        """Validate a request's `sampling_params`. InvalidRequest names the field."""
        values: dict[str, Any] = dict(raw or {})
        for name, neutral in _UNSUPPORTED_NEUTRAL.items():
            value = values.pop(name, None)
            if value not in neutral:
                raise InvalidRequest(f"sampling_params.{name}: not supported by the embedded engine, got {value!r}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidRequest(f"sampling_params: unknown field(s) {unknown}; known are {sorted(known)}")
        given: dict[str, Any] = {k: v for k, v in values.items() if v is not None or k == "max_new_tokens"}
        for name in ("stop", "stop_regex"):
            text = given.get(name)
            if text is not None:
                given[name] = _strings(name, text)
        if "stop_token_ids" in given:
            given["stop_token_ids"] = _token_set(given["stop_token_ids"])
        if given.get("top_k") == -1:
            given["top_k"] = TOP_K_ALL
        params = cls(**given)
        params._check()
        return params

    def _check(self) -> None:
        for name in ("min_new_tokens", "top_k", "n"):
            _integer(name, getattr(self, name))
        for name in ("max_new_tokens", "sampling_seed", "stream_interval"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number, got {value!r}.")
        checks = (
            (self.temperature >= 0, f"temperature must be a non-negative finite number, got {self.temperature}."),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}."),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}."),
            (self.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {self.top_k}."),
            (self.n >= 1, f"n must be at least 1, got {self.n}."),
            (self.stream_interval is None or self.stream_interval >= 0, "stream_interval must be at least 0."),
            (self.min_new_tokens >= 0, f"min_new_tokens must be at least 0, got {self.min_new_tokens}."),
        )
        for good, message in checks:
            if not good:
                raise InvalidRequest(message)
        if self.max_new_tokens is not None:
            if self.max_new_tokens < 0:
                raise InvalidRequest(f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")
            if self.min_new_tokens > self.max_new_tokens:
                raise InvalidRequest(
                    f"min_new_tokens must be in [0, max_new_tokens({self.max_new_tokens})], got {self.min_new_tokens}."
                )


def _integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(t, str) and t for t in texts):
        raise InvalidRequest(f"{name} must be a non-empty string or a list of them, got {value!r}.")
    if name == "stop_regex":
        for pattern in texts:
            try:
                re.compile(pattern)
            except re.error as e:
                raise InvalidRequest(f"stop_regex {pattern!r} is not a regular expression: {e}") from None
    return texts


def _token_set(value: Any) -> frozenset[int]:
    if not isinstance(value, (list, tuple, set)):
        raise InvalidRequest(f"stop_token_ids must be a list of integers, got {value!r}.")
    for token in value:
        _integer("stop_token_ids", token)
    return frozenset(value)


def make_generator(seed: int | None) -> random.Random:
    """A request's own stream of uniform numbers: its tokens do not depend on who else is in the batch."""
    return random.Random(seed)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    logits: [n, vocab], any float dtype; uniforms: n numbers in [0, 1), ignored for greedy rows.
    Returns (token ids [n] int64, logprobs [n, vocab] fp32 of logits / temperature, before any truncation: what SGLang
    reports, and the distribution the trainer recomputes).
    """
    logits = logits.float()
    scales = [p.scale for p in params]
    if any(s != 1.0 for s in scales):
        logits = logits / torch.tensor(scales, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = [p.greedy for p in params]
    if all(greedy):
        return logits.argmax(dim=-1), logprobs
    # Inverse of the cumulative distribution, vocabulary in order (sorted only where something is cut).
    probs = logprobs.exp()
    order: torch.Tensor | None = None
    if any(p.truncates and not p.greedy for p in params):
        probs, order = _truncate(probs, params)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64 if probs.device.type == "cpu" else torch.float32)
    u = torch.tensor(list(uniforms), dtype=cumulative.dtype, device=probs.device)[:, None]
    picked = (cumulative <= u * cumulative[:, -1:]).sum(dim=-1, keepdim=True).clamp_(max=probs.shape[-1] - 1)
    # u * total can round up to the total itself; then the last token with any mass is meant, never one without.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(dim=-1, keepdim=True)
    picked = torch.minimum(picked, last)
    tokens = (picked if order is None else order.gather(-1, picked))[:, 0]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=tokens.device), logits.argmax(dim=-1), tokens)
    return tokens, logprobs


def _truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities with top-k, then top-p, then min-p cut to zero, and their token order. [n, vocab] each.

    Rows that cut nothing stay in vocabulary order.
    """
    device = probs.device
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=device)[None]
    top_k = torch.tensor([min(p.top_k, probs.shape[-1]) for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    keep = (rank < top_k) & ((before <= top_p) | (top_p >= 1.0)) & (ordered >= ordered[:, :1] * min_p)
    cut = torch.tensor([p.truncates for p in params], device=device)[:, None]  # a row must not depend on the others
    return torch.where(cut, ordered * keep, probs), torch.where(cut, order, rank)
