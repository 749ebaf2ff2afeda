"""Ray shells of the rollout side: one engine host an actor, and the producer with its buffer and ledger.

State and rules are `host`, `producer` and `buffer.data_buffer`. Async actors of one event loop each: nothing blocks.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from miles_disagg.buffer.base import Batch
from miles_disagg.buffer.data_buffer import make_buffer
from miles_disagg.config.imports import import_function
from miles_disagg.config.secrets import read_token
from miles_disagg.domain.errors import WeightVersionGone
from miles_disagg.domain.versions import Constraint, VersionRef
from miles_disagg.observe.events import Event, Timeline
from miles_disagg.prompts.base import PromptSource
from miles_disagg.prompts.ledger import Ledger
from miles_disagg.prompts.models import VARIABLE
from miles_disagg.prompts.reward import RewardRunner, load_reward
from miles_disagg.prompts.source import DataOptions, DatasetSource
from miles_disagg.prompts.tasks import make_task
from miles_disagg.prompts.tokenizer import load_tokenizer
from miles_disagg.replica.activation import Activation
from miles_disagg.replica.staging import DiskStager
from miles_disagg.rollout.base import GenerationClient, RolloutOptions, SamplingOptions
from miles_disagg.rollout.continuation import ContinuingClient
from miles_disagg.rollout.evaluate import evaluate
from miles_disagg.rollout.host import EngineHost, HostSpec
from miles_disagg.rollout.node_actor import RemoteNode
from miles_disagg.rollout.pool import RolloutClient
from miles_disagg.rollout.producer import Producer
from miles_disagg.rollout.teacher import TaughtClient, Teachers, TeacherSpec
from miles_disagg.rollout.trajectory import PluggedClient
from miles_disagg.store.actor import RemoteLedger, import_hook
from miles_disagg.store.base import open_store
from miles_disagg.store.ledger import PRE_READ
from miles_disagg.store.versions import VersionStore


@dataclass(frozen=True)
class StagingSpec:
    """Where versions come from and where this host builds them; None in their place under broadcast."""

    store_url: str
    directory: Path
    base: Path
    pre_read_path: str | None = None


@ray.remote(max_restarts=0)
class RolloutEngine:
    """One engine, its replica and its reconciler. nodes: EngineNode actors of the further nodes that it spans."""

    def __init__(self, spec: HostSpec, staging: StagingSpec | None, store: Any, nodes: Sequence[Any] = ()):
        ledger = RemoteLedger(store)

        def stager() -> DiskStager:
            assert staging is not None
            objects = VersionStore(open_store(staging.store_url))
            pre_read = import_hook(staging.pre_read_path, PRE_READ)
            return DiskStager(objects, staging.directory, staging.base, reader=spec.replica_id, pre_read=pre_read)

        sink = ledger if spec.follow else None  # who does not follow must not be waited for
        others = [RemoteNode(node, f"{spec.replica_id}: node {i}") for i, node in enumerate(nodes, 1)]
        self._host = EngineHost(
            spec, source=ledger, stager=stager if staging else None, sink=sink, nodes=others,
            address=ray.util.get_node_ip_address(),
        )  # fmt: skip

    async def start(self) -> str:
        """Start the engine and serve it; the replica's URL."""
        return await self._host.start()

    async def pin(self, version: int, seconds: float) -> None:
        await self._host.pin(version, seconds)

    async def begin_update(self, ref: VersionRef) -> None:
        await self._host.begin_update(ref)

    async def init_group(self, group: dict[str, Any]) -> None:
        await self._host.init_group(**group)

    async def in_group(self, name: str) -> bool:
        return self._host.in_group(name)

    async def destroy_group(self, name: str) -> None:
        await self._host.destroy_group(name)

    async def receive_bucket(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, form: str | None
    ) -> None:
        await self._host.receive_bucket(names, dtypes, shapes, group, form)

    async def finish_update(self) -> Activation:
        return await self._host.finish_update()

    async def abort_update(self, reason: str) -> None:
        await self._host.abort_update(reason)

    async def status(self) -> dict[str, Any]:
        return self._host.status()

    async def peer(self, method: str, *args: Any) -> Any:
        """Call a method of `replica.peer.PeerReceiver`."""
        result = getattr(self._host.receiver(), method)(*args)
        return await result if inspect.isawaitable(result) else result

    async def digests(self) -> dict[str, str]:
        return await self._host.digests()

    async def events(self) -> list[Event]:
        return self._host.timeline.drain()

    async def stop(self) -> None:
        """End the engine's process (managed) and leave the gateway."""
        await self._host.stop()


