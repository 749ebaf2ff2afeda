"""Short real runs of what needs more than a trainer: PPO with a critic, resumed; distillation from a teacher."""

import asyncio
import json

import pytest

from miles_disagg.config.machine import free_port
from miles_disagg.config.model import quickstart_directory
from miles_disagg.engine.launch import EngineProcess, embedded
from miles_disagg.prompts.quickstart import make_quickstart
from tests.cluster import processes
from tests.cluster.test_train_command import Run


def rows(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "train/tokens" in row]


@pytest.mark.slow
def test_ppo_trains_policy_and_critic_and_goes_on_after_a_restart(tiny_checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{a}+{b}="}) + "\n" for a in range(1, 9) for b in range(1, 9)))
    data = ("--prompt-data", str(prompts), "--custom-rm-path", "tests.cluster.test_algorithms_in_a_run.length")
    flags = (
        "--advantage-estimator", "ppo", "--gamma", "0.99", "--lambd", "0.95", "--critic-lr", "1e-3",
        "--value-clip", "10", "--num-critic-only-steps", "2", "--normalize-advantages", "--n-samples-per-prompt", "1",
        "--rollout-batch-size", "16", "--save-interval", "6",
    )  # fmt: skip
    run = Run(tiny_checkpoint, tmp_path / "run", "--num-rollout", "12", *data, *flags)
    assert run.wait(timeout=400) == 0, run.log.read_text()
    first = rows(tmp_path / "run")
    assert ["train/loss" in row for row in first] == [False] * 2 + [True] * 10
    losses = [row["train/value_loss"] for row in first]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4]), losses
    assert processes.gone(run.marker, timeout=20) == []
    load = ("--load", str(tmp_path / "run"), "--num-rollout", "14")
    again = Run(tiny_checkpoint, tmp_path / "run", *load, *data, *flags)
    assert again.wait(timeout=400) == 0, again.log.read_text()
    later = rows(tmp_path / "run")
    assert len(later) == 14
    assert all("train/loss" in row for row in later[12:]), "the critic-only steps are over for good"
    assert later[12]["train/value_loss"] < losses[0]


@pytest.mark.slow
def test_distillation_brings_the_policy_nearer_to_the_teacher(tiny_checkpoint, tmp_path):
    """Advantages of zero but for the teacher's: what changes the policy is the teacher."""
    make_quickstart(quickstart_directory())
    teacher = EngineProcess.start(embedded(quickstart_directory(), port=free_port()), tmp_path / "teacher.log")
    try:
        asyncio.run(teacher.wait_ready(180))
        run = Run(
            tiny_checkpoint, tmp_path / "run", "--num-rollout", "25", "--lr", "3e-3", "--rollout-batch-size", "16",
            "--use-opd", "--opd-teacher-urls", teacher.url,
            "--custom-advantage-function-path", "tests.cluster.test_algorithms_in_a_run.nothing",
        )  # fmt: skip
        assert run.wait(timeout=400) == 0, run.log.read_text()
    finally:
        asyncio.run(teacher.stop())
    divergence = [row["train/opd_reverse_kl"] for row in rows(tmp_path / "run")]
    assert len(divergence) == 25
    assert sum(divergence[-5:]) < 0.8 * sum(divergence[:5]), divergence


def length(sample) -> float:
    return len(sample.tokens) / 6


def nothing(groups):
    return [[0.0] * len(group.samples) for group in groups]
