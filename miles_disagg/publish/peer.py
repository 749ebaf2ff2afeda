"""Publication peer to peer, the trainer's side: every rank sends its own shards straight to the engines' ranks.

A `PeerSource` lives in each trainer rank. The trainer waits only while `stage` packs this rank's shards, converted to
the engines' types, into a send buffer that is registered once; `send` runs behind the next step. Nothing is gathered.
What goes where is `weights.transfer.plan`'s; the engine's half is `engine.inplace`'s plugin; who calls whom is
`cluster.peer`'s.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_disagg.domain.errors import DeadlineExceeded, PublicationFailed
from miles_disagg.engine.inplace.miles_inplace.memory import INTEGERS
from miles_disagg.engine.inplace.miles_inplace.transport import (
    Job,
    Nixl,
    Pairs,
    TransportError,
    area_sums,
    element_sum,
    region,
)
from miles_disagg.publish.finite import refuse_non_finite
from miles_disagg.publish.peer_changes import Changes
from miles_disagg.weights.transfer.blocks import Block, RankLayout, Storage
from miles_disagg.weights.transfer.link import GroupSeat, Link, Patch, Sums
from miles_disagg.weights.transfer.plan import Mailbox, Piece, Plan, Write, runs


@dataclass(frozen=True)
class LocalShard:
    """One parameter of this rank: its elements as boxes of checkpoint tensors, and the checkpoint's type."""

    parameter: torch.Tensor
    blocks: tuple[Block, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Route:
    """One rank's part of the plan. writes: in order, of every target; dtypes: of the targets' storages by piece."""

    source: int
    pieces: tuple[Piece, ...]
    packed: tuple[Piece, ...]
    packed_bytes: int
    writes: tuple[Write, ...]
    dtypes: Mapping[tuple[int, int], str]
    mailboxes: Mapping[int, Mailbox]

    @classmethod
    def of(cls, plan: Plan, source: int, bucket: int) -> Route:
        """Cut the plan for `source`, with writes of at most `bucket` bytes."""
        pieces = tuple(p for p in plan.pieces if p.source == source)
        dtypes = {(p.target, p.target_storage): plan.targets[p.target].storages[p.target_storage].dtype for p in pieces}
        writes = tuple(w for w in plan.writes(bucket) if w.source == source)
        boxes = {target: box for (s, target), box in plan.mailboxes().items() if s == source}
        return cls(source, pieces, tuple(plan.of_source(source)), plan.packed_bytes[source], writes, dtypes, boxes)


@dataclass
class Sent:
    """What one rank's `send` did: by target, why it failed, the checksums of what its staging area or weights must
    hold, and where changes only were sent. seconds: of all of it; wire_seconds: from the first write until the last one
    was done. moved: 1 if any bit of this rank's shards changed since the version before, else 0."""

    errors: dict[int, str] = field(default_factory=dict)
    sums: dict[int, Sums] = field(default_factory=dict)
    patches: dict[int, Patch] = field(default_factory=dict)
    wire_bytes: int = 0
    seconds: float = 0.0
    wire_seconds: float = 0.0
    export_seconds: float = 0.0
    moved: int = 0


class PeerSource:
    """One trainer rank's half. States: routed -> staging -> sending -> idle; keeps one packed copy of its shards.

    transport: `nixl` or `torch`. timeout: seconds of one update's transfer. delta: keep the version before too, and
    send changed words to an engine that has it in its staging area, where they fit into its mailbox.
    """

    def __init__(self, shards: Sequence[LocalShard], *, name: str, transport: str, timeout: float, delta: bool = False):
        self._shards, self._name, self._transport, self._timeout = list(shards), name, transport, timeout
        self._device = self._shards[0].parameter.device
        self._nixl: Nixl | None = None
        self._route: Route | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copies: list[tuple[torch.Tensor, torch.Tensor, torch.dtype]] = []
        self._idle = threading.Event()
        self._idle.set()
        self._staged = False
        self._export_seconds = 0.0
        self._changes = Changes() if delta else None
        self._seen: tuple[str, list[Any], int] = ("", [], 0)  # version, checksums, moved

    def layout(self) -> RankLayout:
        """This rank's parameters, one storage each."""
        storages = tuple(
            Storage(s.parameter.numel(), s.parameter.element_size(), str(s.parameter.dtype).removeprefix("torch."))
            for s in self._shards
        )
        return RankLayout(self._name, storages, tuple(b for s in self._shards for b in s.blocks))

    def route(self, route: Route) -> None:
        """Adopt a plan: make the send buffer and register it."""
        if not self._idle.wait(self._timeout):
            raise DeadlineExceeded("the previous transfer", self._timeout)
        if self._nixl is not None:
            self._nixl.close()
        self._route, self._staged = route, False
        self._buffer = torch.zeros(route.packed_bytes, dtype=torch.uint8, device=self._device)
        self._copies = [self._copy(piece, route) for piece in route.packed]
        own = [self._buffer]
        if self._changes is not None:
            own.append(self._changes.route(self._buffer, route.mailboxes, _word(route)))
        if self._transport == "nixl" and route.packed_bytes:
            try:
                self._nixl = Nixl(f"{self._name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}")
                regions = [region(tensor) for tensor in own if tensor.numel()]
                self._nixl.register(regions, cuda=self._device.type == "cuda")
            except TransportError as error:
                raise PublicationFailed(f"{self._name}: {error}") from error

    def _copy(self, piece: Piece, route: Route) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        shard = self._shards[piece.source_storage]
        wire = getattr(torch, route.dtypes[piece.target, piece.target_storage])
        source = shard.parameter.detach().view(-1)
        source = source.as_strided(piece.shape, piece.source_strides, source.storage_offset() + piece.source_offset)
        packed = self._buffer[piece.packed : piece.packed + piece.nbytes].view(wire).view(piece.shape)
        return source, packed, shard.dtype

    def open(self, timeout: float) -> float:
        """Start staging; waits for the previous send to settle. Seconds waited, or DeadlineExceeded."""
        started = time.monotonic()
        if not self._idle.wait(timeout):
            raise DeadlineExceeded("the previous peer-to-peer transfer", timeout, "it has neither ended nor failed")
        self._idle.clear()
        return time.monotonic() - started

    @torch.no_grad()
    def stage(self) -> None:
        """Pack this rank's shards, in the checkpoint's and then the engines' types; they may change afterwards."""
        if self._idle.is_set():
            raise PublicationFailed("stage() without open()")
        if self._route is None:
            raise PublicationFailed(f"{self._name} has no transfer plan")
        started = time.monotonic()
        if self._changes is not None:
            self._changes.keep()
        plain = [(s, d) for s, d, dtype in self._copies if s.dtype == d.dtype == dtype]
        if plain:
            torch._foreach_copy_([d for _, d in plain], [s for s, _ in plain])
        for source, packed, dtype in self._copies:
            if not source.dtype == packed.dtype == dtype:
                packed.copy_(source.to(dtype))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._staged = True
        self._export_seconds = time.monotonic() - started

    def check(self) -> None:
        """NonFiniteWeights if what was staged holds NaN or Inf: it must not be published."""
        if self._route is None or not self._staged:
            raise PublicationFailed(f"{self._name} has staged nothing to send")
        with self._aside():
            refuse_non_finite(
                (piece.tensor, packed) for piece, (_, packed, _) in zip(self._route.packed, self._copies, strict=True)
            )

    def send(self, version: str, links: Sequence[Link], group: GroupSeat | None = None, *, whole: bool = False) -> Sent:
        """Send what was staged to the linked engine ranks. Failures of single targets are in the result.

        group: where to meet them, with torch.distributed. whole: no changes, complete shards. The staged bytes stay, to
        be sent again.
        """
        try:
            with self._aside():
                return self._send(version, links, group, whole)
        finally:
            self._idle.set()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On CUDA, a stream of its own: not behind the training step."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield

    def _send(self, version: str, links: Sequence[Link], group: GroupSeat | None, whole: bool) -> Sent:
        started, route = time.monotonic(), self._route
        if route is None or not self._staged:
            raise PublicationFailed(f"{self._name} has staged nothing to send")
        sent = Sent(export_seconds=self._export_seconds)
        mine = {link.target: link for link in links}
        writes = [w for w in route.writes if w.target in mine]
        sent.wire_bytes = sum(w.nbytes for w in writes)

        if group is not None:
            begun = time.monotonic()
            self._send_in_group(group, mine, writes, sent)
            sent.wire_seconds = time.monotonic() - begun
            summed = _Sums(self._buffer, route, mine, writes, self._copies)
        else:
            summed = self._send_one_sided(route, mine, writes, sent, whole)
        self._note_sums(version, summed, sent)
        if self._changes is not None:
            self._changes.sent(version, [link for link in links if link.target not in sent.errors])
        sent.seconds = time.monotonic() - started
        return sent

    def _send_one_sided(
        self,
        route: Route,
        links: Mapping[int, Link],
        writes: Sequence[Write],
        sent: Sent,
        whole: bool,
    ) -> _Sums:
        jobs: list[Job] = []
        targets: list[int] = []
        for target, link in links.items():
            own = [w for w in writes if w.target == target]
            patch = None if whole or self._changes is None else self._changes.patch(link, own)
            if patch is not None:
                sent.patches[target], local, remote = patch
                sent.wire_bytes += sum(n for _, n, _ in local) - sum(w.nbytes for w in own)
                if local:
                    key = ("changes", target, link.token)
                    jobs.append(Job(key, link.metadata, local, remote, link.cuda, once=True))
                    targets.append(target)
                continue
            if link.mode == "staging":
                pairs = [(w.packed, w.nbytes, link.base + w.staged) for w in own]
            else:
                pairs = [run for p in route.pieces if p.target == target for run in _live_runs(p, link)]
            if not pairs:
                continue
            here, number = self._buffer.data_ptr(), self._device.index or 0
            local = [(here + at, n, number) for at, n, _ in pairs]
            remote = [(address, n, link.device) for _, n, address in pairs]
            jobs.append(Job((target, link.token), link.metadata, local, remote, link.cuda))
            targets.append(target)
        summed: list[_Sums] = []

        def meanwhile() -> None:  # on CUDA this only starts the work
            summed.append(_Sums(self._buffer, route, links, writes, self._copies))

        if jobs:
            assert self._nixl is not None
            begun = time.monotonic()
            for target, error in zip(targets, self._nixl.write(jobs, self._timeout, meanwhile), strict=True):
                if error is not None:
                    sent.errors[target] = f"{self._name}: {error}"
            sent.wire_seconds = time.monotonic() - begun
        else:
            meanwhile()
        return summed[0]

    def _send_in_group(self, group: GroupSeat, links: Mapping[int, Link], writes: Sequence[Write], sent: Sent) -> None:
        assert self._route is not None
        seats = {target: group.ranks[i] for i, target in enumerate(sorted(links))}
        try:
            pairs = Pairs(rank=self._route.source, **group.fields())
            try:
                pairs.send([(seats[w.target], self._buffer[w.packed : w.packed + w.nbytes]) for w in writes])
            finally:
                pairs.leave()
        except TransportError as error:
            sent.errors.update({target: f"{self._name}: {error}" for target in links})

    def _note_sums(self, version: str, summed: _Sums, sent: Sent) -> None:
        sent.sums, seen = summed.read()
        if self._seen[0] != version:
            self._seen = (version, seen, int(seen != self._seen[1]))
        sent.moved = self._seen[2]

    def unsettled(self) -> set[int]:
        """Targets that may still be reached by a write which was given up; they must not be sent anything else yet."""
        return set() if self._nixl is None else {key[-2] for key in self._nixl.unsettled()}

    def discard(self) -> None:
        """What was staged will not be sent for now."""
        self._idle.set()

    def describe(self) -> dict[str, Any]:
        """Bytes of the send buffer; with changes only, there is as much again and their outbox."""
        return {"name": self._name, "packed_bytes": self._buffer.numel()}


class _Sums:
    """Checksums of what is sent, started at once and read when the writes are done: of the staging areas' writes, or
    of single pieces for engines that are written to directly."""

    def __init__(
        self,
        buffer: torch.Tensor,
        route: Route,
        links: Mapping[int, Link],
        writes: Sequence[Write],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor, torch.dtype]],
    ):
        self._route, self._links = route, links
        self._staged = [w for w in writes if links[w.target].mode == "staging"]
        self._areas = sorted({(w.packed, w.nbytes) for w in self._staged})
        self._area_values = area_sums(buffer, self._areas)
        self._piece_values: torch.Tensor | None = None
        if any(link.mode == "direct" for link in links.values()):
            self._piece_values = torch.stack([element_sum(p, INTEGERS[p.itemsize]) for _, p, _ in copies])

    def read(self) -> tuple[dict[int, Sums], list[Any]]:
        """(Sums by target, all values in an order that is the same for every version.)"""
        areas = dict(zip(self._areas, self._area_values.tolist(), strict=True))
        pieces: dict[int, int] = {}
        if self._piece_values is not None:
            packed = [piece.packed for piece in self._route.packed]
            pieces = dict(zip(packed, self._piece_values.tolist(), strict=True))
        sums: dict[int, Sums] = {}
        for w in self._staged:
            sums.setdefault(w.target, []).append([w.staged, w.nbytes, areas[w.packed, w.nbytes]])
        for p in self._route.pieces:
            if p.target in self._links and self._links[p.target].mode == "direct":
                sums.setdefault(p.target, []).append([p.staged, p.nbytes, pieces[p.packed]])
        return sums, [*areas.items(), *sorted(pieces.items())]


def _word(route: Route) -> int:
    """Bytes of the words that are compared: 4 where an engine has elements of 4, else 2."""
    return 4 if any(dtype == "float32" for dtype in route.dtypes.values()) else 2


def _live_runs(piece: Piece, link: Link) -> list[tuple[int, int, int]]:
    """(byte offset in the send buffer, bytes, address) of a piece's contiguous runs in the live weights."""
    size = piece.nbytes // max(1, math.prod(piece.shape))
    base = link.slots[piece.target_storage]
    return [(piece.packed + at * size, n * size, base + there * size) for at, there, n in runs(piece)]
