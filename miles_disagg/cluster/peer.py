"""Publishing peer to peer: one plan for all layouts, then each version straight from trainer ranks to engine ranks.

`PeerChannel` is a `publications.Channel`. It asks both sides for their layouts, gives each its part of the plan, and
runs an update: links, writes, checksums, landing under the pause. An engine that is not at the newest version gets it
from another engine that serves it, or else from the trainer. The two ends are `publish.peer` and `replica.peer`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_disagg.cluster.calls import ActorLost, call, call_all
from miles_disagg.cluster.fleet import Fleet, Member
from miles_disagg.cluster.publications import commit_staged
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.domain.errors import EngineUnavailable, MilesDisaggError, PublicationFailed, UpdateFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.publish.peer import Route, Sent
from miles_disagg.store.actor import RemoteLedger
from miles_disagg.weights.transfer.blocks import RankLayout
from miles_disagg.weights.transfer.link import GroupSeat, Link, Patch, Sums, arrivals, ranks_of
from miles_disagg.weights.transfer.plan import MAIL_SHARE, Plan, aligned, fingerprint, make_plan
from miles_disagg.weights.transfer.report import summary

_ATTEMPTS = 3
Observe = Callable[[VersionRef, int | None], dict[str, float]]


@dataclass(frozen=True)
class PeerSettings:
    """transport: `nixl` or `torch` (then over `backend`); bucket: bytes of a piece or write; timeout: seconds of one
    update."""

    transport: str
    backend: str
    bucket: int
    timeout: float


@dataclass
class _Update:
    """One engine's part of an update under way."""

    member: Member
    links: list[Link]
    sums: list[Sums] = field(default_factory=list)
    patches: list[list[Patch]] = field(default_factory=list)
    error: MilesDisaggError | None = None

    @property
    def staged(self) -> bool:
        return all(link.mode == "staging" for link in self.links)


