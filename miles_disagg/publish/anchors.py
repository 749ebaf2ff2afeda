"""When a delta version also gets shortcuts for late joiners (a folded delta, an anchor in full). Pure.

Writing one costs the trainer's side about a full version; not writing one costs every reader that joins the whole
chain. So `auto` writes when the readers that joined since the last one (or one, if none did) had to read more than
that: the rent-or-buy rule, at most twice the best possible bytes.
"""

from __future__ import annotations

from typing import Literal


class AnchorPolicy:
    """interval: every N versions; `auto`; None: never."""

    def __init__(self, interval: int | Literal["auto"] | None):
        self._interval = interval
        self._chain = self._read = 0.0
        self._seen: frozenset[str] | None = None

    def due(self, version: int, wire_bytes: float, full_bytes: float, readers: frozenset[str]) -> bool:
        """True if `version` should get shortcuts now. Call it once for every published delta.

        wire_bytes: of this delta; full_bytes: of the complete weights; readers: names of all known readers.
        """
        if self._interval is None:
            return False
        if isinstance(self._interval, int):
            return version % self._interval == 0
        self._chain += wire_bytes
        seen = readers if self._seen is None else self._seen  # who is there at the first delta came with the base
        self._read += len(readers - seen) * self._chain
        self._seen = seen | readers
        if max(self._read, self._chain) < full_bytes:
            return False
        self._chain = self._read = 0.0
        return True
