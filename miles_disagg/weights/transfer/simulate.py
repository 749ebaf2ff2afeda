"""The time of a peer-to-peer transfer for a model of a trillion parameters, from its plan alone. Pure.

The plan is made for one layer of each pipeline stage and scaled to all of them: layers are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles_disagg.weights.transfer.layouts import (
    EngineParallel,
    ModelSizes,
    TrainerParallel,
    engine_layouts,
    trainer_layouts,
)
from miles_disagg.weights.transfer.plan import make_plan
from miles_disagg.weights.transfer.report import Rates, expected, summary

TRILLION = ModelSizes(
    vocab=163_840, hidden=7168, ffn=18_432, layers=64, heads=64, kv_heads=8, head_dim=128, experts=384, expert_ffn=2048
)
TRAINER = TrainerParallel(tensor=4, pipeline=8, data=8, expert=32)
PUBLISHED_SECONDS = 1.3
"""Reported for a 1T model from 256 training to 128 inference GPUs; trainer in bf16, engines in 8 bits."""


@dataclass(frozen=True)
class Simulated:
    """One case: ranks of each engine, bytes of an element on the wire, seconds, and what it waits for."""

    engines: int
    engine_ranks: int
    dtype: str
    seconds: float
    bottleneck: str
    lines: tuple[str, ...]


def simulate(
    engine_ranks: int,
    *,
    ranks: int = 128,
    dtype: str = "bfloat16",
    rates: Rates | None = None,
    bucket: int = 512 << 20,
    model: ModelSizes = TRILLION,
    trainer: TrainerParallel = TRAINER,
) -> Simulated:
    """`ranks` / `engine_ranks` engines, experts spread over each one's ranks; dtype: of the engines' weights."""
    rates = rates or Rates()
    part = replace(model, layers=trainer.pipeline)
    engines = ranks // engine_ranks
    shape = EngineParallel(tensor=engine_ranks, expert=engine_ranks)
    targets = [r for i in range(engines) for r in engine_layouts(part, shape, name=f"engine-{i}", dtype=dtype)]
    plan = make_plan(trainer_layouts(part, trainer), targets, bucket=bucket)
    found = expected(plan, rates, bucket, model.layers / part.layers)
    return Simulated(engines, engine_ranks, dtype, found.seconds, found.bottleneck, tuple(summary(plan, bucket)))


def table(cases: Sequence[Simulated], rates: Rates, model: ModelSizes = TRILLION) -> list[str]:
    """For people."""
    out = [
        f"{model.parameters() / 1e12:.2f} T parameters from {TRAINER.world} trainer ranks (TP {TRAINER.tensor}, "
        f"PP {TRAINER.pipeline}, DP {TRAINER.data}, EP {TRAINER.expert}), {rates.send:g} GB/s out of and "
        f"{rates.receive:g} GB/s into each rank"
    ]
    for case in cases:
        out.append(
            f"  {case.engines} engine(s) of {case.engine_ranks} ranks, {case.dtype}: {case.seconds:.2f} s, waiting for "
            f"{case.bottleneck}"
        )
    out.append(
        f"published for 256 -> 128 GPUs, engines in 8 bits: {PUBLISHED_SECONDS} s (how many engines it filled is not "
        "said; these are bounds from bytes and rates, without pauses)"
    )
    return out
