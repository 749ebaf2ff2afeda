"""What spawned trainer ranks do (see `ranks.py`). Runs in their processes; results are plain picklable values."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_disagg.domain.errors import CheckpointError
from miles_disagg.domain.versions import VersionRef
from miles_disagg.engine.sglang import SGLangEngine
from miles_disagg.engine.tensors import raw_bytes
from miles_disagg.publish.broadcast import BroadcastSource
from miles_disagg.publish.disk import DiskSource
from miles_disagg.store.local import LocalStore
from miles_disagg.store.publication import Description
from miles_disagg.store.versions import VersionStore
from miles_disagg.trainer.base import RankSpec, TrainerSpec, TrainSample
from miles_disagg.trainer.megatron import checkpoint, convert, parallel, step
from miles_disagg.trainer.megatron.batch import Columns, pack, policy_columns, response_offsets, with_weights
from miles_disagg.trainer.megatron.trainer import MegatronTrainer
from miles_disagg.trainer.vocab_parallel import logprobs_and_entropy
from miles_disagg.weights.checkpoint import checkpoint_digest
from miles_disagg.weights.delta import plan_shards
from miles_disagg.weights.digest import digest
from tests.fakes.update_target import EngineTarget


def exported(trainer: MegatronTrainer, bucket_bytes: int = 1 << 12) -> dict[str, np.ndarray]:
    """This source's tensors as raw bytes."""
    out: dict[str, np.ndarray] = {}

    def sink(bucket: list[tuple[str, torch.Tensor]]) -> None:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= bucket_bytes
        for name, tensor in bucket:
            assert name not in out
            out[name] = tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().copy()

    trainer.export(sink, bucket_bytes)
    return out


def sft(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], steps: int) -> dict[str, Any]:
    """Import, export, logits, scores, gradients of the first step, `steps` steps, export again."""
    trainer = MegatronTrainer(spec, rank)
    try:
        out: dict[str, Any] = {"imported": exported(trainer), "is_source": trainer.is_source}
        out["logits"] = logits(trainer, batch[0])
        out["logprobs"] = trainer.logprobs(batch)
        out["gradients"] = gradients(trainer, batch) if not spec.use_distributed_optimizer else None
        out["steps"] = [dict(trainer.sft_step(batch)) for _ in range(steps)]
        out["trained"] = exported(trainer)
        return out
    finally:
        trainer.close()


def logits(trainer: MegatronTrainer, sample: TrainSample) -> np.ndarray | None:
    """All logits of one sample, gathered over TP, on the last stage."""
    layout = trainer.layout
    micro = pack([sample], [0], Columns(response_offsets([sample]), {}), layout.device)
    trainer.model.eval()

    def forward(data: Any, stage: Any) -> Any:
        return step._forward(stage, next(data)), lambda out, non_loss_data=True: out.detach().float()

    with torch.no_grad():
        outputs = step._schedule(forward, trainer.model, [micro], forward_only=True, collect_non_loss_data=True)
    if not outputs:
        return None
    parts = [torch.empty_like(outputs[0]) for _ in range(layout.tp_size)]
    dist.all_gather(parts, outputs[0].contiguous(), group=layout.tp_group)
    return torch.cat(parts, -1)[0, :, : trainer.hf.vocab_size].cpu().numpy()


def gradients(trainer: MegatronTrainer, batch: Sequence[TrainSample]) -> dict[str, np.ndarray]:
    """Gradients of the supervised loss under HF names, on sources; nothing is updated."""
    columns = with_weights(policy_columns(batch, None), batch, "token-mean")
    micros = trainer._micro_batches(batch, columns)
    trainer._policy.ddp.train()
    trainer._policy.ddp.zero_grad_buffer()
    step.train_pass(trainer._policy.ddp, micros, trainer._scorer(), step.cross_entropy_loss, 2, trainer.layout)
    if not trainer.layout.exports:
        return {}
    named = convert.gather_weights(trainer.model, trainer.hf, trainer.layout, {}, value=lambda p: vars(p)["main_grad"])
    return {name: tensor.cpu().numpy().copy() for name, tensor in named}


def policy(
    rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], global_batch_size: int, version: int | None = None
) -> dict[str, Any]:
    """Two train steps on the same batch, and what was exported after them."""
    trainer = MegatronTrainer(spec, rank)
    try:
        steps = [
            dict(trainer.train_step(batch, global_batch_size=global_batch_size, version=version)) for _ in range(2)
        ]
        return {"steps": steps, "trained": exported(trainer)}
    finally:
        trainer.close()


