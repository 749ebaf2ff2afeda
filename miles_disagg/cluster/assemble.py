"""What runs where: builds a run's parts in order, hands them to the loop, and takes them down in reverse order.

Order of start: run directory, Ray, version store (the claim), gateway, then trainer and engines side by side, then the
producer. Whatever ends the loop (the last step, an error, Ctrl-C), everything that was started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup

from miles_disagg.cluster import checkpoints, resume, specs
from miles_disagg.cluster.calls import Lifeline
from miles_disagg.cluster.connect import cluster, reserved
from miles_disagg.cluster.endpoint import ServiceFleet
from miles_disagg.cluster.fleet import Fleet
from miles_disagg.cluster.ledger import DEATHS, KeptLedger
from miles_disagg.cluster.peer import PeerChannel
from miles_disagg.cluster.producer import RemoteProducer
from miles_disagg.cluster.publications import BroadcastChannel, DiskChannel, Movement, Publications
from miles_disagg.cluster.resume import Lineage
from miles_disagg.cluster.rollout_side import evaluators, frozen, rollout_side, start_here
from miles_disagg.cluster.run import Run
from miles_disagg.cluster.scorers import reference_spec, vocabulary_problems
from miles_disagg.cluster.trainer_group import TrainerGroup
from miles_disagg.config.flags import save_config
from miles_disagg.config.placement import PlacementPlan, plan_placement
from miles_disagg.config.resolve import resolve
from miles_disagg.config.run import RunConfig
from miles_disagg.domain.errors import ConfigError, MilesDisaggError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.observe.console import RunConsole
from miles_disagg.observe.events import EventLog, Timeline
from miles_disagg.observe.metrics import RayMetrics
from miles_disagg.observe.trackers import JsonlTracker, TensorBoardTracker, Tracker, Trackers, WandbTracker
from miles_disagg.prompts.tokenizer import load_tokenizer
from miles_disagg.publish.anchors import AnchorPolicy
from miles_disagg.rollout.actor import RolloutProducer
from miles_disagg.store.actor import RemoteLedger, VersionStoreActor
from miles_disagg.weights.checkpoint import checkpoint_digest

Loop = Callable[[Run], Awaitable[None]]


def running(config: RunConfig, loop: Loop) -> int:
    """Assemble the run of a resolved configuration, drive it with `loop`, take it down. Returns the exit status."""
    run_dir = config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    total = plan_placement(config).total()
    with (
        resume.locked(run_dir),
        cluster(
            address=config.cluster.ray_address,
            namespace=config.run_id,
            dashboard=config.cluster.ray_dashboard,
            num_cpus=total.get("CPU", 1.0),
            num_gpus=None,
        ),
    ):
        # Only now is it known which devices a cluster that was joined has.
        config = resolve(config, gpus=int(ray.cluster_resources().get("GPU", 0)))
        save_config(config, run_dir / "config.yaml")
        return asyncio.run(_drive(config, plan_placement(config), loop))


async def _drive(config: RunConfig, plan: PlacementPlan, loop: Loop) -> int:
    """Run `loop` until it ends, fails or is interrupted; always leave a summary."""
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if not (config.output.save_on_interrupt and run is not None and run.leave_after_step(task.cancel)):
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    title = f"{config.run_id}: {config.engines.topology}, {config.weights.mode} over {config.weights.transport}"
    console = RunConsole(title, config.num_rollout)
    run: Run | None = None
    status, reason, begun = "completed", "", time.monotonic()
    try:
        async with assembled(config, plan, console) as run:
            console.begin()
            try:
                await loop(run)
            except asyncio.CancelledError:
                if run.leaving:
                    await run.save_before_leaving()
                raise
            finally:
                console.end()
                with contextlib.suppress(MilesDisaggError, asyncio.CancelledError):
                    await run.close_books()
    except asyncio.CancelledError:
        status, reason = "interrupted", "stopped by a signal"
    except MilesDisaggError as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    if run is None:
        console.say(f"the run {status} before its first step, after {time.monotonic() - begun:.0f} s: {reason}")
        summary = {"status": status, "reason": reason, "steps": 0, "seconds": time.monotonic() - begun}
    else:
        result = run.summary(status, reason)
        summary = result.to_json()
        for sentence in result.sentences():
            console.say(sentence)
        if status != "completed" and checkpoints.complete(config.run_dir):
            console.say(f"Continue it with: miles-disagg train --load {config.run_dir}")
    (config.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return {"completed": 0, "interrupted": 130}.get(status, 1)


@asynccontextmanager
async def assembled(config: RunConfig, plan: PlacementPlan, console: RunConsole) -> AsyncIterator[Run]:
    """All parts of a run, started; taken down in reverse order at the end."""
    timeline, lifeline = Timeline("driver"), Lifeline()
    digest = await asyncio.to_thread(checkpoint_digest, config.checkpoint)
    continued = await asyncio.to_thread(resume.find, config, digest)
    async with AsyncExitStack() as stack:
        trackers = Trackers(_trackers(config))
        stack.callback(trackers.close)
        events = EventLog(config.run_dir / "events.jsonl")
        stack.callback(events.close)
        console.say(f"run {config.run_id} in {config.run_dir}")
        lineage = Lineage(config.run_dir)
        ledger, newest = await _claim(config, digest, lineage, console.say, lifeline, stack)
        base = VersionRef(config.run_id, 0)
        published = None if continued is None else await _published(config, newest, console.say, stack)
        fleet, endpoint = await rollout_side(config, plan, ledger, base, console.say, lifeline, stack)
        judges = await evaluators(config, plan, ledger, base, console.say, stack)
        placement = stack.enter_context(
            reserved(
                plan.trainer.name,
                [b.resources() for b in plan.trainer.bundles],
                plan.trainer.strategy,
                config.timeouts.placement_timeout,
            )
        )
        ranks = plan.trainer.slots * len(plan.trainer.bundles)
        beside = f", and {len(plan.evaluators)} for evaluation alone" if judges else ""
        console.say(f"starting {ranks} trainer rank(s) and {len(fleet.members)} engine(s){beside}")
        served = await frozen(config, plan, console.say, lifeline, stack)
        fleets = [fleet, *([judges.fleet] if judges else [])]
        trainer = await _start_together(config, plan, placement, fleets, stack, published)
        watch = asyncio.create_task(trainer.keep(lifeline), name="look after the trainer")
        stack.callback(watch.cancel)
        judge = judges.fleet.gateway_url if judges else None
        producer = await _producer(config, endpoint, base, console.say, stack, served, judge)
        if continued is not None and continued.checkpoint is not None:
            await trainer.load(str(continued.checkpoint / checkpoints.TRAINER))
            console.say(f"continuing after step {continued.step} from {continued.checkpoint}")
        channel = _channel(
            config, trainer, ledger, fleet, Movement(trainer, console.say),
            full_first=newest != base and published is None,
        )  # fmt: skip
        if isinstance(channel, PeerChannel):
            await channel.prepare()
        publications = Publications(
            config.run_id, newest.version, trainer, channel, fleet, timeline,
            on_published=producer.advance,
            give_out=lineage.given_out,
            timeout=config.timeouts.update_weights_timeout,
        )  # fmt: skip
        if isinstance(fleet, Fleet) and config.weights.transport != "disk":
            fleet.repair = publications.repair
        stack.push_async_callback(publications.cancel)
        yield Run(
            config, trainer, fleet, producer, publications,
            trackers=trackers, console=console, events=events, timeline=timeline, run_dir=config.run_dir,
            continued=continued, identity=resume.identity(config, digest), evaluators=judges, lifeline=lifeline,
        )  # fmt: skip


def _trackers(config: RunConfig) -> list[Tracker]:
    out: list[Tracker] = [JsonlTracker(config.run_dir / "metrics.jsonl"), RayMetrics(config.run_id)]
    if config.output.use_tensorboard:
        out.append(TensorBoardTracker(config.run_dir / "tensorboard"))
    if config.output.use_wandb:
        out.append(WandbTracker(config.run_dir, config.run_id, config.model_dump(mode="json")))
    return out


async def _claim(
    config: RunConfig,
    digest: str,
    lineage: Lineage,
    say: Callable[[str], None],
    lifeline: Lifeline,
    stack: AsyncExitStack,
) -> tuple[KeptLedger, VersionRef]:
    """The version store actor, with this run's claim, looked after; the newest version there is."""
    url = config.version_store if config.weights.transport == "disk" else None
    hooks = (config.weights.custom_update_weight_post_write_path, config.weights.custom_update_weight_pre_read_path)
    args = (config.run_id, url, 1.0, *hooks)
    store = start_here(VersionStoreActor, config.run_id, "version-store", *args, restarts=DEATHS)
    stack.callback(ray.kill, store)
    ledger = KeptLedger(store, say, timeout=config.timeouts.update_weights_timeout)
    boot = lineage.version if url is None else 0  # without a store, nobody else knows which numbers are taken
    claim = await ledger.claim(digest, boot_version=boot, owner=lineage.owner)
    await asyncio.to_thread(lineage.claimed, claim.owner if claim else None)

    async def release() -> None:
        keeping.cancel()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(10.0):
                await ledger.release()

    stack.push_async_callback(release)
    keeping = asyncio.create_task(ledger.keep(lifeline), name="look after the version store")
    await ledger.announce()
    newest = await ledger.latest()
    assert newest is not None
    return ledger, newest


