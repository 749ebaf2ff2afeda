"""How many replicas a fleet should have. Pure: loads and times in, a number out. Starting and draining is `service`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalePolicy:
    """target: requests in flight for each replica. up/down: seconds that the load must ask for it before the number
    grows / shrinks by one."""

    least: int
    most: int
    target: float
    up_seconds: float
    down_seconds: float

    def wanted(self, requests: int) -> int:
        """Replicas that this load asks for."""
        return min(self.most, max(self.least, math.ceil(requests / self.target)))


class Autoscaler:
    """Damps the policy: grows to what was asked for all of `up_seconds` (the least of it), shrinks by one at a time
    after `down_seconds` of asking for less, so that a lull between two batches costs no replica."""

    def __init__(self, policy: ScalePolicy):
        self._policy = policy
        self._above_since: float | None = None
        self._below_since: float | None = None
        self._asked: list[int] = []
        self.number = policy.least

    def observe(self, now: float, requests: int) -> int:
        """The number of replicas there should be at monotonic time `now`, with so many requests in flight."""
        policy, wanted = self._policy, self._policy.wanted(requests)
        if wanted > self.number:
            self._below_since = None
            self._above_since = now if self._above_since is None else self._above_since
            self._asked.append(wanted)
            if now - self._above_since >= policy.up_seconds:
                self.number = min(self._asked)
                self._above_since, self._asked = None, []
        elif wanted < self.number:
            self._above_since, self._asked = None, []
            self._below_since = now if self._below_since is None else self._below_since
            if now - self._below_since >= policy.down_seconds:
                self.number -= 1
                self._below_since = now
        else:
            self._above_since = self._below_since = None
            self._asked = []
        return self.number
