"""The Ray shell around one trainer rank: a MegatronTrainer and its half of a publication. No decisions here.

The default group runs what is collective, one call at a time; `publish` (encode, write, send) and `save` (writing a
checkpoint) run behind it; `control` answers meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from miles_disagg.config.machine import free_port
from miles_disagg.domain.samples import SampleGroup
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Event, Timeline
from miles_disagg.publish.base import GroupSpec
from miles_disagg.store.actor import import_hook
from miles_disagg.store.base import open_store
from miles_disagg.store.ledger import POST_WRITE
from miles_disagg.trainer.advantages import Advantage
from miles_disagg.trainer.base import RankSpec, TrainerSpec
from miles_disagg.trainer.batch import train_samples
from miles_disagg.weights.checkpoint import open_checkpoint
from miles_disagg.weights.digest import digest


@dataclass(frozen=True)
class PublicationSpec:
    """How this run's sources publish.

    transport: `disk` (to store_url), `broadcast` (backend of the process group) or `p2p` (over p2p_transport).
    base: the base checkpoint; published: the checkpoint of the version published last, where that is not the base.
    companions: files put beside full versions. encoding: of deltas, None for full versions; snapshot_device: where the
    published bytes are kept to compare with. post_write_path: hook for mounts. Times in seconds, sizes in bytes.
    """

    transport: str
    store_url: str
    checksum: str
    base: str
    companions: tuple[str, ...]
    bucket_bytes: int
    backend: str
    timeout: float
    published: str | None = None
    encoding: str | None = None
    snapshot_device: str = "auto"
    post_write_path: str | None = None
    p2p_transport: str = "nixl"


@ray.remote(max_restarts=0, concurrency_groups={"publish": 1, "save": 1, "control": 2})  # pyright: ignore[reportCallIssue]
class TrainerActor:
    """One rank, named `trainer-<rank>`."""

    def __init__(self, name: str, run_id: str):
        self._timeline = Timeline(name)
        self._run_id = run_id
        self._trainer: Any = None
        self._source: Any = None
        self._saving: Any = None

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, int, list[int]]:
        """Address of this process's host, a free port on it, and the GPUs it was given."""
        return ray.util.get_node_ip_address(), free_port(""), [int(g) for g in ray.get_gpu_ids()]

    @ray.method(concurrency_group="control")
    def alive(self) -> bool:
        """True, if anything answers."""
        return True

    def setup(self, spec: TrainerSpec, rank: RankSpec, publication: PublicationSpec, batch_size: int) -> None:
        """Meet the other ranks, load the model, prepare publishing. batch_size: samples per optimizer step."""
        import torch

        from miles_disagg.publish.peer import PeerSource

        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        from miles_disagg.trainer.megatron.trainer import MegatronTrainer

        self._publication, self._batch_size = publication, batch_size
        self._trainer = MegatronTrainer(spec, rank)
        if publication.transport == "p2p":  # every rank sends its own shards
            name = f"trainer rank {rank.rank}"
            shards = self._trainer.shards()
            self._source = PeerSource(
                shards,
                name=name,
                transport=publication.p2p_transport,
                timeout=publication.timeout,
                delta=publication.encoding is not None,
            )
        elif self._trainer.is_source:
            self._source = _make_source(publication, self._trainer.source_index)

    def source_index(self) -> int | None:
        """Position among the sources, None if this rank publishes nothing."""
        return self._trainer.source_index

    def train(
        self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[Advantage]], version: int
    ) -> dict[str, float]:
        """Optimizer steps on one batch (collective)."""
        with self._timeline.span("train", version):
            batch = train_samples(groups, advantages)
            return dict(self._trainer.train_step(batch, global_batch_size=self._batch_size, version=version))

    def stage(self, ref: VersionRef) -> None:
        """Copy the weights out (collective). This is the whole of the trainer's stall."""
        with self._timeline.span("export", ref.version):
            if self._source is None:
                self._trainer.export(lambda _: None, self._publication.bucket_bytes)
                return
            self._source.open(self._publication.timeout)
            if self._publication.transport == "p2p":
                self._trainer.check_copies()
                self._source.stage()
                return
            self._trainer.export(self._source.stage, self._publication.bucket_bytes)

    @ray.method(concurrency_group="publish")
    def encode(self, ref: VersionRef, encoding: str | None, kind: Any = "version") -> Any:
        """Disk: diff, encode and digest what was staged."""
        with self._timeline.span("encode", ref.version):
            return self._source.encode(ref, encoding, kind)

    @ray.method(concurrency_group="publish")
    def write(self, plan: Any) -> Any:
        """Disk: write this source's shard; its receipt."""
        with self._timeline.span("write"):
            return self._source.write(plan)

    @ray.method(concurrency_group="publish")
    def settle(self, published: bool) -> None:
        """The publication ended."""
        self._source.settle(published)

    @ray.method(concurrency_group="publish")
    def prepare(self, ref: VersionRef) -> None:
        """Broadcast: check, and digest or diff, what was staged, before engines are paused."""
        with self._timeline.span("encode", ref.version):
            self._source.prepare(str(ref))

    @ray.method(concurrency_group="publish")
    def send(self, ref: VersionRef, targets: Sequence[tuple[Any, str, int]], whole: bool = False) -> dict[str, float]:
        """Broadcast: send what was staged to engine actors, given with their names and numbers of ranks."""
        with self._timeline.span("send", ref.version):
            engines = [ActorTarget(*target) for target in targets]
            return dict(asyncio.run(self._source.send(str(ref), engines, whole=whole)))

    def peer_layout(self) -> Any:
        """Peer to peer: what this rank holds."""
        return self._source.layout()

    def peer_route(self, route: Any) -> int:
        """Peer to peer: adopt this rank's part of the plan; bytes of its send buffer."""
        self._source.route(route)
        return route.packed_bytes

    @ray.method(concurrency_group="publish")
    def peer_check(self) -> None:
        """Peer to peer: NonFiniteWeights if what was staged must not be published."""
        self._source.check()

    @ray.method(concurrency_group="publish")
    def peer_send(self, ref: VersionRef, links: Sequence[Any], seat: Any = None, whole: bool = False) -> Any:
        """Peer to peer: send this rank's part of what was staged to the linked engine ranks."""
        with self._timeline.span("send", ref.version):
            return self._source.send(str(ref), links, seat, whole=whole)

    @ray.method(concurrency_group="publish")
    def peer_unsettled(self) -> Any:
        """Peer to peer: targets that may still be reached by a write of this rank which was given up."""
        return self._source.unsettled()

    @ray.method(concurrency_group="publish")
    def discard(self) -> None:
        """Broadcast: drop what was staged."""
        self._source.discard()

    def digests(self) -> dict[str, str]:
        """xxh3-128 of every tensor this source would publish now, by HF name (collective)."""
        found: dict[str, str] = {}

        def sink(bucket: Any) -> None:
            for name, tensor in bucket:
                found[name] = digest(raw_bytes(tensor), "xxh3-128")

        self._trainer.export(sink, self._publication.bucket_bytes)
        return found

    def begin_save(self, directory: str) -> None:
        """Copy out a training checkpoint (collective)."""
        with self._timeline.span("copy_checkpoint"):
            self._saving = self._trainer.begin_checkpoint(directory)

    @ray.method(concurrency_group="save")
    def write_save(self) -> Any:
        """Write this rank's part of the checkpoint that was copied out last; what `finish_save` needs of it."""
        with self._timeline.span("write_checkpoint"):
            return self._saving.write()

    @ray.method(concurrency_group="save")
    def finish_save(self, ranks: Sequence[Any]) -> None:
        """Rank 0: all ranks wrote their parts, the checkpoint may appear."""
        self._saving.finish(ranks)

    def load(self, directory: str) -> None:
        """Restore a training checkpoint (collective)."""
        self._trainer.load_checkpoint(directory)

    @ray.method(concurrency_group="control")
    def events(self) -> list[Event]:
        """Events since the last call."""
        return self._timeline.drain()

    def close(self) -> None:
        """Leave the process groups (collective)."""
        if self._source is not None and self._publication.transport == "broadcast":
            asyncio.run(self._source.close())
        self._trainer.close()


