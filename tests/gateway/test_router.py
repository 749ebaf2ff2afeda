"""Who gets a request: versions, load, sessions, silence. No I/O, a clock by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_disagg.domain.errors import (
    EngineUnavailable,
    InvalidRequest,
    WeightVersionGone,
    WeightVersionNotReady,
)
from miles_disagg.domain.versions import ANY_VERSION, Constraint
from miles_disagg.gateway.router import Router


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Waiting:
    gone = False

    def replica_gone(self) -> None:
        self.gone = True


def beat(router: Router, name: str, applied: int | None = 0, **fields: Any) -> Any:
    run = fields.pop("run_id", "run")
    latest = None if applied is None else f"{run}/weight_v{applied:06d}"
    message = {"replica_id": name, "url": f"http://{name}", "run_id": run, "applied": applied, "latest": latest}
    return router.heartbeat({**message, "state": "ready", "ready": applied is not None, "active_requests": 0, **fields})


def make(**settings: Any) -> tuple[Router, Clock]:
    clock = Clock()
    return Router(clock=clock, rng=random.Random(0), **settings), clock


def test_a_request_of_a_run_never_goes_to_another_one_whatever_the_numbers_say() -> None:
    router, _ = make()
    beat(router, "a", 40, run_id="old")
    with pytest.raises(WeightVersionNotReady):
        router.pick(Constraint(min_version=0), run_id="new")
    beat(router, "a", None, run_id=None, latest="new/weight_v000000")
    with pytest.raises(WeightVersionNotReady):
        router.pick(Constraint(min_version=0), run_id="new")
    beat(router, "a", 0, run_id="new")
    assert router.pick(Constraint(min_version=0), run_id="new").member.applied == 0


def test_a_run_that_nobody_speaks_of_any_more_is_forgotten_in_whatever_order_they_were_seen() -> None:
    router, _ = make()  # restarted in the middle of a change of runs: the newer one is seen first
    beat(router, "a", 0, run_id="new")
    beat(router, "b", 40, run_id="old")
    beat(router, "b", 0, run_id="new")
    assert router.run_id == "new"
    assert {router.pick(ANY_VERSION, rid=f"r{i}").member.replica_id for i in range(20)} == {"a", "b"}


def seen(version: int, published: str, live: str) -> dict[str, str]:
    return {"version": f"run/weight_v{version:06d}", "published": published, "live": live}


def test_a_replica_whose_live_weights_are_not_the_published_ones_is_refused_until_they_are() -> None:
    router, _ = make()
    beat(router, "good", 3, fingerprint=seen(3, "p", "p"))
    bad = beat(router, "bad", 3, fingerprint=seen(3, "p", "x"))
    assert not bad.ready
    assert "fingerprint x" in bad.reason
    assert {router.pick(ANY_VERSION, rid=f"r{i}").member.replica_id for i in range(20)} == {"good"}
    assert beat(router, "bad", 4, fingerprint=seen(3, "p", "x")).ready  # another version was loaded since
    assert beat(router, "bad", 4, fingerprint=seen(4, "q", "q")).ready


def test_what_was_published_is_what_most_replicas_found_in_the_store() -> None:
    router, _ = make()
    odd = beat(router, "odd", 3, fingerprint=seen(3, "x", "x"))  # its disk and its engine agree, and both are wrong
    assert odd.ready
    beat(router, "b", 3, fingerprint=seen(3, "p", "p"))
    beat(router, "c", 3, fingerprint=seen(3, "p", "p"))
    assert not odd.ready
    assert {m.replica_id for m in router.members if m.ready} == {"b", "c"}


def test_a_majority_that_leaves_takes_its_word_along() -> None:
    router, _ = make()
    odd = beat(router, "odd", 3, fingerprint=seen(3, "x", "x"))
    for name in "bc":
        beat(router, name, 3, fingerprint=seen(3, "p", "p"))
    assert not odd.ready
    router.goodbye("b")
    beat(router, "c", 4, fingerprint=seen(4, "q", "q"))
    assert odd.ready
    for i in range(2000):  # asked of everybody at every heartbeat, this would take minutes
        beat(router, f"r{i}", 5, fingerprint=seen(5, "p", "p"))
    assert not beat(router, "odd", 5, fingerprint=seen(5, "p", "x")).ready


def test_requests_go_only_to_replicas_that_satisfy_the_constraint() -> None:
    router, _ = make()
    for version in (3, 4, 5):
        beat(router, f"r{version}", version)
    assert router.pick(Constraint(min_version=5)).member.replica_id == "r5"
    assert router.pick(Constraint(exact_version=4)).member.replica_id == "r4"
    with pytest.raises(WeightVersionNotReady) as caught:
        router.pick(Constraint(min_version=6))
    assert (caught.value.served, caught.value.latest) == (5, 5)
    with pytest.raises(WeightVersionGone):
        router.pick(Constraint(exact_version=2))


def test_an_old_exact_version_is_not_gone_while_a_replica_has_yet_to_say_what_it_serves() -> None:
    router, _ = make()
    beat(router, "a", 5)
    beat(router, "b", None, state="booting")
    with pytest.raises(WeightVersionNotReady):
        router.pick(Constraint(exact_version=2))


def test_the_least_loaded_replica_is_chosen_and_a_suspect_only_if_nobody_else_is_left() -> None:
    router, clock = make()
    a, b = beat(router, "a", max_in_flight=10), beat(router, "b", max_in_flight=10)
    a.outstanding.add(Waiting())
    assert router.pick(ANY_VERSION).member is b
    router.suspect(b)
    assert router.pick(ANY_VERSION).member is a
    assert router.pick(ANY_VERSION, exclude={a}).member is b
    clock.now += 2.0
    assert router.pick(ANY_VERSION).member is b


def test_requests_of_other_gateways_count_as_load() -> None:
    router, _ = make()
    beat(router, "a", active_requests=7)
    b = beat(router, "b", active_requests=2)
    assert router.pick(ANY_VERSION).member is b


def test_a_silent_replica_leaves_rotation_and_its_requests_are_told() -> None:
    router, clock = make(expiry=5.0)
    a = beat(router, "a")
    waiting = Waiting()
    a.outstanding.add(waiting)
    clock.now = 4.9
    assert router.expire() == []
    clock.now = 5.1
    assert router.expire() == [a]
    assert waiting.gone
    with pytest.raises(EngineUnavailable):
        router.pick(ANY_VERSION)


def test_goodbye_takes_a_replica_out_of_rotation_but_lets_its_requests_finish() -> None:
    router, _ = make()
    a = beat(router, "a")
    waiting = Waiting()
    a.outstanding.add(waiting)
    assert router.goodbye("a")
    assert not router.goodbye("a")
    assert not waiting.gone
    with pytest.raises(EngineUnavailable):
        router.pick(ANY_VERSION)


def test_a_session_stays_on_its_replica_and_its_move_is_reported_once() -> None:
    router, _ = make()
    for name in "abc":
        beat(router, name)
    first = router.pick(ANY_VERSION, "s").member
    first.outstanding.update(Waiting() for _ in range(50))
    assert router.pick(ANY_VERSION, "s").member is first
    router.goodbye(first.replica_id)
    moved = router.pick(ANY_VERSION, "s")
    assert moved.rebound_from == first.replica_id
    assert router.pick(ANY_VERSION, "s") == type(moved)(moved.member, None)


def test_a_session_waits_for_its_own_replica_to_catch_up() -> None:
    router, _ = make()
    beat(router, "a", 1)
    bound = router.pick(ANY_VERSION, "s").member
    beat(router, "b", 2)
    with pytest.raises(WeightVersionNotReady):
        router.pick(Constraint(min_version=2), "s")
    beat(router, "a", 2)
    assert router.pick(Constraint(min_version=2), "s").member is bound


def test_gateways_that_never_talked_bind_a_session_to_the_same_replica() -> None:
    routers = [make()[0] for _ in range(2)]
    for router in routers:
        for name in "abcdef":
            beat(router, name)
    for i in range(20):
        assert len({r.pick(ANY_VERSION, f"s{i}").member.replica_id for r in routers}) == 1


def test_a_rid_finds_its_replica_again_from_any_gateway_and_load_stays_even() -> None:
    routers = [make()[0] for _ in range(2)]
    for router in routers:
        for name in "abc":
            beat(router, name)
    for i in range(20):
        assert len({r.pick(ANY_VERSION, rid=f"r{i}").member.replica_id for r in routers}) == 1
    for i in range(300):
        routers[0].pick(ANY_VERSION, rid=f"r{i}").member.outstanding.add(Waiting())
    taken = [m.taken for m in routers[0].members]
    assert sum(taken) == 300
    assert max(taken) <= 1.25 * 101 + 1


def test_in_a_large_fleet_too_a_rid_finds_its_replica_again_while_others_come_and_go() -> None:
    one, other = make()[0], make()[0]
    for i in range(500):
        beat(one, f"r{i}", i % 2)
        beat(other, f"r{499 - i}", (499 - i) % 2)
    wanted = Constraint(min_version=1)
    first = {f"q{i}": one.pick(wanted, rid=f"q{i}").member.replica_id for i in range(300)}
    assert {rid: other.pick(wanted, rid=rid).member.replica_id for rid in first} == first
    assert len(set(first.values())) > 100, "they are spread"
    for i in range(0, 500, 50):  # a tenth of them is replaced
        other.goodbye(f"r{i}")
        beat(other, f"new{i}", 1)
    again = {rid: other.pick(wanted, rid=rid).member.replica_id for rid in first}
    assert sum(again[rid] == first[rid] for rid in first) > 270
    for rid in range(4000):
        one.pick(wanted, rid=f"l{rid}").member.outstanding.add(Waiting())
    assert max(m.taken for m in one.members) <= 2 * 4000 / 250


def test_replicas_of_another_run_are_out_of_rotation() -> None:
    router, _ = make()
    beat(router, "old", 7)
    beat(router, "new", 0, run_id="second")
    assert router.run_id == "second"
    assert router.pick(ANY_VERSION).member.replica_id == "new"
    with pytest.raises(WeightVersionNotReady):
        router.pick(Constraint(min_version=5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica_id", ""),
        ("replica_id", "a/b"),
        ("url", "ftp://x"),
        ("applied", -1),
        ("applied", "7"),
        ("run_id", ".."),
    ],
)
def test_a_malformed_heartbeat_names_its_field(field: str, value: object) -> None:
    router, _ = make()
    with pytest.raises(InvalidRequest, match=field):
        beat(router, "a", **{"applied": 0}) and router.heartbeat(
            {"replica_id": "a", "url": "http://a", "applied": 0, "run_id": "run", field: value}
        )


versions = st.integers(0, 6)
constraints = st.one_of(
    st.just(ANY_VERSION), st.builds(Constraint, min_version=versions), st.builds(Constraint, exact_version=versions)
)


@given(
    fleet=st.lists(st.tuples(st.one_of(st.none(), versions), st.booleans(), st.sampled_from(["run", "old"]))),
    constraint=constraints,
    session=st.sampled_from([None, "s", "t"]),
    copies=st.sampled_from([1, 20]),
    rid=st.sampled_from([None, "r", "q"]),
    seed=st.integers(0, 100),
)
def test_a_pick_always_satisfies_the_constraint_and_a_refusal_means_that_nobody_does(
    fleet: list[tuple[int | None, bool, str]],
    constraint: Constraint,
    session: str | None,
    rid: str | None,
    copies: int,
    seed: int,
) -> None:
    router = Router(clock=Clock(), rng=random.Random(seed), run_id="run")
    for i, (applied, ready, run) in enumerate(fleet * copies):
        beat(router, f"r{i}", applied, ready=ready and applied is not None, run_id=run)
    fits = [m for m in router.members if m.ready and m.run_id == "run" and constraint.satisfied_by(m.applied)]
    try:
        picked = router.pick(constraint, session, rid=rid).member
    except (WeightVersionNotReady, WeightVersionGone, EngineUnavailable):
        assert not fits
    else:
        assert picked in fits
