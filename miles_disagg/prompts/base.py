"""Ports of the prompt side: a tokenizer as far as prompts need one, a source, a reward.

Adapters stand beside this file: `source` (JSONL, Parquet), `tasks` (generators), `reward`, `ledger`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from miles_disagg.domain.samples import Prompt, Sample

RewardFunction = Callable[[Sample], float | Awaitable[float]]
"""What a user plugs in: a finite number for one sample; sync functions run off the event loop."""


class TokenizerLike(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def __len__(self) -> int: ...


class PromptSource(Protocol):
    """An endless or finite stream of prompts with a cursor that can be saved."""

    def next_prompt(self) -> Prompt | None:
        """The next prompt, or None when the last epoch is over."""
        ...

    def prompt(self, key: str) -> Prompt:
        """The prompt of ledger key `epoch:index`, without moving the cursor."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able cursor."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. PromptDataError when it belongs to other data."""
        ...


class Reward(Protocol):
    """Scores one sample, off the event loop and within a deadline."""

    async def __call__(self, sample: Sample) -> float:
        """A finite number, or RewardError."""
        ...

    async def close(self) -> None: ...
