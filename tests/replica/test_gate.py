"""The gate's rules in every order of events: admission, drains, pauses, failures, attribution. No engine, no I/O."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles_disagg.domain.errors import EngineUnavailable, Overloaded, WeightVersionGone, WeightVersionNotReady
from miles_disagg.domain.versions import ANY_VERSION, Constraint, VersionRef
from miles_disagg.engine.base import PauseMode
from miles_disagg.replica.gate import Flight, Gate, Phase, StopKind
from tests.fakes.replica import ref

versions = st.integers(0, 8)
constraints = st.one_of(
    st.just(ANY_VERSION), st.builds(Constraint, min_version=versions), st.builds(Constraint, exact_version=versions)
)


class GateMachine(RuleBasedStateMachine):
    """Plays an activator and clients that behave; `truth` is who really wrote each token."""

    @initialize(mode=st.sampled_from(["in_place", "retract"]), recomputes=st.booleans())
    def start(self, mode: PauseMode, recomputes: bool) -> None:
        self.gate = Gate(6, mode)
        self.gate.engine_recomputes = recomputes
        self.gate.open(ref(0))
        self.engine = 0  # what the engine holds
        self.truth: dict[Flight, list[int]] = {}
        self.keys: dict[str, set[int]] = {}  # versions computed under a cache key from the start

    @rule(constraint=constraints)
    def a_request_arrives(self, constraint: Constraint) -> None:
        gate = self.gate
        try:
            flight = gate.try_admit("r", constraint)
        except Overloaded:
            assert gate.active >= 6
        except EngineUnavailable:
            assert gate.phase is Phase.FENCED
        except WeightVersionGone:
            assert gate.served is not None
            assert (constraint.exact_version or 0) < gate.served.version
        except WeightVersionNotReady:
            closed = gate.phase is not Phase.OPEN
            assert closed or not constraint.satisfied_by(gate.served and gate.served.version)
        else:
            if flight is None:
                assert gate.phase is Phase.PAUSED
                assert gate.target is not None
                assert constraint.satisfied_by(gate.target.version)
            else:
                assert gate.phase in (Phase.OPEN, Phase.DRAINING)
                assert constraint.satisfied_by(flight.version_start)
                self.truth[flight] = []

    @precondition(lambda self: self.truth and self.gate.phase in (Phase.OPEN, Phase.DRAINING))
    @rule(data=st.data(), n=st.integers(1, 3), stamped=st.booleans())
    def the_engine_writes(self, data: st.DataObject, n: int, stamped: bool) -> None:
        flight = data.draw(st.sampled_from(sorted(self.truth, key=id)))
        if flight.stop is not None:
            return
        if not self.truth[flight]:
            self.keys.setdefault(flight.cache_key, set()).add(self.engine)
        self.truth[flight] += [self.engine] * n
        self.gate.record(flight, len(self.truth[flight]), str(ref(self.engine)) if stamped else None)

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(sorted(self.truth, key=id)))
        del self.truth[flight]
        self.gate.leave(flight)

    @precondition(lambda self: self.gate.phase is Phase.OPEN and self.engine < 8)
    @rule()
    def an_activation_begins(self) -> None:
        self.gate.begin_drain(ref(self.engine + 1))

    @precondition(lambda self: self.gate.phase is Phase.DRAINING)
    @rule()
    def it_is_called_off(self) -> None:
        self.gate.cancel_drain()

    @precondition(lambda self: self.gate.phase is Phase.DRAINING)
    @rule(late=st.data(), fails=st.booleans(), written=st.integers(0, 2))
    def it_goes_through(self, late: st.DataObject, fails: bool, written: int) -> None:
        gate = self.gate
        for flight in gate.draining():  # drained, or ended by name
            flight.interrupt(StopKind.END, "deadline")
            self.truth.pop(flight)
            gate.leave(flight)
        gate.pause()
        if self.truth and written:  # tokens already under way when the engine paused, whatever their stamp
            flight = late.draw(st.sampled_from(sorted(self.truth, key=id)))
            self.truth[flight] += [self.engine] * written
            gate.record(flight, len(self.truth[flight]), str(ref(self.engine + late.draw(st.integers(0, 1)))))
        gate.interrupt_paused()
        if fails:
            gate.fence("the load failed")
            gate.open(ref(self.engine))
        else:
            self.engine += 1
            gate.open(ref(self.engine))
        for flight in self.truth:
            if flight.stop is not None:
                assert flight.stop.kind is StopKind.RESTART
                gate.readmit(flight)
            elif not self.truth[flight]:
                assert gate.engine_recomputes, "a request without tokens kept the old cache key"

    @rule(stamp=st.sampled_from(["default", "other/weight_v000001", str(ref(99))]))
    def an_engine_changed_behind_our_back_fences(self, stamp: str) -> None:
        if self.gate.phase is not Phase.OPEN or not self.truth:
            return
        flight = next(iter(self.truth))
        with pytest.raises(EngineUnavailable):
            self.gate.record(flight, flight.tokens + 1, stamp)
        assert self.gate.phase is Phase.FENCED
        self.gate.fail_flights("gone")
        for failed in list(self.truth):
            assert failed.stop is not None
            self.gate.leave(failed)
        self.truth.clear()
        self.gate.open(ref(self.engine))

    @invariant()
    def every_token_has_the_version_that_wrote_it(self) -> None:
        for flight, written in getattr(self, "truth", {}).items():
            spans = flight.spans
            attributed = [
                span.version
                for i, span in enumerate(spans)
                for _ in range(span.first_token, spans[i + 1].first_token if i + 1 < len(spans) else flight.tokens)
            ]
            assert attributed == written
            assert not written or flight.version_start == written[0]
            if flight.exact:
                assert set(written) <= {flight.constraint.exact_version}
            assert all(flight.constraint.satisfied_by(v) for v in written)

    @invariant()
    def no_prefix_is_shared_by_two_versions(self) -> None:
        if hasattr(self, "gate") and self.gate.engine_recomputes:
            return  # there are no prefixes
        assert all(len(v) == 1 for v in getattr(self, "keys", {}).values())

    @invariant()
    def nobody_leaks(self) -> None:
        if hasattr(self, "gate"):
            assert self.gate.active == len(self.truth)


GateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_gate_in_any_order = GateMachine.TestCase


async def test_a_newer_run_closes_the_gate_for_every_constraint() -> None:
    gate = Gate(4)
    gate.open(ref(3))
    gate.latest = VersionRef("other", 0)
    with pytest.raises(WeightVersionNotReady):
        gate.try_admit("r", ANY_VERSION)


async def test_even_the_same_version_loaded_again_has_its_own_cache_key() -> None:
    gate = Gate(4)
    keys = set()
    for _ in range(3):
        gate.open(ref(1))
        keys.add(gate.cache_key)
    assert len(keys | {Gate(4).cache_key}) == 4


async def test_waiting_for_an_activation_ends_with_its_deadline() -> None:
    gate = Gate(4)
    gate.open(ref(0))
    gate.begin_drain(ref(1))
    gate.pause()
    with pytest.raises(WeightVersionNotReady):
        await gate.admit("r", ANY_VERSION, wait_seconds=0.02)
    assert gate.active == 0
