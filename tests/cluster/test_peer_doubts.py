"""An engine that a failed transfer may still reach is sent nothing until that has arrived or failed."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miles_disagg.cluster.fleet import Fleet, Member
from miles_disagg.cluster.peer import PeerChannel, PeerSettings
from miles_disagg.domain.errors import DeadlineExceeded, EngineUnavailable, PublicationFailed
from miles_disagg.publish.peer import Sent
from tests.fakes.replica import ref


class Remote:
    """An actor of a plain object: every method has a `remote`, which answers at once or raises what the object does."""

    def __init__(self, real: Any):
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: SimpleNamespace(future=lambda: self._answer(name, args)))

    def _answer(self, name: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self.real, name)(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Rank:
    """A trainer rank whose writes fail, or do not come back; `late`: targets they may still reach."""

    def __init__(self, fails: str | Exception):
        self.fails, self.late, self.sends = fails, set[int](), 0

    def peer_send(self, *_: Any) -> Sent:
        self.sends += 1
        if isinstance(self.fails, Exception):
            raise self.fails
        return Sent(errors={0: self.fails} if self.fails else {})

    def peer_unsettled(self) -> set[int]:
        return self.late


class Engine:
    """The engine's side: notes whether its memory was to be registered anew."""

    def __init__(self) -> None:
        self.renewed: list[bool] = []
        self.adrift = True

    def peer(self, method: str, *args: Any) -> Any:
        if method == "links_and_choice":
            self.renewed.append(args[0])
            return [SimpleNamespace(target=0, mode="staging")], "nixl, into a staging area"
        return self.adrift if method == "unsettled" else None

    def status(self) -> dict[str, Any]:
        return {"process_up": True}


def channel_of(rank: Rank, *engines: Engine) -> tuple[PeerChannel, list[Member]]:
    """A channel from one trainer rank to `engines`, each of one rank."""
    members = [
        cast(Member, SimpleNamespace(spec=SimpleNamespace(replica_id=f"engine-{i}"), actor=Remote(engine)))
        for i, engine in enumerate(engines)
    ]
    fleet = SimpleNamespace(members=members, say=lambda _: None)
    trainer = SimpleNamespace(ranks=[Remote(rank)])
    settings = PeerSettings("nixl", "gloo", 1 << 20, 5.0)
    channel = PeerChannel(cast(Any, trainer), cast(Any, None), cast(Fleet, fleet), lambda *_: {}, settings)
    channel._targets = [(i,) for i in range(len(engines))]
    return channel, members


@pytest.mark.parametrize("fails", ["rank 0: the write was not done after 5 s", DeadlineExceeded("rank 0", 5.0)])
async def test_nothing_is_sent_while_an_earlier_write_may_land_and_then_to_memory_registered_anew(fails) -> None:
    rank, engine = Rank(fails), Engine()
    channel, (member,) = channel_of(rank, engine)
    with pytest.raises((PublicationFailed, DeadlineExceeded)):
        await channel._send(ref(1), [member], whole=False)
    assert (rank.sends, engine.renewed) == (1, [False])
    rank.late = {0}
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="no engine can be reached"):
            await channel._send(ref(2), [member], whole=True)
    assert (rank.sends, engine.renewed) == (1, [False]), "something was sent that the late bytes would fall upon"
    rank.late = set()
    with pytest.raises((PublicationFailed, DeadlineExceeded)):
        await channel._send(ref(2), [member], whole=True)
    assert (rank.sends, engine.renewed) == (2, [False, True])


async def test_a_write_to_another_engine_does_not_matter() -> None:
    rank, engines = Rank("the write was not done"), [Engine(), Engine()]
    channel, members = channel_of(rank, *engines)
    with pytest.raises(PublicationFailed):
        await channel._send(ref(1), members[:1], whole=False)
    rank.late = {1}
    assert await channel._settled(members[0]), "it failed before, so its memory is registered anew"


async def test_an_engine_that_was_half_given_weights_waits_for_what_the_giver_sent() -> None:
    rank, engines = Rank(""), [Engine(), Engine()]
    channel, (donor, member) = channel_of(rank, *engines)
    channel._doubts.add(member, [donor])
    with pytest.raises(
        EngineUnavailable, match="what engine-0 wrote to engine-1 before has neither arrived nor failed"
    ):
        await channel._settled(member)
    donor.actor = None
    assert await channel._settled(member), "a giver that has ended writes no more"