class ActorTarget:
    """`publish.base.UpdateTarget` of a RolloutEngine actor, for the part of an update that a source drives."""

    def __init__(self, actor: Any, name: str, num_ranks: int):
        self._actor, self.name, self.num_ranks = actor, name, num_ranks

    async def init_group(self, group: GroupSpec) -> None:
        """Let the engine join."""
        fields = {**asdict(group), "group_name": group.name}
        del fields["name"]
        await self._actor.init_group.remote(fields)

    async def in_group(self, group_name: str) -> bool:
        """True if its engine is still in."""
        return await self._actor.in_group.remote(group_name)

    async def destroy_group(self, group_name: str) -> None:
        """Let the engine leave."""
        await self._actor.destroy_group.remote(group_name)

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: str,
        load_format: str | None,
    ) -> None:
        """Let the engine receive one bucket; its replica knows the version from `begin_update`."""
        await self._actor.receive_bucket.remote(names, dtypes, shapes, group_name, load_format)


def raw_bytes(tensor: Any) -> Any:
    """The tensor's bytes in host memory, uint8 [n]."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _make_source(spec: PublicationSpec, index: int) -> Any:
    if spec.transport == "broadcast":
        from miles_disagg.publish.broadcast import BroadcastSource

        here = ray.util.get_node_ip_address()
        delta = spec.encoding is not None
        return BroadcastSource(address=here, backend=spec.backend, timeout=spec.timeout, delta=delta)
    from miles_disagg.publish.device import choose_device
    from miles_disagg.publish.disk import DiskSource

    with open_checkpoint(spec.base) as base:
        device = choose_device(spec.snapshot_device, spec.encoding, base)
    return DiskSource(
        open_store(spec.store_url),
        Path(spec.base),
        published=Path(spec.published) if spec.published else None,
        checksum_format=spec.checksum,
        companions=[Path(path) for path in spec.companions] if index == 0 else (),
        post_write=import_hook(spec.post_write_path, POST_WRITE),
        device=device,
    )
