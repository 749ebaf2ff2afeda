"""The relay tree: few read from the origin, few are served by one, and no two views of the fleet make a circle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.gateway.relays import FAN_OUT_HOSTS, FAN_OUT_ZONES, RelayPoint, RelayTree, tree

points = st.dictionaries(
    st.integers(0, 60).map(lambda n: f"r{n}"),
    st.tuples(st.sampled_from("abcd"), st.integers(0, 9)),
    min_size=1,
).map(lambda d: {name: RelayPoint(z, f"{z}{h}", name, f"http://{name}") for name, (z, h) in d.items()})


def name_of(url: str) -> str:
    return url.removeprefix("http://")


@given(points)
@settings(max_examples=200, deadline=None)
def test_one_reads_from_the_origin_and_everybody_serves_few(fleet: dict[str, RelayPoint]) -> None:
    above = tree(fleet)
    assert above.keys() == fleet.keys()
    assert sum(not urls for urls in above.values()) == 1
    hosts: dict[str, set[str]] = {}
    zones: dict[str, set[str]] = {}
    for name, urls in above.items():
        if not urls:
            continue
        parent = name_of(urls[0])
        if fleet[parent].zone != fleet[name].zone:
            zones.setdefault(parent, set()).add(name)
        elif fleet[parent].host != fleet[name].host:
            hosts.setdefault(parent, set()).add(name)
    assert all(len(served) <= FAN_OUT_ZONES for served in zones.values())
    assert all(len(served) <= FAN_OUT_HOSTS for served in hosts.values())
    across = {(fleet[n].zone, fleet[n].host) for served in hosts.values() for n in served}
    assert len(across) == sum(len(served) for served in hosts.values()), "a host is fetched for once"
    assert len({fleet[n].zone for served in zones.values() for n in served}) == sum(map(len, zones.values()))


@given(points, st.randoms(use_true_random=False), st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_gateways_that_know_different_replicas_never_send_two_to_each_other(fleet, rng, views: int) -> None:
    edges: dict[str, set[str]] = {}
    for _ in range(views):
        seen = {name: point for name, point in fleet.items() if rng.random() < 0.7}
        for name, urls in tree(seen).items():
            edges.setdefault(name, set()).update(map(name_of, urls))
    done: set[str] = set()
    while edges:  # peel off whoever waits for nobody that is left: a circle would never be peeled
        free = {name for name, needs in edges.items() if needs <= done | (fleet.keys() - edges.keys())}
        assert free, f"a circle among {sorted(edges)}"
        done |= free
        edges = {name: needs for name, needs in edges.items() if name not in free}


def test_depth_grows_with_the_logarithm_of_the_hosts() -> None:
    fleet = {f"r{i}": RelayPoint(f"z{i % 20}", f"h{i}", f"r{i}", f"http://r{i}") for i in range(10_000)}
    above = tree(fleet)

    def depth(name: str) -> int:
        return 1 + depth(name_of(above[name][0])) if above[name] else 0

    assert max(depth(name) for name in fleet) <= 8  # log3(20) + log4(500)


def test_the_tree_is_made_anew_when_members_changed_and_not_for_every_heartbeat() -> None:
    made = RelayTree(interval=1.0)
    a, b = (RelayPoint("", name, name, f"http://{name}") for name in "ab")
    made.put("a", a)
    assert made.above("a", 0.0) == ()
    made.put("b", b)
    assert made.above("b", 0.5) is None, "its place is not known yet"
    first, second = sorted((a, b), key=lambda p: p.order)
    assert made.above(second.replica_id, 1.5) == (first.url,)
    assert made.above(first.replica_id, 1.5) == ()
    made.put(first.replica_id, None)
    assert made.above(second.replica_id, 3.0) == ()
    assert made.above(first.replica_id, 3.0) is None
