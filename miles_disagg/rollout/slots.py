"""A counted, fair bound on samples in flight. Nothing about what a sample is."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Slots:
    """At most `total` slots are out; whoever asked first is served first, also when it wants several at once."""

    def __init__(self, total: int):
        self.total, self.free = total, total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Slots that are out."""
        return self.total - self.free

    async def acquire(self, n: int = 1) -> None:
        """Wait for `n` slots and take them all at once."""
        if n > self.total:
            raise ValueError(f"{n} slots of {self.total} can never be had")
        if not self._waiting and self.free >= n:
            self.free -= n
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(n)  # served and cancelled in the same moment
            else:
                with contextlib.suppress(ValueError):  # already skipped by `_serve`
                    self._waiting.remove((n, turn))
                self._serve()
            raise

    def release(self, n: int = 1) -> None:
        """Give `n` slots back."""
        self.free += n
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.free >= self._waiting[0][0]:
            n, turn = self._waiting.popleft()
            if not turn.done():
                self.free -= n
                turn.set_result(None)
