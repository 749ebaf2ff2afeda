"""Parts that die while a run waits for something else, and actors that hang."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from miles_disagg.cluster.calls import ActorLost, Lifeline, Pulse, call
from miles_disagg.cluster.fleet import Fleet, FleetTimeouts, Member
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.domain.errors import DeadlineExceeded, EngineStartError, EngineUnavailable


class Reference:
    """A Ray reference with its answer; without one, nothing ever comes."""

    def __init__(self, answer: Any = None, error: Exception | None = None, *, silent: bool = False):
        self._future: Future[Any] = Future()
        if error is not None:
            self._future.set_exception(error)
        elif not silent:
            self._future.set_result(answer)

    def future(self) -> Future[Any]:
        return self._future


def dead() -> Reference:
    return Reference(error=ray.exceptions.RayActorError())


async def test_who_waits_hears_at_once_that_a_part_is_lost_for_good() -> None:
    lifeline, ended = Lifeline(), []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    assert await lifeline.hold(asyncio.sleep(0, "batch")) == "batch"
    waiting = asyncio.create_task(lifeline.hold(forever()))
    await asyncio.sleep(0)
    lifeline.cut(EngineUnavailable("no engine is left"))
    lifeline.cut(EngineUnavailable("nor a gateway"))
    with pytest.raises(EngineUnavailable, match="no engine is left"):
        await asyncio.wait_for(waiting, 5)
    assert ended == ["cancelled"]
    with pytest.raises(EngineUnavailable, match="no engine is left"):  # and whoever asks later
        await asyncio.wait_for(lifeline.hold(forever()), 5)


async def test_a_cancellation_that_meets_the_answer_is_not_lost() -> None:
    reference = Reference(silent=True)
    asking = asyncio.create_task(call(reference, "engine-0: status", 30.0))
    await asyncio.sleep(0)
    reference.future().set_result("answer")
    await asyncio.sleep(0)  # it is there, and the task has not seen it
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_actor_that_owes_too_many_answers_in_a_row_is_lost_and_a_slow_one_is_not() -> None:
    pulse = Pulse("gateway", seconds=0.01, owed=2)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="gateway: alive"):
            await pulse.ask(Reference(silent=True), "alive")
        assert await pulse.ask(Reference(True), "alive") is True
    with pytest.raises(DeadlineExceeded):
        await pulse.ask(Reference(silent=True), "alive")
    with pytest.raises(ActorLost, match="owes 2 answers in a row"):
        await pulse.ask(Reference(silent=True), "alive")
    with pytest.raises(ActorLost):
        await Pulse("gateway").ask(dead(), "alive")


async def test_a_trainer_rank_that_dies_is_named_while_nothing_is_asked_of_it(monkeypatch) -> None:
    monkeypatch.setattr("miles_disagg.cluster.trainer_group._LOOK_SECONDS", 0.01)
    answers = [Reference(True), Reference(True), dead()]
    ranks = [SimpleNamespace(alive=SimpleNamespace(remote=lambda: Reference(True)))]
    ranks.append(SimpleNamespace(alive=SimpleNamespace(remote=lambda: answers.pop(0))))
    lifeline = Lifeline()
    await asyncio.wait_for(TrainerGroup(ranks, 1.0, 1.0).keep(lifeline), 5)
    assert "trainer rank 1: be there: its process died" in str(lifeline.error)
    assert answers == []


class Engines(Fleet):
    """A fleet whose engine actors are dead, and of which no other one comes up."""

    starts = 0

    async def _start(self, member: Member) -> None:
        self.starts += 1
        raise EngineStartError("the engine ended with status 1")

    async def _end_actors(self, member: Member) -> None:
        pass


async def test_an_engine_that_does_not_come_up_again_is_tried_again_then_given_up_by_name() -> None:
    forgotten, said, lifeline = [], [], Lifeline()

    async def forget(name: str) -> None:
        forgotten.append(name)

    ledger: Any = SimpleNamespace(forget=forget)
    spec: Any = SimpleNamespace(replica_id="engine-0", restart_limit=2, command="embedded")
    actor = SimpleNamespace(status=SimpleNamespace(remote=dead))
    gateway: Any = None
    fleet = Engines(
        [Member(spec, None, None, actor=actor)], gateway, ledger, FleetTimeouts(1.0, 1.0, 1.0, 1.0), said.append,
        lifeline=lifeline,
    )  # fmt: skip
    await asyncio.wait_for(fleet._supervise(), 20)
    assert fleet.starts == 2
    assert forgotten == ["engine-0"], "publications do not wait for it"
    assert fleet.members[0].lost
    assert sum("could not be started again yet: the engine ended with status 1" in line for line in said) == 2
    assert "no engine is left: engine-0: given up after 2 replacements" in str(lifeline.error)
