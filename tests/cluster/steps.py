"""A step of `train_async.train`, up to where tests look into a run."""

from __future__ import annotations

from typing import Any

from miles_disagg.buffer.base import Batch
from miles_disagg.cluster.run import Run


async def publish_step(run: Run, step: int) -> tuple[Batch, dict[str, Any]]:
    """Take a batch, train on it and publish the result; the batch and the step's metrics, for `run.report`."""
    batch = await run.next_batch(step)
    metrics = await run.trainer.train(batch.groups, batch.trainer_version)
    await run.generation_saw(batch)
    await run.publish_next_version()
    return batch, metrics
