"""Token ids to text for the embedded engine: whole, and piece by piece for streams and stop strings.

A piece never ends inside a multi-byte character, nor in what may become a stop string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_disagg.engine.embedded.sampling import SamplingParams

_TAIL_MARGIN = 8


class Text:
    """The checkpoint's tokenizer; None if the directory has none, and then text in and out is refused or empty."""

    def __init__(self, path: str | Path):
        from transformers import AutoTokenizer

        self.tokenizer: Any = None
        if any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)

    def decode(self, tokens: Sequence[int], params: SamplingParams) -> str:
        """Text of `tokens`."""
        if self.tokenizer is None or not tokens:
            return ""
        return self.tokenizer.decode(
            list(tokens),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def one(self, token: int) -> str:
        """Text of a single token, for logprobs with text."""
        return "" if self.tokenizer is None else self.tokenizer.decode([token])

    def matched_stop(self, output: Sequence[int], params: SamplingParams) -> str | None:
        """The stop string or pattern that the newest token of `output` completed, if any."""
        if not params.stop and not params.stop_regex:
            return None
        longest = max((len(s) for s in params.stop), default=0)
        # a token has at least one byte and a character at most four, so a stop string spans at most 4 * len tokens
        tail = output if params.stop_regex else output[-(longest * 4 + _TAIL_MARGIN) :]
        text = self.tokenizer.decode(list(tail)) if self.tokenizer is not None else ""
        for stop in params.stop:
            if stop in text:
                return stop
        return next((p for p in params.stop_regex if re.search(p, text)), None)

    def finished(self, output: Sequence[int], params: SamplingParams, reason: dict[str, Any]) -> str:
        """Text of a finished output: without the stop token, and cut at the stop string (unless `no_stop_trim`)."""
        matched = reason.get("matched")
        tokens = list(output)
        if isinstance(matched, int) and tokens and not params.no_stop_trim:
            tokens.pop()
        text = self.decode(tokens, params)
        if isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[: at + len(matched)] if params.no_stop_trim else text[:at]
        return text


class StreamText:
    """Text of a growing output, decoded incrementally: only a short window of tokens is decoded per call."""

    def __init__(self, text: Text, params: SamplingParams):
        self._text, self._params = text, params
        self._done = ""
        self._read = self._prefix = 0  # tokens whose text is in _done; where the decoding window starts

    def upto(self, output: Sequence[int], count: int) -> str:
        """Text that is certain after the first `count` tokens of `output`. `count` never shrinks between calls."""
        before = self._text.decode(output[self._prefix : self._read], self._params)
        window = self._text.decode(output[self._prefix : count], self._params)
        if len(window) > len(before) and not window.endswith("\ufffd"):
            self._done += window[len(before) :]
            self._prefix, self._read = self._read, count
        return self._hold_back(self._done)

    def _hold_back(self, text: str) -> str:
        """`text` without an end that may turn out to be the beginning of a stop string."""
        for stop in self._params.stop:
            for size in range(min(len(stop), len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    text = text[:-size]
                    break
        return text


def end_tokens(path: str | Path, config: Any, text: Text) -> frozenset[int]:
    """Tokens that end a response: of `generation_config.json`, `config.json` and the tokenizer together."""
    found: list[Any] = [getattr(config.get_text_config(), "eos_token_id", None)]
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        found.append(json.loads(generation.read_text()).get("eos_token_id"))
    if text.tokenizer is not None:
        found.append(text.tokenizer.eos_token_id)
    flat = [t for value in found for t in (value if isinstance(value, list) else [value])]
    return frozenset(t for t in flat if isinstance(t, int))