def raised(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample] = ()) -> str:
    """`<error type>: <message>` of building a trainer, or of a step on `batch` with a proof that nothing moved."""
    try:
        trainer = MegatronTrainer(spec, rank)
    except Exception as e:
        assert not dist.is_initialized(), "a trainer that could not be built must leave nothing behind"
        return f"{type(e).__name__}: {e}"
    try:
        before = exported(trainer)
        trainer.train_step(batch)
        return "no error"
    except Exception as e:
        after = exported(trainer)
        assert all(np.array_equal(before[name], after[name]) for name in before), "weights moved"
        return f"{type(e).__name__}: {e}"
    finally:
        trainer.close()


def vocab_parallel(rank: RankSpec, vocab_size: int, padded: int, temperature: float) -> dict[str, np.ndarray | bool]:
    """Logprobs, entropies and logit gradients of a random case, with the vocabulary split over all ranks."""
    layout = parallel.initialize(TrainerSpec("", tensor_parallel=rank.world_size), rank)
    try:
        full, targets, weights = (t.to(layout.device) for t in vocab_case(vocab_size, padded))
        local = full.chunk(rank.world_size, 1)[rank.rank].clone().requires_grad_()
        before = local.detach().clone()
        logp, entropy = logprobs_and_entropy(
            local, targets, first=rank.rank * local.shape[1], vocab_size=vocab_size, group=layout.tp_group,
            temperature=temperature,
        )  # fmt: skip
        (logp * weights[0] + entropy * weights[1]).sum().backward()
        assert local.grad is not None
        return {
            "logp": logp.detach().cpu().numpy(),
            "entropy": entropy.detach().cpu().numpy(),
            "grad": local.grad.cpu().numpy(),
            "untouched": torch.equal(local.detach(), before),
        }
    finally:
        parallel.shutdown()


def vocab_case(vocab_size: int, padded: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits [9, padded], targets [9], weights [2, 9]) of a fixed random case."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, padded, generator=generator) * 4
    return logits, torch.randint(0, vocab_size, (9,), generator=generator), torch.randn(2, 9, generator=generator)


def transformers_after_megatron(rank: RankSpec, spec: TrainerSpec, sample: TrainSample) -> np.ndarray:
    """Logits of transformers in a process in which the shim is installed and Megatron has trained."""
    from transformers import AutoModelForCausalLM

    trainer = MegatronTrainer(spec, rank)
    try:
        trainer.sft_step([sample])
    finally:
        trainer.close()
    model = AutoModelForCausalLM.from_pretrained(spec.hf_checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([list(sample.tokens)])).logits[0].numpy()


