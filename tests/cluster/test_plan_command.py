"""`miles-disagg plan`: what it prints, for a run and for a trillion parameters."""

import json

import pytest

from miles_disagg.cluster.plan_command import main
from miles_disagg.domain.errors import ConfigError
from miles_disagg.weights.transfer.layouts import ModelSizes, TrainerParallel
from miles_disagg.weights.transfer.report import Rates
from miles_disagg.weights.transfer.simulate import simulate


def flags(checkpoint, *more: str) -> list[str]:
    return ["--hf-checkpoint", str(checkpoint), "--num-rollout", "1", "--task", "addition", *more]


def test_the_plan_of_a_configuration_is_balanced_over_ranks(tiny_checkpoint, capsys):
    ranks = ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--num-rollout-engines", "2")
    assert main([*flags(tiny_checkpoint, *ranks), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["sent_bytes"]) == 4
    assert sum(said["sent_bytes"].values()) == sum(said["received_bytes"].values())
    assert max(said["sent_bytes"].values()) < 1.3 * min(said["sent_bytes"].values())
    assert len(set(said["received_bytes"].values())) == 1


def test_it_says_who_sends_how_much_and_how_long_it_takes(tiny_checkpoint, capsys):
    assert main(flags(tiny_checkpoint, "--send-gb-per-s", "2")) == 0
    said = capsys.readouterr().out
    assert "every element once" in said
    assert "slowest pair: trainer rank 0 -> engine-0 rank 0" in said
    assert "at 2 GB/s out" in said


def test_what_cannot_be_planned_is_named(tiny_checkpoint):
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 3 does not divide"):
        main(flags(tiny_checkpoint, "--tensor-model-parallel-size", "3", "--actor-num-gpus-per-node", "3"))
    with pytest.raises(ConfigError, match="--simulate takes no configuration: drop --lr 1"):
        main(["--simulate", "--lr", "1"])


def test_a_simulation_waits_for_the_ranks_that_receive_the_most():
    model = ModelSizes(1024, 256, 0, 4, 8, 8, 32, experts=16, expert_ffn=64)
    trainer = TrainerParallel(tensor=2, pipeline=2, data=4, expert=8)
    rates = Rates(send=1.0, receive=1.0, per_write=0.0)
    few, many = (simulate(n, ranks=8, rates=rates, model=model, trainer=trainer) for n in (4, 8))
    assert (few.engines, many.engines) == (2, 1)
    assert few.bottleneck.startswith("engine-")
    assert few.seconds > 1.5 * many.seconds
