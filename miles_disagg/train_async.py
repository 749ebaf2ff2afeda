"""The asynchronous algorithm, on one page.

Generation goes on while the trainer steps and while weights are published; the three meet only in the data buffer
and in the version store. Everything named here is built by `cluster.assemble`.
"""

from __future__ import annotations

from miles_disagg.cluster.assemble import running
from miles_disagg.cluster.run import Run
from miles_disagg.config.run import RunConfig


def run(config: RunConfig) -> int:
    """Start everything, train, stop everything. Returns the process's exit status."""
    return running(config, train)


async def train(run: Run) -> None:
    """Train on `run.steps` batches.

    Schedule `async`: samples are kept in flight throughout, at most `--max-weight-staleness` versions old when they
    are consumed. Schedule `sync`: a batch is generated, trained on and published before the next one is started.
    """
    await run.take_up()  # where it left off, if this run is a continued one
    await run.evaluate_base()
    await run.start_generation()

    for step in run.steps:
        batch = await run.next_batch(step)  # waits for fresh enough groups, with a deadline
        metrics = await run.trainer.train(batch.groups, batch.trainer_version)  # generation goes on meanwhile
        await run.generation_saw(batch)  # the ledger: these groups are trained

        if run.publication_is_due(step):
            await run.publish_next_version()  # stalls for the copy-out; encode, write, activate overlap the next step
        if run.evaluation_is_due(step):
            await run.evaluate_in_background(step)
        if run.checkpoint_is_due(step):
            await run.save_checkpoint(step)

        await run.report(step, batch, metrics)

    await run.stop_generation()
    await run.settle()  # the last version is served everywhere
    await run.evaluate_final()
