"""What spawned trainer ranks do (see `ranks.py`). Runs in their processes; results are plain picklable values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles_disagg.trainer.base import RankSpec, TrainerSpec, TrainSample
from miles_disagg.trainer.megatron import convert, step
from miles_disagg.trainer.megatron.batch import Columns, pack, policy_columns, response_offsets, with_weights
from miles_disagg.trainer.megatron.trainer import MegatronTrainer


def exported(trainer: MegatronTrainer, bucket_bytes: int = 1 << 12) -> dict[str, np.ndarray]:
    """This source's tensors as raw bytes."""
    out: dict[str, np.ndarray] = {}

    def sink(bucket: list[tuple[str, torch.Tensor]]) -> None:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= bucket_bytes
        for name, tensor in bucket:
            assert name not in out
            out[name] = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().copy()

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
    return torch.cat(parts, -1)[0, :, : trainer.hf.vocab_size].numpy()


def gradients(trainer: MegatronTrainer, batch: Sequence[TrainSample]) -> dict[str, np.ndarray]:
    """Gradients of the supervised loss under HF names, on sources; nothing is updated."""
    columns = with_weights(policy_columns(batch, None), batch, "token-mean")
    micros = trainer._micro_batches(batch, columns)
    trainer._ddp.train()
    trainer._ddp.zero_grad_buffer()
    step.train_pass(trainer._ddp, micros, trainer._scorer(), step.cross_entropy_loss, 2, trainer.layout)
    if trainer.layout.dp:
        return {}
    named = convert.gather_weights(trainer.model, trainer.hf, trainer.layout, {}, value=lambda p: vars(p)["main_grad"])
    return {name: tensor.numpy().copy() for name, tensor in named}


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
