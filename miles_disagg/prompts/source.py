"""Prompt data of files and Hugging Face data sets on disk: parsed, checked, tokenized, shuffled, with a cursor.

What generated data sets contain is `tasks`; what became of each prompt is `ledger`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import xxhash

from miles_disagg.domain.errors import ConfigError, PromptDataError
from miles_disagg.domain.samples import Prompt
from miles_disagg.prompts.base import TokenizerLike
from miles_disagg.prompts.dataset_files import read_rows
from miles_disagg.prompts.tasks import TaskItem

_LISTED = 20  # how many skipped prompts `DatasetSource.skipped` names one by one


@dataclass(frozen=True)
class DataOptions:
    """How rows become prompts. `max_prompt_tokens` is the context length minus the response budget (None: no limit)."""

    input_key: str = "input"
    label_key: str | None = "label"
    metadata_key: str | None = "metadata"
    apply_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_prompt_tokens: int | None = None
    long_prompts: Literal["error", "skip"] = "error"
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None


@dataclass(frozen=True)
class _Row:
    text: str
    tokens: tuple[int, ...]
    label: str | None
    metadata: Mapping[str, Any]


class DatasetSource:
    """Prompts of one or more files, pass after pass, each pass shuffled by `(seed, epoch)`.

    Everything is read and tokenized at once, so that every bad line is found before the first step.
    """

    def __init__(
        self, rows: Iterable[tuple[str, int, Mapping[str, Any]]], tokenizer: TokenizerLike, options: DataOptions
    ):
        """`rows`: (name of the file or task, 1-based line, fields)."""
        self._options = options
        self.skipped: list[str] = []
        self.num_skipped = 0
        digest, self._where, self._rows = xxhash.xxh3_128(), "--prompt-data", list[_Row]()
        for self._where, line, row in rows:
            parsed = self._parse(self._where, line, row, tokenizer)
            if parsed is not None:
                digest.update(repr((parsed.tokens, parsed.label)).encode())
                self._rows.append(parsed)
        if not self._rows:
            raise PromptDataError(f"no usable prompt ({self.num_skipped} skipped as too long)", file=self._where)
        self.digest = digest.hexdigest()
        self._epoch, self._position = 0, 0
        self._order: tuple[int, list[int]] | None = None

    @classmethod
    def from_files(cls, paths: Sequence[str], tokenizer: TokenizerLike, options: DataOptions) -> DatasetSource:
        """Prompts of files or data set directories (`dataset_files.read_rows`), one after the other."""
        return cls(((path, line, row) for path in paths for line, row in read_rows(path)), tokenizer, options)

    @classmethod
    def from_items(
        cls, name: str, items: Iterable[TaskItem], tokenizer: TokenizerLike, options: DataOptions
    ) -> DatasetSource:
        """Prompts of a generated task (`tasks.make_task`); its items have their own field names."""
        options = replace(options, input_key="input", label_key="label", metadata_key="metadata")
        rows = ((f"task {name}", number, item.row()) for number, item in enumerate(items, start=1))
        return cls(rows, tokenizer, options)

    def __len__(self) -> int:
        return len(self._rows)

    def _parse(self, path: str, line: int, row: Mapping[str, Any], tokenizer: TokenizerLike) -> _Row | None:
        o = self._options
        if o.input_key not in row:
            raise PromptDataError(
                f"no field {o.input_key!r} (there are {sorted(row)}); set --input-key", file=path, line=line
            )
        text, tokens = render(row[o.input_key], tokenizer, o, path, line)
        if not tokens:
            raise PromptDataError(f"field {o.input_key!r} is empty", file=path, line=line)
        if o.max_prompt_tokens is not None and len(tokens) > o.max_prompt_tokens:
            message = (
                f"prompt has {len(tokens)} tokens, the context leaves room for {o.max_prompt_tokens}; "
                "shorten it, lower --rollout-max-response-len, or pass --long-prompts skip"
            )
            if o.long_prompts == "error":
                raise PromptDataError(message, file=path, line=line)
            self.num_skipped += 1
            if len(self.skipped) < _LISTED:
                self.skipped.append(f"{path}, line {line}: {len(tokens)} tokens")
            return None
        metadata = row.get(o.metadata_key) if o.metadata_key else None
        if metadata is not None and not isinstance(metadata, Mapping):
            raise PromptDataError(f"field {o.metadata_key!r} is not an object", file=path, line=line)
        return _Row(text, tokens, _label(row, o.label_key, path, line), dict(metadata or {}))

    def next_prompt(self) -> Prompt | None:
        """The next prompt of the current pass; the pass after it when it is over; None after the last pass."""
        if self._options.epochs is not None and self._epoch >= self._options.epochs:
            return None
        prompt = self._at(self._epoch, self._index(self._epoch, self._position))
        self._position += 1
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
        return prompt

    def prompt(self, key: str) -> Prompt:
        """The prompt of ledger key `epoch:index`, without moving the cursor."""
        epoch, _, index = key.partition(":")
        return self._at(int(epoch), int(index))

    def all(self) -> list[Prompt]:
        """Every prompt once, in file order (for evaluation)."""
        return [self._at(0, i) for i in range(len(self._rows))]

    def state(self) -> dict[str, Any]:
        """JSON-able cursor: pass, position within it, and what data it belongs to."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._options.seed, "digest": self.digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. PromptDataError when the files or the seed are not those it was saved with."""
        if state["digest"] != self.digest:
            raise PromptDataError("not the prompts of the run being resumed; give it the same data", file=self._where)
        if state["seed"] != self._options.seed:
            raise PromptDataError(
                f"the run being resumed shuffled with seed {state['seed']}, not {self._options.seed} (--rollout-seed)",
                file=self._where,
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _index(self, epoch: int, position: int) -> int:
        if not self._options.shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._rows)))
            random.Random(f"{self._options.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][position]

    def _at(self, epoch: int, index: int) -> Prompt:
        row = self._rows[index]
        return Prompt(index, epoch, row.text, row.tokens, row.label, row.metadata)


def _label(row: Mapping[str, Any], key: str | None, path: str, line: int) -> str | None:
    if key is None:
        return None
    if key not in row:
        raise PromptDataError(f"no field {key!r} (there are {sorted(row)}); set --label-key", file=path, line=line)
    value = row[key]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def render(
    value: Any, tokenizer: TokenizerLike, options: DataOptions, path: str, line: int
) -> tuple[str, tuple[int, ...]]:
    """Text and token ids of one input field: a string, or chat messages (`[{"role", "content"}, ...]`)."""
    is_text = isinstance(value, str)
    is_chat = isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value)
    if not is_text and not is_chat:
        raise PromptDataError(f"{options.input_key!r} is neither text nor a list of messages", file=path, line=line)
    chat = options.apply_chat_template or not is_text
    text: Any = value
    try:
        if chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": value}] if is_text else value,
                tokenize=False,
                add_generation_prompt=True,
                **(options.chat_template_kwargs or {}),
            )
        tokens = tuple(tokenizer.encode(text, add_special_tokens=not chat))
    except Exception as error:  # jinja's and the tokenizer's own: whatever it is, this line caused it
        what = "chat template" if chat else "tokenizer"
        raise PromptDataError(f"the {what} refused it: {error}", file=path, line=line) from error
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown != getattr(tokenizer, "eos_token_id", None) and unknown in tokens:
        raise PromptDataError("it has characters that the tokenizer does not know", file=path, line=line)
    return text, tokens


