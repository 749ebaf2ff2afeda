"""A clock and an event loop's selector whose seconds pass only when everybody waits. Standard library only: whoever
simulates puts the clock in the place of `time.monotonic` before anything else is imported."""

from __future__ import annotations

import selectors


class VirtualClock:
    """Seconds that pass only when everybody waits."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class VirtualSelector(selectors.SelectSelector):
    """Does not sleep: the clock jumps to the next timer."""

    def __init__(self, clock: VirtualClock):
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None):
        """See the base class; `timeout` passes at once."""
        if timeout is None:
            raise RuntimeError("everybody waits for ever")
        self._clock.now += max(0.0, timeout)
        return super().select(0)


CLOCK = VirtualClock()
