"""NIXL's Python API as far as `transport.Nixl` calls it, with writes that never end."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any


class Handle:
    """Of one write (number: in the order they are started), or of a list of regions (None)."""

    def __init__(self, api: StuckApi):
        self.api = api
        self.number: int | None = None

    def release(self) -> None:
        """Noted."""
        if self.number is not None:
            self.api.released.append(self.number)


class StuckApi:
    """The module and its only agent. done: numbers of writes that end, at the first look at them."""

    def __init__(self, done: Collection[int] = ()):
        self.done, self.started = done, 0
        self.released: list[int] = []
        self.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=0)

    def nixl_agent(self, *_: Any) -> StuckApi:
        """The agent."""
        return self

    def add_remote_agent(self, metadata: bytes) -> str:
        """Its name."""
        return metadata.decode()

    def transfer(self, handle: Handle) -> str:
        """Start a write."""
        handle.number, self.started = self.started, self.started + 1
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        """How it stands."""
        return "DONE" if handle.number in self.done else "PROC"

    def __getattr__(self, name: str) -> Any:
        """Everything else succeeds."""
        return lambda *_, **__: Handle(self)