class PeerChannel:
    """See the module. `prepare` comes before the first version."""

    def __init__(
        self, trainer: TrainerGroup, ledger: RemoteLedger, fleet: Fleet, observe: Observe, settings: PeerSettings
    ):
        self._trainer, self._ledger, self._fleet = trainer, ledger, fleet
        self._observe, self._settings = observe, settings
        self._plan: Plan | None = None
        self._targets: list[tuple[int, ...]] = []
        self._said: dict[str, str] = {}
        self._doubts = Doubts()

    # --- the plan -----------------------------------------------------------------------------------

    async def prepare(self) -> Plan:
        """Ask everybody for layouts, make the plan, give each side its part, register memory. Says what was planned."""
        members, bucket = self._fleet.members, aligned(self._settings.bucket)
        sources: list[RankLayout] = await self._ranks("peer_layout", "describe its shards", [()] * self._ranks_count)
        engines: list[list[RankLayout]] = list(
            await asyncio.gather(*(self._ask(m, "layout", "describe its weights") for m in members))
        )
        plan = make_plan(sources, [rank for ranks in engines for rank in ranks], bucket=self._settings.bucket)
        self._plan, self._targets = plan, ranks_of(engines)
        routes = [(Route.of(plan, source, bucket),) for source in range(len(sources))]
        await self._ranks("peer_route", "adopt its part of the transfer plan", routes)
        for member, targets in zip(members, self._targets, strict=True):
            await self._adopt(member, targets)
        for line in summary(plan, bucket):
            self._fleet.say(f"p2p: {line}")
        await asyncio.gather(*(self._links(m) for m in members))
        return plan

    async def _adopt(self, member: Member, targets: Sequence[int]) -> None:
        parts = [arrivals(self._planned, target) for target in targets]
        mail = max(aligned(self._planned.staged_bytes[t] // MAIL_SHARE) for t in targets)
        await self._ask(member, "adopt", "adopt its part of the transfer plan", list(targets), parts, mail)

    @property
    def _planned(self) -> Plan:
        if self._plan is None:
            raise PublicationFailed("there is no transfer plan: `prepare` comes first")
        return self._plan

    # --- a version ----------------------------------------------------------------------------------

    async def deliver(self, ref: VersionRef) -> dict[str, float]:
        """Check, move the pointer, send, land. Engines that fail serve what they served, or stay fenced, and are sent
        it again by the fleet's supervision."""
        try:
            await self._ranks("peer_check", f"check {ref}", [()] * self._ranks_count)
        except BaseException:
            await self.discard()
            raise
        metrics = await commit_staged(self._ledger, ref)
        for attempt in range(_ATTEMPTS):
            try:
                members = [m for m in self._fleet.members if not m.lost]
                sent = await self._send(ref, members, whole=attempt > 0)
                return {**metrics, **_metrics(sent), **self._observe(ref, max(s.moved for s in sent))}
            except EngineUnavailable as error:
                self._fleet.say(f"{ref} waits for an engine: {error}")
                break
            except MilesDisaggError as error:
                self._fleet.say(f"sending {ref} failed, trying the engines that still answer: {error}")
        await self.discard()
        return metrics

    async def repair(self, ref: VersionRef, member: Member) -> None:
        """Bring one engine to `ref`: from an engine that serves it, else from what the trainer staged last."""
        await self._rejoin(member)
        donor = await self._donor(ref, member)
        if donor is None:
            self._fleet.say(f"{member.spec.replica_id} gets {ref} from the trainer")
            await self._send(ref, [member], whole=True)
            return
        try:
            await self._give(ref, donor, member)
            self._fleet.say(f"{member.spec.replica_id} got {ref} from {donor.spec.replica_id}")
        except MilesDisaggError as error:
            self._fleet.say(f"{member.spec.replica_id}: {donor.spec.replica_id} could not give {ref} ({error})")
            await self._send(ref, [member], whole=True)

    async def discard(self) -> None:
        """What was staged is kept, to be sent again, until the next copy-out."""
        what = "end a publication"
        await call_all([(r.discard.remote(), f"trainer rank {i}: {what}") for i, r in enumerate(self._actors)], 30.0)

    async def _send(self, ref: VersionRef, members: Sequence[Member], *, whole: bool) -> list[Sent]:
        """From the trainer to `members`. Those written to directly are paused for it, the others for the landing."""
        updates = [u for u in await asyncio.gather(*(self._linked(m) for m in members)) if u is not None]
        if not updates:
            raise EngineUnavailable(f"no engine can be reached for {ref}")
        staged, direct = [u for u in updates if u.staged], [u for u in updates if not u.staged]
        sent: list[Sent] = []
        if staged:
            sent += await self._transfer(ref, staged, whole)
            await self._verify(staged)
            await self._land(ref, staged, self._nothing)
        if direct:

            async def write(begun: list[_Update]) -> None:
                for update in begun:
                    await self._ask(update.member, "expect", "expect bytes in its live weights")
                sent.extend(await self._transfer(ref, begun, whole))
                await self._verify(begun)

            await self._land(ref, direct, write)
        return sent

    async def _land(
        self, ref: VersionRef, updates: list[_Update], write: Callable[[list[_Update]], Awaitable[None]]
    ) -> None:
        """Pause, write if it is time only now, put in place, serve. Failed engines are left for the supervision."""
        good = [u for u in updates if u.error is None]
        for bad in (u for u in updates if u.error is not None):
            self._fleet.say(f"{bad.member.spec.replica_id} did not get {ref}: {bad.error}")
        if not good:
            raise PublicationFailed(f"no engine got {ref}: {updates[0].error}")
        async with self._fleet.update(ref, [u.member for u in good]) as members:
            begun = [u for u in good if u.member in members]
            await write(begun)

            async def land(update: _Update) -> None:
                try:
                    if update.error is not None:
                        raise update.error
                    await self._ask(update.member, "land", f"put {ref} in place")
                except MilesDisaggError as error:
                    self._fleet.say(f"{update.member.spec.replica_id} did not get {ref}: {error}")

            await asyncio.gather(*(land(u) for u in begun))

    async def _nothing(self, _: list[_Update]) -> None:
        """Nothing is left to write under the pause."""

    async def _verify(self, updates: Sequence[_Update]) -> None:
        async def one(update: _Update) -> None:
            try:
                if update.error is None:
                    await self._ask(update.member, "verify", "compare checksums", update.sums, False, update.patches)
            except MilesDisaggError as error:
                update.error = error

        await asyncio.gather(*(one(u) for u in updates))

    async def _transfer(self, ref: VersionRef, updates: Sequence[_Update], whole: bool) -> list[Sent]:
        """All sources write to all linked ranks, side by side. Notes each engine's checksums and errors."""
        links = [link for u in updates for link in u.links]
        seat = await self._seat(links) if self._settings.transport == "torch" else None
        receiving = [self._receive(u, links, seat) for u in updates if seat is not None]
        everybody: list[int | Member] = list(range(self._ranks_count))
        for update in updates:  # until all have answered: an exception leaves it so
            self._doubts.add(update.member, everybody)
        sent, *_ = await asyncio.gather(
            self._ranks("peer_send", f"send {ref}", [(ref, links, seat, whole)] * self._ranks_count), *receiving
        )
        assert sent is not None
        for update in updates:
            failed = {i: s.errors[n.target] for i, s in enumerate(sent) for n in update.links if n.target in s.errors}
            self._doubts.clear(update.member)
            if failed:
                self._doubts.add(update.member, list(failed))
                update.error = update.error or UpdateFailed(next(iter(failed.values())))
            update.patches = [
                [s.patches[link.target] for s in sent if link.target in s.patches] for link in update.links
            ]
            update.sums = [[row for s in sent for row in s.sums.get(link.target, [])] for link in update.links]
        return sent

    async def _seat(self, links: Sequence[Link]) -> GroupSeat:
        address, port, _ = await call(self._actors[0].place.remote(), "trainer rank 0: find a port", 30.0)
        first = self._ranks_count
        ranks = tuple(range(first, first + len(links)))  # in the order of target numbers
        name = f"p2p-{secrets.token_hex(6)}"
        return GroupSeat(address, port, first + len(links), name, self._settings.backend, self._settings.timeout, ranks)

    async def _receive(self, update: _Update, links: Sequence[Link], seat: GroupSeat) -> None:
        order = sorted(link.target for link in links)
        ranks = tuple(seat.ranks[order.index(link.target)] for link in update.links)
        own = GroupSeat(**{**seat.fields(), "ranks": ranks})
        all_writes = self._planned.writes(aligned(self._settings.bucket))
        writes = [
            [[w.source, w.staged, w.nbytes] for w in all_writes if w.target == link.target] for link in update.links
        ]
        try:
            await self._ask(update.member, "receive", "receive the weights", own, writes)
        except MilesDisaggError as error:
            update.error = error

    # --- from engine to engine ------------------------------------------------------------------------

    async def _donor(self, ref: VersionRef, member: Member) -> Member | None:
        """An engine of the same layout that serves `ref`."""
        if self._settings.transport != "nixl":
            return None
        wanted = self._prints(member)
        for other in self._fleet.members:
            if other is member or self._prints(other) != wanted:
                continue
            try:
                status = await call(other.actor.status.remote(), f"{other.spec.replica_id}: status", 30.0)
            except MilesDisaggError:
                continue
            if status["process_up"] and status["ready"] and status["applied"] == ref.version:
                return other
        return None

    async def _give(self, ref: VersionRef, donor: Member, member: Member) -> None:
        """The donor's live weights into those of `member`, which stands still meanwhile; the donor goes on serving."""
        links = await self._links(member)
        what = f"give {ref} to {member.spec.replica_id}"
        async with self._fleet.update(ref, [member]):
            await self._ask(member, "expect", "expect bytes in its live weights")
            self._doubts.add(member, [donor])
            sums = await self._ask(donor, "give", what, links, self._settings.timeout)
            self._doubts.clear(member)
            await self._ask(member, "verify", "compare checksums", sums, True)
            await self._ask(member, "land", f"put {ref} in place")

    async def _rejoin(self, member: Member) -> None:
        """An engine whose actor is new knows nothing of the plan yet."""
        index = self._fleet.members.index(member)
        if await self._ask(member, "knows_plan", "say whether it knows the plan"):
            return
        layouts = await self._ask(member, "layout", "describe its weights")
        wanted = [self._planned.targets[t] for t in self._targets[index]]
        if [fingerprint(a) for a in layouts] != [fingerprint(b) for b in wanted]:
            raise UpdateFailed(f"{member.spec.replica_id} was started anew with another layout: restart the run")
        await self._adopt(member, self._targets[index])

    def _prints(self, member: Member) -> list[str]:
        targets = self._targets[self._fleet.members.index(member)]
        return [fingerprint(self._planned.targets[t]) for t in targets]

    # --- calls --------------------------------------------------------------------------------------

    async def _linked(self, member: Member) -> _Update | None:
        try:
            return _Update(member, await self._links(member))
        except MilesDisaggError as error:
            self._fleet.say(f"{member.spec.replica_id} cannot be written to: {error}")
            return None

    async def _links(self, member: Member) -> list[Link]:
        doubtful = await self._settled(member)
        links, chosen = await self._ask(member, "links_and_choice", "register its memory", doubtful)
        self._doubts.clear(member)
        if self._said.get(member.spec.replica_id) != chosen:
            self._said[member.spec.replica_id] = chosen
            self._fleet.say(f"p2p: {member.spec.replica_id}: {chosen}")
        return links

    async def _settled(self, member: Member) -> bool:
        """Whether a transfer to it failed before. EngineUnavailable while something of that may still arrive: it would
        land among, or after, what was sent and verified later."""
        writers = self._doubts.of(member)
        for writer in writers:
            if isinstance(writer, int):
                name = f"trainer rank {writer}"
                call_it = self._actors[writer].peer_unsettled.remote()
                late = await call(call_it, f"{name}: say what is still on its way", self._settings.timeout + 30.0)
                adrift = not late.isdisjoint(self._targets[self._fleet.members.index(member)])
            else:
                name = writer.spec.replica_id
                adrift = await self._gift_adrift(writer)
            if adrift:
                raise EngineUnavailable(
                    f"what {name} wrote to {member.spec.replica_id} before has neither arrived nor failed; nothing "
                    "else is sent there until it has"
                )
        return bool(writers)

    async def _gift_adrift(self, donor: Member) -> bool:
        """False for a donor that was started anew, or has ended: its writes ended with it."""
        if donor.actor is None:
            return False
        try:
            status = await call(donor.actor.status.remote(), f"{donor.spec.replica_id}: status", 30.0)
        except ActorLost:
            return False
        return status["process_up"] and await self._ask(donor, "unsettled", "say what is still on its way")

    @property
    def _actors(self) -> list[Any]:
        return self._trainer.ranks

    @property
    def _ranks_count(self) -> int:
        return len(self._trainer.ranks)

    async def _ranks(self, method: str, what: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [
            (getattr(actor, method).remote(*args), f"trainer rank {i}: {what}")
            for i, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
        ]
        return await call_all(calls, self._settings.timeout + 30.0)

    async def _ask(self, member: Member, method: str, what: str, *args: Any) -> Any:
        if member.actor is None:
            raise EngineUnavailable(f"{member.spec.replica_id} is being replaced")
        reference = member.actor.peer.remote(method, *args)
        return await call(reference, f"{member.spec.replica_id}: {what}", self._settings.timeout + 30.0)


class Doubts:
    """Who may still be writing to an engine: those of a transfer that failed, or did not come back. Trainer ranks by
    number, engines as members."""

    def __init__(self) -> None:
        self._writers: dict[str, list[int | Member]] = {}

    def add(self, member: Member, writers: Sequence[int | Member]) -> None:
        """They may."""
        have = self._writers.setdefault(member.spec.replica_id, [])
        have.extend(w for w in writers if w not in have)

    def clear(self, member: Member) -> None:
        """Nobody may."""
        self._writers.pop(member.spec.replica_id, None)

    def of(self, member: Member) -> list[int | Member]:
        """Those who may."""
        return list(self._writers.get(member.spec.replica_id, []))


def _metrics(sent: Sequence[Sent]) -> dict[str, float]:
    """Seconds of the slowest rank, bytes of all."""
    return {
        "perf/update_weights_export_seconds": max(s.export_seconds for s in sent),
        "perf/update_weights_write_seconds": max(s.seconds for s in sent),
        "perf/update_weights_wire_bytes": float(sum(s.wire_bytes for s in sent)),
    }
