"""Publishing versions behind the training step: one at a time, in order, with back-pressure.

`begin` copies the weights out (the trainer's only stall) and returns; encoding, writing or sending and the commit go on
in a task, and waiting for the fleet in another one. A failed publication is raised at the next `begin` or `settle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from miles_disagg.cluster.endpoint import ServiceFleet
from miles_disagg.cluster.fleet import Fleet, Member
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.domain.errors import DeadlineExceeded, EngineUnavailable, MilesDisaggError, PublicationFailed
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Timeline
from miles_disagg.publish.anchors import AnchorPolicy
from miles_disagg.publish.broadcast import MOVED
from miles_disagg.publish.disk import Published, publish_version
from miles_disagg.publish.movement import MovementWatch
from miles_disagg.store.actor import RemoteLedger

_BROADCAST_ATTEMPTS = 3


class Channel(Protocol):
    """How a staged version reaches the engines."""

    async def deliver(self, ref: VersionRef) -> dict[str, float]:
        """Make `ref` the published version; metrics by name. Raises MilesDisaggError if it could not be."""
        ...

    async def discard(self) -> None:
        """The staged version will not be delivered."""
        ...

    async def repair(self, ref: VersionRef, member: Member) -> None:
        """Bring one engine to `ref`, the version delivered last, where engines do not fetch versions themselves."""
        ...


class Movement:
    """Says aloud when versions are published and the policy does not move, and counts it."""

    def __init__(self, trainer: TrainerGroup, say: Callable[[str], None]):
        self._trainer, self._say, self._watch, self._unchanged = trainer, say, MovementWatch(), 0

    def observe(self, ref: VersionRef, changed_elements: int | None, fingerprint: str = "") -> dict[str, float]:
        """Metrics of a publication; see MovementWatch.observe."""
        self._unchanged = self._unchanged + 1 if changed_elements == 0 else 0
        alarm = self._watch.observe(
            ref,
            learning_rate=self._trainer.learning_rate,
            changed_elements=changed_elements,
            fingerprint=fingerprint,
        )
        if alarm is not None:
            self._say(f"[bold red]ALARM[/bold red] {alarm}")
        return {
            "weights/unchanged_publications": float(self._unchanged),
            "weights/policy_does_not_move": float(alarm is not None),
        }


class DiskChannel:
    """Sources write their shards to the store; the ledger verifies, writes the index and moves the pointer.

    encoding: of deltas, None for full versions. anchors: when a delta also gets a folded delta and a full version
    beside it. keep_versions: with deltas, how many of the newest stay buildable (None: what some reader has not
    passed). keep_files: remove no version. full_first: publish the first version in full, since no source knows the
    bytes of the version before it (a continued run whose newest version could not be rebuilt).
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        ledger: RemoteLedger,
        *,
        encoding: str | None,
        checksum: str,
        anchors: AnchorPolicy,
        keep_versions: int | None,
        keep_files: bool,
        movement: Movement,
        full_first: bool = False,
    ):
        self._trainer, self._ledger, self._movement = trainer, ledger, movement
        self._encoding, self._checksum, self._anchors = encoding, checksum, anchors
        self._keep_versions, self._keep_files, self._full_first = keep_versions, keep_files, full_first

    async def deliver(self, ref: VersionRef) -> dict[str, float]:
        """Encode, write, commit."""

        def encoding_of(opened: VersionRef) -> str | None:
            if opened != ref:
                raise PublicationFailed(f"the store opened {opened}, the trainer staged {ref}")
            return None if self._full_first else self._encoding

        sources = self._trainer.disk_sources()
        published = await publish_version(
            self._ledger, sources, encoding_of, self._checksum, shortcuts_after=self._wants_shortcuts
        )
        self._full_first = False
        keep = 2 if self._encoding is None else self._keep_versions
        await self._ledger.collect(keep=keep, keep_files=self._keep_files)
        moved = self._movement.observe(ref, published.changed_elements, published.fingerprint)
        return {**published.metrics, **moved}

    async def _wants_shortcuts(self, published: Published) -> bool:
        wire = published.metrics["perf/update_weights_wire_bytes"]
        readers = frozenset(await self._ledger.replicas())
        return self._anchors.due(published.ref.version, wire, published.total_bytes, readers)

    async def discard(self) -> None:
        """Forget what was staged."""
        await asyncio.gather(*(source.settle(False) for source in self._trainer.disk_sources()))

    async def repair(self, ref: VersionRef, member: Member) -> None:
        """Nothing: its reconciler follows the store."""


async def commit_staged(ledger: RemoteLedger, ref: VersionRef) -> dict[str, float]:
    """Move the pointer to `ref`, whose bytes the trainer has staged; the metric of how long that took."""
    begun = time.monotonic()
    opened = await ledger.begin()
    if opened != ref:
        raise PublicationFailed(f"the ledger opened {opened}, the trainer staged {ref}")
    await ledger.commit(ref)
    return {"perf/update_weights_commit_seconds": time.monotonic() - begun}


