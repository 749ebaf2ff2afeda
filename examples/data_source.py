"""Data source: an endless curriculum of sums whose numbers grow; its cursor is one integer.

`--data-source-path examples.data_source.Sums`
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from miles_disagg.domain.samples import Prompt
from miles_disagg.prompts.base import TokenizerLike
from miles_disagg.prompts.source import DataOptions

STAGE = 256
"""Prompts until the numbers get one digit longer."""


class Sums:
    """A `PromptSource`. `files` (from --prompt-data) are not used; prompt i is a function of the seed and i."""

    def __init__(self, files: Sequence[str], tokenizer: TokenizerLike, options: DataOptions):
        self._tokenizer, self._seed = tokenizer, options.seed
        self._next = 0

    def next_prompt(self) -> Prompt:
        """The next sum."""
        prompt = self.prompt(f"0:{self._next}")
        self._next += 1
        return prompt

    def prompt(self, key: str) -> Prompt:
        """The sum of ledger key `epoch:index`."""
        index = int(key.partition(":")[2])
        rng, largest = random.Random(f"{self._seed}:{index}"), 10 ** (1 + min(index // STAGE, 3))
        a, b = rng.randrange(largest), rng.randrange(largest)
        text = f"{a}+{b}="
        return Prompt(index, 0, text, tuple(self._tokenizer.encode(text, add_special_tokens=False)), str(a + b))

    def state(self) -> Mapping[str, Any]:
        """The cursor."""
        return {"next": self._next, "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor."""
        if state["seed"] != self._seed:
            raise ValueError(f"the cursor is for --rollout-seed {state['seed']}, not {self._seed}")
        self._next = int(state["next"])
