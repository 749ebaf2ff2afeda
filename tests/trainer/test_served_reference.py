"""The KL term with logprobs of a real server is the one with a second copy of the base model in the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from miles_disagg.domain.samples import Prompt
from miles_disagg.engine import launch
from miles_disagg.rollout.teacher import Teachers, TeacherSpec
from miles_disagg.trainer.base import LossSpec, OptimizerSpec, TrainerSpec, TrainSample
from tests.fakes.scorers import server_of, sharp_model
from tests.trainer.models import make_batch
from tests.trainer.ranks import Job, run_ranks

VOCAB = 14
BATCH = make_batch(8, VOCAB, behaviour=-2.6)
LOSS = LossSpec(kl_coef=0.5, kl_kind="k3", tis_cap=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("reference") / "model", seed=3, factor=3.0)


async def scored(spec: launch.LaunchSpec, log: Path) -> list[TrainSample]:
    """The batch with the server's logprobs."""
    process = launch.EngineProcess.start(spec, log)
    try:
        await process.wait_ready(240)
        asked = TeacherSpec({"0": process.url}, None, 60.0, role="reference", flag="--kl-reference")
        async with Teachers(asked) as reference:
            out = []
            for sample in BATCH:
                prompt = Prompt(0, 0, "", tuple(sample.tokens[: sample.prompt_len]))
                found = await reference.logprobs(prompt, tuple(sample.tokens[sample.prompt_len :]))
                out.append(dataclasses.replace(sample, reference_logprobs=found))
            return out
    finally:
        await process.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_losses_and_steps_are_those_of_the_local_reference(kind: str, model: Path, tmp_path: Path):
    batch = asyncio.run(scored(server_of(kind, model), tmp_path / "server.log"))
    specs = {
        where: TrainerSpec(
            str(model), dtype="fp32", optimizer=OptimizerSpec(lr=2e-3),
            loss=dataclasses.replace(LOSS, kl_reference=where),
        )
        for where in ("local", "served")
    }  # fmt: skip
    jobs = {
        "local": Job("policy", {"spec": specs["local"], "batch": BATCH, "global_batch_size": 4}),
        "served": Job("policy", {"spec": specs["served"], "batch": batch, "global_batch_size": 4}),
        "unscored": Job("raised", {"spec": specs["served"], "batch": BATCH}),
    }
    results = {name: ranks[0] for name, ranks in run_ranks(1, jobs).items()}
    assert "8 of 8 samples have no logprobs of --kl-reference" in results["unscored"]
    local, served = results["local"], results["served"]
    assert local["steps"][1]["train/kl"] > 1e-3, "the policy must have left the reference for this to tell them apart"
    for ours, theirs in zip(local["steps"], served["steps"], strict=True):
        for name in ("train/loss", "train/kl", "train/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-2, abs=1e-4), name
    for name, raw in local["trained"].items():
        np.testing.assert_allclose(served["trained"][name].view(np.float32), raw.view(np.float32), atol=2e-3)