def check_tokenizer(tokenizer: Any, hf_config: Any) -> None:
    """Raise ConfigError unless every id the tokenizer can produce has a row in the model's embedding.

    `hf_config`: a transformers config or a mapping with `vocab_size` and `eos_token_id`. The embedding may be larger
    (padded) than the tokenizer, never smaller. A different end-of-sequence token is an error too: generation would
    never stop, or stop at the wrong place.
    """

    def field(name: str) -> Any:
        return hf_config.get(name) if isinstance(hf_config, Mapping) else getattr(hf_config, name, None)

    problems = []
    vocab_size = field("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is None:
        problems.append("--hf-checkpoint: config.json has no vocab_size")
    elif largest >= vocab_size:
        problems.append(
            f"--hf-checkpoint: the tokenizer produces ids up to {largest}, the model's vocabulary has {vocab_size} "
            "rows; use the tokenizer that belongs to the checkpoint"
        )
    eos = field("eos_token_id")
    eos_ids: Sequence[int] = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    if eos_ids and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos_ids:
        problems.append(
            f"--hf-checkpoint: the tokenizer ends a sequence with id {tokenizer.eos_token_id}, config.json with "
            f"{list(eos_ids)}; use the tokenizer that belongs to the checkpoint"
        )
    if problems:
        raise ConfigError(problems)
