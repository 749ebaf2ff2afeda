"""How many replicas a load asks for, and when. A clock by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.cluster.autoscale import Autoscaler, ScalePolicy

POLICY = ScalePolicy(least=1, most=8, target=10.0, up_seconds=5.0, down_seconds=60.0)


def test_a_burst_shorter_than_the_delay_starts_nothing() -> None:
    scaler = Autoscaler(POLICY)
    assert [scaler.observe(t, 50 if t < 4 else 5) for t in range(10)] == [1] * 10


def test_a_load_that_stays_grows_the_fleet_to_the_least_it_asked_for_meanwhile() -> None:
    scaler = Autoscaler(POLICY)
    loads = [35, 80, 80, 31, 80, 80]
    assert [scaler.observe(t, load) for t, load in enumerate(loads)] == [1, 1, 1, 1, 1, 4]


def test_a_lull_costs_no_replica_and_idleness_costs_them_one_by_one() -> None:
    scaler = Autoscaler(POLICY)
    for t in range(6):
        scaler.observe(t, 35)
    assert scaler.number == 4
    assert [scaler.observe(t, 0) for t in (10, 60, 69)] == [4, 4, 4]
    assert scaler.observe(69.5, 35) == 4
    assert [scaler.observe(t, 0) for t in (70, 129, 130, 189, 190, 250, 310)] == [4, 4, 3, 3, 2, 1, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), max_size=60))
def test_the_number_stays_within_its_bounds_and_shrinks_by_one_at_most(steps: list[tuple[float, int]]) -> None:
    scaler, now, before = Autoscaler(POLICY), 0.0, 1
    for seconds, load in steps:
        now += seconds
        number = scaler.observe(now, load)
        assert POLICY.least <= number <= POLICY.most
        assert number >= before - 1
        before = number
