"""The learning rate of each optimizer step: a pure function of the spec and the step."""

from __future__ import annotations

import math

from miles_disagg.trainer.base import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then constant or decay to `min_lr`."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup_steps) / (spec.decay_steps - spec.warmup_steps))
    left = 1 - done if spec.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return spec.min_lr + (spec.lr - spec.min_lr) * left
