"""Admission: property tests on a simulated clock, against the bound that it promises."""

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_disagg.domain.versions import ANY_VERSION, Constraint
from miles_disagg.rollout.pacing import Pacing


def test_on_policy_waits_for_the_next_version():
    pacing = Pacing(max_staleness=0, groups_per_version=2)
    assert pacing.constraint(0) == Constraint(min_version=0)
    assert pacing.constraint(1) == Constraint(min_version=0)
    assert pacing.constraint(2) is None
    pacing.taken(2, trainer_version=0)
    assert pacing.constraint(0) is None, "the batch of version 0 is complete; the next one is by version 1"
    pacing.advance(1)
    assert pacing.constraint(0) == Constraint(min_version=1)


def test_a_trainer_that_is_ahead_of_publication_is_accounted_for():
    pacing = Pacing(max_staleness=1, groups_per_version=2)
    pacing.taken(2, trainer_version=0)
    pacing.taken(2, trainer_version=1)
    assert pacing.constraint(0) is None, "consumed at version 2, so version 1 is needed, and it is not out yet"
    pacing.advance(1)
    assert pacing.constraint(0) == Constraint(min_version=1)


def test_no_bound_admits_everything():
    assert Pacing(None, 4).constraint(10_000) == ANY_VERSION


@given(k=st.integers(0, 8), per_version=st.integers(1, 16), version=st.integers(0, 50), outstanding=st.integers(0, 400))
def test_admission_is_areals_capacity(k, per_version, version, outstanding):
    """With v B groups consumed before version v: started < (K + v + 1) B."""
    pacing = Pacing(k, per_version, version, version)
    started = version * per_version + outstanding
    assert (pacing.constraint(outstanding) is not None) == (started < (k + version + 1) * per_version)


def simulate(
    seed: int, k: int, batch: int, steps: int, sigma: float, publish_delay: float, workers: int, train: float = 0.5
):
    """Groups with lognormal durations on engines that update in flight; returns (violations, stale, groups, clock)."""
    rng = random.Random(seed)
    pacing, clock, counter = Pacing(k, batch), 0.0, itertools.count()
    running: list[tuple[float, int, int]] = []  # (finish time, tie, version at the first token)
    publications: list[tuple[float, int]] = []
    queued: list[int] = []
    trainer_version = violations = stale = groups = 0
    trainer_free = 0.0
    while trainer_version < steps:
        while len(running) < workers and (constraint := pacing.constraint(len(running) + len(queued))) is not None:
            start = pacing.published
            violations += not constraint.satisfied_by(start)
            heapq.heappush(running, (clock + rng.lognormvariate(0, sigma), next(counter), start))
            groups += 1
        fresh = [v for v in queued if trainer_version - v <= k]
        stale += len(queued) - len(fresh)
        queued = sorted(fresh)
        if len(queued) >= batch and clock >= trainer_free:
            taken, queued = queued[:batch], queued[batch:]
            violations += sum(trainer_version - v > k for v in taken)
            pacing.taken(batch, trainer_version)
            trainer_version += 1
            trainer_free = clock + train
            publications.append((trainer_free + publish_delay, trainer_version))
            continue
        times = [running[0][0]] if running else []
        times += [t for t, _ in publications] + ([trainer_free] if trainer_free > clock else [])
        assert times, f"throughput is zero: {pacing}, {len(queued)} queued at trainer version {trainer_version}"
        clock = min(times)
        while running and running[0][0] <= clock:
            queued.append(heapq.heappop(running)[2])
        for due in [p for p in publications if p[0] <= clock]:
            publications.remove(due)
            pacing.advance(due[1])
    return violations, stale, groups, clock


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    k=st.integers(0, 5),
    batch=st.integers(1, 12),
    sigma=st.floats(0, 2),
    publish_delay=st.floats(0, 3),
    workers=st.integers(1, 64),
)
def test_no_consumed_token_is_older_than_the_bound_and_throughput_is_never_zero(
    seed, k, batch, sigma, publish_delay, workers
):
    violations, *_ = simulate(seed, k, batch, 40, sigma, publish_delay, workers)
    assert violations == 0


def test_with_equal_durations_nothing_is_made_only_to_be_thrown_away():
    for k, workers in itertools.product(range(4), (1, 7, 64)):
        violations, stale, groups, _ = simulate(0, k, 8, 200, sigma=0.0, publish_delay=0.3, workers=workers)
        assert (violations, stale) == (0, 0), (k, workers, groups)


def test_with_long_tails_within_k_steps_throwing_away_stays_the_exception():
    violations, stale, groups, _ = simulate(1, 3, 16, 300, 1.0, 0.2, workers=48, train=2.0)
    assert violations == 0
    assert stale < 0.05 * groups, f"{stale} of {groups}"


@pytest.mark.slow
def test_a_million_samples_without_a_violation():
    total = 0
    for seed in range(40):
        rng = random.Random(seed)
        k, batch = rng.randrange(6), rng.choice([4, 16, 64])
        steps = 25_000 // batch
        violations, _, groups, _ = simulate(seed, k, batch, steps, rng.uniform(0, 1.5), rng.uniform(0, 2), 96)
        assert violations == 0
        total += groups
    assert total >= 1_000_000