class BroadcastChannel:
    """Sources send their tensors into the engines over process groups, while the engines' replicas hold requests."""

    def __init__(self, trainer: TrainerGroup, ledger: RemoteLedger, fleet: Fleet, movement: Movement):
        self._trainer, self._ledger, self._fleet, self._movement = trainer, ledger, fleet, movement

    async def deliver(self, ref: VersionRef) -> dict[str, float]:
        """Prepare, move the pointer, then pause, send from each source in turn, resume.

        The pointer moves before anything is sent: the staged bytes are the version from there on, and a replica
        acknowledges only what is published. What must not be published is refused before that. Engines that fail are
        left fenced; they are sent it again by the fleet's supervision.
        """
        try:
            await self._trainer.prepare(ref)
        except BaseException:
            await self._trainer.discard()
            raise
        metrics = await commit_staged(self._ledger, ref)
        for _ in range(_BROADCAST_ATTEMPTS):
            try:
                sent = await self.send(ref, None)
                moved = self._movement.observe(ref, int(sent.pop(MOVED)))
                return {**metrics, **sent, **moved}
            except EngineUnavailable as error:
                self._fleet.say(f"{ref} waits for an engine: {error}")
                break
            except MilesDisaggError as error:
                self._fleet.say(f"sending {ref} failed, trying the engines that still answer: {error}")
        await self._trainer.discard()  # what was staged stays until the next copy-out: supervision sends it again
        return metrics

    async def send(self, ref: VersionRef, only: Member | None) -> dict[str, float]:
        """Send what was staged last to all engines, or to one."""
        async with self._fleet.update(ref, None if only is None else [only]) as members:
            targets = [(m.actor, m.spec.replica_id, m.num_ranks) for m in members]
            return await self._trainer.send(ref, targets, whole=only is not None)

    async def discard(self) -> None:
        """Forget what was staged."""
        await self._trainer.discard()

    async def repair(self, ref: VersionRef, member: Member) -> None:
        """Send it again, whole."""
        await self.send(ref, member)


class Publications:
    """Numbers versions and publishes them one after another. `on_published` hears of each when it can be served."""

    def __init__(
        self,
        run_id: str,
        first: int,
        trainer: TrainerGroup,
        channel: Channel,
        fleet: Fleet | ServiceFleet,
        timeline: Timeline,
        *,
        on_published: Callable[[int], Awaitable[None]],
        give_out: Callable[[int], None],
        timeout: float,
    ):
        self.version = self._first = first
        self._give_out = give_out
        self.pauses: list[float] = []
        self._run_id, self._trainer, self._channel = run_id, trainer, channel
        self._fleet, self._timeline, self._on_published, self._timeout = fleet, timeline, on_published, timeout
        self._staged = asyncio.Lock()  # held from copy-out to delivery
        self._task: asyncio.Task[None] | None = None
        self._converging: asyncio.Task[None] | None = None  # on the newest version
        self._behind: set[asyncio.Task[None]] = set()  # on any
        self._finished: dict[str, float] = {}

    async def begin(self) -> dict[str, float]:
        """Publish the trainer's weights as the next version; returns the stall's metrics.

        Waits for the previous publication first (`perf/wait_for_publication_seconds`): at most one is under way.
        """
        begun = time.monotonic()
        await self._delivered()
        await self._staged.acquire()
        waited, stalled = time.monotonic() - begun, time.monotonic()
        ref = VersionRef(self._run_id, self.version + 1)
        try:
            await asyncio.to_thread(self._give_out, ref.version)  # durably, so that no later start gives it out again
            await self._trainer.stage(ref)
        except BaseException:
            self._staged.release()
            raise
        self.version = ref.version
        self._task = asyncio.create_task(self._complete(ref), name=f"publish {ref}")
        return {
            "perf/wait_for_publication_seconds": waited,
            "perf/update_weights_trainer_stall_seconds": time.monotonic() - stalled,
        }

    async def _complete(self, ref: VersionRef) -> None:
        scope = asyncio.timeout(self._timeout)
        try:
            with self._timeline.span("publish", ref.version):
                async with scope:
                    metrics = await self._channel.deliver(ref)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"publication of {ref}", self._timeout, "raise --update-weights-timeout") from None
        finally:
            self._staged.release()
        self._finished.update(metrics)
        await self._on_published(ref.version)
        self._converging = asyncio.create_task(self._converge(ref), name=f"converge on {ref}")
        self._behind.add(self._converging)
        self._converging.add_done_callback(self._behind.discard)

    async def _converge(self, ref: VersionRef) -> None:
        """Wait until the fleet serves `ref` or something newer. Behind the training step: it delays nobody."""
        seconds = await self._fleet.wait_converged(ref, self._timeout)
        if seconds is not None:
            self._finished["fleet/convergence_seconds"] = seconds
        row = await self._fleet.phase_metrics()
        self._finished.update(row)
        if "replica/pause_seconds" in row:
            self.pauses.append(row["replica/pause_seconds"])

    async def _delivered(self) -> None:
        if self._task is None:
            return
        try:
            await self._task
        except Exception as error:
            cause = getattr(error, "cause", None) or error  # what an actor raised, without Ray's traceback
            raise PublicationFailed(f"{self._task.get_name()}: {cause}") from error

    async def repair(self, member: Member, ref: VersionRef) -> None:
        """Bring an engine that does not have it to the version published last, once that has been delivered to all."""
        async with self._staged:
            if not ref.version == self.version > self._first:
                return
            assert isinstance(self._fleet, Fleet)
            at = await self._fleet.applied(member)
            if at == ref.version:
                return  # it was among those that it was delivered to
            self._fleet.say(f"{member.spec.replica_id} is at {at}, not at {ref}: sending it again")
            await self._channel.repair(ref, member)

    async def settle(self) -> None:
        """Wait until the last version is published and served by every replica that must serve it."""
        await self._delivered()
        if self._converging is not None:
            await self._converging

    def take_metrics(self) -> dict[str, float]:
        """Metrics of publications finished since the last call."""
        out, self._finished = self._finished, {}
        return out

    async def cancel(self) -> None:
        """Give up on what is under way (the run is stopping)."""
        tasks = [*self._behind, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
