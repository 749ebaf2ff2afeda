"""A trainer that is killed while a checkpoint is being written behind its steps."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from pathlib import Path

import pytest

from miles_disagg.config.machine import free_port
from miles_disagg.trainer.base import OptimizerSpec, RankSpec, TrainerSpec
from tests.trainer import ranks
from tests.trainer.models import make_batch, make_checkpoint
from tests.trainer.ranks import Job, run_ranks

BATCH = make_batch(4, 61)


def test_steps_go_on_while_a_checkpoint_is_written_and_one_that_was_killed_is_never_seen(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3", vocab_size=61, tie_word_embeddings=True)
    spec = TrainerSpec(str(model), 1, 1, "fp32", optimizer=OptimizerSpec(lr=1e-3), meet_timeout=60.0)
    saved = tmp_path / "checkpoints"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([ranks.SCENARIOS])
    results = context.Queue()
    process = context.Process(target=ranks.scenario, args=("stuck_while_saving", {
        "rank": RankSpec(0, 1, "127.0.0.1", free_port(), local_rank=0),
        "spec": spec, "batch": BATCH, "directory": str(saved), "results": results,
    }))  # fmt: skip
    process.start()
    try:
        steps, writing = results.get(timeout=120)
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
    assert writing, "the file is a pipe that nobody reads: it cannot have been written"
    names = sorted(p.name for p in saved.iterdir())
    assert names[-1] == "step_1"
    assert [name for name in names if not name.startswith(".")] == ["step_1"]
    assert any((saved / name / "__0_0.distcp").is_fifo() for name in names[:-1]), "killed while writing"

    again = {"spec": spec, "batch": BATCH, "directory": str(saved / "step_1"), "fresh": True}
    continued = run_ranks(1, {"loaded": Job("load_and_go_on", again)})["loaded"][0]
    for before, after in zip(steps, continued["steps"], strict=True):
        assert after["train/loss"] == pytest.approx(before["train/loss"], rel=1e-5)