def save_and_go_on(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str) -> dict[str, Any]:
    """Two steps, copy a checkpoint out, two more steps, and only then write what was copied, in another thread."""
    trainer = MegatronTrainer(spec, rank)
    try:
        for _ in range(2):
            trainer.sft_step(batch)
        pending = trainer.begin_checkpoint(directory)
        early = os.path.exists(directory)
        out = {"steps": [dict(trainer.sft_step(batch)) for _ in range(2)], "trained": exported(trainer)}
        busy = said(lambda: trainer.begin_checkpoint(f"{directory}.more"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(checkpoint.complete, pending).result(60)
        return {**out, "early": early, "busy": busy, "again": said(lambda: trainer.save_checkpoint(directory))}
    finally:
        trainer.close()


def said(action: Callable[[], object]) -> str:
    """The error of an action, empty if there was none."""
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def stuck_while_saving(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str, results: Any):
    """One step and a checkpoint; another step and a checkpoint whose first file never gets written, for it is a pipe
    that nobody reads; two steps meanwhile, reported. Then wait to be killed."""
    trainer = MegatronTrainer(spec, rank)
    trainer.sft_step(batch)
    trainer.save_checkpoint(f"{directory}/step_1")
    steps = [dict(trainer.sft_step(batch))]
    pending = trainer.begin_checkpoint(f"{directory}/step_2")
    (partial,) = Path(directory).glob(".step_2.*.partial")
    os.mkfifo(partial / "__0_0.distcp")
    writing = threading.Thread(target=pending.write, daemon=True)
    writing.start()
    steps += [dict(trainer.sft_step(batch))]
    results.put((steps, writing.is_alive()))
    time.sleep(120)


def load_and_go_on(
    rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str, fresh: bool = False
) -> dict[str, Any]:
    """One step in another direction (unless `fresh`, as a restarted run is), load, two steps."""
    trainer = MegatronTrainer(spec, rank)
    try:
        if not fresh:
            trainer.sft_step(list(batch)[:2])
        trainer.load_checkpoint(directory)
        return {"steps": [dict(trainer.sft_step(batch)) for _ in range(2)], "trained": exported(trainer)}
    finally:
        trainer.close()


def load_refused(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str) -> str:
    """What loading says."""
    trainer = MegatronTrainer(spec, rank)
    try:
        trainer.load_checkpoint(directory)
        return "no error"
    except CheckpointError as e:
        return str(e)
    finally:
        trainer.close()


def broadcast(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], engine_url: str, version: str) -> Any:
    """One step, then every source stages, trains on, and sends to the engine what it staged; tensors' digests."""
    trainer = MegatronTrainer(spec, rank)
    source = BroadcastSource(address="127.0.0.1", backend="gloo", timeout=60.0) if trainer.is_source else None
    digests: dict[str, str] = {}

    def stage(bucket: list[tuple[str, torch.Tensor]]) -> None:
        assert source is not None
        source.stage(bucket)
        digests.update({name: digest(raw_bytes(tensor), "xxh3-128") for name, tensor in bucket})

    async def send() -> None:
        assert source is not None
        engine = SGLangEngine(engine_url)
        try:
            await source.send(version, [EngineTarget(engine)])
        finally:
            await engine.close()

    try:
        trainer.sft_step(batch)
        if source is not None:
            source.open(1.0)
        trainer.export(stage, 1 << 14)
        trainer.sft_step(batch)
        for index in range(trainer.num_sources):
            if trainer.source_index == index:
                asyncio.run(send())
            dist.barrier()
        return digests
    finally:
        trainer.close()


def published(
    rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], store: str, versions: int
) -> list[dict[str, np.ndarray]]:
    """Train and publish deltas as sources on hosts of their own, which share nothing but the store; what each exported.

    Summaries and receipts go over the process group here, as a run's go through Ray; rank 0 commits.
    """
    trainer = MegatronTrainer(spec, rank)
    objects, base = LocalStore(Path(store)), Path(spec.hf_checkpoint)
    objects.scratch = Path(store).with_name(f"host-{rank.rank}")
    committer, out = VersionStore(objects), []
    source = DiskSource(objects, base, workers=1) if trainer.is_source else None

    def of_sources(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, (trainer.source_index, value))
        return [found for index, found in sorted(row for row in everyone if row[0] is not None)]

    try:
        if rank.rank == 0:
            committer.claim("run", checkpoint_digest(base))
        for version in range(1, versions + 1):
            ref = VersionRef("run", version)
            trainer.sft_step(batch)
            if source is not None:
                source.open(10.0)
            trainer.export(source.stage if source is not None else lambda _: None, 1 << 12)
            out.append(exported(trainer))
            if rank.rank == 0:
                committer.begin(ref)
            dist.barrier()
            plans = plan_shards(of_sources(source.encode(ref, "sparse") if source is not None else None))
            plan = plans[trainer.source_index] if trainer.source_index is not None else None
            receipts = of_sources(source.write(plan) if source is not None and plan is not None else None)
            if rank.rank == 0:
                committer.commit(ref, Description("sparse", version - 1), receipts)
            dist.barrier()
            if source is not None:
                source.settle(True)
        return out
    finally:
        trainer.close()


def ppo(
    rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], global_batch_size: int, steps: int = 2
) -> dict[str, Any]:
    """Values, `steps` rollout steps with a critic, values again, and the policy's weights before and after."""
    trainer = MegatronTrainer(spec, rank)
    try:
        before, weights = trainer.values(batch), exported(trainer)
        done = [dict(trainer.train_step(batch, global_batch_size=global_batch_size)) for _ in range(steps)]
        return {
            "before": before,
            "steps": done,
            "values": trainer.values(batch),
            "imported": weights,
            "trained": exported(trainer),
        }
    finally:
        trainer.close()


def ppo_saved(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str) -> dict[str, Any]:
    """One step, save, one more."""
    trainer = MegatronTrainer(spec, rank)
    try:
        trainer.train_step(batch)
        trainer.save_checkpoint(directory)
        return {"steps": [dict(trainer.train_step(batch))], "values": trainer.values(batch)}
    finally:
        trainer.close()


def ppo_loaded(rank: RankSpec, spec: TrainerSpec, batch: Sequence[TrainSample], directory: str) -> dict[str, Any] | str:
    """A step in another direction, load, one step; or the error of loading."""
    trainer = MegatronTrainer(spec, rank)
    try:
        trainer.train_step(list(batch)[:2])
        try:
            trainer.load_checkpoint(directory)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return {"steps": [dict(trainer.train_step(batch))], "values": trainer.values(batch)}
    finally:
        trainer.close()