@dataclass(frozen=True)
class ProducerSpec:
    """Everything the producer is made of. endpoint: URL of the gateway or rollout service; eval_endpoint: of engines
    that only evaluate (None: there are none); models: URLs of frozen ones by name. Times in seconds."""

    run_id: str
    endpoint: str
    checkpoint: Path
    files: tuple[str, ...]
    data: DataOptions
    held_out_files: tuple[str, ...]
    held_out: DataOptions
    task: str | None
    task_sizes: tuple[int | None, int]
    rm_type: str | None
    custom_rm_path: str | None
    rm_url: str | None
    reward_timeout: float
    reward_workers: int
    options: RolloutOptions
    sampling: SamplingOptions
    eval_sampling: SamplingOptions
    buffer_groups: int
    request_timeout: float
    version: int = 0
    token_file: str | None = None
    generate_path: str | None = None
    source_path: str | None = None
    filter_path: str | None = None
    teacher: TeacherSpec | None = None
    reference: TeacherSpec | None = None
    buffer_path: str | None = None
    eval_endpoint: str | None = None
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _sources(spec: ProducerSpec, tokenizer: Any) -> tuple[PromptSource, DatasetSource | None]:
    """Training and held-out prompts: of the built-in task, of the files, or of a plugged-in source."""
    if spec.task:
        num_train, num_held_out = spec.task_sizes
        split = make_task(spec.task, seed=spec.data.seed, num_train=num_train, num_held_out=num_held_out)
        return (
            DatasetSource.from_items(spec.task, split.train, tokenizer, spec.data),
            DatasetSource.from_items(spec.task, split.held_out, tokenizer, spec.held_out),
        )
    if spec.source_path:
        source = import_function(spec.source_path, "--data-source-path")(spec.files, tokenizer, spec.data)
    else:
        source = DatasetSource.from_files(spec.files, tokenizer, spec.data)
    if not spec.held_out_files:
        return source, None
    return source, DatasetSource.from_files(spec.held_out_files, tokenizer, spec.held_out)


