"""The Ray shell around one trainer rank: a MegatronTrainer and its half of a publication. No decisions here.

The default group runs what is collective, one call at a time; `publish` runs encode, write and send behind it; `control`
answers meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from miles_disagg.domain.samples import SampleGroup
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.events import Event, Timeline
from miles_disagg.publish.base import GroupSpec
from miles_disagg.store.base import open_store
from miles_disagg.trainer.advantages import grpo_advantages
from miles_disagg.trainer.base import RankSpec, TrainerSpec
from miles_disagg.trainer.batch import train_samples
from miles_disagg.weights.digest import digest


@dataclass(frozen=True)
class PublicationSpec:
    """How this run's sources publish.

    transport: `disk` (store_url, encoding None for full versions) or `broadcast` (backend of the process group).
    companions: files put beside full versions. Times in seconds, sizes in bytes.
    """

    transport: str
    store_url: str
    encoding: str | None
    checksum: str
    snapshot: str
    companions: tuple[str, ...]
    bucket_bytes: int
    backend: str
    timeout: float
    keep_for_repair: bool = True


@ray.remote(max_restarts=0, concurrency_groups={"publish": 1, "control": 2})
class TrainerActor:
    """One rank, named `trainer-<rank>`."""

    def __init__(self, name: str, run_id: str):
        self._timeline = Timeline(name)
        self._run_id = run_id
        self._trainer: Any = None
        self._source: Any = None

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, int, list[int]]:
        """Address of this process's host, a free port on it, and the GPUs it was given."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1], [int(g) for g in ray.get_gpu_ids()]

    def setup(self, spec: TrainerSpec, rank: RankSpec, publication: PublicationSpec, normalise_std: bool) -> None:
        """Meet the other ranks, load the model, prepare publishing."""
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        from miles_disagg.trainer.megatron import create_trainer

        self._spec, self._publication, self._normalise_std = spec, publication, normalise_std
        self._trainer = create_trainer(spec, rank)
        if self._trainer.is_source:
            self._source = _make_source(publication)

    def source_index(self) -> int | None:
        """Position among the sources, None if this rank publishes nothing."""
        return self._trainer.source_index

    def train(self, groups: Sequence[SampleGroup], version: int, global_batch_size: int) -> dict[str, float]:
        """Optimizer steps on one batch (collective)."""
        advantages = grpo_advantages([g.rewards for g in groups], normalise_std=self._normalise_std)
        with self._timeline.span("train", version):
            batch = train_samples(groups, advantages)
            return dict(self._trainer.train_step(batch, global_batch_size=global_batch_size, version=version))

    def stage(self, ref: VersionRef) -> None:
        """Copy the weights out (collective). This is the whole of the trainer's stall."""
        with self._timeline.span("export", ref.version):
            if self._source is None:
                self._trainer.export(lambda _: None, self._publication.bucket_bytes)
                return
            self._source.open(self._publication.timeout)
            self._trainer.export(self._source.stage, self._publication.bucket_bytes)

    @ray.method(concurrency_group="publish")
    def encode(self, ref: VersionRef) -> Any:
        """Disk: diff, encode and digest what was staged."""
        with self._timeline.span("encode", ref.version):
            return self._source.encode(ref)

    @ray.method(concurrency_group="publish")
    def write(self, plan: Any) -> Any:
        """Disk: write this source's shard; its receipt."""
        with self._timeline.span("write"):
            return self._source.write(plan)

    @ray.method(concurrency_group="publish")
    def settle(self, published: bool) -> None:
        """The publication ended."""
        self._source.settle(published)