async def _published(
    config: RunConfig, newest: VersionRef, say: Callable[[str], None], stack: AsyncExitStack
) -> Path | None:
    """Checkpoint of the version that a continued run published last; see `resume.published_weights`."""
    stack.callback(resume.forget_published_weights, config)
    return await asyncio.to_thread(resume.published_weights, config, newest, say)


async def _start_together(
    config: RunConfig,
    plan: PlacementPlan,
    placement: PlacementGroup,
    fleets: Sequence[Fleet | ServiceFleet],
    stack: AsyncExitStack,
    published: Path | None,
) -> TrainerGroup:
    """Trainer and engines start side by side: both load the same checkpoint and neither needs the other yet.

    published: checkpoint of the version published last, where that is not the base.
    """
    device = config.trainer.trainer_device
    starting = asyncio.create_task(
        TrainerGroup.start(
            specs.trainer_spec(config),
            specs.publication_spec(config, device, published),
            plan.trainer,
            placement,
            run_id=config.run_id,
            env={"NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "1"} if device != "cuda" else {"NCCL_CUMEM_ENABLE": "0"},
            global_batch_size=config.global_batch_size,
            start_timeout=config.timeouts.trainer_start_timeout,
            step_timeout=config.timeouts.train_step_timeout,
            update_timeout=config.timeouts.update_weights_timeout,
        )
    )
    engines = [asyncio.create_task(fleet.start()) for fleet in fleets]
    try:
        await asyncio.gather(*engines)
        trainer = await starting
    except BaseException:
        for task in (starting, *engines):
            task.cancel()
        await asyncio.gather(starting, *engines, return_exceptions=True)
        raise

    async def close() -> None:
        with contextlib.suppress(Exception):
            await trainer.close(config.timeouts.shutdown_timeout)

    stack.push_async_callback(close)
    return trainer


async def _producer(
    config: RunConfig,
    endpoint: str,
    base: VersionRef,
    say: Callable[[str], None],
    stack: AsyncExitStack,
    served: Mapping[str, tuple[str, ...]],
    judge: str | None,
) -> RemoteProducer:
    reference = reference_spec(config, served)
    if reference is not None and config.loss.kl_reference in served:  # one at a URL was looked at in the preflight
        tokenizer = await asyncio.to_thread(load_tokenizer, config.checkpoint)
        if problems := await vocabulary_problems(tokenizer, reference):
            raise ConfigError(problems)
    spec = specs.producer_spec(config, endpoint, base.version)
    spec = replace(spec, models=served, eval_endpoint=judge, reference=reference)
    producer = RemoteProducer(
        lambda: start_here(RolloutProducer, config.run_id, "rollout-producer", spec),
        config.timeouts.trainer_start_timeout,
        say,
    )
    stack.callback(producer.kill)
    await producer.set_up()

    async def close() -> None:
        with contextlib.suppress(Exception):
            await producer.close(10.0)

    stack.push_async_callback(close)
    return producer


def _channel(
    config: RunConfig, trainer: TrainerGroup, ledger: RemoteLedger, fleet: Fleet | ServiceFleet, movement: Movement,
    *, full_first: bool,
) -> DiskChannel | BroadcastChannel | PeerChannel:  # fmt: skip
    if isinstance(fleet, Fleet) and config.weights.transport == "p2p":
        return PeerChannel(trainer, ledger, fleet, movement.observe, specs.peer_settings(config))
    if isinstance(fleet, Fleet) and config.weights.transport == "broadcast":
        return BroadcastChannel(trainer, ledger, fleet, movement)
    weights = config.weights
    return DiskChannel(
        trainer,
        ledger,
        encoding=weights.encoding,
        checksum=weights.update_weight_delta_checksum,
        anchors=AnchorPolicy(weights.update_weight_anchor_interval),
        keep_versions=weights.update_weight_keep_versions,
        keep_files=weights.update_weight_disk_keep_files,
        movement=movement,
        full_first=full_first,
    )
