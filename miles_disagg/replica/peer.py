"""Peer-to-peer updates, the engine's side: registering its memory with the trainer's ranks, and landing what they sent.

The engine has loaded `engine.inplace`'s plugin, which holds registered memory on every rank. An update is `links`, the
sources' writes, `verify`, then `land` between the activator's `begin_update` and `finish_update`. Where bytes go
straight into live weights, `expect` comes before the first of them: from there on only a whole update serves again.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_disagg.domain.errors import EngineError, InvalidVersionRef, UpdateFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.base import Engine
from miles_disagg.replica.activation import Activator
from miles_disagg.replica.inplace import InPlaceUnavailable, Plugin
from miles_disagg.weights.transfer.blocks import RankLayout
from miles_disagg.weights.transfer.link import GroupSeat, Link, Patch, Sums, parse_layout
from miles_disagg.weights.transfer.plan import fingerprint

_PROBE_SAMPLES = 512  # elements of each piece of a tensor that are compared with the checkpoint


@dataclass(frozen=True)
class PeerOptions:
    """transport: `nixl` or `torch`; staging: `auto`, `always`, `never`; bucket: bytes of a write; spare: bytes that an
    `auto` staging area leaves free; deadline: seconds for one step of an update; delta: changes may be sent."""

    transport: str = "nixl"
    staging: str = "auto"
    bucket: int = 512 << 20
    spare: int = 1 << 30
    deadline: float = 600.0
    delta: bool = False


class PeerReceiver:
    """One engine. checkpoint: the run's base on this host, for names and shapes. name: the replica's."""

    def __init__(self, name: str, engine: Engine, activator: Activator, checkpoint: Path, options: PeerOptions):
        self.plugin = Plugin(engine, deadline=options.deadline)
        self._name, self._engine, self._activator = name, engine, activator
        self._checkpoint, self._options = checkpoint, options
        self._layouts: list[RankLayout] = []
        self._targets: tuple[int, ...] = ()
        self._arrivals: list[list[list[Any]]] = []
        self._tokens: list[str] = []
        self._identity: str | None = None
        self._mail = 0
        self.describes = ""

    async def layout(self) -> list[RankLayout]:
        """Every rank's recorded layout, checked against the base checkpoint if that is what it holds. EngineError."""
        async with self._activator.undisturbed():
            await self._open()
        return self._layouts

    async def _open(self) -> None:
        """Record the map anew. The request waits for running ones, so the engine is paused for a moment."""
        try:
            paused = self._activator.serving
            if paused:
                await self._engine.pause("in_place")
            try:
                opened = await self.plugin.open(self._checkpoint)
                if not self._layouts and _is_base(opened["weight_version"]):  # later its layout is compared instead
                    await self._probe()
            finally:
                if paused:
                    await self._engine.resume()
            raw = await self.plugin.ask("peer_layout")
        except InPlaceUnavailable as error:
            raise EngineError(f"{self._name} cannot receive weights peer to peer: {error}") from error
        found = [parse_layout(f"{self._name} rank {rank}", one) for rank, one in enumerate(raw)]
        if self._layouts and [fingerprint(a) for a in found] != [fingerprint(b) for b in self._layouts]:
            raise EngineError(f"{self._name} was started anew with another layout of its weights: restart the run")
        self._layouts, self._tokens = found, []

    async def _probe(self) -> None:
        probe = self.plugin.call("probe", directory=str(self._checkpoint), limit=_PROBE_SAMPLES)
        for rank, answer in enumerate(await probe):
            if answer["mismatch"]:
                raise InPlaceUnavailable(f"rank {rank}: {answer['mismatch']} is not where its map says")

    def adopt(self, targets: Sequence[int], arrivals: Sequence[list[list[Any]]], mail: int = 0) -> None:
        """Its ranks' numbers in the plan, what each receives, and bytes of each one's mailboxes for changes."""
        self._mail = mail
        self._targets, self._arrivals, self._tokens = tuple(targets), list(arrivals), []

    def knows_plan(self) -> bool:
        """False for an engine that was started after the plan was made."""
        return bool(self._arrivals)

    async def links_and_choice(self, renew: bool = False) -> tuple[list[Link], str]:
        """`links`, and in words where the bytes go."""
        links = await self.links(renew)
        return links, self.describes

    async def links(self, renew: bool = False) -> list[Link]:
        """Where bytes go now, one a rank. Memory is registered at the first call, whenever it has moved since, and to
        `renew` it: what is on its way to the old registration does not get there any more."""
        async with self._activator.undisturbed():
            try:
                answers = await self.plugin.ask("peer_ready")
            except InPlaceUnavailable:
                answers = []
            gone = [a["token"] for a in answers] != self._tokens
            if not answers or (self._tokens and gone):
                await self._open()
            if not self._tokens or gone or renew:
                answers = await self._prepare()
        return [Link.parse(t, a) for t, a in zip(self._targets, answers, strict=True)]

    async def _prepare(self) -> list[dict[str, Any]]:
        files = []
        for rank, rows in enumerate(self._arrivals):
            path = self.plugin.directory / f"pieces-{rank}.json"
            await asyncio.to_thread(path.write_text, json.dumps(rows))
            files.append(str(path))
        o = self._options
        answers = await self.plugin.ask(
            "peer_prepare", pieces=files, transport=o.transport, staging=o.staging, bucket=o.bucket, spare=o.spare,
            mail=self._mail if o.delta else 0,
        )  # fmt: skip
        self._tokens = [a["token"] for a in answers]
        modes = {a["mode"] for a in answers}
        total, free = sum(a["bytes"] for a in answers), min(a["free"] for a in answers)
        if len(modes) > 1:
            raise EngineError(f"{self._name}: its ranks chose differently ({modes}): set --update-weight-p2p-staging")
        how = "into a staging area" if modes == {"staging"} else "straight into the live weights, under the pause"
        self.describes = f"{o.transport}, {how} ({total / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB were free)"
        return answers

    async def receive(self, seat: GroupSeat, writes: Sequence[list[list[int]]]) -> None:
        """torch.distributed: receive [source, staged, nbytes] on each rank, in order."""
        await self.plugin.ask("peer_receive", group=seat.fields(), ranks=list(seat.ranks), writes=list(writes))

    async def expect(self) -> None:
        """Bytes will be written into the live weights from now on (within `begin_update`)."""
        await self._activator.receive(_nothing(), "bytes in the live weights")

    async def verify(self, sums: Sequence[Sums], given: bool = False, patches: Sequence[list[Patch]] = ()) -> None:
        """What arrived has the senders' checksums, on each rank; `land` may follow. UpdateFailed if not.

        given: another engine wrote it, into the live weights. patches: changed words to put into what arrived before.
        """
        self._identity = None
        identity = uuid.uuid4().hex
        try:
            await self.plugin.ask("peer_verify", id=identity, sums=list(sums), given=given, patches=list(patches))
        except InPlaceUnavailable as error:
            raise UpdateFailed(f"{self._name}: {error}") from error
        self._identity = identity

    async def land(self) -> None:
        """Under the pause: put what was verified in place and stamp the version being updated to."""
        identity, self._identity = self._identity, None
        if identity is None:
            raise UpdateFailed(f"{self._name}: nothing that was sent has been verified")
        commit = self.plugin.commit(identity, str(self._activator.updating_to))
        await self._activator.receive(commit, "putting the weights in place")

    async def give(self, links: Sequence[Link], timeout: float) -> list[Sums]:
        """Write the weights served here into an equal engine's live weights; sums for its `verify`, by rank."""
        to = [
            {"slots": {str(k): v for k, v in link.slots.items()}, "device": link.device, "cuda": link.cuda,
             "token": link.token, "metadata": link.encoded_metadata()}
            for link in links
        ]  # fmt: skip
        async with self._activator.undisturbed():
            try:
                answers = await self.plugin.ask("peer_give", to=to, timeout=timeout)
            except InPlaceUnavailable as error:
                raise EngineError(f"{self._name} could not give its weights away: {error}") from error
        return [answer["sums"] for answer in answers]

    async def unsettled(self) -> bool:
        """True while what `give` gave up may still arrive at the other engine. EngineError if it cannot be said."""
        return self.plugin.is_open and any(a["unsettled"] for a in await self.plugin.ask("peer_unsettled"))

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor as it is served; see `Plugin.digests`."""
        async with self._activator.undisturbed():
            try:
                await self.plugin.ask("status")
            except InPlaceUnavailable:
                await self._open()
            return await self.plugin.digests(self._checkpoint)

    def close(self) -> None:
        """Forget the session."""
        self.plugin.close()


def _is_base(stamp: str) -> bool:
    """False for an engine that goes on with a version of a run: nothing on this host has its values."""
    try:
        return VersionRef.parse(stamp).version == 0
    except InvalidVersionRef:
        return True


async def _nothing() -> None:
    return None
