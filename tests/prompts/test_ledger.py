"""The ledger: states, conservation, restart."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from miles_disagg.prompts.ledger import Ledger, LedgerError


def test_a_prompt_that_is_trained_on_passes_every_state():
    ledger = Ledger()
    assert ledger.handed_out("0:1") == 1
    ledger.generated("0:1")
    ledger.queued("0:1")
    ledger.taken("0:1")
    assert ledger.totals()["in_flight"] == 1
    ledger.trained(["0:1"])
    assert ledger.totals()["trained"] == 1
    assert ledger.unfinished() == []
    ledger.check()


def test_a_dropped_prompt_may_come_again_and_both_attempts_are_counted():
    ledger = Ledger()
    ledger.handed_out("0:1")
    ledger.dropped("0:1", "aborted")
    assert ledger.dropped_prompts() == {"0:1": "aborted"}
    assert ledger.handed_out("0:1") == 2
    ledger.generated("0:1")
    ledger.dropped("0:1", "stale")
    totals = ledger.totals()
    assert (totals["handed_out"], totals["retried"]) == (2, 1)
    assert (totals["failed"], totals["dropped"]) == ({"aborted": 1}, {"stale": 1})
    ledger.check()


@pytest.mark.parametrize(
    "moves", [["queued"], ["generated", "taken"], ["generated", "queued", "trained"], ["handed_out"]]
)
def test_a_move_that_skips_a_state_is_refused(moves):
    ledger = Ledger()
    ledger.handed_out("0:1")
    for move in moves[:-1]:
        getattr(ledger, move)("0:1")
    with pytest.raises(LedgerError, match="0:1"):
        getattr(ledger, moves[-1])(["0:1"] if moves[-1] == "trained" else "0:1")


def test_a_prompt_that_vanishes_is_found():
    ledger = Ledger()
    ledger.handed_out("0:1")
    del ledger._live["0:1"]
    with pytest.raises(LedgerError, match="does not balance"):
        ledger.check()


def test_a_restart_drops_what_was_unfinished_except_what_was_kept():
    ledger = Ledger()
    for key in "abc":
        ledger.handed_out(key)
    ledger.generated("b")
    ledger.queued("b")
    copy = Ledger()
    copy.load_state(json.loads(json.dumps(ledger.state())))
    assert copy.abandon("restart", keep=["b"]) == ["a", "c"]
    assert copy.totals()["failed"] == {"restart": 2}
    assert copy.totals()["queued"] == 1
    copy.check()


def test_folding_forgets_trained_prompts_of_earlier_epochs_and_keeps_their_count():
    ledger = Ledger()
    for key in ("0:1", "1:1", "0:2"):
        ledger.handed_out(key)
    for key in ("0:1", "1:1"):
        ledger.generated(key)
        ledger.queued(key)
        ledger.taken(key)
        ledger.trained([key])
    ledger.dropped("0:2", "aborted")
    before = ledger.totals()
    ledger.fold(before_epoch=1)
    assert ("0:1" in ledger, "1:1" in ledger, "0:2" in ledger) == (False, True, True)
    assert ledger.totals() == before
    ledger.check()


class Books(RuleBasedStateMachine):
    """Any order of legal moves, with restarts in between, keeps the books balanced."""

    def __init__(self):
        super().__init__()
        self.ledger, self.next = Ledger(), 0

    def keys(self, *states: str) -> list[str]:
        return [k for k in map(str, range(self.next)) if self.ledger.entry(k).state in states]

    @rule()
    def hand_out(self):
        self.ledger.handed_out(str(self.next))
        self.next += 1

    @rule(data=st.data(), reason=st.sampled_from(["stale", "timeout"]), move=st.integers(0, 5))
    def move(self, data, reason, move):
        legal = {
            0: (("generating",), self.ledger.generated),
            1: (("in_flight",), self.ledger.queued),
            2: (("queued",), self.ledger.taken),
            3: (("taken",), lambda key: self.ledger.trained([key])),
            4: (("generating", "in_flight", "queued", "taken"), lambda key: self.ledger.dropped(key, reason)),
            5: (("dropped",), self.ledger.handed_out),
        }
        states, action = legal[move]
        if keys := self.keys(*states):
            action(data.draw(st.sampled_from(keys)))

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger = Ledger()
        self.ledger.load_state(state)
        self.ledger.abandon("restart", keep=self.keys("queued"))

    @invariant()
    def balanced(self):
        self.ledger.check()


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_books_balance_after_any_history = Books.TestCase