@ray.remote(num_cpus=0, max_restarts=0)
class RolloutProducer:
    """The producer, the data buffer and the ledger of a run."""

    def __init__(self, spec: ProducerSpec):
        self._spec = spec
        self._timeline = Timeline("rollout-producer")
        self._evaluations = 0
        self._name = f"{spec.run_id}-{uuid.uuid4().hex[:8]}"  # of this incarnation: a rid must never be asked for again

    async def setup(self) -> None:
        """Read the prompts, load what is plugged in."""
        spec = self._spec
        tokenizer = await asyncio.to_thread(load_tokenizer, spec.checkpoint)
        source, held_out = await asyncio.to_thread(_sources, spec, tokenizer)
        self._held_out = held_out.all() if held_out else []
        os.environ[VARIABLE] = json.dumps(dict(spec.models))  # this actor's process, and its reward workers
        function = load_reward(spec.rm_type, custom_path=spec.custom_rm_path, url=spec.rm_url)
        self._reward = RewardRunner(function, timeout=spec.reward_timeout, workers=spec.reward_workers)
        self._clients: list[RolloutClient] = []
        generate = self._client(spec.endpoint, tokenizer)
        self._judge = self._client(spec.eval_endpoint, tokenizer) if spec.eval_endpoint else generate
        self._scorers = [Teachers(asked) for asked in (spec.teacher, spec.reference) if asked]
        taught = TaughtClient(generate, *self._scorers) if self._scorers else generate
        chosen = import_function(spec.filter_path, "--dynamic-sampling-filter-path") if spec.filter_path else None
        self._buffer = make_buffer(spec.buffer_path, spec.buffer_groups)
        self._producer = Producer(
            taught, source, self._reward, self._buffer, Ledger(), spec.options, spec.sampling,
            run_id=spec.run_id, version=spec.version, on_group=self._saw, group_filter=chosen,
        )  # fmt: skip

    def _client(self, endpoint: str, tokenizer: Any) -> GenerationClient:
        """What generates samples at `endpoint`, by the run's generate function if there is one."""
        spec, token = self._spec, read_token(self._spec.token_file, "--rollout-auth-token-file")
        client = RolloutClient(endpoint, api_key=token, timeout=spec.request_timeout, run_id=spec.run_id)
        self._clients.append(client)
        generate: GenerationClient = ContinuingClient(client) if spec.options.partial else client
        if spec.generate_path is None:
            return generate
        plugged = import_function(spec.generate_path, "--custom-generate-function-path")
        return PluggedClient(generate, plugged, tokenizer)

    def _saw(self, group: Any) -> None:
        times = [s.timings for s in group.samples if "submitted" in s.timings and "finished" in s.timings]
        if times:
            begin, end = min(t["submitted"] for t in times), max(t["finished"] for t in times)
            self._timeline.add("generation", begin, end, group.oldest_version)

    async def start(self) -> None:
        self._producer.start()

    async def advance(self, version: int) -> None:
        self._producer.advance(version)

    async def produce_and_take(self, version: int, timeout: float) -> Batch:
        """Synchronous schedule: generate one batch at `version`."""
        groups = self._spec.options.batch_groups
        await self._producer.produce(groups, Constraint(min_version=version), timeout)
        return await self.next_batch(version, timeout)

    async def next_batch(self, trainer_version: int, timeout: float) -> Batch:
        """The next batch, no staler than the bound; raises what ended production, if anything did."""
        self._producer.raise_failure()
        options = self._spec.options
        return await self._buffer.get_batch(
            options.batch_groups, trainer_version=trainer_version, max_staleness=options.max_staleness, timeout=timeout
        )

    async def trained(self, keys: list[str]) -> None:
        self._producer.trained(keys)

    async def evaluate(self, constraint: Constraint, timeout: float) -> dict[str, float]:
        """Accuracy on the held-out prompts under `constraint`, as metrics."""
        self._evaluations += 1
        result = await evaluate(
            self._judge, self._held_out, self._spec.eval_sampling, constraint, self._reward,
            name=f"{self._name}-{self._evaluations}", timeout=timeout, max_concurrent=len(self._held_out),
        )  # fmt: skip
        if constraint.exact_version is not None and result.num_gone:
            raise WeightVersionGone(constraint.exact_version, None)
        return result.metrics()

    async def metrics(self) -> dict[str, float]:
        return self._producer.metrics()

    async def state(self) -> dict[str, Any]:
        """Cursor, ledger, buffer contents: JSON-able."""
        return self._producer.state()

    async def load_state(
        self, state: dict[str, Any], version: int | None, consumed: int, trained: Sequence[str] = ()
    ) -> None:
        """Continue from `state` at the published `version`; before `start`. See `Producer.load_state`."""
        self._producer.load_state(state, version=version, consumed=consumed, trained=trained)

    async def events(self) -> list[Event]:
        return self._timeline.drain()

    async def ledger(self) -> dict[str, Any]:
        """The ledger's totals, checked to balance, and why each prompt was given up that was."""
        return {**self._producer.ledger.check(), "given_up": dict(self._producer.poison)}

    async def stop(self) -> None:
        """End generation: what is in flight is dropped by name, what is queued too."""
        try:
            await self._producer.stop()
        finally:
            await self._buffer.close()

    async def close(self) -> None:
        """Release connections and reward workers."""
        for client in self._clients:
            await client.close()
        for scorer in self._scorers:
            await scorer.close()
        await self._reward.close()
