"""Generated tasks with verifiable answers, split into training and held-out items that never overlap.

`addition` is the quickstart's; every reasoning-gym data set is a task by its name when that package is installed.
Items are rows as `source` reads them (`input`, `label`, `metadata`). Scoring them is `reward`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from miles_disagg.domain.errors import ConfigError

_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class TaskItem:
    """One question with its answer; `identity` is what the split is made by (equal identities are one item)."""

    input: str
    label: str
    identity: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def held_out(self) -> bool:
        """True for about a tenth of all items, by a digest of the identity alone: the split can never overlap."""
        return xxhash.xxh3_64_intdigest(self.identity.encode()) % 1000 < 1000 * _HELD_OUT_SHARE

    def row(self) -> dict[str, Any]:
        """The JSONL row."""
        return {"input": self.input, "label": self.label, "metadata": self.metadata}


@dataclass(frozen=True)
class Split:
    """Training and held-out items, disjoint by identity."""

    train: tuple[TaskItem, ...]
    held_out: tuple[TaskItem, ...]


def make_task(name: str, *, seed: int = 0, num_train: int | None = None, num_held_out: int = 256) -> Split:
    """Items of a named task, the same for the same arguments. `num_train=None`: all there are (`addition` only).

    ConfigError for a name that is neither `addition` nor an installed reasoning-gym data set.
    """
    if name == "addition":
        items: Iterable[TaskItem] = _addition(seed)
    else:
        items = _reasoning_gym(name, seed)
        if num_train is None:
            raise ConfigError([f"--task {name}: give the number of training items"])
    train: list[TaskItem] = []
    held_out: list[TaskItem] = []
    seen: set[str] = set()
    misses = 0
    for item in items:
        if (num_train is not None and len(train) >= num_train and len(held_out) >= num_held_out) or misses > 10_000:
            break
        misses += 1
        if item.identity in seen and name != "addition":
            continue
        side, limit = (held_out, num_held_out) if item.held_out else (train, num_train)
        seen.add(item.identity)
        if limit is None or len(side) < limit:
            side.append(item)
            misses = 0
    if not train or not held_out:
        raise ConfigError([f"--task {name}: only {len(seen)} distinct items; too few to hold some out"])
    return Split(tuple(train), tuple(held_out))


def addition_answer(a: int, b: int) -> str:
    """The digits of `a + b`, lowest first: written this way a carry is known when its digit is written."""
    return str(a + b)[::-1]


def _addition(seed: int) -> Iterator[TaskItem]:
    """Every sum of two two-digit numbers, in an order that depends on the seed; `a+b` and `b+a` are on one side."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(f"addition:{seed}").shuffle(pairs)
    for a, b in pairs:
        yield TaskItem(f"{a}+{b}=", addition_answer(a, b), f"{min(a, b)}+{max(a, b)}", {"task": "addition"})


def _reasoning_gym(name: str, seed: int) -> Iterator[TaskItem]:
    """Items of a reasoning-gym data set without end, each with the entry that its scorer needs."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            [f"--task {name}: neither 'addition' nor can it be a reasoning-gym task: pip install 'miles-disagg[tasks]'"]
        ) from error
    chunk, start = 1024, 0
    while True:
        try:
            data = reasoning_gym.create_dataset(name, size=chunk, seed=seed * 1_000_003 + start)
        except ValueError as error:
            raise ConfigError([f"--task {name}: not 'addition' and unknown to reasoning-gym ({error})"]) from error
        for i in range(chunk):
            entry = data[i]
            metadata = {"task": name, "entry": json.loads(json.dumps(entry, default=str))}
            yield TaskItem(entry["question"], str(entry["answer"]), entry["question"], metadata)
        start += 1


def write_jsonl(path: Path, items: Iterable[TaskItem]) -> None:
    """Write items as `--prompt-data` reads them, one JSON object a line."""
    with path.open("w", encoding="utf-8") as out:
        for item in items:
            out.write(json.dumps(item.row(), ensure_ascii=False) + "\n")
