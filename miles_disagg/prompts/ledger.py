"""What became of every prompt: a conservation law that is checked, not hoped for.

One entry a prompt; every hand-out of it is an attempt. An attempt is in exactly one state:
`generating` -> `in_flight` (generated, not yet queued) -> `queued` -> `taken` (with the trainer) -> `trained`,
and from any of the unfinished ones to `dropped(reason)`. So, in attempts, at every moment:

    handed_out = generating + generated + failed             (failed: dropped before it was generated)
    generated  = trained + queued + dropped + in flight      (in flight: in_flight + taken)

The unit is a prompt with its group of samples. Pure bookkeeping: who generates is `rollout`, who queues is `buffer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LIVE = ("generating", "in_flight", "queued", "taken")


@dataclass
class Entry:
    """State of a prompt's current attempt (1-based), and the reason when it was dropped."""

    state: str
    attempt: int = 1
    reason: str | None = None


class LedgerError(AssertionError):
    """The books do not balance, or a prompt moved to a state it cannot reach: a bug in the caller."""


class Ledger:
    """Books of all prompts. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._live: dict[str, Entry] = {}
        self._done: dict[str, Entry] = {}
        self._finished: Counter[str] = Counter()  # trained, generated, handed_out, retried
        self._dropped: Counter[str] = Counter()  # generated ones, by reason
        self._failed: Counter[str] = Counter()  # never generated, by reason

    def __contains__(self, key: str) -> bool:
        return key in self._live or key in self._done

    def entry(self, key: str) -> Entry:
        """The entry of a prompt; KeyError when it was never handed out (or folded away)."""
        return self._live[key] if key in self._live else self._done[key]

    def attempts(self, key: str) -> int:
        """How often a prompt was handed out so far."""
        return self.entry(key).attempt if key in self else 0

    def handed_out(self, key: str) -> int:
        """A prompt goes to generation; returns the attempt number. A dropped prompt may come again (a retry)."""
        if key in self and self.entry(key).state != "dropped":
            raise LedgerError(f"prompt {key} was handed out again while it is {self.entry(key).state}")
        before = self._done.pop(key, None)
        self._live[key] = entry = Entry("generating", before.attempt + 1 if before else 1)
        self._finished["retried"] += before is not None
        self._finished["handed_out"] += 1
        return entry.attempt

    def generated(self, key: str) -> None:
        """All samples of the group exist and are scored."""
        self._move(key, "in_flight", ("generating",))
        self._finished["generated"] += 1

    def queued(self, key: str) -> None:
        """The buffer accepted the group."""
        self._move(key, "queued", ("in_flight",))

    def taken(self, key: str) -> None:
        """The trainer has the group."""
        self._move(key, "taken", ("queued",))

    def trained(self, keys: Iterable[str]) -> None:
        """An optimizer step consumed these groups."""
        for key in keys:
            self._done[key] = self._move(key, "trained", ("taken",))
            del self._live[key]
            self._finished["trained"] += 1

    def is_trained(self, key: str) -> bool:
        """True if the prompt was trained on (and is not folded away yet)."""
        return key in self._done and self._done[key].state == "trained"

    def trained_elsewhere(self, keys: Iterable[str]) -> None:
        """Enter prompts that were trained on after these books were saved, with all that came before that."""
        for key in keys:
            if key not in self._live:
                self.handed_out(key)
            steps = {"generating": self.generated, "in_flight": self.queued, "queued": self.taken}
            while (step := steps.get(self._live[key].state)) is not None:
                step(key)
            self.trained([key])

    def dropped(self, key: str, reason: str) -> None:
        """The attempt is given up; it will never be trained on."""
        before = self._live[key].state if key in self._live else "unknown"
        self._done[key] = entry = self._move(key, "dropped", LIVE)
        del self._live[key]
        entry.reason = reason
        (self._failed if before == "generating" else self._dropped)[reason] += 1

    def fold(self, before_epoch: int) -> None:
        """Forget the trained prompts of earlier epochs; their counts stay. Keeps a long run's books small."""
        self._done = {
            k: e for k, e in self._done.items() if e.state != "trained" or int(k.split(":")[0]) >= before_epoch
        }

    def _move(self, key: str, state: str, allowed: tuple[str, ...]) -> Entry:
        entry = self._live.get(key)
        if entry is None or entry.state not in allowed:
            now = self.entry(key).state if key in self else "unknown"
            raise LedgerError(f"prompt {key} is {now} and cannot become {state}")
        entry.state = state
        return entry

    def totals(self) -> dict[str, Any]:
        """Counts in attempts: `handed_out generating generated queued in_flight trained dropped failed retried`."""
        live = Counter(e.state for e in self._live.values())
        return {
            "handed_out": self._finished["handed_out"],
            "generating": live["generating"],
            "generated": self._finished["generated"],
            "in_flight": live["in_flight"] + live["taken"],
            "queued": live["queued"],
            "trained": self._finished["trained"],
            "dropped": dict(self._dropped),
            "failed": dict(self._failed),
            "retried": self._finished["retried"],
        }

    def check(self) -> dict[str, Any]:
        """The totals; LedgerError with all numbers unless both conservation laws hold."""
        t = self.totals()
        dropped, failed = sum(t["dropped"].values()), sum(t["failed"].values())
        if t["handed_out"] != t["generating"] + t["generated"] + failed or (
            t["generated"] != t["trained"] + t["queued"] + dropped + t["in_flight"]
        ):
            raise LedgerError(f"the ledger does not balance: {t}")
        return t

    def unfinished(self) -> list[str]:
        """Keys of prompts that are neither trained nor dropped, in the order they were handed out."""
        return list(self._live)

    def dropped_prompts(self) -> dict[str, str]:
        """Prompts that ended dropped, with the reason of the last attempt."""
        return {k: e.reason or "" for k, e in self._done.items() if e.state == "dropped"}

    def abandon(self, reason: str, keep: Iterable[str] = ()) -> list[str]:
        """After a restart: whatever was unfinished is dropped with `reason`, except `keep`. Returns what was dropped.

        The caller hands these prompts out again, so that none is lost.
        """
        kept = set(keep)
        lost = [key for key in self.unfinished() if key not in kept]
        for key in lost:
            self.dropped(key, reason)
        return lost

    def state(self) -> dict[str, Any]:
        """JSON-able: everything."""
        return {
            "live": {k: asdict(e) for k, e in self._live.items()},
            "done": {k: asdict(e) for k, e in self._done.items()},
            "finished": dict(self._finished),
            "dropped": dict(self._dropped),
            "failed": dict(self._failed),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; checks that the books balance."""
        self._live = {k: Entry(**e) for k, e in state["live"].items()}
        self._done = {k: Entry(**e) for k, e in state["done"].items()}
        self._finished, self._dropped = Counter(state["finished"]), Counter(state["dropped"])
        self._failed = Counter(state["failed"])
        self.check()
