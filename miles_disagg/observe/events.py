"""Begin/end events of a run (generation, step, publish, materialize, pause), for `events.jsonl`.

Processes away from the driver collect events in a `Timeline` and the driver drains and writes them, so that a run
directory needs no shared file system.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Event:
    """Something that took time. `begin` and `end` are Unix seconds; `version` is the policy version concerned."""

    name: str
    actor: str
    begin: float
    end: float
    version: int | None = None


class Timeline:
    """Thread-safe, bounded collection of events of one process; the oldest are dropped beyond `limit`."""

    def __init__(self, actor: str, limit: int = 100_000):
        self._actor, self._limit = actor, limit
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, name: str, begin: float, end: float, version: int | None = None) -> None:
        """Record a finished event."""
        with self._lock:
            self._events.append(Event(name, self._actor, begin, end, version))
            del self._events[: -self._limit]

    @contextmanager
    def span(self, name: str, version: int | None = None) -> Iterator[None]:
        """Record the time spent inside the block, also when it raises."""
        begin = time.time()
        try:
            yield
        finally:
            self.add(name, begin, time.time(), version)

    def drain(self) -> list[Event]:
        """Return and forget everything recorded so far."""
        with self._lock:
            out, self._events = self._events, []
        return out


class EventLog:
    """Appends events to `<run-dir>/events.jsonl`. One writer: the driver."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, events: Iterable[Event]) -> None:
        """Append events, one JSON object a line."""
        for event in events:
            self._file.write(json.dumps(asdict(event)) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
